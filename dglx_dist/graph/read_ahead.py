"""Asking the processor for a row that is needed soon, so that its memory is near by then."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dglx_dist.records import Array

_LINE_BYTES = 64


@njit(nogil=True, inline="always")
def read_ahead(rows: Array, row: int) -> None:
    """Ask for row ``row`` of (n, d) ``rows`` to read it; returns at once and changes nothing."""
    step = max(1, _LINE_BYTES // rows.itemsize)
    for column in range(0, rows.shape[1], step):
        _ask_to_read(rows, row, column)


@njit(nogil=True, inline="always")
def change_ahead(rows: Array, row: int) -> None:
    """As :func:`read_ahead`, to change it: no other processor keeps the row."""
    step = max(1, _LINE_BYTES // rows.itemsize)
    for column in range(0, rows.shape[1], step):
        _ask_to_change(rows, row, column)


@intrinsic
def _ask_to_read(_context: Any, rows: Any, row: Any, column: Any) -> Any:
    return _prefetch(rows, 0)


@intrinsic
def _ask_to_change(_context: Any, rows: Any, row: Any, column: Any) -> Any:
    return _prefetch(rows, 1)


def _prefetch(rows: Any, for_writing: int) -> Any:
    """Return the signature and the code of LLVM's prefetch of ``rows[row, column]``."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, kind, array, list(arguments[1:]))
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        made = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        ask = cgutils.get_or_insert_function(builder.module, made, "llvm.prefetch.p0i8")
        how, soon_again, of_data = (ir.Constant(word, value) for value in (for_writing, 3, 1))
        builder.call(ask, [builder.bitcast(place, byte), how, soon_again, of_data])
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp), make
