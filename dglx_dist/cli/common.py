"""Console output, errors, and commands made from option records."""

import ctypes
import inspect
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from dglx_dist.comm.topology import is_launched_by_torchrun, read_topology
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.options import Option, find_flag, list_options
from dglx_dist.progress import PlainConsole, say
from dglx_dist.records import FEATURE, LABEL, SPLITS, EdgeType, format_type

C = TypeVar("C")

_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY

LAUNCHER, LAUNCHED = "--launcher", "--launched"
"""Hidden flags for the launcher, and for ranks that leave showing their error to the launcher."""


def report_error(error: Exception, *, debug: bool) -> None:
    """Show one message on standard error, or a traceback with ``debug``.

    Under torchrun, the error is also recorded for torchrun. The launcher that ``dglx train`` uses shows the
    earliest error among all ranks, so its ranks print none.
    """
    is_rank = is_launched_by_torchrun()
    is_for_user = isinstance(error, DglxError)
    if is_rank:
        # The import loads torch. Ranks have loaded it anyway, but other commands must start quickly.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        if is_for_user and not debug:
            # torchrun prints the recorded traceback. Users correct such an error by its message alone.
            error.__traceback__ = error.__cause__ = None
            error.__suppress_context__ = True
        get_error_handler().record_exception(error)

    if debug:
        Console(stderr=True, soft_wrap=True).print_exception()
        return
    if LAUNCHED in sys.argv:
        return

    message = f"error: {error}"
    if not is_for_user:
        message = f"unexpected {type(error).__name__}: {error}\n"
        message += "run the same command with --debug for the traceback"
    if is_rank:
        message = f"rank {read_topology().rank}: {message}"
    say(message, "red")


def write(text: str, style: str = "") -> None:
    """Write a line to standard output."""
    PlainConsole(soft_wrap=True).print(text, style=style)


def warn(text: str) -> None:
    say(f"warning: {text}", "yellow")


def show(table: Table | Callable[[int], Table]) -> None:
    """Print a table, or a table for the available width. Without a terminal it has at least 150 columns."""
    console = PlainConsole()
    if not console.is_terminal:
        console = PlainConsole(width=max(console.width, 150))
    console.print(table if isinstance(table, Table) else table(console.width))


def draw_or_warn(draw: Callable[[], object], target: Path, remedy: str = "") -> None:
    """Call ``draw``, which writes ``target``, and print its path. Warn if the picture cannot be written.

    ``remedy`` ends the warning, for instance ``; choose a file with --picture FILE``.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draw()
    except OSError as error:
        warn(f"the picture could not be written to {target}: {error.strerror}{remedy}")
    else:
        write(f"picture: {target}")


def check_picture(picture: Path, option: str, example: str) -> None:
    """Create the folder for ``picture``, the value of ``option``. Raise ConfigError if it is not writable."""
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=picture.parent):
            is_folder = picture.is_dir()
    except OSError as error:
        raise ConfigError(
            f"{option} {picture} cannot be written ({error.strerror}). Choose a file in a writable folder."
        ) from error
    if is_folder:
        raise ConfigError(f"{option} {picture} is a folder. Choose a file in it, such as {example}.")


def command(config: type[C]) -> Callable[[Callable[[C], None]], Callable[..., None]]:
    """Turn a function that takes an option record into a ``typer`` command. Its help is the docstring.

    If the record has a field ``given``, it lists the fields that were set on the command line.
    """
    hints = get_type_hints(config)
    options = [(field, option, find_flag(config, field.name)) for field, option in list_options(config)]

    def decorate(run: Callable[[C], None]) -> Callable[..., None]:
        def call(context: typer.Context, **values: Any) -> None:
            parsed: dict[str, Any] = {}
            for field, option, flag in options:
                value = values[field.name]
                # An option that is None gets the record's default.
                if value is None:
                    continue
                if option.parse is not None:
                    value = option.parse(value, flag)
                parsed[field.name] = value

            if "given" in hints:
                parsed["given"] = _find_given(context, values)
            run(config(**parsed))

        # typer reads names, help and types from these attributes.
        parameters = [inspect.Parameter("context", _KEYWORD_ONLY, annotation=typer.Context)]
        for field, option, flag in options:
            parameters.append(_make_parameter(field, option, hints[field.name], flag))
        call.__name__, call.__doc__ = run.__name__, run.__doc__
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
        return call

    return decorate


def _find_given(context: typer.Context, names: Iterable[str]) -> frozenset[str]:
    """Return those option ``names`` that are on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return frozenset(
        name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    )


def _make_parameter(field: Field[Any], option: Option, hint: Any, flag: str) -> inspect.Parameter:
    """Make the ``typer`` parameter for a record's field: an option, or an argument without flag."""
    # Where the type is str, a parser or the record's check reads the text.
    is_text = option.parse is not None or get_origin(hint) is Literal
    value_type: Any = option.kind or (str if is_text else hint)

    is_required = field.default is MISSING and field.default_factory is MISSING
    default: Any = inspect.Parameter.empty
    if not is_required:
        # The record fills in an empty default, so that the help does not show it.
        is_empty = field.default in (MISSING, "", ())
        default = None if is_empty else field.default
    if default is None:
        value_type = value_type | None

    info: Any = typer.Argument(**option.shown)
    if flag.startswith("-") and (not is_required or option.flag is not None):
        info = typer.Option(flag, **option.shown)
    annotation = Annotated[value_type, info]
    return inspect.Parameter(field.name, _KEYWORD_ONLY, default=default, annotation=annotation)


def list_possible_labels(node_columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Join the names of columns with one number per node, separated by commas."""
    names = []
    for columns in node_columns.values():
        for name, column in columns.items():
            # Masks and ids also have one number per node, but nobody learns them.
            if len(column.shape) == 1 and not name.endswith(("_mask", "_id")):
                names.append(name)
    return ", ".join(names)


def suggest_training_command(
    folder: object, node_columns: Mapping[str, Mapping[str, Any]], etypes: Iterable[EdgeType], ranks: int = 1
) -> str:
    """Return the command that trains on a dataset with these columns.

    The result is empty if nodes have labels but no split, or if several node types have labels.
    """
    labelled = [columns for columns in node_columns.values() if LABEL in columns]
    if len(labelled) > 1 or any(SPLITS[0] not in columns for columns in labelled):
        return ""

    targets = [format_type(etype) for etype in etypes]
    has_features = all(FEATURE in columns for columns in node_columns.values())
    is_homogeneous = max(len(node_columns), len(targets)) <= 1
    rows = " --embeddings 64"
    options = ""
    if labelled:
        if not is_homogeneous:
            options = " --model rgcn"
        elif not has_features:
            options = rows
    else:
        options = " --task link"
        if not (is_homogeneous and has_features):
            options += f" --model none{rows}"
        if len(node_columns) > 1 and len(targets) > 1:
            options += f" --target {shlex.quote(targets[0])}"

    if ranks > 1:
        options += f" --ranks {ranks}"
    return f"dglx train {shlex.quote(str(folder))}{options}"


@contextmanager
def redirect_libraries_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error while the block runs, also for C libraries.

    METIS, for example, prints complaints about tiny graphs, and standard output is for results. C libraries
    write to descriptor 1 whatever ``sys.stdout`` is, so the descriptor itself is replaced.
    """
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(2, 1)

    try:
        yield
    finally:
        # Output from the block may still be in the C library's buffer. NULL flushes all streams.
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
