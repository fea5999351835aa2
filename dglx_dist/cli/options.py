"""Options of a command as fields of a frozen dataclass: its command line, help and range checks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from dglx_dist.errors import ConfigError

C = TypeVar("C")
_KEY = "dglx_dist.cli"
"""Key of an option in the metadata of its field."""


@dataclass(frozen=True)
class Check:
    """Range of the values of an option."""

    holds: Callable[[Any], bool]
    allowed: str
    """What the value must be, as in ``--layers 0 must be at least 1``."""


def at_least(least: float) -> Check:
    """Return the check for finite numbers from ``least`` on."""
    return Check(lambda value: least <= value < math.inf, f"at least {least}")


def one_of(*known: str) -> Check:
    """Return the check for one of several words."""
    return Check(lambda value: value in known, f"{', '.join(known[:-1])} or {known[-1]}")


@dataclass(frozen=True, kw_only=True)
class _Option:
    """Command-line part of a field."""

    flag: str | None
    kind: Any
    parse: Callable[[Any, str], Any] | None
    check: Check | None
    shown: Mapping[str, Any]


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    check: Check | None = None,
    kind: Any = None,
    parse: Callable[[Any, str], Any] | None = None,
    panel: str | None = None,
    metavar: str | None = None,
) -> Any:
    """Return a dataclass field that is an option of a command.

    Args:
        default: Value without the option; a class such as ``dict`` is called. None and "" are not shown;
            ``...``: a positional argument that is required.
        help: Text of ``--help``.
        flag: Spelling; None: the name of the field, with dashes.
        check: Range of the value; None: the words of a ``Literal``, else any. The value None is allowed.
        kind: Type on the command line; None: ``str`` with ``parse``, else the type of the field.
        parse: Makes the value of the field from that on the command line and the flag.
        panel: Heading in ``--help``.
        metavar: Placeholder of the value in ``--help``.
    """
    shown = {"help": help, "rich_help_panel": panel, "metavar": metavar}
    metadata = {_KEY: _Option(flag=flag, kind=kind, parse=parse, check=check, shown=shown)}
    if default is ...:
        return field(metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def as_text(value: object, _flag: str) -> str:
    """Return a path as text, for ``parse``."""
    return str(value)


path_option = partial(option, kind=Path, parse=as_text)
"""As :func:`option`, for a path in a field of type ``str``."""


def check_ranges(config: Any) -> None:
    """Raise ConfigError for the first option of the record that is out of its range."""
    hints = get_type_hints(type(config))
    for one, declared in _options(type(config)):
        value, hint, check = getattr(config, one.name), hints[one.name], declared.check
        if check is None and get_origin(hint) is Literal:
            check = one_of(*get_args(hint))
        if check is not None and value is not None and not check.holds(value):
            raise ConfigError(f"{_flag(one)} {value} must be {check.allowed}")


def check_values(config: object, checks: Iterable[tuple[str, bool, str]]) -> None:
    """Raise ConfigError for the first option that does not fit the others.

    Args:
        config: Has the value of ``--some-name`` as ``some_name``.
        checks: (name without dashes, whether it is wrong, what it must be).
    """
    for name, wrong, allowed in checks:
        if wrong:
            raise ConfigError(f"--{name} {getattr(config, name.replace('-', '_'))} must be {allowed}")


def common_fields(source: object, target: type) -> dict[str, Any]:
    """Return the values of ``source``, a record, for the fields that the record class ``target`` has too."""
    known = {one.name for one in fields(target)}
    return {one.name: getattr(source, one.name) for one in fields(source) if one.name in known}  # type: ignore[arg-type]  # a record


def flag_of(config: type, name: str) -> str:
    """Return the spelling of the option of the field ``name``."""
    return next(_flag(one) for one, _ in _options(config) if one.name == name)


def command(config: type[C]) -> Callable[[Callable[[C, Set[str]], None]], Callable[..., None]]:
    """Make a function of a record of options a command of ``typer``, whose help is the docstring.

    The function is called with the record and the names of the fields that stood on the command line.
    """

    def decorate(run: Callable[[C, Set[str]], None]) -> Callable[..., None]:
        def call(context: typer.Context, **values: Any) -> None:
            sources = {name: context.get_parameter_source(name) for name in values}
            given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
            run(config(**_parsed(config, values)), given)

        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        hints = get_type_hints(config)
        parameters += [_parameter(one, declared, hints[one.name]) for one, declared in _options(config)]
        call.__name__, call.__doc__ = run.__name__, run.__doc__
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
        return call

    return decorate


def _options(config: type) -> list[tuple[Field[Any], _Option]]:
    return [(one, one.metadata[_KEY]) for one in fields(config) if _KEY in one.metadata]


def _flag(one: Field[Any]) -> str:
    return one.metadata[_KEY].flag or "--" + one.name.replace("_", "-")


def _parameter(one: Field[Any], declared: _Option, hint: Any) -> inspect.Parameter:
    kind = declared.kind or (str if declared.parse or get_origin(hint) is Literal else hint)
    default: Any = inspect.Parameter.empty
    info = typer.Argument(**declared.shown)
    if one.default is not MISSING or one.default_factory is not MISSING:
        default = None if one.default in (MISSING, "") else one.default
        kind = kind | None if default is None else kind
        info = typer.Option(_flag(one), **declared.shown)
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _parsed(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for the values of the command line; the record has the defaults of the others."""
    parsed = {}
    for one, declared in _options(config):
        value = values[one.name]
        if value is not None:
            parse = declared.parse
            parsed[one.name] = value if parse is None else parse(value, _flag(one))
    return parsed
