"""Sizes in bytes as people write them."""

from __future__ import annotations

from dglx_dist.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}


def read_size(text: str) -> int:
    """Return the bytes of "4GB", "512MB" or "1000".

    Raises:
        ConfigError: it is no size.
    """
    digits = text.strip().upper().rstrip("BKMGT")
    unit = text.strip().upper()[len(digits) :]
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is no size in bytes; write it as '4GB', '512MB' or '1000'") from None
    if size < 1:
        raise ConfigError(f"a size of {text!r} leaves no room; write it as '4GB' or '512MB'")
    return size
