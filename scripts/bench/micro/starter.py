"""What the micro-benchmarks share: options, a graph in parts, ranks, the timing loop, tables and JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dglx_dist.comm.topology import launched_by_torchrun, rank_environment
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.errors import ConfigError


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Options that all have; ``name`` is the program's."""
    made = argparse.ArgumentParser(
        prog=f"python scripts/bench {name}",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    return made


def graph_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The same, and those of :func:`on_graph`."""
    made = parser(name, description)
    made.add_argument("--nodes", type=int, default=200_000)
    made.add_argument("--degree", type=float, default=25.0)
    made.add_argument("--features", type=int, default=100)
    made.add_argument("--folder", type=Path, help="a dataset in parts, in place of the generated graph")
    return made


def on_ranks(measure: Callable[[], None], servers: int, arguments: list[str]) -> int:
    """Start the calling script again on so many servers of one rank; in these, call ``measure``.

    Args:
        measure: What each rank does.
        servers: How many.
        arguments: The script and its options.

    Returns:
        The exit code.
    """
    warnings.filterwarnings("ignore", message=".*CPU affinity.*")
    if launched_by_torchrun():
        measure()
        return 0
    command, environment = torchrun_command(arguments, servers, servers)
    return subprocess.run(command, env=environment, check=False).returncode


def on_graph(measure: Callable[[], None], servers: int, options: argparse.Namespace) -> int:
    """The same on a graph: that of ``--folder``, else the built-in one cut by metis, a part per server."""
    if options.folder is not None:
        return on_ranks(measure, servers, sys.argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "graph"
        config = SyntheticConfig(
            nodes=options.nodes, degree=options.degree, features=options.features, seed=0
        )
        graph = generate(config)
        assignment = PARTITIONERS.get("metis")(PartitionOptions()).assign(graph, servers, 0)
        write_dataset(graph, assignment, folder)
        return on_ranks(measure, servers, [*sys.argv, "--folder", str(folder)])


T = TypeVar("T")
Row = Mapping[str, object]
"""Figures of one line of a table, by the head of their column."""


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that ``work`` takes, and what it returns."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """The median of ``rounds`` calls, after two to warm up."""
    return statistics.median([timed(work)[0] for _ in range(rounds + 2)][2:])


def in_turn(
    contestants: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 0
) -> dict[str, list[float]]:
    """What each of ``contestants`` returns, taken in turn, so that a slow moment of the machine hits all.

    Args:
        contestants: By name; each call is one round.
        rounds: Of each.
        warm_up: Rounds at first that are left out: they page memory in, and compile.
    """
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            found[name].append(contestant())
    return {name: values[warm_up:] for name, values in found.items()}


def text_table(rows: Sequence[Row]) -> str:
    """Rows as aligned text, floats with two digits."""
    lines = [list(rows[0])]
    lines += [[f"{one:.2f}" if isinstance(one, float) else str(one) for one in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def write_json(options: argparse.Namespace, value: object) -> None:
    """Write the figures to the file of ``--json``, where it is given."""
    if options.json:
        options.json.write_text(json.dumps(value, indent=1), encoding="utf-8")


def torchrun_command(
    script_args: Sequence[str], ranks: int, servers: int = 1
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that start ``ranks`` ranks on this machine.

    Args:
        script_args: A script and its arguments, or ``-m``, a module and its arguments.
        ranks: Processes.
        servers: Virtual servers; the last may have fewer ranks.

    Raises:
        ConfigError: the ranks cannot be cut into so many servers.
    """
    per_server = -(-ranks // servers) if servers > 0 else 0
    if ranks < 1 or servers < 1 or -(-ranks // per_server) != servers:
        raise ConfigError(
            f"{ranks} ranks cannot be cut into {servers} servers; make the ranks a multiple of the servers"
        )
    command = [sys.executable, "-m", "dglx_dist.cli.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    return [*command, *script_args], rank_environment(ranks, ranks_per_server=per_server)
