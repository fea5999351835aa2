"""``dglx train``."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dglx_dist.cli.common import LAUNCHED, LAUNCHER, command, show, write
from dglx_dist.comm.topology import (
    add_secret,
    build_rank_environment,
    is_launched_by_torchrun,
    mark_as_parent,
    read_settings,
    read_topology,
)
from dglx_dist.errors import ConfigError
from dglx_dist.progress import say
from dglx_dist.registry import AUTO
from dglx_dist.report.tables import plural
from dglx_dist.training.config import LINK, TrainConfig, count_ranks_per_server

if TYPE_CHECKING:
    from dglx_dist.cli.train_job import Trained

INTERRUPTED = 128 + signal.SIGINT
_SIGNAL_CODES = (INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)


def start_ranks(arguments: Sequence[str], *, ranks: int, servers: int | None) -> int:
    """Run ``dglx ARGUMENTS`` on W ``ranks`` on this machine, as S virtual servers, and wait for them.

    A process with the same command launches them, because libraries read environment variables when they are
    loaded. SIGTERM, SIGUSR1 and Ctrl-C are passed on.

    Returns:
        The exit code. 75 if the ranks have saved a checkpoint after a signal, 128 + signal if they could not.
        Otherwise the code from the rank that failed first, or 128 + the signal that ended the launcher.
            Unless it
        is 0, a message has been shown.

    Raises:
        ConfigError: If the servers are uneven, or there are no ranks.
    """
    mark_as_parent()
    ranks_per_server = count_ranks_per_server(ranks, servers)
    environment = add_secret(build_rank_environment(ranks, ranks_per_server=ranks_per_server))
    command = [sys.executable, "-m", "dglx_dist.cli", LAUNCHER, *arguments]
    launcher = subprocess.Popen(command, env=environment)
    received = set[int]()

    def pass_on(signal_number: int, _: object) -> None:
        received.add(signal_number)
        launcher.send_signal(signal_number)

    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # A shell starts background commands with SIGINT ignored. It must stay ignored then.
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, pass_on)

    # The code is negative if a signal has ended the launcher.
    code = launcher.wait()
    if code < 0 and -code not in received:
        name = signal.Signals(-code).name
        say(f"the launcher of the ranks was ended by {name}. The ranks end with it.", "red")
        return 128 - code

    # A signal that was passed on ends a launcher that has not installed its handler yet.
    if code < 0:
        code = 128 - code
    if code in _SIGNAL_CODES:
        reason = "interrupted"
        if code != INTERRUPTED:
            reason = f"ended by {signal.Signals(code - 128).name}"
        say(
            f"{reason}; the ranks have ended. The same command resumes from the newest checkpoint, if any",
            "red",
        )
    return code


def become_launcher(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Check ``config``, fork the ranks for ``dglx ARGUMENTS`` and wait for them.

    Only the ranks return from this function. It ends this process otherwise. See :func:`check_before_launch`
    for ConfigError and StorageError.
    """
    from dglx_dist.comm.stopping import end_with_parent

    end_with_parent()
    # Garbage collection takes a quarter of the import time, and imports produce no garbage.
    gc.disable()
    check_before_launch(config)
    from dglx_dist.cli.torchrun import launch

    standalone = ("--standalone", "--nproc-per-node", str(config.ranks))
    code = launch([*standalone, "-m", "dglx_dist.cli", LAUNCHED, *arguments])
    if code is not None:
        raise typer.Exit(code)


@command(TrainConfig)
def train(config: TrainConfig) -> None:
    """Train a model on a partitioned dataset, evaluate it exactly, and write results and cost to a folder.

    Two processes on this machine: `dglx train data/demo --ranks 2 --epochs 5 --out runs/demo`

    With torchrun: `torchrun --nproc-per-node 4 -m dglx_dist.cli train data/demo --out runs/demo`

    RUNDIR gets `summary.json`, `metrics.jsonl`, `config.json`, `picture.png` and the weights.
    `model.safetensors` has those of the best epoch by validation, or of the last epoch without validation,
    and `final.safetensors` those of the last epoch. `dglx report RUNDIR` shows the results again.
    """
    ranks, servers = config.ranks, config.servers
    if is_launched_by_torchrun():
        check_launched(ranks, servers)
    elif LAUNCHER in sys.argv:
        become_launcher(config, [argument for argument in sys.argv[1:] if argument != LAUNCHER])
    elif ranks is not None:
        raise typer.Exit(start_ranks(sys.argv[1:], ranks=ranks, servers=servers))
    elif servers not in (None, 1):
        raise ConfigError(f"--servers {servers} divides ranks among servers. Set their number with --ranks.")

    # This process is a rank now, or trains alone.
    from dglx_dist.cli.train_job import train_dataset, train_seeds

    trained = train_seeds(config) if config.seeds else train_dataset(config)
    if trained.rank == 0:
        _show_results(config, trained)


