"""Counted collectives with a time limit: sums, gathers, broadcasts, barriers, and clock comparison.

All ranks must call every function in the same order. On one rank nothing is sent.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.comm.ledger import CONTROL, ring_bytes
from dglx_dist.comm.session import ALL_GATHER, Session, check_values_equal, warn_user
from dglx_dist.data.external_memory import Ranks
from dglx_dist.errors import ConfigError, DatasetError, DglxError, PeerError, StorageError
from dglx_dist.records import Array

_MAX_STATUS_CHARS = 100
"""Maximum length of the status that a rank reports. Other ranks compare it with their own."""

T = TypeVar("T")


def sum_over_ranks(
    tensor: Tensor,
    session: Session,
    *,
    phase: str,
    layer: int = 0,
    in_place: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum ``tensor`` over all ranks, without gradient. Every rank must call this.

    The result is bitwise equal on all ranks. The ledger counts a ring's bytes: each of the W ranks sends 2 (W
    - 1) / W times the tensor's bytes to the next rank.

    Args:
        tensor: The values to sum, with the same shape and dtype on all ranks.
        session: The session whose ranks take part.
        phase: Ledger phase.
        layer: Ledger layer.
        in_place: Whether to overwrite ``tensor``, which must be contiguous.
        group: Process group with all ranks. The default is the default group.

    Raises:
        PeerError: If a rank is dead or silent.
    """
    topology = session.topology
    total = tensor.detach()
    if not in_place:
        total = total.clone(memory_format=torch.contiguous_format)
    if topology.world_size == 1 or total.numel() == 0:
        return total

    with report_failed_peers(session, f"all-reduce ({phase})"):
        dist.all_reduce(total, group=group)
    count_all_reduce(session, phase, total.numel() * total.element_size(), layer)
    return total


def count_all_reduce(session: Session, phase: str, num_bytes: int, layer: int = 0) -> None:
    """Count the bytes that this rank sends to the next rank in a ring all-reduce over ``num_bytes``."""
    topology = session.topology
    num_sent = ring_bytes(num_bytes, topology.world_size, topology.rank)
    session.ledger.add(phase, layer, topology.rank, _next_rank(session), num_sent)


def gather_int64(values: Sequence[int] | Array, session: Session) -> Array:
    """Return (W, K) int64 with rank r's values in row r. All ranks pass equally many values, K."""
    own_values = np.ascontiguousarray(values, dtype=np.int64).reshape(-1)
    num_ranks = session.topology.world_size
    if num_ranks == 1 or not len(own_values):
        return np.broadcast_to(own_values, (num_ranks, len(own_values))).copy()
    return gather_rows(torch.from_numpy(own_values), session).numpy()


