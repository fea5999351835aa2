"""Ranks and servers of a job, and its launch settings, which are read from the environment."""

import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from dglx_dist.errors import ConfigError

_DGL_VARIABLES = (
    *("DGL_ROLE", "DGL_DIST_MODE", "DGL_IP_CONFIG", "DGL_NUM_SERVER", "DGL_NUM_CLIENT", "DGL_NUM_SAMPLER"),
    *("DGL_SERVER_ID", "DGL_GROUP_ID", "DGL_GRAPH_FORMAT", "DGL_KEEP_ALIVE", "DGL_DIST_MAX_TRY_TIMES"),
)

T = TypeVar("T")

_LOOPBACK = "lo"
_PARENT = "DGLX_PARENT"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_MIN_SECRET_CHARS, _MAX_SECRET_CHARS = 32, 4096
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Topology:
    """This rank, all ranks, and the servers that they share (machines, or virtual parts of machines)."""

    rank: int
    world_size: int
    server_of_rank: tuple[int, ...]
    """(W,) server by rank. Servers are numbered from 0, and a server's ranks are contiguous."""

    def __post_init__(self) -> None:
        if len(self.server_of_rank) != self.world_size or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} of {self.world_size} with servers {self.server_of_rank} is not a "
                "topology. Pass one server per rank and a rank in [0, world_size)."
            )

        is_sorted = list(self.server_of_rank) == sorted(self.server_of_rank)
        servers = sorted(set(self.server_of_rank))
        if not is_sorted or servers != list(range(len(servers))):
            raise ConfigError(
                f"servers must be numbered from 0 with contiguous ranks, but are {self.server_of_rank}"
            )

    @property
    def server(self) -> int:
        return self.server_of_rank[self.rank]

    @property
    def num_servers(self) -> int:
        return self.server_of_rank[-1] + 1

    @cached_property
    def local_rank(self) -> int:
        return self.ranks_of_server(self.server).index(self.rank)

    def ranks_of_server(self, server: int) -> tuple[int, ...]:
        return tuple(rank for rank, member in enumerate(self.server_of_rank) if member == server)

    def is_same_server(self, a: int, b: int) -> bool:
        return self.server_of_rank[a] == self.server_of_rank[b]


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address at which the ranks meet, and the launcher's facts about machines."""

    host: str
    port: int
    hosted_by_agent: bool
    """Whether the launcher hosts the store. Otherwise rank 0 does."""
    attempt: int
    """Number of restarts by the launcher, which separates the keys of attempts."""
    job: str
    """Name that the launcher uses for the job."""
    num_nodes: int
    """Real machines (torchrun nodes)."""
    node: int
    """This machine's number."""
    local_rank: int
    """Index of this rank on its machine, which selects its accelerator."""
    is_local: bool
    """Whether all ranks are certainly on this machine."""
    interface: str | None
    """Network interface to bind to: loopback on one machine, or None for the one that reaches ``host``."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings from environment variables, which replace missing arguments."""

    strategy: str | None = None
    """Value from DGLX_STRATEGY."""
    timeout_s: float | None = None
    """Seconds from DGLX_TIMEOUT."""
    device: str | None = None
    """Value from DGLX_DEVICE."""
    curve: bool = False
    """Whether DGLX_CURVE encrypts calls and rows between ranks."""
    secret: bytes | None = field(default=None, repr=False)
    """The job's secret, from DGLX_SECRET or the file DGLX_SECRET_FILE."""
    require_secret: bool = False
    """Whether DGLX_REQUIRE_SECRET forbids ranks on several machines to start without a secret."""
    ranks_per_server: int | None = None
    """Value from DGLX_RANKS_PER_SERVER."""
    omp_threads: int | None = None
    """First number in OMP_NUM_THREADS."""
    allocator_set: bool = False
    """Whether the user configured the allocator by a MALLOC_ variable, GLIBC_TUNABLES or LD_PRELOAD."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The strategy's options from DGLX_OPTIONS, a JSON object."""
    part_config: Path | None = None
    """Partition from DGL_CONF_PATH, which DGL's launcher sets."""
    dgl_processes: Mapping[str, str] = field(default_factory=dict)
    """Variables by which DGL's launcher configures its servers and clients, if they are set."""
    trace: Path | None = None
    """Folder from DGLX_TRACE to which every session writes its trace; see comm/trace.py."""
    scratch: Path | None = None
    """Folder on a disk from DGLX_SCRATCH for the rows that ranks share. The default is memory."""


