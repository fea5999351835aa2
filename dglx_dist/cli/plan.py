"""``dglx plan``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dglx_dist.cli.common import draw_or_warn, libraries_on_stderr, say, show, whole_numbers, write
from dglx_dist.comm.topology import launched_by_torchrun
from dglx_dist.errors import ConfigError

if TYPE_CHECKING:
    from dglx_dist.cli.plan_job import PlanConfig
    from dglx_dist.planner.choose import Regions
    from dglx_dist.planner.records import Choice


T = TypeVar("T")

_MODEL, _SERVERS, _GRAPH, _CHOICE = "Model", "Servers", "A graph without a dataset", "Choice"

_MAX_BITS_PER_S = 10**14
"""Above the limit of tc, for links between accelerators inside of a server."""
_FIGURES_OPTIONS = ("features", "classes", "train_share", "partitioner", "edge_cut", "degree_spread", "speed")
_DATA_OPTIONS = ("dry_batches", "seed")
_BATCH_OPTIONS = ("fanout", "batch_size")


def plan(  # noqa: PLR0913  # one argument per option
    context: typer.Context,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="What `dglx partition` wrote; else --nodes and --edges."),
    ] = None,
    model: Annotated[
        str, typer.Option(rich_help_panel=_MODEL, help="sage, gcn, sgc, gat, mlp or resgcn (deep).")
    ] = "sage",
    layers: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Convolutions.")] = 2,
    hidden: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Width between them.")] = 64,
    heads: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Attention heads of gat.")] = 4,
    fanout: Annotated[
        str | None,
        typer.Option(
            metavar="K,K", rich_help_panel=_MODEL, help="As for `dglx train`. Default: 25, then 10."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Targets per rank and step. Default: 512.")
    ] = None,
    servers: Annotated[int, typer.Option(rich_help_panel=_SERVERS, help="How many.")] = 2,
    ranks: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_SERVERS,
            help="Processes on all servers together, as for `dglx train`. Default: one on each.",
        ),
    ] = None,
    ranks_per_server: Annotated[
        int | None, typer.Option(rich_help_panel=_SERVERS, help="Processes on each, in place of --ranks.")
    ] = None,
    bandwidth_external: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", rich_help_panel=_SERVERS, help="Of a server's card, e.g. 10gbit. Default: 1gbit."
        ),
    ] = None,
    bandwidth_internal: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", rich_help_panel=_SERVERS, help="Between the ranks of a server, together."
        ),
    ] = None,
    latency_ms: Annotated[
        float | None,
        typer.Option(rich_help_panel=_SERVERS, help="Of a message between servers. Default: 0.5."),
    ] = None,
    cores: Annotated[
        float | None, typer.Option(rich_help_panel=_SERVERS, help="Of a rank. Default: as this machine's.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_SERVERS, help="Of a rank, e.g. 16GB. Default: as here."
        ),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", rich_help_panel=_SERVERS, help="All servers are this machine.")
    ] = False,
    speed: Annotated[
        float,
        typer.Option(
            rich_help_panel=_GRAPH, help="Of a rank, relative to one core of a server; an accelerator: 50."
        ),
    ] = 1.0,
    nodes: Annotated[float | None, typer.Option(rich_help_panel=_GRAPH, help="E.g. 1e9.")] = None,
    edges: Annotated[float | None, typer.Option(rich_help_panel=_GRAPH, help="E.g. 2e10.")] = None,
    features: Annotated[int, typer.Option(rich_help_panel=_GRAPH, help="Columns.")] = 100,
    classes: Annotated[int, typer.Option(rich_help_panel=_GRAPH, help="Of the labels.")] = 50,
    train_share: Annotated[
        float, typer.Option(rich_help_panel=_GRAPH, help="Share of training nodes.")
    ] = 0.1,
    partitioner: Annotated[
        str, typer.Option(rich_help_panel=_GRAPH, help="random, or metis and the like.")
    ] = "metis",
    edge_cut: Annotated[
        float | None, typer.Option(rich_help_panel=_GRAPH, help="Share of edges between servers, if known.")
    ] = None,
    degree_spread: Annotated[
        float,
        typer.Option(rich_help_panel=_GRAPH, help="Mean square of the in-degrees over their squared mean."),
    ] = 4.0,
    unit: Annotated[
        str,
        typer.Option(
            rich_help_panel=_CHOICE,
            help="mini_batch, full_graph, or any: an epoch of one is not an epoch of the other.",
        ),
    ] = "mini_batch",
    full_graph_epochs: Annotated[
        float,
        typer.Option(
            rich_help_panel=_CHOICE,
            help="With --unit any: epochs of whole graphs equivalent to one of mini-batches.",
        ),
    ] = 5.0,
    allow_estimators: Annotated[
        bool,
        typer.Option(
            "--allow-estimators",
            rich_help_panel=_CHOICE,
            help="Also choose among strategies that do not train exactly.",
        ),
    ] = False,
    dry_batches: Annotated[
        int, typer.Option(help="Counted batches of each rank; 0: all of an epoch, exactly.")
    ] = 20,
    structure: Annotated[str, typer.Option(help="auto, replicated on each server, or partitioned.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the planned run.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE.png",
            help="Draw the fastest strategy at other hidden widths and bandwidths.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON and nothing else.")] = False,
) -> None:
    """Predict time, traffic and memory of an epoch under every strategy, and choose one.

    For a dataset: `dglx plan --data data/demo --model sage --hidden 16 --servers 2 --ranks 4
    --bandwidth-external 1gbit`

    Without a dataset: `dglx plan --nodes 1e9 --edges 2e10 --features 128 --servers 64 --ranks-per-server 8
    --bandwidth-external 100gbit --cores 8 --speed 50 --memory 80GB`

    Nothing is trained: one process counts batches and plans of all ranks, and times the model on a few of
    them. `dglx train --strategy auto` does this and trains.
    """
    from dglx_dist.cli.plan_job import PlanConfig, make_map, make_plan
    from dglx_dist.data.storage.files import read_size
    from dglx_dist.planner.records import Rate
    from dglx_dist.planner.workload import Figures
    from dglx_dist.report.tables import plan_head, plan_lines, plan_table

    _check_no_unused_options(context, has_data=data is not None, unit=unit)
    if (nodes is None) != (edges is None):
        raise ConfigError("--nodes and --edges belong together; give both, or --data DIR")
    figures = None
    if nodes is not None and edges is not None:
        figures = Figures(
            nodes=nodes,
            edges=edges,
            features=features,
            classes=classes,
            train_share=train_share,
            method=partitioner,
            edge_cut=edge_cut,
            degree_spread=degree_spread,
        )
    rate = partial(Rate.parse, most=_MAX_BITS_PER_S)
    config = PlanConfig(
        data=None if data is None else str(data),
        figures=figures,
        model=model,
        layers=layers,
        hidden=hidden,
        heads=heads,
        fanouts=None if fanout is None else whole_numbers(fanout, "--fanout"),
        batch_size=batch_size,
        servers=servers,
        ranks_per_server=_ranks_of_each(ranks, ranks_per_server, servers),
        external=_read("--bandwidth-external", rate, bandwidth_external),
        internal=_read("--bandwidth-internal", rate, bandwidth_internal),
        latency_ms=latency_ms,
        cores=cores,
        here=here,
        memory_bytes=_read("--memory", read_size, memory),
        speed=speed,
        unit=unit,  # type: ignore[arg-type]  # checked by PlanConfig
        estimators=allow_estimators,
        full_graph_epochs=full_graph_epochs,
        dry_batches=dry_batches,
        seed=seed,
        structure=structure,  # type: ignore[arg-type]  # checked by PlanConfig
    )
    notify = None if as_json else lambda text: say(f"counting: {text}", "dim")
    if picture is not None:
        _check_picture(picture)
    with libraries_on_stderr():
        choice, regions = (make_plan(config, notify), None) if picture is None else make_map(config, notify)
    if picture is not None and regions is not None:
        _draw(config, choice, regions, picture, quiet=as_json)
    if as_json:
        write(json.dumps(choice.to_json()))
        return
    write(plan_head(choice))
    show(plan_table(choice))
    for line in plan_lines(choice):
        write(line)


def _check_no_unused_options(context: typer.Context, *, has_data: bool, unit: str) -> None:
    if launched_by_torchrun():
        raise ConfigError("dglx plan is one process, and torchrun has started this one; leave torchrun out")
    for name in _FIGURES_OPTIONS if has_data else _DATA_OPTIONS:
        if _is_given(context, name):
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} describes a graph without a dataset, but --data is given; leave --{option} out"
                if has_data
                else f"--{option} needs a dataset (--data DIR), but none is given; leave it out"
            )
    for name in _BATCH_OPTIONS if unit == "full_graph" else ():
        if _is_given(context, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for mini-batches, and --unit full_graph has none; leave it "
                "out, or take --unit any"
            )
    if _is_given(context, "full_graph_epochs") and unit != "any":
        raise ConfigError(
            f"--full-graph-epochs compares whole graphs with mini-batches, and --unit is {unit}; "
            "add --unit any"
        )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read(option: str, parse: Callable[[str], T], text: str | None) -> T | None:
    # The option's name goes in front of the error.
    try:
        return None if text is None else parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _ranks_of_each(ranks: int | None, per_server: int | None, servers: int) -> int:
    from dglx_dist.cli.train import ranks_of_each

    each = None if ranks is None else ranks_of_each(ranks, servers)
    if each is not None and per_server not in (None, each):
        raise ConfigError(
            f"--ranks {ranks} on --servers {servers} are {each} on each, and --ranks-per-server is "
            f"{per_server}; give one of the two"
        )
    return each or (1 if per_server is None else per_server)


def _draw(config: PlanConfig, choice: Choice, regions: Regions, picture: Path, *, quiet: bool) -> None:
    from dglx_dist.report.pictures import draw_regions

    ranks = f"{config.servers} x {config.ranks_per_server} ranks"
    unit = {"mini_batch": " of mini-batches", "full_graph": " of whole graphs"}.get(
        config.constraints.unit, ""
    )
    title = f"{choice.graph.name}, {config.model} of {config.layers} layers, {ranks}: the fastest epoch{unit}"
    here = config.hidden, choice.cluster.external_bytes_per_s
    # A warning only: the plan, which took a while, is still shown.
    draw_or_warn(
        lambda: draw_regions(regions, picture, title=title, here=here),
        picture,
        remedy="; say where with --map FILE.png",
        quiet=quiet,
    )


def _check_picture(picture: Path) -> None:
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=picture.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--map {picture} cannot be written ({error.strerror}); give a file in a folder that can be"
        ) from error
    if picture.is_dir():
        raise ConfigError(f"--map {picture} is a folder; give the name of a file in it, such as map.png")
