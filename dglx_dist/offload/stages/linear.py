"""What the stages with a product of rows and weights share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dglx_dist.offload.fields import Fields
from dglx_dist.records import Array

MAX_WIDTH = 1 << 20
"""Most columns of a row."""


def read_width(fields: Fields, name: str) -> int:
    """Return the number of columns that the field ``name`` holds."""
    return fields.whole(name, 1, MAX_WIDTH)


def first_of_second_half(rows: int) -> int:
    """Return where the second half of ``rows`` rows begins: the first one has the odd row."""
    return (rows + 1) // 2


def column_sums(rows: Array) -> Array:
    """Return the sum of all rows, (width,); zeros where there are none."""
    return np.add.reduce(rows, axis=0)


def is_wanted(wanted: Sequence[bool] | None, index: int) -> bool:
    """Whether the gradient of input ``index`` is needed."""
    return wanted is None or wanted[index]