def is_launched_by_torchrun(variables: Mapping[str, str] = os.environ) -> bool:
    return "RANK" in variables and "WORLD_SIZE" in variables


def read_topology(variables: Mapping[str, str] = os.environ) -> Topology:
    """Read this process's topology. Without torchrun, the process is the only rank.

    Assumes equally many ranks on every machine. :func:`assign_servers` corrects that later.
    ``DGLX_RANKS_PER_SERVER`` cuts each machine into virtual servers with so many ranks. A machine's last
    server may be smaller. Raises ConfigError, which names the variable, if a variable is wrong.
    """
    if not is_launched_by_torchrun(variables):
        return Topology(0, 1, (0,))
    world_size = _read_integer(variables, "WORLD_SIZE", least=1)
    rank = _read_integer(variables, "RANK", least=0, below=world_size)
    per_node = _read_integer(variables, "LOCAL_WORLD_SIZE", least=1, default=world_size)
    node_of_rank = tuple(member // per_node for member in range(world_size))
    single_server = Topology(rank, world_size, (0,) * world_size)
    return assign_servers(single_server, node_of_rank, variables)


def assign_servers(
    topology: Topology, node_of_rank: tuple[int, ...], variables: Mapping[str, str] = os.environ
) -> Topology:
    """Assign all ranks in ``topology`` to servers.

    ``node_of_rank`` is the machine by rank, for W ranks. Ranks on the same machine are contiguous. They form
    one server, unless the settings divide them into servers with ``ranks_per_server`` ranks.
    """
    per_server = read_settings(variables).ranks_per_server
    groups: list[tuple[int, int]] = []
    for rank, node in enumerate(node_of_rank):
        local_rank = rank - node_of_rank.index(node)
        virtual_server = local_rank // per_server if per_server else 0
        groups.append((node, virtual_server))
    server_of_group = {group: server for server, group in enumerate(dict.fromkeys(groups))}
    return replace(topology, server_of_rank=tuple(server_of_group[group] for group in groups))


def read_rendezvous(variables: Mapping[str, str] = os.environ) -> Rendezvous:
    """Read the rendezvous if :func:`is_launched_by_torchrun`. A ConfigError names a wrong variable."""
    if "MASTER_ADDR" not in variables:
        raise ConfigError(
            "RANK and WORLD_SIZE are set but MASTER_ADDR is not. Start the script with torchrun, or unset "
            "RANK and WORLD_SIZE to run one process."
        )

    world_size = _read_integer(variables, "WORLD_SIZE", least=1)
    per_node = _read_integer(variables, "LOCAL_WORLD_SIZE", least=1, default=world_size)
    rank = _read_integer(variables, "RANK", least=0, below=world_size)
    default_nodes = -(-world_size // per_node)
    num_nodes = _read_integer(variables, "GROUP_WORLD_SIZE", least=1, default=default_nodes)

    # Each launcher counts its own restarts, so a machine that came back starts at 0. A launcher's store
    # outlives attempts, but rank 0's store does not.
    hosted_by_agent = _read_flag(variables, "TORCHELASTIC_USE_AGENT_STORE")
    attempt = 0
    if hosted_by_agent:
        attempt = _read_integer(variables, "TORCHELASTIC_RESTART_COUNT", least=0, default=0)

    host = variables["MASTER_ADDR"]
    has_one_node = variables.get("GROUP_WORLD_SIZE") == "1"
    interface = _read_first_entry(variables, "GLOO_SOCKET_IFNAME")
    if not interface and has_one_node:
        interface = _LOOPBACK
    return Rendezvous(
        host=host,
        port=_read_integer(variables, "MASTER_PORT", least=1, below=65536),
        hosted_by_agent=hosted_by_agent,
        attempt=attempt,
        job=variables.get("TORCHELASTIC_RUN_ID", "none"),
        num_nodes=num_nodes,
        node=_read_integer(variables, "GROUP_RANK", least=0, default=rank // per_node),
        local_rank=_read_integer(variables, "LOCAL_RANK", least=0, default=rank % per_node),
        is_local=has_one_node or host in LOOPBACK_HOSTS,
        interface=interface or None,
    )


def read_launch() -> tuple[str, int]:
    """Return a name for this start of torchrun and its number of restarts, or ("", 0) without torchrun.

    On several machines the name is the job's id, which the user may use again. It must not be the launcher's
    own name on one machine, because rank 0 may move.
    """
    variables = os.environ
    attempt = _read_integer(variables, "TORCHELASTIC_RESTART_COUNT", least=0, default=0)
    if _read_integer(variables, "GROUP_WORLD_SIZE", least=1, default=1) > 1:
        return variables.get("TORCHELASTIC_RUN_ID", ""), attempt
    # The path is FOLDER/JOB_RANDOM/attempt_1/0/error.json. JOB_RANDOM stays the same after a restart.
    parents = Path(variables.get("TORCHELASTIC_ERROR_FILE", "")).parents
    name = parents[2].name if len(parents) > 2 else ""
    return name, attempt


def is_started_by_agent() -> bool:
    """Return whether torchrun is this process's parent, or started the process that did."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def mark_as_parent() -> None:
    """Tell child processes that this process is their parent; see :func:`take_parent`."""
    os.environ[_PARENT] = str(os.getpid())


def take_parent() -> int | None:
    """Return and forget the parent's process id if it called :func:`mark_as_parent`."""
    parent = os.environ.pop(_PARENT, "")
    return int(parent) if parent.isdecimal() else None


def read_settings(variables: Mapping[str, str] = os.environ) -> Settings:
    """Read the DGLX_ variables. A ConfigError names the variable with an invalid value."""
    per_server = None
    if "DGLX_RANKS_PER_SERVER" in variables:
        per_server = _read_integer(variables, "DGLX_RANKS_PER_SERVER", least=1)

    threads = _read_first_entry(variables, "OMP_NUM_THREADS")
    omp_threads = int(threads) if threads.isdecimal() else 0
    return Settings(
        strategy=variables.get("DGLX_STRATEGY") or None,
        timeout_s=_read_seconds(variables, "DGLX_TIMEOUT"),
        device=variables.get("DGLX_DEVICE") or None,
        curve=_read_flag(variables, "DGLX_CURVE"),
        secret=_read_secret(variables),
        require_secret=_read_flag(variables, "DGLX_REQUIRE_SECRET"),
        ranks_per_server=per_server,
        omp_threads=omp_threads or None,
        allocator_set=_configures_allocator(variables),
        options=_read_object(variables, "DGLX_OPTIONS"),
        part_config=_read_path(variables, "DGL_CONF_PATH"),
        dgl_processes={name: variables[name] for name in _DGL_VARIABLES if name in variables},
        trace=_read_path(variables, "DGLX_TRACE"),
        scratch=_read_path(variables, "DGLX_SCRATCH"),
    )


def _configures_allocator(variables: Mapping[str, str]) -> bool:
    if variables.get("GLIBC_TUNABLES") or variables.get("LD_PRELOAD"):
        return True
    return any(name.startswith("MALLOC_") for name in variables)


def set_settings(strategy: str, options: Mapping[str, object]) -> None:
    """Set DGLX_STRATEGY and DGLX_OPTIONS in this process, for a program that it runs."""
    os.environ.update({"DGLX_STRATEGY": strategy, "DGLX_OPTIONS": json.dumps(dict(options))})


def bind_to_loopback(rendezvous: Rendezvous) -> None:
    """Bind gloo and NCCL in this process to loopback if ``rendezvous`` does.

    Keeps the user's own settings.
    """
    if rendezvous.interface == _LOOPBACK:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, _LOOPBACK)


def add_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """Add a secret for a new job's ranks to ``environment``, unless it has one."""
    if environment.get("DGLX_SECRET") or environment.get("DGLX_SECRET_FILE"):
        return dict(environment)
    return {**environment, "DGLX_SECRET": secrets.token_hex(32)}


def copy_environment() -> dict[str, str]:
    return dict(os.environ)


def _read_integer(
    values: Mapping[str, str], name: str, *, least: int, below: int | None = None, default: int | None = None
) -> int:
    if name not in values:
        if default is not None:
            return default
        raise ConfigError(f"{name} is not set. Start the script with torchrun, or unset RANK.")

    form = f"a whole number of at least {least}"
    if below is not None:
        form += f" and below {below}"

    def parse(text: str) -> int:
        value = int(text)
        if value < least or (below is not None and value >= below):
            raise ValueError
        return value

    return _read_value(values, name, parse, form)


def _read_secret(variables: Mapping[str, str]) -> bytes | None:
    # Messages must not show any part of the secret.
    path = variables.get("DGLX_SECRET_FILE", "")
    if path:
        name = "DGLX_SECRET_FILE"
        secret = _read_private_file(path).strip()
    else:
        name = "DGLX_SECRET"
        secret = os.fsencode(variables.get(name, "")).strip()
        if not secret:
            return None

    if not _MIN_SECRET_CHARS <= len(secret) <= _MAX_SECRET_CHARS:
        raise ConfigError(
            f"{name} has {len(secret)} characters, outside [{_MIN_SECRET_CHARS}, {_MAX_SECRET_CHARS}]. "
            "Make a secret with `openssl rand -hex 32`."
        )
    return secret


def _read_private_file(path: str) -> bytes:
    """Read a file that only this user can read. Raise ConfigError for any other file."""
    try:
        # Opening a pipe must not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_open_to_others = status.st_mode & 0o077 or status.st_uid != os.getuid()
            if is_open_to_others or not stat.S_ISREG(status.st_mode):
                raise ConfigError(
                    f"DGLX_SECRET_FILE={path!r} must be a file of yours that nobody else can read. Run "
                    f"`chmod 600 {path}` as the user of this job."
                )
            return file.read(2 * _MAX_SECRET_CHARS)
    except OSError as error:
        raise ConfigError(f"DGLX_SECRET_FILE={path!r} cannot be read: {error.strerror}") from None


def _read_first_entry(variables: Mapping[str, str], name: str) -> str:
    """Return the first entry in a list that is separated by commas, or "" if the variable is not set."""
    return variables.get(name, "").split(",")[0].strip()


def _read_path(variables: Mapping[str, str], name: str) -> Path | None:
    path = variables.get(name)
    return Path(path) if path else None


def _read_object(variables: Mapping[str, str], name: str) -> dict[str, object]:
    def parse(text: str) -> dict[str, object]:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError
        return value

    if not variables.get(name):
        return {}
    return _read_value(variables, name, parse, 'a JSON object, like {"depth": 2}')


def _read_seconds(variables: Mapping[str, str], name: str) -> float | None:
    def parse(text: str) -> float:
        seconds = float(text)
        if not 0 < seconds < float("inf"):
            raise ValueError
        return seconds

    if not variables.get(name):
        return None
    return _read_value(variables, name, parse, "a number of seconds above 0")


def _read_flag(variables: Mapping[str, str], name: str) -> bool:
    def parse(text: str) -> bool:
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise ValueError
        return word in _TRUE

    return _read_value(variables, name, parse, "one of 1, true, yes, on, 0, false, no, off")


def _read_value(variables: Mapping[str, str], name: str, parse: Callable[[str], T], form: str) -> T:
    """Parse a variable's value. Raise ConfigError if ``parse`` raises ValueError for its text."""
    text = variables.get(name, "")
    try:
        return parse(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} must be {form}. Correct or unset it.") from None


_RANK_DEFAULTS = {
    # Without this, every large tensor is mapped, page-faulted in and returned to the system at every step,
    # which costs up to a third of a training step on CPUs. memory.keep_memory() does the same from within,
    # but only after the first imports. A MALLOC_TOP_PAD_ would add 0.5 GB to a rank and no speed.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    # Without this, each rank adds a C++ stack from torch's store to its own message if its launcher is
    # killed.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def build_rank_environment(
    num_ranks: int, *, ranks_per_server: int | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the complete environment for ``num_ranks`` ranks on this machine.

    Sets glibc's allocator to keep its memory, and each rank's threads to its share of the cores. The user's
    settings stay.

    Args:
        num_ranks: Ranks to start.
        ranks_per_server: Ranks per virtual server. The default is read from ``environment``.
        environment: Variables to extend. The default is this process's environment.

    Raises:
        ConfigError: If a number is below 1.
    """
    if num_ranks < 1 or (ranks_per_server is not None and ranks_per_server < 1):
        raise ConfigError(f"{num_ranks} ranks, {ranks_per_server} per server: both must be at least 1")
    if environment is None:
        environment = os.environ
    num_threads = max(len(os.sched_getaffinity(0)) // num_ranks, 1)
    variables = {**_RANK_DEFAULTS, "OMP_NUM_THREADS": str(num_threads), **environment}
    if ranks_per_server is not None:
        variables["DGLX_RANKS_PER_SERVER"] = str(ranks_per_server)
    return variables


def set_rank_variables(variables: Mapping[str, str]) -> None:
    """Add a rank's variables to the environment in this process, which is a fork of the launcher."""
    os.environ.update(variables)


def format_endpoint(address: str, port: int | str) -> str:
    # URLs enclose IPv6 addresses in brackets.
    if ":" in address:
        return f"tcp://[{address}]:{port}"
    return f"tcp://{address}:{port}"
