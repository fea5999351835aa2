"""``dglx train``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dglx_dist.cli.common import LAUNCHED, literals, say, show, whole_numbers, write
from dglx_dist.comm.topology import launched_by_torchrun, rank_environment, read_topology
from dglx_dist.errors import ConfigError
from dglx_dist.report.tables import plural

INTERRUPTED = 128 + signal.SIGINT


def start_ranks(arguments: Sequence[str], *, ranks: int, servers: int | None) -> int:
    """Run ``dglx ARGUMENTS`` on ``ranks`` ranks of this machine and wait for them.

    Args:
        arguments: What follows ``dglx``, e.g. ``["train", "data/x", "--debug"]``.
        ranks: W.
        servers: S virtual servers of W / S ranks each; None: one, or what DGLX_RANKS_PER_SERVER says.

    Returns:
        The exit code: 0, 130 after Ctrl-C, that of the rank that failed first, or 128 + the signal that ended
        the launcher; unless it is 0, a message has been shown.

    Raises:
        ConfigError: there are no ranks, or they cannot be divided among the servers.
    """
    command = [
        *(sys.executable, "-m", "dglx_dist.cli.torchrun"),
        *("--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "dglx_dist.cli", LAUNCHED, *arguments),
    ]
    environment = rank_environment(ranks, ranks_per_server=ranks_of_each(ranks, servers))
    process = subprocess.Popen(command, env=environment)
    # Ending this command ends its ranks too.
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The terminal also interrupts the launcher, which ends the ranks; wait for it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.wait()
        code = INTERRUPTED
    # In the background of a script this process ignores the interrupt, and only the launcher receives it.
    if code == INTERRUPTED:
        say(
            "interrupted; the ranks have ended. The same command with --resume goes on from the newest "
            "checkpoint, where --checkpoint-every saved any",
            "red",
        )
    if code < 0:
        name = signal.Signals(-code).name
        say(f"the launcher of the ranks was ended by {name}; the ranks end with it", "red")
        return 128 - code
    return code


def ranks_of_each(ranks: int, servers: int | None) -> int | None:
    """Return the number of ranks on each server; None without a number of servers.

    Raises:
        ConfigError: there are no ranks, or they cannot be divided among the servers.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    if servers is None:
        return None
    if servers < 1 or ranks % servers:
        raise ConfigError(
            f"--ranks {ranks} cannot be divided among --servers {servers}; "
            "make the ranks a multiple of the servers"
        )
    return ranks // servers


_MODEL, _RUN, _LOADER = "Model and optimizer", "Run folder, evaluation, checkpoints", "Loading"


