"""Options of ``dglx plan``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from dglx_dist.cli.common import in_option
from dglx_dist.cli.options import Check, at_least, option, path_option
from dglx_dist.cli.train import ranks_of_each
from dglx_dist.cli.train_config import ModelConfig
from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate

_SERVERS, _GRAPH, _CHOICE = "Servers", "A graph without a dataset", "Choice"
_POSITIVE = Check(lambda value: 0 < value < math.inf, "a number above 0")
_MAX_BITS_PER_S = 10**14
"""Above the limit of tc, for links between accelerators inside of a server."""


def _rate(text: str, flag: str) -> Rate:
    return in_option(flag, partial(Rate.parse, most=_MAX_BITS_PER_S), text)


def _size(text: str, flag: str) -> int:
    from dglx_dist.data.storage.files import read_size

    return in_option(flag, read_size, text)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ModelConfig):
    """Options of ``dglx plan``: graph, model and servers.

    Raises:
        UnknownNameError: there is no such model, or no such partitioner.
        ConfigError: a value is out of range, or not exactly one of data and figures is given.
    """

    data: str | None = path_option(
        None, "What `dglx partition` wrote; else --nodes and --edges.", metavar="DIR"
    )
    servers: int = option(2, "How many.", panel=_SERVERS, check=at_least(1))
    ranks: int | None = option(
        None, "Processes on all servers together, as for `dglx train`. Default: one on each.", panel=_SERVERS
    )
    ranks_per_server: int | None = option(
        None, "Processes on each, in place of --ranks.", panel=_SERVERS, check=at_least(1)
    )
    external: Rate | None = option(
        None,
        "Of a server's card, e.g. 10gbit. Default: 1gbit.",
        flag="--bandwidth-external",
        metavar="RATE",
        panel=_SERVERS,
        parse=_rate,
    )
    internal: Rate | None = option(
        None,
        "Between the ranks of a server, together.",
        flag="--bandwidth-internal",
        metavar="RATE",
        panel=_SERVERS,
        parse=_rate,
    )
    latency_ms: float | None = option(
        None,
        "Of a message between servers. Default: 0.5.",
        panel=_SERVERS,
        check=Check(lambda value: 0 <= value < math.inf, "a number of at least 0"),
    )
    cores: float | None = option(
        None, "Of a rank. Default: as this machine's.", panel=_SERVERS, check=_POSITIVE
    )
    """Of a rank; None: this machine's, divided by the ranks that share it."""
    memory_bytes: int | None = option(
        None,
        "Of a rank, e.g. 16GB. Default: as here.",
        flag="--memory",
        metavar="SIZE",
        panel=_SERVERS,
        parse=_size,
    )
    here: bool = option(False, "All servers are this machine.", panel=_SERVERS)
    """As under ``dglx train --servers`` and scripts/netlab."""
    speed: float = option(
        1.0, "Of a rank, relative to one core of a server; an accelerator: 50.", panel=_GRAPH, check=_POSITIVE
    )
    nodes: float | None = option(None, "E.g. 1e9.", panel=_GRAPH)
    edges: float | None = option(None, "E.g. 2e10.", panel=_GRAPH)
    features: int = option(100, "Columns.", panel=_GRAPH)
    classes: int = option(50, "Of the labels.", panel=_GRAPH)
    train_share: float = option(0.1, "Share of training nodes.", panel=_GRAPH)
    partitioner: str = option("metis", "random, or metis and the like.", panel=_GRAPH)
    edge_cut: float | None = option(None, "Share of edges between servers, if known.", panel=_GRAPH)
    degree_spread: float = option(4.0, "Mean square of the in-degrees over their squared mean.", panel=_GRAPH)
    unit: Literal["mini_batch", "full_graph", "any"] = option(
        "mini_batch",
        "mini_batch, full_graph, or any: an epoch of one is not an epoch of the other.",
        panel=_CHOICE,
    )
    full_graph_epochs: float = option(
        5.0,
        "With --unit any: epochs of whole graphs equivalent to one of mini-batches.",
        panel=_CHOICE,
        check=_POSITIVE,
    )
    estimators: bool = option(
        False,
        "Also choose among strategies that do not train exactly.",
        flag="--allow-estimators",
        panel=_CHOICE,
    )
    dry_batches: int = option(
        20, "Counted batches of each rank; 0: all of an epoch, exactly.", check=at_least(0)
    )
    seed: int = option(0, "Of the planned run.", check=at_least(0))
    picture: Path | None = option(
        None,
        "Draw the fastest strategy at other hidden widths and bandwidths.",
        flag="--map",
        metavar="FILE.png",
    )
    as_json: bool = option(False, "Write JSON and nothing else.", flag="--json")
    epoch: int = 1

    def __post_init__(self) -> None:
        # Imported here: they load torch, and `dglx --help` stays quick.
        from dglx_dist.data.partition.base import PARTITIONERS
        from dglx_dist.training.models import MODEL_KINDS, check_kind

        check_kind(self.model, MODEL_KINDS)
        super().__post_init__()
        if (self.nodes is None) != (self.edges is None):
            raise ConfigError("--nodes and --edges belong together; give both, or --data DIR")
        if (self.data is None) == (self.nodes is None):
            raise ConfigError(
                "give either the folder of a partitioned dataset (--data DIR), or the figures of a graph "
                "(--nodes, --edges, --features)"
            )
        if self.data is None:
            PARTITIONERS.resolve(self.partitioner)
        each = self.per_server
        if self.ranks_per_server not in (None, each):
            raise ConfigError(
                f"--ranks {self.ranks} on --servers {self.servers} are {each} on each, and "
                f"--ranks-per-server is {self.ranks_per_server}; give one of the two"
            )

    @property
    def per_server(self) -> int:
        """Ranks on each server."""
        if self.ranks is None:
            return self.ranks_per_server or 1
        return ranks_of_each(self.ranks, self.servers) or 1

    @property
    def ranks_of_machine(self) -> int:
        """Ranks that share the cores and the memory of one machine."""
        return self.per_server * (self.servers if self.here else 1)
