"""Options as fields of frozen records: a record is declared once, with defaults, help texts and ranges.

From it come commands and their help (:func:`dglx_dist.cli.common.command`), range checks and ``config.json``.
:func:`read_options` makes a record of options that were given by name.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dglx_dist.errors import ConfigError
from dglx_dist.registry import suggest_name

T = TypeVar("T")


def is_integer(value: object) -> bool:
    """Return whether ``value`` is an int, or one of NumPy, and fits 64 bits; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and -(1 << 63) <= int(value) < 1 << 63


def check_integer(name: str, value: Any, *, least: int) -> int:
    """Return ``value`` as an int; raise ConfigError unless ``least <= value < 2**63``."""
    if not is_integer(value) or value < least:
        raise ConfigError(f"{name}={value!r}; give a whole number of at least {least} and below 2**63")
    return int(value)


def list_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return ``names``; a string is one name."""
    return (names,) if isinstance(names, str) else tuple(names)


_KEY = "dglx_dist"
"""Key of an option in the metadata of its field."""


@dataclass(frozen=True)
class Check:
    """Range of the values of an option."""

    holds: Callable[[Any], bool]
    allowed: str
    """What the value must be, as in ``--layers 0 must be at least 1``."""


ABOVE_ZERO = Check(lambda value: 0 < value < math.inf, "a number above 0")


def at_least(least: float) -> Check:
    """Return the check for finite numbers from ``least`` on."""
    return Check(lambda value: least <= value < math.inf, f"at least {least}")


def between(least: float, most: float) -> Check:
    """Return the check for numbers from ``least`` to ``most``."""
    return Check(lambda value: least <= value <= most, f"from {least:g} to {most:g}")


def one_of(*known: str) -> Check:
    """Return the check for one of several words."""
    return Check(lambda value: value in known, f"{', '.join(known[:-1])} or {known[-1]}")


@dataclass(frozen=True, kw_only=True)
class Option:
    """Command-line part of a field; see :func:`option`."""

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
        flag: Spelling; None: the name of the field, with dashes. Without a dash: an argument.
        check: Range of the value; None: the words of a ``Literal``, else any. The value None is allowed.
        kind: Type on the command line; None: ``str`` with ``parse``, else the type of the field.
        parse: Makes the value of the field from that on the command line and the flag.
    """
    shown = {"help": help, "rich_help_panel": panel, "metavar": metavar}
    metadata = {_KEY: Option(flag=flag, kind=kind, parse=parse, check=check, shown=shown)}
    if default is ...:
        return field(metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


path_option = partial(option, kind=Path, parse=lambda value, _flag: str(value))
"""As :func:`option`, for a path in a field of type ``str``."""


def list_options(config: type) -> list[tuple[Field[Any], Option]]:
    """Return the fields of a record that are options."""
    return [(one, one.metadata[_KEY]) for one in fields(config) if _KEY in one.metadata]


def types_in(config: Any) -> dict[str, type]:
    """Return the types of the fields of a record: of ``int | None`` it is int, of words str."""
    first = {name: (*get_args(hint), hint)[0] for name, hint in get_type_hints(config).items()}
    return {name: kind if isinstance(kind, type) else str for name, kind in first.items()}


def check_names(
    owner: str, options: Iterable[str], known: Iterable[str], types: Mapping[str, type] | None = None
) -> None:
    """Raise ConfigError for the first of ``options`` that is not among the ``known`` ones of ``owner``.

    The message has the nearest name, and all with their ``types``.
    """
    known = sorted(known)
    for name in options:
        if name not in known:
            listed = [f"{key} ({types[key].__name__})" if types else key for key in known]
            raise ConfigError(
                f"{owner} has no option {name!r}{suggest_name(name, known)} (its options: "
                f"{', '.join(listed) or 'none: leave it out'})"
            )


def read_options(
    owner: str, record: Callable[..., T], options: Mapping[str, object], names: Iterable[str] = ()
) -> T:
    """Return ``options`` as a ``record`` of the fields ``names``, without names all.

    A whole number is converted where a text or a float is expected: the command line reads ``memory=1000`` as
    one.

    Raises:
        ConfigError: ``owner`` has no such option, or a value has another type, or the record refuses it.
    """
    types = types_in(record)
    types = {name: types[name] for name in names or types}
    check_names(owner, options, types, types)
    values = {name: _read_value(owner, name, value, types[name]) for name, value in options.items()}
    return record(**values)


def _read_value(owner: str, name: str, value: Any, kind: type) -> Any:
    if kind in (str, float, int) and is_integer(value):
        return kind(value)
    # bool is a subclass of int, but a flag in place of a number is a mistake.
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(
            f"option {name}={value!r} of {owner} must be of type {kind.__name__}, not {type(value).__name__}"
        )
    return value


def find_flag(config: type, name: str) -> str:
    """Return the spelling of the option of the field ``name``."""
    declared = next(declared for one, declared in list_options(config) if one.name == name)
    return declared.flag or "--" + name.replace("_", "-")


def check_ranges(config: Any, spelled: str = "{flag} {value}") -> None:
    """Raise ConfigError, with the option as ``spelled``, for the first option that is out of its range."""
    hints = get_type_hints(type(config))
    for one, declared in list_options(type(config)):
        value, hint, check = getattr(config, one.name), hints[one.name], declared.check
        if value is None and hint is not int:
            continue
        if hint in (int, int | None) and not is_integer(value):
            check = Check(lambda _: False, "a whole number below 2**63")
        elif check is None and get_origin(hint) is Literal:
            check = one_of(*get_args(hint))
        if check is not None and not check.holds(value):
            where = spelled.format(flag=find_flag(type(config), one.name), name=one.name, value=value)
            raise ConfigError(f"{where} must be {check.allowed}")


def check_values(config: object, checks: Iterable[tuple[str, bool, str]]) -> None:
    """Raise ConfigError for the first (name with dashes, whether it is wrong, what it must be) at fault."""
    for name, wrong, allowed in checks:
        if wrong:
            given = getattr(config, name.replace("-", "_"))
            shown = ",".join(map(str, given)) if isinstance(given, tuple) else given
            raise ConfigError(f"--{name}{'' if given is True else f' {shown}'} must be {allowed}")


def select_common_fields(source: object, target: type) -> dict[str, Any]:
    """Return the values of ``source``, a record, for the fields that the record class ``target`` has too."""
    known = {one.name for one in fields(target)}
    return {one.name: getattr(source, one.name) for one in fields(source) if one.name in known}  # type: ignore[arg-type]  # a record


def parse_names(text: str, _flag: str = "") -> tuple[str, ...]:
    """Read ``train,degree`` as ("train", "degree")."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_integers(text: str, flag: str, like: str = "25,10 (-1: all)") -> tuple[int, ...]:
    """Read ``25,10`` as (25, 10); -1 is allowed and means all; ConfigError otherwise, as of all these."""
    words = parse_names(text)
    if not words or not all(re.fullmatch(r"-1|[0-9]+", word) for word in words):
        raise ConfigError(f"{flag} {text!r} must be whole numbers with commas, like {like}")
    return tuple(map(int, words))


def parse_fractions(text: str, flag: str) -> tuple[float, ...]:
    """Read ``1,1,2`` as (1.0, 1.0, 2.0)."""
    try:
        return tuple(float(word) for word in parse_names(text))
    except ValueError:
        raise ConfigError(f"{flag} {text!r} must be numbers with commas, like 1,1,2") from None


def parse_tolerances(text: str, flag: str) -> float | dict[str, float]:
    """Read ``0.05`` as 0.05 for all, ``train=0.1,degree=0.02`` as one for each; nothing is {}."""
    found = parse_by_name(text, flag) or {}
    try:
        return float(found) if isinstance(found, str) else {name: float(found[name]) for name in found}
    except ValueError:
        raise ConfigError(f"{flag} {text!r} must be like 0.05 or train=0.1,degree=0.02") from None


def parse_by_name(text: str, flag: str) -> str | dict[str, str]:
    """Read ``float16`` as one value for all, ``feat=float16,x=bfloat16`` as one for each."""
    return parse_pairs(parse_names(text), flag) if "=" in text else text


def parse_pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    """Read ["a=1", "b=x"] as {"a": "1", "b": "x"}."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{flag} {word!r} must be NAME=VALUE")
    split = [word.partition("=") for word in words]
    return {name.strip(): value.strip() for name, _, value in split}


def parse_literals(words: Sequence[str], flag: str) -> dict[str, object]:
    """Read ["a=1", "b=0.5", "c=true", "d=x"] as {"a": 1, "b": 0.5, "c": True, "d": "x"}."""
    return {name: parse_literal(value) for name, value in parse_pairs(words, flag).items()}


named_values = partial(
    option, dict, flag="--option", metavar="NAME=VALUE", kind=list[str], parse=parse_literals
)
"""As :func:`option`, for ``--option NAME=VALUE``, which may be repeated."""


def parse_literal(text: str) -> object:
    """Return ``text`` as true or false, a number or itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def prefix_errors(parse: Callable[[str], T]) -> Callable[[str, str], T]:
    """Return ``parse`` for :func:`option`: the text of its ConfigError begins with the flag."""

    def read(text: str, flag: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error}") from None

    return read
