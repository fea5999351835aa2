"""Reading the options that a user gave to a dataset source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dglx_dist.errors import ConfigError
from dglx_dist.registry import did_you_mean


def refuse_unknown(options: Mapping[str, object], known: Iterable[str], source: str) -> None:
    """Raise ConfigError when ``options`` has a name that is not in ``known``, with the nearest one."""
    allowed = sorted(known)
    for name in options:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise ConfigError(
                f"the dataset source {source!r} has no option {name!r}{hint} "
                f"(known: {', '.join(allowed) or 'none'})"
            )


def whole_number(options: Mapping[str, object], name: str) -> int | None:
    """Return the option ``name`` as an int >= 0; None when it was not given.

    Raises:
        ConfigError: it is not a whole number, or negative.
    """
    if options.get(name) is None:
        return None
    text = str(options[name])
    if not text.isdecimal():
        raise ConfigError(f"the option {name}={text!r} must be a whole number, 0 or more")
    return int(text)
