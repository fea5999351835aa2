"""``DistEmbedding``: trainable rows on the servers, pulled per mini-batch, updated by ``dglx_dist.optim``."""

import zlib
from collections.abc import Callable
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

from dglx_dist.comm.collectives import barrier, run_on_all_ranks
from dglx_dist.comm.devices import start_copy_to_host
from dglx_dist.comm.session import Shared
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import (
    DistTensor,
    OpenedGraph,
    PartitionPolicy,
    get_opened_graph,
    view_owned_rows,
)
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Ids, as_ids
from dglx_dist.graph.row_kernels import number_distinct
from dglx_dist.graph.shared_memory import InitRows, check_memory
from dglx_dist.graph.sparse_gradient import RowGradient, sum_weighted
from dglx_dist.internals.pytorch import to_device
from dglx_dist.keyed_random import full_word, item_key
from dglx_dist.records import Array, StepShare

_CHUNK_BYTES = 1 << 24
"""Bytes of rows that are generated at a time if they need conversion."""


def fill_uniform(rows: Tensor, first: int, seed: int, name: str, scale: float = 1.0) -> None:
    """Fill (n, d) floating-point rows, which start at id ``first``, with uniform draws in [-scale, scale).

    The draws depend only on the seed, the tensor's name and the row's id.
    """
    stream = np.uint64(zlib.crc32(name.encode()) | (seed & 0xFFFFFFFF) << 32)
    if rows.dtype in (torch.float32, torch.float64):
        _fill_with_draws(rows.numpy(), first, stream)
        rows.mul_(scale)
        return

    # NumPy has no bfloat16, so other dtypes are converted chunk by chunk.
    chunk_rows = max(1, _CHUNK_BYTES // max(4 * rows.shape[1], 1))
    for start in range(0, len(rows), chunk_rows):
        chunk = rows[start : start + chunk_rows]
        float_rows = np.empty(chunk.shape, dtype=np.float32)
        _fill_with_draws(float_rows, first + start, stream)
        chunk.copy_(torch.from_numpy(float_rows).mul_(scale))


@njit(cache=True, nogil=True)
def _fill_with_draws(rows: Array, first: int, stream: np.uint64) -> None:
    """Fill the (n, d) ``rows`` with draws in [-1, 1). ``first`` is the first row's id."""
    num_rows, num_columns = rows.shape
    for row in range(num_rows):
        key = item_key(stream, first + row)
        for column in range(num_columns):
            # float32 holds 24 bits exactly. So float32 and float64 rows start equal, and no draw rounds to 1.
            rows[row, column] = np.float64(full_word(key, column) >> np.uint64(40)) * 2.0**-23 - 1.0


PHASE = "embeddings"
"""Ledger phase for pulled rows."""

_COMPUTE_DTYPE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@final
class DistEmbedding(Shared):
    """One trainable row per node or edge, for one type, cut over the servers (DistDGL, section 5.4).

    A call pulls a mini-batch's rows. ``backward`` stores their gradients here. An optimizer from
    :mod:`dglx_dist.graph.optim` sends them in ``step()`` to the ranks that own the rows. Without ``step()``,
    at most one gradient row for each id is kept. ``torch.no_grad()`` keeps none.

    Creating an embedding is collective. If the name exists, the embedding uses that tensor. Any rank may call
    an embedding alone. In synchronous mode no barrier is needed between ``step()`` and a call on another
    rank, because ``step()`` returns when all ranks have applied it.

    Args:
        num_embeddings: Row count. It equals the number of nodes or edges of the type.
        embedding_dim: Number of columns d.
        name: Name in ``g.nodes[...].data``, the same on all ranks. With None, nothing can attach later.
        init_func: Function from (shape, dtype) to the first values for the local server's rows. One rank per
            server calls it. The default is uniform in [-scale, scale). The draws depend on the session's
            seed, the name and the row's id, and not on the number of ranks.
        part_policy: ``g.get_node_partition_policy(ntype)`` or another policy. It is needed if several types
            have ``num_embeddings`` nodes or edges.
        dtype: float32, float64, bfloat16 or float16. The last two, and their optimizer states, are computed
            in float32. Rows are rounded when they are stored.
        graph: Graph that the rows belong to. The default is the graph that was opened last.
        scale: Scale for the first values without ``init_func``. Pass a link decoder's ``row_scale``.

    Raises:
        ConfigError: on all ranks, for a wrong dtype, row count or dimension, or if memory is short.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str | None = None,
        init_func: InitRows | None = None,
        part_policy: PartitionPolicy | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        graph: OpenedGraph | None = None,
        scale: float = 1.0,
    ) -> None:
        store = part_policy.store if part_policy is not None else (graph or get_opened_graph()).kvstore

        def check_arguments() -> PartitionPolicy:
            if dtype not in _COMPUTE_DTYPE:
                dtypes = ", ".join(map(str, _COMPUTE_DTYPE))
                raise ConfigError(f"a DistEmbedding cannot train {dtype} rows. Use one of {dtypes}.")
            if not isinstance(embedding_dim, int) or embedding_dim < 1:
                raise ConfigError(f"embedding_dim is {embedding_dim!r}. Use an integer of at least 1.")
            return part_policy or (graph or get_opened_graph()).find_policy_of_length(num_embeddings)

        # A rank can attach to an existing tensor alone. Creating a tensor is collective.
        if any(key.endswith(f"~{name}") for key in store.names()):
            policy = check_arguments()
        else:
            policy = run_on_all_ranks(store.session, check_arguments, ConfigError)
        self.dataset = ""
        """Checksum of the dataset whose ids number the rows. Empty if its graph is closed."""
        open_graph = graph or get_opened_graph()
        if open_graph.kvstore is policy.store:
            self.dataset = open_graph.dataset.manifest.checksum

        attaches = name is not None and store.has(policy.key(name))
        shape = (num_embeddings, embedding_dim)
        if not attaches:
            # init_func returns a second copy of the rows.
            num_copies = 1 if init_func is None else 2
            row_bytes = embedding_dim * dtype.itemsize * num_copies
            remedy = "use a smaller embedding_dim or dtype=torch.bfloat16, or more servers on more machines"
            description = f"the embedding {name!r} of shape {shape} in {dtype}"
            check_memory(store.session, policy.bounds, row_bytes, description, remedy)
        self.weight = DistTensor(shape, dtype, name, init_func, policy)
        """(num_embeddings, embedding_dim) rows."""
        if not attaches and init_func is None:
            # Each rank fills the rows that it owns, without a second copy.
            first, _ = policy.owned_range
            owned_rows = view_owned_rows(self.weight)
            fill_uniform(owned_rows, first, store.session.seed, self.weight.name, scale)
            barrier(store.session, f"first values of {self.weight.name!r}")

        self._gradients: list[RowGradient] = []
        self._num_kept_rows = 0
        self.optm_state: tuple[DistTensor, ...] = ()
        """The optimizer's tensors. Empty without an optimizer."""

    @property
    def name(self) -> str:
        return self.weight.name

    data_name = name
    """DGL's name for :attr:`name`."""

    @property
    def num_embeddings(self) -> int:
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.weight.shape[1]

    @property
    def part_policy(self) -> PartitionPolicy:
        return self.weight.part_policy

    @property
    def kvstore(self) -> KVStore:
        return self.weight.kvstore

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype for returned rows, gradients and optimizer states."""
        return _COMPUTE_DTYPE[self.weight.dtype]

    def __repr__(self) -> str:
        shape = f"{self.num_embeddings}, {self.embedding_dim}"
        return f"DistEmbedding({self.name!r}, {shape}, {self.weight.dtype})"

    def __call__(self, ids: Ids, device: torch.device | str | None = None) -> Tensor:
        """Pull the rows for ``ids``. With gradients enabled, ``backward`` stores their gradients here.

        Each distinct row is pulled once. Not collective.

        Args:
            ids: (K,) integers, a mask over all rows, or a slice. Ids may be repeated, and K may be 0.
            device: Device for the result. The default is the same device as ``ids``.

        Returns:
            (K, d) rows in :attr:`compute_dtype`.
        """
        row_ids = as_ids(ids, self.num_embeddings, repr(self.name))
        if device is None:
            device = ids.device if isinstance(ids, Tensor) else "cpu"
        target = torch.device(device)
        if not torch.is_grad_enabled():
            return self._pull(row_ids, target)

        distinct_ids, row_indices = number_distinct(row_ids)
        leaf = self._pull(distinct_ids, target, distinct=True).requires_grad_()
        record = self._make_hook(distinct_ids, self.kvstore.session.step_share)
        leaf.register_post_accumulate_grad_hook(record)  # type: ignore[no-untyped-call]  # torch does not annotate this
        if len(distinct_ids) == len(row_ids):
            return leaf
        return F.embedding(to_device(torch.from_numpy(row_indices), target), leaf)

    def reset_trace(self) -> None:
        """Drop all gradients. This is DGL's name; see also the optimizers' ``zero_grad()``."""
        self._gradients = []
        self._num_kept_rows = 0

    def take_gradients(self) -> list[RowGradient]:
        """Return and drop all gradients, ordered by backward pass, once they are on the host."""
        gradients = self._gradients
        self.reset_trace()
        _wait_for(gradients)
        return gradients

    def _pull(self, ids: Array, device: torch.device, *, distinct: bool = False) -> Tensor:
        rows = self.kvstore.pull(self.weight.kvstore_key, ids, distinct=distinct, phase=PHASE)
        return to_device(rows, device).to(self.compute_dtype)

    def _make_hook(self, ids: Array, share: StepShare | None) -> Callable[[Tensor], None]:
        """Return the hook that moves the gradient out of the leaf. The hook keeps no leaf or graph alive."""

        def record(leaf: Tensor) -> None:
            gradient = leaf.grad
            leaf.grad = None
            assert gradient is not None
            rows, wait = start_copy_to_host(gradient.detach())
            self._keep(RowGradient(ids=ids, rows=rows.numpy(), share=share, wait=wait))

        return record

    def _keep(self, gradient: RowGradient) -> None:
        self._gradients.append(gradient)
        self._num_kept_rows += len(gradient.ids)
        # A program without optimizer steps would fill the memory. Beyond this size most ids are repeated.
        if len(self._gradients) > 1 and self._num_kept_rows > 2 * self.num_embeddings:
            _wait_for(self._gradients)
            self._gradients = _sum_by_share(self._gradients)
            self._num_kept_rows = sum(len(gradient.ids) for gradient in self._gradients)


def _wait_for(gradients: list[RowGradient]) -> None:
    for gradient in gradients:
        if gradient.wait is not None:
            gradient.wait()


def _sum_by_share(gradients: list[RowGradient]) -> list[RowGradient]:
    """Return one gradient per step share, because each share gets another weight."""
    sums = []
    for share in dict.fromkeys(gradient.share for gradient in gradients):
        total = sum_weighted([(gradient, 1.0) for gradient in gradients if gradient.share == share])
        assert total is not None
        sums.append(RowGradient(ids=total.ids, rows=total.rows, share=share))
    return sums
