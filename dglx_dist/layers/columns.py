"""Which input columns a part holds."""

from __future__ import annotations

from collections.abc import Sequence
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


def deal_out_concatenated(widths: Sequence[int], parts: int) -> tuple[tuple[Columns, ...], ...]:
    """Cut matrices that stand side by side, each by itself, into ``parts``.

    Args:
        widths: Columns of each matrix, in their order.
        parts: How many parts.

    Returns:
        For each part its runs, one per matrix, as columns of the whole; there may be none in a run.

    Raises:
        ConfigError: there is no matrix, one has no columns, or there are no parts.
    """
    if not widths:
        raise ConfigError("no matrices to cut; name at least one feature")
    total, cuts, before = sum(widths), [], 0
    for width in widths:
        cuts.append(
            [
                Columns(first=before + one.first, last=before + one.last, width=total)
                for one in deal_out_columns(width, parts)
            ]
        )
        before += width
    return tuple(zip(*cuts, strict=True))