def gather_rows(
    tensor: Tensor, session: Session, *, phase: str = CONTROL, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Stack the tensors from all W ranks into one (W, ...) tensor, on the device of ``tensor``.

    Row r is rank r's tensor. All ranks must pass the same shape and dtype. For ``group`` see
    :func:`sum_over_ranks`.
    """
    topology = session.topology
    if topology.world_size == 1:
        return tensor.unsqueeze(0)

    rows = [torch.empty_like(tensor) for _ in range(topology.world_size)]
    name = ALL_GATHER if phase == CONTROL else f"{ALL_GATHER} ({phase})"
    with report_failed_peers(session, name):
        dist.all_gather(rows, tensor, group=group)

    num_sent = tensor.numel() * tensor.element_size() * (topology.world_size - 1)
    session.ledger.add(phase, 0, topology.rank, _next_rank(session), num_sent)
    return torch.stack(rows)


def gather_json(value: object, session: Session) -> list[Any]:
    """Return every rank's JSON value, by rank. Raise TypeError if ``value`` is not a JSON value."""
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    return [json.loads(row.tobytes()) for row in gather_arrays(encoded, session)]


def gather_arrays(array: Array, session: Session) -> list[Array]:
    """Return every rank's (k, ...) array, by rank. Only the length k may differ between ranks."""
    lengths = gather_int64([len(array)], session)[:, 0]
    padded = np.zeros((int(lengths.max()), *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    rows = gather_rows(torch.from_numpy(padded), session).numpy()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


@final
class SessionRanks(Ranks):
    """A session's ranks, as workers on files that all of them see."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rank = session.topology.rank
        self.count = session.topology.world_size

    def gather(self, local: Array) -> list[Array]:
        return gather_arrays(local, self._session)

    def gather_objects(self, value: object) -> list[Any]:
        return gather_json(value, self._session)


def broadcast_json(value: object, session: Session, source: int = 0) -> Any:
    """Return the JSON value that rank ``source`` passes. Values from other ranks are ignored."""
    topology = session.topology
    is_source = topology.rank == source
    if topology.world_size == 1:
        return json.loads(json.dumps(value))

    encoded = json.dumps(value).encode() if is_source else b""
    size = int(gather_int64([len(encoded)], session)[source, 0])
    buffer = torch.empty(size, dtype=torch.uint8)
    if is_source:
        buffer = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)

    with report_failed_peers(session, "broadcast"):
        dist.broadcast(buffer, source)
    if is_source:
        for rank in range(topology.world_size):
            session.ledger.add(CONTROL, 0, source, rank, size)
    return json.loads(buffer.numpy().tobytes())


def barrier(session: Session, what: str) -> None:
    """Wait until every rank calls this. A PeerError names missing or dead ranks. ``what`` is for messages."""
    if session.store is not None:
        with report_status(session, what):
            session.store.barrier(what, check=lambda missing: session.raise_for_dead(missing, what))


@contextmanager
def report_failed_peers(session: Session, name: str) -> Iterator[None]:
    """Turn torch.distributed's errors in a ``with`` block into PeerErrors that name the failed ranks."""
    with report_status(session, name):
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"{session.describe_failure(name)} ({error})") from error


@contextmanager
def report_status(session: Session, what: str) -> Iterator[None]:
    """Set the status that this rank reports to others in the ``with`` block."""
    old_status = session.rpc.status
    session.rpc.status = what[:_MAX_STATUS_CHARS]
    try:
        yield
    finally:
        session.rpc.status = old_status


def _next_rank(session: Session) -> int:
    return (session.topology.rank + 1) % session.topology.world_size


_CLOCK_OP = "cluster.clock"
_ROUND_TRIPS = 20


@dataclass(frozen=True, kw_only=True)
class Clock:
    """This rank's ``time.perf_counter()`` relative to rank 0's."""

    offset_s: float
    """Seconds to add to a time on this rank to get the time on rank 0."""
    error_s: float
    """Largest error in ``offset_s`` at the measurement's time: half the fastest round trip."""


def measure_clock(session: Session) -> Clock:
    """Compare this rank's clock with rank 0's. Collective, on one thread at a time.

    Only the fastest of 20 round trips counts. Rank 0 reads its clock during the round trip, so the trip's
    middle differs from that moment by at most half its duration. Clocks on different machines drift apart
    afterwards, usually by less than 10 us per second.
    """
    if session.topology.rank == 0:
        _serve_clock(session)
        return Clock(offset_s=0.0, error_s=0.0)

    barrier(session, "comparing clocks")
    clocks = []
    for _ in range(_ROUND_TRIPS):
        start_s = time.perf_counter()
        (reading,) = session.rpc.call(0, _CLOCK_OP, "", [], phase=CONTROL)
        end_s = time.perf_counter()

        offset_s = float(reading.reshape(-1)[0]) - (start_s + end_s) / 2
        clocks.append(Clock(offset_s=offset_s, error_s=(end_s - start_s) / 2))
    barrier(session, "clocks compared")
    return min(clocks, key=lambda clock: clock.error_s)


def _serve_clock(session: Session) -> None:
    """Tell the other ranks this rank's clock until all have measured it."""
    session.rpc.register(_CLOCK_OP, lambda _name, _arrays: [np.array([time.perf_counter()])])
    try:
        barrier(session, "comparing clocks")
        barrier(session, "clocks compared")
    finally:
        session.rpc.unregister(_CLOCK_OP)


def raise_for_missing(
    session: Session, missing: Sequence[int], what: str, *, advice: str, late: bool
) -> None:
    """Raise PeerError if a rank in ``missing``, which should send ``what``, failed or is dead.

    If ``late``, the time limit is over. Then raise for all missing ranks, with ``advice`` as the remedy.
    """
    failure = session.store.first_failure() if session.store is not None else None
    if failure is not None:
        failed_rank, reason = failure
        if failed_rank in missing:
            raise PeerError(f"rank {failed_rank} failed before it sent {what}: {reason}")

    session.raise_for_dead(list(missing), what)
    if late:
        names = ", ".join(f"rank {rank} on {session.hosts[rank]}" for rank in missing)
        cause = session.describe_failure(what)
        raise PeerError(
            f"{names} did not send {what} within {session.timeout_s:g} s ({cause}); "
            f"{advice}, or raise timeout_s (DGLX_TIMEOUT)"
        )


def check_equal(
    session: Session,
    what: str,
    value: object,
    remedy: str = "pass the same value on all ranks",
    error: type[DglxError] = ConfigError,
) -> None:
    """Raise ``error`` on all ranks unless all pass the same ``value``. Every rank must call this.

    ``value`` consists of JSON values and scalars from NumPy or torch. Other objects are compared by their
    ``repr``. For a dictionary or a list, the message shows the first item that differs.
    """

    def convert(item: Any) -> Any:
        return item.item() if hasattr(item, "item") else repr(item)

    json_value = json.loads(json.dumps(value, default=convert))
    check_values_equal(what, gather_json(json_value, session), remedy, error)


def run_on_all_ranks(session: Session, action: Callable[[], T], error: type[DglxError] = StorageError) -> T:
    """Run ``action`` and return its result. If it raises on one rank, all ranks raise. Collective.

    ``action`` must not call a collective. On the rank where ``action`` failed, its error is raised. The other
    ranks raise ``error`` with the failed rank and its message, or DatasetError if that was raised there.
    """
    problem, result = "", None
    own_error: Exception | None = None
    try:
        result = action()
    except Exception as error_here:  # noqa: BLE001
        # Catch every error. A value with a wrong type on one rank must not leave the others waiting.
        own_error = error_here
        problem = _describe_error(error_here)

    try:
        problems = gather_json([problem, isinstance(own_error, DatasetError)], session)
    finally:
        # This rank's error is more useful than an error from the gathering.
        if own_error is not None:
            raise own_error

    for rank, (text, is_dataset_error) in enumerate(problems):
        if text:
            error_type = DatasetError if is_dataset_error else error
            raise error_type(f"rank {rank} on {session.hosts[rank]}: {text}")
    return result  # type: ignore[return-value]  # the result is set unless an error was raised


def _describe_error(error: Exception) -> str:
    """Return the error's message, with its type unless the message explains the problem alone."""
    if isinstance(error, DglxError | IndexError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


_CAUSES = (
    "the loop calls model.module(...) or torch.autograd.grad; the optimizer, its learning rate or a step "
    "depends on the rank or on the loss of one rank (give a scheduler dx.reduce_mean); a second model is not "
    "wrapped; DistributedDataParallel is used; "
    "reset_parameters() is called, or one rank loads other weights, after dx.wrap"
)


def check_replicas(weights: Mapping[str, Tensor], session: Session) -> None:
    """Raise ConfigError on all ranks unless their ``weights`` are equal to the bit. All ranks call this.

    Ranks on different machines may differ by rounding, because their processors may round differently. Then
    only a warning is logged.
    """
    if session.topology.world_size == 1:
        return

    # Compare one digest per rank. A digest per weight is needed only for the error message.
    rows = {name: tensor.detach().cpu().contiguous().view(-1) for name, tensor in weights.items()}
    digests = {name: zlib.crc32(row.view(torch.uint8).numpy().data) for name, row in rows.items()}
    total_digest = zlib.crc32(repr(sorted(digests.items())).encode())
    total_digests = gather_int64([total_digest], session)[:, 0]
    if (total_digests == total_digests[0]).all():
        return

    all_digests = gather_json(digests, session)
    differing_ranks = [rank for rank, digest in enumerate(all_digests) if digest != all_digests[0]]
    all_names = {**all_digests[0], **all_digests[differing_ranks[0]]}
    names = [name for name in all_names if len({digest.get(name) for digest in all_digests}) > 1]
    message = f"{names[0]!r} differs between rank 0 and ranks {', '.join(map(str, differing_ranks))}"

    has_equal_names = all(digest.keys() == digests.keys() for digest in all_digests)
    if len(set(session.hosts)) > 1 and has_equal_names:
        differing_rows = [rows[name] for name in names]
        if _are_equal_up_to_rounding(differing_rows, session):
            warn_user(f"{message} by no more than rounding")
            return
    raise ConfigError(f"{message}, so the ranks train different models. Likely causes: {_CAUSES}")


def _are_equal_up_to_rounding(rows: Sequence[Tensor], session: Session) -> bool:
    """Return whether the sums over ``rows`` are nearly equal on all ranks. Every rank must call this."""
    sums = gather_rows(torch.stack([_sum_in_three_ways(row) for row in rows]), session)
    magnitudes = sums[0, :, :1]
    return bool(((sums - sums[0]).abs() <= 1e-6 * magnitudes).all())


def _sum_in_three_ways(row: Tensor) -> Tensor:
    """Return (3,) float64 sums over the (n,) ``row``: its magnitudes, its values, and weighted values.

    Rows that differ by rounding have nearly equal sums. Rows from different models do not.
    """
    values = row.double()
    weights = torch.arange(len(values), dtype=torch.float64).cos()
    return torch.stack([values.abs().sum(), values.sum(), (values * weights).sum()])
