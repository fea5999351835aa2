"""``g.ndata`` and the like, with DGL's tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast, final

from dglx_dist.compat.lifetime import lifetimes_of
from dglx_dist.compat.tensor import DistTensor, inner_tensor
from dglx_dist.graph.dist_tensor import DistTensor as InnerTensor
from dglx_dist.graph.views import DataView as Inner

K = TypeVar("K")


@final
class DataView(MutableMapping[str, DistTensor]):
    """The named tensors of the nodes or edges of one type."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    def __getitem__(self, key: str) -> DistTensor:
        return DistTensor.over(self._inner[key])

    def __setitem__(self, key: str, val: DistTensor) -> None:
        self._inner[key] = cast("InnerTensor", inner_tensor(val))
        # From now on the view refers to it, whatever becomes of the script's own name for it.
        kept = self._inner[key]
        lifetimes_of(kept.kvstore).use(kept.kvstore_key, kept)

    def __delitem__(self, key: str) -> None:
        del self._inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return repr({name: repr(self._inner[name]) for name in self._inner})


@final
@dataclass(frozen=True)
class Space:
    """What ``g.nodes[ntype]`` and ``g.edges[etype]`` are."""

    data: DataView


@final
class Spaces(Generic[K]):
    """``g.nodes`` and ``g.edges``."""

    def __init__(self, view_of: Callable[[K], Inner]) -> None:
        self._view_of = view_of

    def __getitem__(self, key: K) -> Space:
        return Space(DataView(self._view_of(key)))