def _show_results(config: TrainConfig, trained: Trained) -> None:
    """Print a run's tables, and where its files are."""
    from dglx_dist.report.tables import build_epoch_table, build_spread_table, build_summary_table
    from dglx_dist.training.best_epoch import BEST_WEIGHTS, FINAL_WEIGHTS

    run_folder = config.out
    repeat = f"dglx report {config.out}"
    if config.seeds:
        run_folder = f"{config.out}/seed-N"
        repeat += f", for one seed: {config.out}/seed-{config.seeds[0]}"
        show(build_spread_table(trained.summary))
    else:
        show(partial(build_epoch_table, trained.epochs))
        show(build_summary_table(trained.summary))

    written = f"written to {config.out}"
    if config.predictions:
        written += f", predictions to {config.predictions}"
    if config.save_embeddings:
        written += f", embeddings to {config.save_embeddings}"
    best = f"{run_folder}/{BEST_WEIGHTS}"
    last = f"{run_folder}/{FINAL_WEIGHTS}"
    weights = f"weights of the best epoch: {best}, of the last: {last}"
    write(f"{written}; again: {repeat}; {weights}")


def check_launched(ranks: int | None, servers: int | None) -> None:
    """Raise ConfigError if torchrun has started other ranks or servers than the options request."""
    topology = read_topology()
    if ranks not in (None, topology.world_size):
        raise ConfigError(
            f"--ranks {ranks}, but torchrun has started {topology.world_size}. Leave --ranks "
            "out, or run it without torchrun."
        )
    if servers not in (None, topology.num_servers):
        raise ConfigError(
            f"--servers {servers}, but torchrun's ranks are on {topology.num_servers}. Leave "
            "--servers out, and set DGLX_RANKS_PER_SERVER for virtual servers."
        )


def check_before_launch(config: TrainConfig) -> None:
    """Refuse a run that cannot work, before any process is started.

    The checks return their results again in the ranks. Here only their errors matter. Raises ConfigError for
    an option or a device, and StorageError if the dataset cannot be read.
    """
    from dglx_dist.comm.devices import check_request
    from dglx_dist.data.storage.manifest import read_manifest
    from dglx_dist.graph.partition_book import resolve_etype
    from dglx_dist.planner.workload import check_choosable
    from dglx_dist.strategies.base import resolve_strategy

    strategy = resolve_strategy(config.strategy, auto=True)
    _check_strategy(config, strategy)
    check_request(config.device, read_settings().device)

    manifest = read_manifest(Path(config.data))
    for etype_name in config.target:
        resolve_etype(etype_name, manifest.edge_types)
    if strategy == AUTO and config.task != LINK:
        check_choosable(manifest, config.data)

    num_parts = manifest.num_parts
    num_servers = config.servers or 1
    if num_parts < num_servers:
        raise ConfigError(
            f"{config.data} has {plural(num_parts, 'part')}, too few for --servers "
            f"{num_servers}. Use at most {num_parts} servers, or partition again with `dglx "
            f"partition DATA --parts {num_servers} --out DIR`."
        )


def _check_strategy(config: TrainConfig, strategy: str) -> None:
    """Raise ConfigError if ``strategy`` does not support its options, the task, or the run's loop."""
    from dglx_dist.planner.auto import read_auto_options
    from dglx_dist.strategies.base import STRATEGIES
    from dglx_dist.training.fit_config import check_loop

    options = {**read_settings().options, **config.strategy_options}
    if strategy == AUTO:
        # The choice compares only strategies that support the task.
        read_auto_options(options)
        return

    STRATEGIES.get(strategy).read_options(options)
    traits = STRATEGIES.get(strategy).traits
    if config.task == LINK and not traits.on_edges:
        alternatives = [name for name in STRATEGIES.names() if STRATEGIES.get(name).traits.on_edges]
        raise ConfigError(
            f"--task link needs batches of edges, but strategy {strategy!r} has none. "
            f"Use --strategy {' or '.join(alternatives)}."
        )

    if config.embeddings and traits.features != "rows":
        raise ConfigError(
            f"--embeddings are rows on the servers, but strategy {strategy!r} does not fetch "
            "them. Use --strategy data_parallel."
        )
    check_loop(config, traits, strategy)
