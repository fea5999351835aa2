"""Options of ``dglx plan``. Imports no torch, so that ``dglx --help`` is fast."""

from dataclasses import dataclass
from functools import partial

from dglx_dist.errors import ConfigError
from dglx_dist.memory import read_size
from dglx_dist.options import ABOVE_ZERO, at_least, option, path_option, prefix_errors
from dglx_dist.planner.records import ChoiceOptions, Rate
from dglx_dist.training.config import ModelConfig, count_ranks_per_server
from dglx_dist.training.model_kinds import KINDS, check_kind

_server_option = partial(option, panel="Servers")
_MAX_BITS_PER_S = 10**14
"""Largest rate. It is above tc's limit, for links between accelerators inside a server."""
_rate_option = partial(
    _server_option, None, metavar="RATE", parse=prefix_errors(partial(Rate.parse, most=_MAX_BITS_PER_S))
)
_size_option = partial(_server_option, None, metavar="SIZE", parse=prefix_errors(read_size))


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ChoiceOptions, ModelConfig):
    """Options of ``dglx plan``: graph, model and servers. A wrong value raises ConfigError."""

    folder: str | None = path_option(None, "Folder that `dglx partition` wrote.", flag="DIR", metavar="DIR")
    data: str | None = path_option(None, "The same folder as an option.", metavar="DIR")
    """Folder of the dataset, from either option."""
    servers: int = _server_option(2, "Number of servers.", check=at_least(1))
    ranks: int | None = _server_option(
        None, "Number of processes on all servers together, like in `dglx train`. Default: one per server."
    )
    ranks_per_server: int | None = _server_option(
        None, "Number of processes per server, instead of --ranks.", check=at_least(1)
    )
    external: Rate | None = _rate_option(
        "Rate of a server's network card, e.g. 10gbit. Default: 1gbit.", flag="--bandwidth-external"
    )
    internal: Rate | None = _rate_option(
        "Total rate between the ranks of a server.", flag="--bandwidth-internal"
    )
    cores: float | None = _server_option(
        None, "Number of cores per rank. Default: a rank's share of this machine.", check=ABOVE_ZERO
    )
    memory_bytes: int | None = _size_option(
        "Memory per rank, e.g. 16GB (10^9 bytes each). Default: a rank's share of this machine.",
        flag="--memory",
    )
    device_memory_bytes: int | None = _size_option(
        "GPU memory per rank, e.g. 80GB (10^9 bytes each). Default: as here, if the model is timed on a GPU.",
        flag="--device-memory",
    )
    here: bool = _server_option(False, "Assume that all servers share this machine.")
    """This is the case for ``dglx train --servers`` and scripts/netlab."""
    seed: int = option(0, "Random seed of the planned run.", check=at_least(0))
    as_json: bool = option(False, "Write JSON and nothing else.", flag="--json")
    given: frozenset[str] = frozenset()
    """Fields whose options are on the command line."""

    def __post_init__(self) -> None:
        check_kind(self.model, KINDS)
        super().__post_init__()

        if self.folder is not None:
            if self.data not in (None, self.folder):
                raise ConfigError(f"the dataset is {self.folder}, but --data is {self.data}. Use one.")
            # The dataclass is frozen, so the field cannot be assigned.
            object.__setattr__(self, "data", self.folder)
        if self.data is None:
            raise ConfigError("the folder DIR of a dataset is missing. Pass one that `dglx partition` wrote.")

        ranks_per_server = self.per_server
        if self.ranks_per_server not in (None, ranks_per_server):
            raise ConfigError(
                f"--ranks {self.ranks} on --servers {self.servers} are {ranks_per_server} on each, but "
                f"--ranks-per-server is {self.ranks_per_server}. Use one of the two."
            )

    @property
    def per_server(self) -> int:
        """Number of ranks on each server, from either option. 1 by default."""
        if self.ranks is None:
            return self.ranks_per_server or 1
        return count_ranks_per_server(self.ranks, self.servers) or 1

    @property
    def ranks_of_machine(self) -> int:
        """Number of ranks that share the cores and the memory of one machine."""
        if self.here:
            return self.per_server * self.servers
        return self.per_server
