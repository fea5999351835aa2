"""Options of ``dglx plan``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dglx_dist.cli.common import ranks_of_each
from dglx_dist.errors import ConfigError
from dglx_dist.options import ABOVE_ZERO, Check, at_least, between, in_option, option, path_option
from dglx_dist.planner.records import ChoiceOptions, Rate
from dglx_dist.training.config import ModelConfig

_of_servers = partial(option, panel="Servers")
_of_graph = partial(option, panel="A graph without a dataset")
_MAX_BITS_PER_S = 10**14
"""Above the limit of tc, for links between accelerators inside of a server."""
_MOST_NODES, _MOST_EDGES, _MOST_COLUMNS = 10**15, 10**21, 10**6
"""Larger values are typing errors."""
_rate = in_option(partial(Rate.parse, most=_MAX_BITS_PER_S))


def _size(text: str, flag: str) -> int:
    from dglx_dist.data.storage.files import read_size

    return in_option(read_size)(text, flag)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ChoiceOptions, ModelConfig):
    """Options of ``dglx plan``: graph, model and servers.

    Raises:
        UnknownNameError: there is no such model, or no such partitioner.
        ConfigError: a value is out of range, or not exactly one of data and figures is given.
    """

    data: str | None = path_option(
        None, "What `dglx partition` wrote; else --nodes and --edges.", metavar="DIR"
    )
    servers: int = _of_servers(2, "How many.", check=at_least(1))
    ranks: int | None = _of_servers(
        None, "Processes on all servers together, as for `dglx train`. Default: one on each."
    )
    ranks_per_server: int | None = _of_servers(
        None, "Processes on each, in place of --ranks.", check=at_least(1)
    )
    external: Rate | None = _of_servers(
        None,
        "Of a server's card, e.g. 10gbit. Default: 1gbit.",
        flag="--bandwidth-external",
        metavar="RATE",
        parse=_rate,
    )
    internal: Rate | None = _of_servers(
        None,
        "Between the ranks of a server, together.",
        flag="--bandwidth-internal",
        metavar="RATE",
        parse=_rate,
    )
    latency_ms: float | None = _of_servers(
        None, "Of a message between servers. Default: 0.5.", check=at_least(0)
    )
    cores: float | None = _of_servers(None, "Of a rank. Default: as this machine's.", check=ABOVE_ZERO)
    """Of a rank; None: this machine's, divided by the ranks that share it."""
    memory_bytes: int | None = _of_servers(
        None, "Of a rank, e.g. 16GB. Default: as here.", flag="--memory", metavar="SIZE", parse=_size
    )
    here: bool = _of_servers(False, "All servers are this machine.")
    """As under ``dglx train --servers`` and scripts/netlab."""
    speed: float = _of_graph(
        1.0, "Of a rank, relative to one core of a server; an accelerator: 50.", check=ABOVE_ZERO
    )
    nodes: float | None = _of_graph(None, "E.g. 1e9.", check=between(1, _MOST_NODES))
    edges: float | None = _of_graph(None, "E.g. 2e10.", check=between(0, _MOST_EDGES))
    features: int = _of_graph(100, "Columns.", check=between(1, _MOST_COLUMNS))
    classes: int = _of_graph(50, "Of the labels.", check=between(1, _MOST_COLUMNS))
    train_share: float = _of_graph(
        0.1, "Share of training nodes.", check=Check(lambda value: 0 < value <= 1, "above 0 and at most 1")
    )
    partitioner: str = _of_graph("metis", "random, or metis and the like.")
    edge_cut: float | None = _of_graph(None, "Share of edges between servers, if known.", check=between(0, 1))
    degree_spread: float = _of_graph(
        4.0, "Mean square of the in-degrees over their squared mean.", check=between(1, _MOST_NODES)
    )
    seed: int = option(0, "Of the planned run.", check=at_least(0))
    picture: Path | None = option(
        None,
        "Draw the fastest strategy at other hidden widths and bandwidths.",
        flag="--map",
        metavar="FILE.png",
    )
    as_json: bool = option(False, "Write JSON and nothing else.", flag="--json")
    given: frozenset[str] = frozenset()
    """Fields whose options stood on the command line."""

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
