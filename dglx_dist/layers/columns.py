"""Which input columns a part holds."""

from __future__ import annotations

from dataclasses import dataclass

from dglx_dist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns ``first:last`` of a matrix with ``width`` of them; there may be none."""

    first: int
    last: int
    width: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def cut(self) -> slice:
        """For indexing."""
        return slice(self.first, self.last)


def deal_out_columns(width: int, parts: int) -> tuple[Columns, ...]:
    """Cut ``width`` columns into ``parts`` runs; the first ``width % parts`` are one longer (P3, 2.1).

    More parts than columns leave the last parts without any.

    Raises:
        ConfigError: there are no columns, or no parts.
    """
    if width < 1 or parts < 1:
        raise ConfigError(f"{width} columns cannot be cut into {parts} parts; both must be at least 1")
    least, longer = divmod(width, parts)
    ends = [(part + 1) * least + min(part + 1, longer) for part in range(parts)]
    return tuple(
        Columns(first=first, last=last, width=width) for first, last in zip([0, *ends], ends, strict=False)
    )
