"""Layers of ranks that have no edge: the others count on them, forward and backward, all the same.

A rank without targets at a layer may hold rows that others need, and must take their gradients in backward.
So its output has to depend on what it gave away, although nothing of that went into it. And its layers have
to run on no rows at all, which those of DGL do but for shapes that torch cannot complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import dgl
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dglx_dist.strategies.granndis.halo_frame import HaloFrame


@final
class NoRows(TorchFunctionMode):
    """While it is on, ``view`` and ``reshape`` complete -1 for a tensor without rows, too.

    ``h.view(len(h), -1, width)``, which the residuals of DGL's attention layers write, has any number there
    for torch; here it has that of a tensor with rows.

    Args:
        owner: Who turns it on by :meth:`turn_on`; None: it is used in a ``with``.
    """

    def __init__(self, owner: object = None) -> None:
        super().__init__()
        self._owner = owner

    def turn_on(self) -> None:
        """Turn it on in this thread, until :meth:`turn_off`."""
        self.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __exit__(self, *error: Any) -> None:
        """Turn it off, and those inside that an interrupt left on: torch calls no hooks then."""
        while (mode := _current_mode()) is not self and isinstance(mode, NoRows):
            mode.__exit__()
        super().__exit__(*(error or (None, None, None)))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Complete the shape where ``func`` is one of those two."""
        if func in _RESHAPING and not kwargs and not args[0].numel():
            given = args[1] if isinstance(args[1], Sequence) else args[1:]
            if all(isinstance(size, int) for size in given):
                return func(args[0], _completed(args[0].shape, given))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def turn_off(owner: object) -> None:
        """Turn off the one that was turned on last in this thread, if it is on and ``owner`` did it."""
        mode = _current_mode()
        if isinstance(mode, NoRows) and mode._owner is owner:
            mode.__exit__()


def _current_mode() -> object:
    return _get_current_function_mode()  # type: ignore[no-untyped-call]  # torch leaves it bare


_RESHAPING: tuple[Callable[..., Any], ...] = (Tensor.view, Tensor.reshape, torch.reshape)


def _completed(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return ``wanted``, where -1 stands for what makes rows as long as those of ``shape``."""
    known = math.prod(size for size in wanted[1:] if size != -1)
    if len(shape) < 2 or shape[0] or not wanted or wanted[0] or -1 not in wanted or not known:
        return tuple(wanted)
    return tuple(math.prod(shape[1:]) // known if size == -1 else size for size in wanted)


def tie(output: Any, rows: Tensor) -> Any:
    """Return ``output``, such that backward through any tensor of it reaches ``rows``, with zeros.

    Args:
        output: A tensor, or tuples, lists and dicts that hold some.
        rows: What the exchange returned.
    """
    if not (rows.requires_grad and torch.is_grad_enabled()):
        return output
    leaves, layout = tree_flatten(output)
    places = [n for n, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    tied = _Tie.apply(rows, *[leaves[n] for n in places]) if places else ()  # type: ignore[no-untyped-call]  # torch leaves it bare
    for place, tensor in zip(places, tied, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, layout)


def reduce_nothing(block: Any, message: Any, reduce: Any) -> dict[str, Tensor]:
    """Return what a user-defined reduction leaves where no message arrives: zeros, as DGL fills in.

    DGL calls no user-defined reduction on a graph without edges and sets no column, so code that reads the
    result would fail on such a rank alone. The columns' names and shapes come from one imaginary edge, whose
    message reads the same columns of the sources as on other ranks: what is exchanged then is exchanged.

    Args:
        block: Of one edge type, without edges; not changed.
        message: As of ``update_all``.
        reduce: A function of nodes with a mailbox.

    Returns:
        (targets, ...) per column, tied to the columns that were read.
    """
    read: dict[str, Tensor] = {}

    def bring(name: str, rows: Tensor) -> Tensor:
        read[name] = rows
        return _one_row(rows)

    imagined = _one_edge(block)
    imagined._node_frames[0] = HaloFrame(block._node_frames[0], bring, 1)
    before = dict(imagined.dstdata.items())
    imagined.update_all(message, reduce)
    columns = {
        name: rows.new_zeros((block.num_dst_nodes(), *rows.shape[1:]))
        for name, rows in imagined.dstdata.items()
        if before.get(name) is not rows
    }
    for rows in read.values():
        columns = tie(columns, rows)
    return columns


def _one_edge(block: Any) -> Any:
    """Return a block of one edge, whose destination and edge have the columns of ``block``, zeros."""
    (source, relation, destination), device = block.canonical_etypes[0], block.device
    ends = torch.zeros(1, dtype=block.idtype, device=device)
    one = dgl.create_block({(source, relation, destination): (ends, ends)}, {source: 1}, {destination: 1})
    for theirs, ours in ((one.dstdata, block.dstdata), (one.edata, block.edata)):
        for name, rows in ours.items():
            theirs[name] = _one_row(rows)
    return one


def _one_row(rows: Tensor) -> Tensor:
    return torch.zeros((1, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.options = rows.shape, {"dtype": rows.dtype, "device": rows.device}
        # Clones, for autograd forbids changing views of several outputs in place, and users do.
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return torch.zeros(ctx.shape, **ctx.options), *gradients
