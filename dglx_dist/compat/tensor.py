"""DGL's ``DistTensor``, over ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.shared import Shared
from dglx_dist.compat.attached import attached_rows
from dglx_dist.compat.lifetime import lifetimes_of
from dglx_dist.compat.policy import PartitionPolicy, inner_policy, outer_policy
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor as Inner
from dglx_dist.graph.dist_tensor import opened_graph
from dglx_dist.graph.ids import Ids
from dglx_dist.graph.shared_rows import InitRows

if TYPE_CHECKING:
    from dglx_dist.compat.kvstore import KVClient


@final
class DistTensor(Shared):
    """Rows on the servers, with DGL's arguments; ``.inner`` is ours.

    Creating one is collective. Writing waits until the rows are there, as DGL's does not. A tensor that is
    not persistent is freed when a later one is created and no rank refers to it any more.

    Args:
        shape: Of the whole.
        dtype: Torch's.
        name: Attaches to what exists of that name.
        init_func: (shape, dtype) to the first rows; zeros when None.
        part_policy: Needed where several types have so many nodes or edges.
        persistent: Whether it stays when nobody refers to it any more.
        is_gdata: Whether ``g.nodes[...].data`` shows it.
        attach: Of no effect: DGL appends the number of a group of clients, of which there is one here.

    Raises:
        ConfigError: a persistent tensor without a name, or as for ``dglx_dist.DistTensor``.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        name: str | None = None,
        init_func: InitRows | None = None,
        part_policy: PartitionPolicy | None = None,
        persistent: bool = False,
        is_gdata: bool = True,
        attach: bool = True,
    ) -> None:
        if name is None and persistent:
            raise ConfigError("a tensor that nobody can find by name cannot be persistent; give it a name")
        policy = inner_policy(part_policy)
        store = opened_graph().kvstore if policy is None else policy.store
        lifetimes, known = lifetimes_of(store), set(store.names())
        # Attaching to what exists is not collective, and freeing is.
        if name is None or not any(key.endswith(f"~{name}") for key in known):
            lifetimes.free(store)
        self.inner = Inner(tuple(shape), dtype, name, init_func, policy, persistent, is_gdata)
        if persistent or self.inner.kvstore_key in known:
            lifetimes.use(self.inner.kvstore_key, self)
        else:
            lifetimes.add(self.inner.kvstore_key, self)

    @staticmethod
    def over(inner: Inner) -> DistTensor:
        """Return DGL's view of one of our tensors."""
        made = DistTensor.__new__(DistTensor)
        made.inner = inner
        lifetimes_of(inner.kvstore).use(inner.kvstore_key, made)
        return made

    def __getitem__(self, idx: Ids) -> Tensor:
        """Return the rows of ``idx``, (K, *row); of one integer, (1, *row)."""
        found = attached_rows(self.inner, idx)
        return self.inner[_many(idx)] if found is None else found

    def __setitem__(self, idx: Ids, val: Tensor) -> None:
        """Overwrite rows, and wait until their owners have them."""
        self.inner[_many(idx)] = val

    def __or__(self, other: DistTensor) -> DistTensor:
        """Return a new tensor, such as the union of two masks. Collective."""
        if not isinstance(other, DistTensor):
            return NotImplemented
        made = DistTensor.over(self.inner | other.inner)
        lifetimes_of(self.inner.kvstore).add(made.inner.kvstore_key, made)
        return made

    def __len__(self) -> int:
        return len(self.inner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved by ``torch.save`` as the tensor of all rows, which is read without this package."""
        rows = self.inner.to_local()
        return rows.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __copy__(self) -> DistTensor:
        return self

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def kvstore(self) -> KVClient:
        """The store, as DGL's client shows it."""
        from dglx_dist.compat.kvstore import KVClient

        return KVClient.over(self.inner.kvstore)

    @property
    def kvstore_key(self) -> str:
        """Under which ``kvstore`` knows it; as :attr:`name`."""
        return self.name

    @property
    def local_partition(self) -> Tensor:
        """The own server's rows."""
        return self.inner.local_rows()

    @property
    def part_policy(self) -> PartitionPolicy:
        """How its rows are laid over the partitions."""
        return outer_policy(self.inner.part_policy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.inner.shape

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype."""
        return self.inner.dtype

    @property
    def name(self) -> str:
        """``<policy>~<name given at creation>``, as DGL has it."""
        return f"{self.inner.part_policy.policy_str}~{self.inner.name}"

    @property
    def tensor_name(self) -> str:
        """The name given at creation."""
        return self.inner.name

    def count_nonzero(self) -> int:
        """Return how many values of the whole are not zero."""
        return self.inner.count_nonzero()


def inner_tensor(value: object) -> object:
    """Return ours where ``value`` is DGL's view of it, else ``value``."""
    return value.inner if isinstance(value, DistTensor) else value


def _many(idx: Ids) -> Ids:
    return [int(idx)] if isinstance(idx, int | np.integer) else idx
