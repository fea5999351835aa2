"""Asking the processor for a row that will be changed soon, so that its memory is near when it is needed."""

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
    """Ask for row ``row`` of (n, d) ``rows``; returns at once and changes nothing."""
    step = max(1, _LINE_BYTES // rows.itemsize)
    for column in range(0, rows.shape[1], step):
        _ask(rows, row, column)


@intrinsic
def _ask(_context: Any, rows: Any, row: Any, column: Any) -> Any:
    """Return the code of LLVM's prefetch of ``rows[row, column]``, for writing."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, kind, array, list(arguments[1:]))
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        made = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        ask = cgutils.get_or_insert_function(builder.module, made, "llvm.prefetch.p0i8")
        for_writing, soon_again, of_data = (ir.Constant(word, value) for value in (1, 3, 1))
        builder.call(ask, [builder.bitcast(place, byte), for_writing, soon_again, of_data])
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp), make
