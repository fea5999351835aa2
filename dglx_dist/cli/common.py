"""Console output, errors, and commands made from records of options."""

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

LAUNCHER, LAUNCHED = "--launcher", "--launched"
"""Hidden flags of the launcher, and of ranks that leave showing their error to the launcher."""


def report_error(error: Exception, *, debug: bool) -> None:
    """Show one message on standard error, or a traceback with ``debug``.

    Under torchrun, the error is also recorded for torchrun. The launcher of ``dglx train`` shows the first
    error of all ranks, so its ranks print none.
    """
    if is_launched_by_torchrun():
        # The import loads torch. Ranks have loaded it anyway, but other commands must start quickly.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        if isinstance(error, DglxError) and not debug:
            # torchrun prints the recorded traceback. Users correct such an error by its message alone.
            error.__traceback__ = error.__cause__ = None
            error.__suppress_context__ = True
        get_error_handler().record_exception(error)
    if debug:
        Console(stderr=True, soft_wrap=True).print_exception()
    elif LAUNCHED not in sys.argv:
        rank = f"rank {read_topology().rank}: " if is_launched_by_torchrun() else ""
        kind, hint = "error", ""
        if not isinstance(error, DglxError):
            kind = f"unexpected {type(error).__name__}"
            hint = "\nrun the same command with --debug for the traceback"
        say(f"{rank}{kind}: {error}{hint}", "red")


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
    """Create the folder of ``picture``, the value of ``option``. Raise ConfigError if it is not writable."""
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
    """Turn a function of a record of options into a command of ``typer``. Its help is the docstring.

    A field ``given`` of the record gets the names of the fields whose options are on the command line.
    """

    def decorate(run: Callable[[C], None]) -> Callable[..., None]:
        def call(context: typer.Context, **values: Any) -> None:
            parsed: dict[str, Any] = {}
            # An option that is None gets the default of the record.
            for field, option in list_options(config):
                if (value := values[field.name]) is not None:
                    parse = option.parse
                    flag = find_flag(config, field.name)
                    parsed[field.name] = value if parse is None else parse(value, flag)

            if "given" in hints:
                sources = {name: context.get_parameter_source(name) for name in values}
                names = (name for name, source in sources.items() if source and source.name == "COMMANDLINE")
                parsed["given"] = frozenset(names)

            run(config(**parsed))

        hints = get_type_hints(config)
        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += [
            _make_parameter(field, option, hints[field.name], find_flag(config, field.name))
            for field, option in list_options(config)
        ]
        call.__name__, call.__doc__ = run.__name__, run.__doc__
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
        return call

    return decorate


def _make_parameter(field: Field[Any], option: Option, hint: Any, flag: str) -> inspect.Parameter:
    kind = option.kind or (str if option.parse or get_origin(hint) is Literal else hint)
    default: Any = inspect.Parameter.empty
    if field.default is not MISSING or field.default_factory is not MISSING:
        default = None if field.default in (MISSING, "", ()) else field.default
        kind = kind | None if default is None else kind
    is_option = flag.startswith("-") and (default is not inspect.Parameter.empty or option.flag is not None)
    info = typer.Option(flag, **option.shown) if is_option else typer.Argument(**option.shown)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, keyword, default=default, annotation=Annotated[kind, info])


def list_possible_labels(node_columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the names of the columns with one number per node, separated by commas."""
    names = []
    for columns in node_columns.values():
        names += [name for name, column in columns.items() if len(column.shape) == 1]
    return ", ".join(name for name in names if not name.endswith(("_mask", "_id")))


def suggest_training_command(
    folder: object, node_columns: Mapping[str, Mapping[str, Any]], etypes: Iterable[EdgeType], ranks: int = 1
) -> str:
    """Return the command that trains on a dataset with these columns, "" if it has labels but no split."""
    labelled = [columns for columns in node_columns.values() if LABEL in columns]
    if len(labelled) > 1 or any(SPLITS[0] not in columns for columns in labelled):
        return ""
    targets = [format_type(etype) for etype in etypes]
    is_several = max(len(node_columns), len(targets)) > 1
    rows = "" if all(FEATURE in columns for columns in node_columns.values()) else " --embeddings 64"
    if labelled:
        options = " --model rgcn" if is_several else rows
    else:
        options = " --task link" + (" --model none --embeddings 64" if rows or is_several else "")
        options += f" --target {shlex.quote(targets[0])}" if min(len(node_columns), len(targets)) > 1 else ""

    options += f" --ranks {ranks}" if ranks > 1 else ""
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
        # Output of the block may still be in the buffer of the C library. NULL flushes all streams.
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