def train(  # noqa: PLR0913  # one argument per option
    data: Annotated[Path, typer.Argument(metavar="DIR", help="What `dglx partition` wrote.")],
    strategy: Annotated[
        str,
        typer.Option(help="A wrong name lists all strategies; auto chooses one."),
    ] = "data_parallel",
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes to start here, with torchrun. Default: one, or those of torchrun."),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(help="Treat the ranks as if they were on this number of machines. Default: one."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the strategy; repeatable.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a rank may be silent.")] = 300.0,
    seed: Annotated[
        int, typer.Option(help="Of weights, order and samples, which are equal on any number of ranks.")
    ] = 0,
    model: Annotated[
        str,
        typer.Option(
            help="sage, gcn, sgc, gat, mlp or resgcn (deep); for several types rgcn or hgt.",
            rich_help_panel=_MODEL,
        ),
    ] = "sage",
    layers: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Convolutions.")] = 2,
    hidden: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Width between them.")] = 64,
    heads: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Attention heads of gat and hgt.")] = 4,
    dropout: Annotated[
        float, typer.Option(rich_help_panel=_MODEL, help="Probability, after each layer but the last.")
    ] = 0.5,
    recompute: Annotated[
        str,
        typer.Option(
            rich_help_panel=_MODEL,
            help="Save memory in resgcn: backward recomputes each layer, and either exchanges rows of "
            "other ranks again (exchange) or keeps them (keep).",
        ),
    ] = "none",
    epochs: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Of the whole run.")] = 20,
    lr: Annotated[float, typer.Option(rich_help_panel=_MODEL, help="Learning rate of Adam.")] = 0.01,
    weight_decay: Annotated[float, typer.Option(rich_help_panel=_MODEL, help="Of Adam.")] = 0.0,
    fanout: Annotated[
        str | None,
        typer.Option(
            metavar="K,K",
            rich_help_panel=_LOADER,
            help="Neighbours sampled per node and layer, input-most first; -1: all. Default: 25, then 10 "
            "for each other layer; all where the strategy takes the whole graph.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_LOADER,
            help="Targets per rank and step. Default: 512; all where the strategy takes the whole graph.",
        ),
    ] = None,
    structure: Annotated[
        str, typer.Option(rich_help_panel=_LOADER, help="auto, replicated on each server, or partitioned.")
    ] = "auto",
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            rich_help_panel=_LOADER,
            help="Cache features of other servers: vip (most needed by batches), degree or halo.",
        ),
    ] = None,
    cache_alpha: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LOADER, help="Size of the cache, as a fraction of the server's own nodes."
        ),
    ] = 0.2,
    depth: Annotated[
        int | None, typer.Option(rich_help_panel=_LOADER, help="Batches prepared ahead. Default: 1.")
    ] = None,
    loader_threads: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_LOADER, help="Threads that prepare them; 0: the training loop. Default: 1."
        ),
    ] = None,
    verify: Annotated[
        str, typer.Option(rich_help_panel=_LOADER, help="auto: read new files, full: all, never.")
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RUNDIR",
            rich_help_panel=_RUN,
            help="An earlier run there is replaced. Default: runs/NAME-STRATEGY, NAME of DIR.",
        ),
    ] = None,
    eval_every: Annotated[
        int, typer.Option(rich_help_panel=_RUN, help="Epochs between exact evaluations; 0: at the end.")
    ] = 1,
    patience: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_RUN, help="Stop after this number of evaluations without a better one."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(rich_help_panel=_RUN, help="Epochs between checkpoints in RUNDIR/checkpoints; 0: none."),
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            rich_help_panel=_RUN,
            help="Resume from the newest checkpoint in RUNDIR; from the start if there is none.",
        ),
    ] = False,
    predictions: Annotated[
        Path | None,
        typer.Option(metavar="DIR", rich_help_panel=_RUN, help="Write the class of every node, as Parquet."),
    ] = None,
    save_embeddings: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel=_RUN, help="Write every node's last hidden layer, as Parquet."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_RUN,
            help="Write a timeline of all ranks, for Perfetto; `dglx report FILE` draws it.",
        ),
    ] = None,
    trace_steps: Annotated[
        int, typer.Option(rich_help_panel=_RUN, help="Number of first steps in the trace.")
    ] = 200,
) -> None:
    """Train a model on a partitioned dataset, evaluate it exactly, and write results and cost to a folder.

    Two processes here: `dglx train data/demo --ranks 2 --epochs 5 --out runs/demo`

    Under torchrun: `torchrun --nproc-per-node 4 -m dglx_dist.cli train data/demo --out runs/demo`

    RUNDIR gets `summary.json`, `metrics.jsonl`, `config.json` and `picture.png`; `dglx report RUNDIR` shows
    them again.
    """
    from dglx_dist.cli.train_config import TrainConfig

    plan = TrainConfig(
        data=str(data),
        out=str(out or Path("runs") / f"{data.absolute().name}-{strategy}"),
        strategy=strategy,
        strategy_options=literals(option or [], "--option"),
        model=model,
        layers=layers,
        hidden=hidden,
        heads=heads,
        dropout=dropout,
        recompute=recompute,
        fanouts=None if fanout is None else whole_numbers(fanout, "--fanout"),
        batch_size=batch_size,
        epochs=epochs,
        lr=lr,
        weight_decay=weight_decay,
        seed=seed,
        eval_every=eval_every,
        patience=patience,
        checkpoint_every=checkpoint_every,
        resume=resume,
        structure=structure,  # type: ignore[arg-type]  # checked by DistGraph
        verify=verify,  # type: ignore[arg-type]  # checked by open_dataset
        cache=cache,
        cache_alpha=cache_alpha,
        depth=depth,
        loader_threads=loader_threads,
        timeout_s=timeout,
        predictions=None if predictions is None else str(predictions),
        save_embeddings=None if save_embeddings is None else str(save_embeddings),
        trace=None if trace is None else str(trace),
        trace_steps=trace_steps,
    )
    if launched_by_torchrun():
        check_launched(ranks, servers)
    elif ranks is not None:
        check_names(strategy, data, servers or 1)
        raise typer.Exit(start_ranks(sys.argv[1:], ranks=ranks, servers=servers))
    elif servers not in (None, 1):
        raise ConfigError(f"--servers {servers} divides ranks among servers; give their number with --ranks")
    from dglx_dist.cli.train_job import train_dataset

    trained = train_dataset(plan)
    if trained.rank == 0:
        from dglx_dist.report.tables import epoch_table, summary_table

        show(epoch_table(trained.epochs))
        show(summary_table(trained.summary))
        write(f"written to {trained.folder}; again: dglx report {trained.folder}")


def check_launched(ranks: int | None, servers: int | None) -> None:
    """Raise ConfigError when torchrun has started other ranks or servers than the options ask for."""
    topology = read_topology()
    if ranks not in (None, topology.world_size):
        raise ConfigError(
            f"--ranks {ranks}, but torchrun has started {topology.world_size}; leave --ranks out, or "
            "leave torchrun out"
        )
    if servers not in (None, topology.num_servers):
        raise ConfigError(
            f"--servers {servers}, but torchrun's ranks are on {topology.num_servers}; leave --servers out, "
            "and set DGLX_RANKS_PER_SERVER for virtual servers"
        )


def check_names(strategy: str, data: Path, servers: int) -> None:
    """Check strategy and dataset before any process is started.

    Raises:
        UnknownNameError: there is no such strategy.
        StorageError: there is no partitioned dataset at ``data``.
        ConfigError: it has fewer parts than there are ``servers``, or ``auto`` cannot plan for it.
    """
    from dglx_dist.data.storage.manifest import read_manifest
    from dglx_dist.planner.workload import check_plannable
    from dglx_dist.strategies.base import AUTO, STRATEGIES

    if strategy != AUTO:
        STRATEGIES.resolve(strategy)
    manifest = read_manifest(data)
    if strategy == AUTO:
        check_plannable(manifest, str(data))
    parts = manifest.num_parts
    if parts < servers:
        raise ConfigError(
            f"{data} has {plural(parts, 'part')}, too few for --servers {servers}; start {parts} at most, or "
            f"partition again with `dglx partition DATA --parts {servers} --out DIR`"
        )
