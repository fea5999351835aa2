"""Declare options as fields in frozen records, with defaults, help texts and ranges.

A record is the single place that declares its options. Commands and their help
(:func:`dglx_dist.cli.common.command`), range checks and ``config.json`` are derived from it.
:func:`read_options` creates a record from options by name.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import datetime, timezone
from functools import cache, partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dglx_dist.errors import ConfigError
from dglx_dist.registry import suggest_name

T = TypeVar("T")


def is_integer(value: object) -> bool:
    """Return whether ``value`` is an int or a NumPy integer that fits 64 bits. A bool is not an integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return -(1 << 63) <= int(value) < 1 << 63


def check_integer(name: str, value: Any, *, least: int) -> int:
    """Return ``value`` as an int. Raise ConfigError unless ``least <= value < 2**63``."""
    if not is_integer(value) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least} and below 2**63")
    return int(value)


def list_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` as a tuple. A string is a single name."""
    return (names,) if isinstance(names, str) else tuple(names)


_KEY = "dglx_dist"
"""Key for an option in its field's metadata."""


@dataclass(frozen=True)
class Check:
    """Range check for an option's value."""

    holds: Callable[[Any], bool]
    allowed: str
    """Text about valid values, for messages like ``--layers 0 must be at least 1``."""


ABOVE_ZERO = Check(lambda value: 0 < value < math.inf, "a number above 0")


def at_least(least: float) -> Check:
    """Return a check for finite numbers not below ``least``."""
    return Check(lambda value: least <= value < math.inf, f"at least {least}")


def between(least: float, most: float) -> Check:
    """Return a check for numbers from ``least`` to ``most``."""
    return Check(lambda value: least <= value <= most, f"from {least:g} to {most:g}")


def one_of(*choices: str) -> Check:
    """Return a check that allows only the words in ``choices``."""
    return Check(lambda value: value in choices, f"{', '.join(choices[:-1])} or {choices[-1]}")


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field's settings for the command line, see :func:`option`."""

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
    """Return a dataclass field that is also a command's option.

    Args:
        default: Default value. A class such as ``dict`` is called. The help does not show None and "". With
            ``...``, the field is a required positional argument.
        flag: Spelling on the command line. None: the field's name with dashes. A name without a leading dash
            makes an argument.
        check: Range check. None: only the words in a ``Literal`` are allowed, otherwise any value. The value
            None always passes.
        kind: Type on the command line. None: ``str`` if ``parse`` is set, otherwise the field's type.
        parse: Function that converts (value on the command line, flag) to the field's value.
    """
    shown = {"help": help, "rich_help_panel": panel, "metavar": metavar}
    metadata = {_KEY: Option(flag=flag, kind=kind, parse=parse, check=check, shown=shown)}
    if default is ...:
        return field(metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):(/+)(.*)", re.DOTALL)


def find_address(location: str | os.PathLike[str]) -> str | None:
    """Return ``location`` as an address such as ``s3://bucket/name``, or None if it is a path or a name.

    ``Path`` removes one slash from an address. The result has it again.
    """
    match = _ADDRESS.fullmatch(os.fspath(location))
    if match is None or (isinstance(location, str) and len(match[2]) < 2):
        return None
    scheme = match[1].lower()
    slashes = "///" if scheme in ("file", "local") else "//"
    return f"{scheme}:{slashes}{match[3]}"


def format_location(location: str | os.PathLike[str]) -> str:
    """Return a path or an address as text."""
    return find_address(location) or str(location)


def refuse_addresses(config: object, names: Iterable[str]) -> None:
    """Raise ConfigError if an option in ``names`` is an address. They must be files on this machine."""
    for name in names:
        value = getattr(config, name)
        if value is not None and find_address(value) is not None:
            flag = find_flag(type(config), name)
            location = hide_query(find_address(value) or "")
            raise ConfigError(f"{flag} {location} is an address. Name a path on this machine.")


def hide_query(address: str) -> str:
    """Return an address for messages, without the query of a signed URL."""
    return address.partition("?")[0] if address.startswith("http") else address


def refuse_signed(config: object, names: Iterable[str]) -> None:
    """Raise ConfigError if one of the options ``names`` is a signed URL, because files of a run repeat it.

    A record may lack some of the options.
    """
    for name in names:
        address = find_address(getattr(config, name, None) or "")
        if address is not None and hide_query(address) != address:
            raise ConfigError(
                f"{name} {hide_query(address)} is a signed URL, which names one object for some time. Give "
                "an address without a query, such as s3://BUCKET/NAME."
            )


path_option = partial(option, kind=Path, parse=lambda value, _flag: format_location(value))
"""Like :func:`option`, for a path or an address in a ``str`` field."""


def list_options(config: type) -> list[tuple[Field[Any], Option]]:
    """Return those of a record's fields that are options."""
    options = []
    for config_field in fields(config):
        if _KEY in config_field.metadata:
            options.append((config_field, config_field.metadata[_KEY]))
    return options


def types_in(config: Any) -> dict[str, type]:
    """Return the type of each field in a record. ``int | None`` counts as int, and words count as str."""
    types = {}
    for name, hint in get_type_hints(config).items():
        # ``int | None`` has types as arguments, and a Literal has words.
        first_type = (*get_args(hint), hint)[0]
        types[name] = first_type if isinstance(first_type, type) else str
    return types


def check_names(
    owner: str, options: Iterable[str], known: Iterable[str], types: Mapping[str, type] | None = None
) -> None:
    """Raise ConfigError for the first name in ``options`` that ``owner`` does not know.

    The message suggests the nearest name, and lists all ``known`` options with their ``types``.
    """
    known = sorted(known)
    for name in options:
        if name in known:
            continue
        described = known
        if types:
            described = [f"{key} ({types[key].__name__})" for key in known]
        choices = ", ".join(described) or "none: leave it out"
        suggestion = suggest_name(name, known)
        raise ConfigError(f"{owner} has no option {name!r}{suggestion} (its options: {choices})")


def read_options(
    owner: str, record: Callable[..., T], options: Mapping[str, object], names: Iterable[str] = ()
) -> T:
    """Create a ``record`` from ``options``, which may set the fields ``names``, or without names any field.

    A whole number is converted if a text or a float is expected, because the command line reads
    ``memory=1000`` as an integer. Raises ConfigError if ``owner`` has no such option, a value has another
    type, or the record rejects it.
    """
    types = types_in(record)
    types = {name: types[name] for name in names or types}
    check_names(owner, options, types, types)
    values = {name: _read_value(owner, name, value, types[name]) for name, value in options.items()}
    return record(**values)


def _read_value(owner: str, name: str, value: Any, expected: type) -> Any:
    """Return an option's ``value``, with a whole number converted to ``expected``. Reject other types."""
    if expected in (str, float, int) and is_integer(value):
        return expected(value)
    # bool is a subclass of int, but where a number belongs, a flag is a mistake.
    is_misplaced_flag = expected is not bool and isinstance(value, bool)
    if is_misplaced_flag or not isinstance(value, expected):
        actual = type(value).__name__
        raise ConfigError(
            f"option {name}={value!r} of {owner} must be of type {expected.__name__}, not {actual}"
        )
    return value


def find_flag(config: type, name: str) -> str:
    """Return how the field ``name`` is spelled on the command line."""
    options = {config_field.name: option for config_field, option in list_options(config)}
    return options[name].flag or "--" + name.replace("_", "-")


def format_words(config: Any, names: Iterable[str]) -> list[str]:
    """Return a record's options ``names`` as command-line words, like ``["--fanout", "15,10"]``."""
    words = []
    for name in names:
        words.append(find_flag(type(config), name))
        value = getattr(config, name)
        # A flag that is set has no value.
        if value is not True:
            words.append(_format_value(value))
    return words


def _format_value(value: object) -> str:
    """Return an option's value as on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


@cache
def _read_hints(config: type) -> dict[str, Any]:
    """Return the types of a record class's fields. They are cached, because evaluation takes milliseconds."""
    return get_type_hints(config)


def check_ranges(config: Any, template: str = "{flag} {value}") -> None:
    """Raise ConfigError for the first option out of range. ``template`` formats it in the message."""
    hints = _read_hints(config.__class__)
    for config_field, option in list_options(type(config)):
        name = config_field.name
        value = getattr(config, name)
        hint = hints[name]
        # None is allowed, except for a number that has no default.
        if value is None and hint is not int:
            continue

        check = option.check
        if hint in (int, int | None) and not is_integer(value):
            check = Check(lambda _: False, "a whole number below 2**63")
        elif check is None and get_origin(hint) is Literal:
            check = one_of(*get_args(hint))
        if check is not None and not check.holds(value):
            text = template.format(flag=find_flag(type(config), name), name=name, value=value)
            raise ConfigError(f"{text} must be {check.allowed}")


def check_values(config: object, checks: Iterable[tuple[str, bool, str]]) -> None:
    """Raise ConfigError for the first failed check: (name with dashes, whether it fails, allowed values)."""
    for name, fails, allowed in checks:
        if not fails:
            continue
        option = f"--{name}"
        value = getattr(config, name.replace("-", "_"))
        if value is not True:
            option += f" {_format_value(value)}"
        raise ConfigError(f"{option} must be {allowed}")


def select_common_fields(source: object, target: type) -> dict[str, Any]:
    """Return values from the record ``source`` for all fields that the record class ``target`` has, too."""
    source_names = {field.name for field in fields(source)}  # type: ignore[arg-type]  # a record
    target_names = {field.name for field in fields(target)}
    return {name: getattr(source, name) for name in source_names & target_names}


def parse_names(text: str, _flag: str = "") -> tuple[str, ...]:
    """Parse ``train,degree`` as ("train", "degree")."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_integers(text: str, flag: str, like: str = "25,10 (-1: all)") -> tuple[int, ...]:
    """Parse ``25,10`` as (25, 10), where -1 means all. This and the next parsers raise ConfigError."""
    words = parse_names(text)
    if not words or not all(re.fullmatch(r"-1|[0-9]+", word) for word in words):
        raise ConfigError(f"{flag} {text!r} must be whole numbers separated by commas, like {like}")
    return tuple(map(int, words))


def parse_fractions(text: str, flag: str) -> tuple[float, ...]:
    """Parse ``1,1,2`` as (1.0, 1.0, 2.0)."""
    try:
        return tuple(float(word) for word in parse_names(text))
    except ValueError:
        raise ConfigError(f"{flag} {text!r} must be numbers separated by commas, like 1,1,2") from None


def read_time(text: str) -> float:
    """Parse a time: an integer, a float, or an ISO date, which becomes seconds since 1970 in UTC.

    Raises ConfigError for any other text, and for a date with fractions of a second.
    """
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue

    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(f"{text!r} is not a time. Use a number, or a date like 2024-05-31T12:00.") from None
    if date.microsecond:
        raise ConfigError(f"{text!r} has fractions of a second, but dates are stored as whole seconds.")
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return int(date.timestamp())


def parse_times(text: str, _flag: str) -> tuple[float, ...]:
    """Parse ``1700000000,2024-01-31`` as two times, see :func:`read_time`."""
    return tuple(read_time(word) for word in parse_names(text))


def parse_tolerances(text: str, flag: str) -> float | dict[str, float]:
    """Parse ``0.05`` as one value for all names, ``train=0.1,degree=0.02`` as a mapping, and "" as {}."""
    values = parse_by_name(text, flag) or {}
    try:
        if isinstance(values, str):
            return float(values)
        return {name: float(value) for name, value in values.items()}
    except ValueError:
        raise ConfigError(f"{flag} {text!r} must be like 0.05 or train=0.1,degree=0.02") from None


def parse_by_name(text: str, flag: str) -> str | dict[str, str]:
    """Parse ``float16`` as one value for all names, and ``feat=float16,x=bfloat16`` as a mapping."""
    if "=" not in text:
        return text
    return parse_pairs(parse_names(text), flag)


def parse_pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    """Parse ["a=1", "b=x"] as {"a": "1", "b": "x"}."""
    pairs = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ConfigError(f"{flag} {word!r} must be NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def parse_literals(words: Sequence[str], flag: str) -> dict[str, object]:
    """Parse ["a=1", "b=0.5", "c=true", "d=x"] as {"a": 1, "b": 0.5, "c": True, "d": "x"}."""
    return {name: parse_literal(value) for name, value in parse_pairs(words, flag).items()}


named_values = partial(
    option, dict, flag="--option", metavar="NAME=VALUE", kind=list[str], parse=parse_literals
)
"""Like :func:`option`, for the repeatable ``--option NAME=VALUE``."""


def parse_literal(text: str) -> object:
    """Return ``text`` as a bool or a number if it is one, otherwise unchanged."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


def prefix_errors(parse: Callable[[str], T]) -> Callable[[str, str], T]:
    """Return ``parse`` in the form that :func:`option` takes. Its error messages then start with the flag."""

    def read(text: str, flag: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error}") from None

    return read
