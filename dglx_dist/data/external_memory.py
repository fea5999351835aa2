"""Memory budgets, and files for data that does not fit: buckets, spills, sorted edges and finished stages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, final

import numpy as np
import psutil
import pyarrow as pa

from dglx_dist.data.storage.columns import checksum, id_dtype, numpy_dtype
from dglx_dist.data.storage.files import (
    PARTIAL_SUFFIX,
    discard,
    name_write_failures,
    partial_folder,
    publish,
    read_small_file,
    remove_abandoned,
    remove_abandoned_of,
    replace_atomically,
    try_lock,
)
from dglx_dist.errors import ConfigError, DatasetError, PeerError, StorageError
from dglx_dist.memory import format_bytes, machine_memory, resident_bytes, return_memory
from dglx_dist.progress import progress, say
from dglx_dist.records import Array, ColumnInfo

LIBRARY_BYTES = 48 * 2**20
"""Memory for library code that is not loaded yet, and for buffers that do not depend on the limit."""
PROGRAM_BYTES = 192 * 2**20
"""Approximate memory for Python and its libraries, including :data:`LIBRARY_BYTES`. Used in messages."""
BUDGET_SHARES = 6
"""Shares of the budget. A bucket takes one share."""
MIN_WORK_BYTES = 24 * 2**20
"""Minimum budget beside the program itself. With less memory the pieces become too small."""


_ROUNDING_MB = 8


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory for work beside the program itself. Steps run one at a time."""

    work: int
    reserved: int = PROGRAM_BYTES
    """Bytes that the program and :meth:`with_reserved` take."""

    def with_reserved(self, num_bytes: int) -> Budget:
        """Return the budget with ``num_bytes`` less for work. The number may be negative."""
        return Budget(work=self.work - num_bytes, reserved=self.reserved + num_bytes)

    def remedy(self, num_bytes: int) -> str:
        """Advise how much memory to grant for ``num_bytes`` of work."""
        return f"grant --memory {(self.reserved + num_bytes) // 10**6 + _ROUNDING_MB}MB"

    @property
    def batch(self) -> int:
        """Table bytes to read at a time. Converting them takes several times that memory."""
        return self.work // 32

    @property
    def bucket(self) -> int:
        """Bytes to sort or look up at a time."""
        return self.work // BUDGET_SHARES


def open_budget(limit: int) -> Budget:
    """Return the budget: ``limit`` bytes minus this process's current memory.

    If the machine or the control group has less memory, its memory is the limit, and a message says so.
    Raises ConfigError if the budget is too small.
    """
    available, _ = machine_memory()
    if limit > available:
        say(f"--memory {format_bytes(limit)} is more than this machine has; using {format_bytes(available)}")
        limit = available
    used = resident_bytes() + LIBRARY_BYTES
    budget = Budget(work=limit - used, reserved=used)
    if budget.work < MIN_WORK_BYTES:
        raise ConfigError(
            f"--memory {limit // 10**6}MB leaves too little beside the {used // 10**6} MB of "
            f"the program itself; {budget.remedy(MIN_WORK_BYTES)} at least"
        )
    return budget


@contextmanager
def low_memory_allocators() -> Iterator[None]:
    """Make allocators return freed memory to the system instead of keeping it.

    Arrow's own pool keeps freed memory for a while, and glibc keeps pieces smaller than the largest one freed
    so far. For example, reading a 9 MB column in 1 MB pieces kept 40 MB. The glibc setting is not reverted.
    """
    previous_pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    release_memory()
    try:
        yield
    finally:
        pa.set_memory_pool(previous_pool)


def release_memory() -> None:
    """Return freed memory to the system. Call it between steps, as malloc does not reuse small pieces."""
    return_memory(1 << 17)


def iterate_runs(values: Array) -> Iterator[tuple[int, slice]]:
    """Yield value and positions for each run of equal values in an ascending (K,) integer array."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    for start, end in pairwise([*starts.tolist(), len(values)]):
        yield int(values[start]), slice(start, end)


@final
class BucketFiles:
    """Records with one dtype, in numbered files in a folder."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.dtype = np.dtype(dtype)

    def append(self, buckets: Array, records: Array) -> None:
        """Append each of the (K,) ``records`` to the file with its bucket number. Their order is kept."""
        # NumPy sorts 16-bit keys in linear time.
        if buckets.max(initial=0) < 1 << 16:
            buckets = buckets.astype(np.uint16)
        order = np.argsort(buckets, kind="stable")
        records = records[order]
        for bucket, run in iterate_runs(buckets[order].astype(np.int64)):
            with (self._folder / str(bucket)).open("ab") as file:
                write_array(file, records[run])

    def take(self, bucket: int) -> Array:
        """Return one file's records and delete the file."""
        path = self._folder / str(bucket)
        if not path.exists():
            return np.empty(0, self.dtype)
        records = np.fromfile(path, self.dtype)
        path.unlink()
        return records


@final
class ScatteredRows:
    """Rows on disk that can be written in any order. Each file has a range that fits in ``memory`` bytes.

    Rows that are never written have the value ``fill``.
    """

    def __init__(
        self,
        folder: Path,
        num_rows: int,
        dtype: Any,
        row_shape: tuple[int, ...] = (),
        *,
        memory: int,
        fill: int = 0,
    ) -> None:
        self._num_rows = num_rows
        self._fill = fill
        self._row = np.dtype((dtype, row_shape))
        self._files = BucketFiles(folder, [("at", np.int64), ("row", dtype, row_shape)])
        # A file's entries are in memory together with the rows that they are written to.
        self._range = max(1, memory // (self._files.dtype.itemsize + self._row.itemsize))

    def put(self, positions: Array, rows: Array) -> None:
        """Write the (k, *row) ``rows`` at the (k,) ``positions``. The last row at a position wins."""
        entries = np.empty(len(positions), self._files.dtype)
        entries["at"] = positions
        entries["row"] = rows
        self._files.append(positions // self._range, entries)

    def chunks(self) -> Iterator[Array]:
        """Yield all rows in order, one range at a time, and delete the files."""
        for first in range(0, self._num_rows, self._range):
            count = min(self._range, self._num_rows - first)
            rows = np.full((count, *self._row.shape), self._fill, dtype=self._row.base)
            entries = self._files.take(first // self._range)
            rows[entries["at"] - first] = entries["row"]
            del entries
            yield rows


def write_array(file: BinaryIO, rows: Array) -> None:
    """Append the values in ``rows`` to a file."""
    # If a disk is full, the error from tofile does not say so.
    file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


@final
class Spill:
    """A new file with rows that are not kept in memory."""

    def __init__(self, path: Path, dtype: Any, chunks: Iterable[Array] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self.path = path
        self._dtype = np.dtype(dtype)
        self.num_rows = 0
        for rows in chunks:
            self.append(rows)

    def append(self, rows: Array) -> None:
        with self.path.open("ab") as file:
            write_array(file, rows.astype(self._dtype, copy=False))
        self.num_rows += len(rows)

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all values in order, at most ``num_rows`` at a time. Rows must be single values."""
        with self.path.open("rb") as file:
            for first in range(0, self.num_rows, num_rows):
                yield np.fromfile(file, self._dtype, min(num_rows, self.num_rows - first))


def spill(folder: Path, name: str, dtype: Any, chunks: Iterable[Array] = ()) -> Spill:
    """Write ``chunks`` to a new file for :func:`map_spill`. Its name contains ``dtype``."""
    return Spill(folder / f"{name}.{np.dtype(dtype).str}", dtype, chunks)


def map_spill(folder: Path, name: str) -> Array:
    """Map the (K,) values that :func:`spill` wrote. Raise FileNotFoundError if they are missing."""
    for path in folder.glob(f"{name}.*"):
        dtype = np.dtype(path.suffix[1:])
        # The file is opened for writing, so that compiled code needs no second variant for read-only arrays.
        return np.memmap(path, dtype, "r+") if path.stat().st_size else np.empty(0, dtype)
    raise FileNotFoundError(f"there is no {name} in {folder}")


class Ranks:
    """The processes that share one job. This class is a job with one process.

    All ranks must call every method in the same order. If one rank ends, the others raise PeerError.
    """

    rank = 0
    count = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does unshared work alone."""
        return self.rank == 0

    def gather(self, array: Array) -> list[Array]:
        """Return the (k, *row) arrays from all ranks. Only k may differ."""
        return [array]

    def union(self, marks: Array) -> Array:
        """Combine the (K,) bool ``marks`` from all ranks by OR."""
        packed = np.bitwise_or.reduce(self.gather(np.packbits(marks)))
        return np.unpackbits(packed, count=len(marks)).view(np.bool_)

    def gather_objects(self, value: object) -> list[Any]:
        """Return the JSON values from all ranks."""
        return [value]


Chunks: TypeAlias = Callable[[int], Iterator[Array]]
"""Function that yields all rows in order, in chunks with at most the given number of rows."""

_SLOTS = 1 << 16
_KEY_BYTES = 24
"""Bytes per edge for the sort key, the position and NumPy's temporary arrays."""
_HUB_SHARES = 5
"""Budget shares that a hub's edges may take. Nothing else is in memory then."""


class EdgeColumn(NamedTuple):
    """An edge column."""

    info: ColumnInfo
    rows: Chunks


@dataclass(frozen=True, kw_only=True)
class EdgeStream:
    """E edges in their original order."""

    sources: Chunks
    destinations: Chunks
    columns: Sequence[EdgeColumn]
    num_sources: int
    num_destinations: int

    @property
    def record_dtype(self) -> np.dtype[np.void]:
        """An edge's dtype: its ends and its columns. Column names may clash, so fields are numbered."""
        fields: list[Any] = [
            ("destination", id_dtype(self.num_destinations)),
            ("source", id_dtype(self.num_sources)),
        ]
        for i, column in enumerate(self.columns):
            fields.append((str(i), numpy_dtype(column.info.dtype), column.info.row_shape))
        return np.dtype(fields)


@dataclass(frozen=True, kw_only=True)
class SortedEdges:
    """CSC in files. Edges are ordered by (destination, source, position in the stream)."""

    indptr: Spill
    """(N_dst + 1,) int64."""
    indices: Spill
    """(E,) sources, int32 if N_src fits, else int64."""
    columns: Sequence[Spill]
    """Sorted :attr:`EdgeStream.columns`. A row's values are stored one after the other."""


def argsort_edges(destinations: Array, sources: Array) -> Array:
    """Return the (K,) positions that stably sort edges by (destination, source)."""
    keys = destinations.astype(np.int64)
    keys *= int(sources.max(initial=0)) + 1
    keys += sources
    return np.argsort(keys, kind="stable")


def sort_edges(
    edges: EdgeStream,
    folder: Path,
    budget: Budget,
    *,
    order: Callable[[Array, Array], Array] = argsort_edges,
    advance: Callable[[int], None] = lambda _: None,
    ranks: Ranks | None = None,
) -> SortedEdges:
    """Sort edges and their columns by (destination, source, position).

    The files ``indptr``, ``indices``, ``carried0``, ``carried1`` ... in ``folder`` are for :func:`map_spill`.
    The destinations are cut into at most 65,536 slots. A bucket has the edges into consecutive slots, at
    least one, and as many as fit in ``budget.bucket`` bytes.

    Args:
        edges: The edges and their columns.
        folder: Where the files are written.
        budget: Memory for sorting.
        order: Returns the sorted positions of one bucket's edges.
        advance: Called with 3 for each edge in total.
        ranks: Ranks that call the function with the same edges and budget. Each rank sorts some destinations
            and returns these. The files have all edges. By default, this process sorts all edges.

    Raises:
        ConfigError: If a slot takes more than five times ``budget.bucket`` bytes.
    """
    ranks = ranks or Ranks()
    record = edges.record_dtype
    largest_field = max(record[name].itemsize for name in record.names or ())
    edge_bytes = record.itemsize + _KEY_BYTES + largest_field
    width = max(_divide_up(edges.num_destinations, _SLOTS), 1)
    step = max(1, budget.bucket // edge_bytes)
    slot_sizes = _count_slots(edges, width, step, advance)
    _check_fits(slot_sizes, width, edge_bytes, budget)

    # Each rank sorts about equally many consecutive buckets, so there are at least as many as ranks.
    total = int(slot_sizes.sum()) + width * len(slot_sizes)
    starts = _find_first_destinations(slot_sizes, width, min(step, _divide_up(total, ranks.count)))
    ends = [*starts[1:], edges.num_destinations]
    first_bucket = len(starts) * ranks.rank // ranks.count
    end_bucket = len(starts) * (ranks.rank + 1) // ranks.count
    own_buckets = range(first_bucket, end_bucket)
    with join_rank_pieces(folder, ranks) as piece:
        buckets = _write_buckets(edges, starts, own_buckets, piece / "buckets", step, advance)
        result = SortedEdges(
            indptr=spill(piece, "indptr", np.int64, [np.zeros(int(ranks.is_first))]),
            indices=spill(piece, "indices", record["source"]),
            columns=[spill(piece, f"carried{i}", record[str(i)].base) for i in range(len(edges.columns))],
        )
        num_written = 0
        for bucket in own_buckets:
            records = buckets.take(bucket)
            records["destination"] -= starts[bucket]
            degrees = np.bincount(records["destination"], minlength=ends[bucket] - starts[bucket])

            # The edges in a bucket are still in the stream's order.
            positions = order(records["destination"], records["source"])
            result.indices.append(records["source"][positions])
            for i, carried in enumerate(result.columns):
                carried.append(records[str(i)][positions])
            result.indptr.append(num_written + np.cumsum(degrees))
            num_written += len(records)
            advance(len(records))
            del records, positions
            release_memory()

        shutil.rmtree(piece / "buckets")
    return result


def _divide_up(value: int, divisor: int) -> int:
    return (value + divisor - 1) // divisor


def _count_slots(edges: EdgeStream, width: int, step: int, advance: Callable[[int], None]) -> Array:
    """Count the edges that end in each slot, which spans ``width`` destinations."""
    slot_sizes = np.zeros(max(_divide_up(edges.num_destinations, width), 1), np.int64)
    for destinations in edges.destinations(step):
        slot_sizes += np.bincount(destinations // width, minlength=len(slot_sizes))
        advance(len(destinations))
    return slot_sizes


def _find_first_destinations(slot_sizes: Array, width: int, max_size: int) -> list[int]:
    """Return the first destination in each bucket.

    A bucket has at most ``max_size`` edges and destinations in total, unless it is a single slot.
    """
    starts = [0]
    bucket_size = 0
    for slot, num_edges in enumerate(slot_sizes.tolist()):
        if bucket_size and bucket_size + num_edges + width > max_size:
            starts.append(slot * width)
            bucket_size = 0
        bucket_size += num_edges + width
    return starts


def _check_fits(slot_sizes: Array, width: int, edge_bytes: int, budget: Budget) -> None:
    slot = int(np.argmax(slot_sizes))
    num_edges = int(slot_sizes[slot])
    if num_edges * edge_bytes > _HUB_SHARES * budget.bucket:
        nodes = f"nodes {slot * width} to {(slot + 1) * width - 1}" if width > 1 else f"node {slot}"
        needed = (num_edges * edge_bytes // _HUB_SHARES + 1) * BUDGET_SHARES
        raise ConfigError(f"{num_edges} edges end at {nodes}, sorted together; {budget.remedy(needed)}")


def _write_buckets(
    edges: EdgeStream,
    starts: list[int],
    bucket_range: range,
    folder: Path,
    step: int,
    advance: Callable[[int], None],
) -> BucketFiles:
    """Write the edges for the buckets in ``bucket_range`` to files. ``starts`` has the first destinations."""
    buckets = BucketFiles(folder, edges.record_dtype)
    owns_all = len(bucket_range) == len(starts)
    column_chunks = [column.rows(step) for column in edges.columns]
    chunks = zip(edges.sources(step), edges.destinations(step), *column_chunks, strict=True)
    for sources, destinations, *columns in chunks:
        records = np.empty(len(sources), edges.record_dtype)
        records["source"] = sources
        records["destination"] = destinations
        for i, rows in enumerate(columns):
            records[str(i)] = rows

        bucket_of = np.searchsorted(starts, destinations, side="right") - 1
        if owns_all:
            buckets.append(bucket_of, records)
        else:
            is_own = (bucket_range.start <= bucket_of) & (bucket_of < bucket_range.stop)
            buckets.append(bucket_of[is_own], records[is_own])
        advance(len(records))
    return buckets


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A folder on disk and a memory budget, to work on a graph larger than memory.

    Arrays over all nodes are in memory. Arrays over edges are memory-mapped files in ``folder`` that are read
    in order. They do not count as memory, because the kernel drops their pages when memory is short.
    """

    folder: Path
    budget: Budget
    """Memory budget, equal on all ranks."""
    ranks: Ranks = field(default_factory=Ranks)
    intact: set[Path] = field(default_factory=set)
    """Stages that this process made or compared with their checksums."""

    def stage(self, name: str, make: Callable[[Path], object], *, shared: bool = False) -> Path:
        """Return a stage's folder. If it does not exist, ``make`` fills it.

        The stage is complete or absent. Rank 0 makes it, or all ranks together if it is ``shared``. If a
        stage from an earlier process does not match its checksums, a message is printed and the stage is made
        again.
        """
        target = self.folder / name
        sums = self.folder / f"{name}.json"

        def save(partial: Path, target: Path) -> None:
            with replace_atomically(sums) as file:
                file.write_text(json.dumps(_compute_checksums(partial)))
            publish(partial, target)

        # Rank 0 looks at the stage, and all ranks follow its answer.
        is_intact, *_ = self.ranks.gather_objects(self.ranks.is_first and self._is_intact(target, sums))
        if not is_intact:
            with name_write_failures(self.folder), shared_folder(target, self.ranks, save) as partial:
                if shared or self.ranks.is_first:
                    make(partial)

        self.intact.add(target)
        return target

    def _is_intact(self, stage: Path, sums: Path) -> bool:
        with name_write_failures(self.folder):
            if not stage.is_dir():
                return False
            if stage in self.intact:
                return True
            damage = _find_damage(stage, sums)
            if damage is None:
                return True
            say(f"making {stage} again: {damage}")
            discard(stage)
            return False

    def array(self, name: str, make: Callable[[], Array], *, shared: bool = False) -> Array:
        """Return the array that ``make`` returns on rank 0. It is stored as a :meth:`stage`."""

        def save(folder: Path) -> None:
            values = make()
            if self.ranks.is_first:
                spill(folder, "array", values.dtype, [values])

        return np.array(map_spill(self.stage(name, save, shared=shared), "array"))

    def with_reserved(self, num_bytes: int) -> Workspace:
        """Return this workspace with ``num_bytes`` less memory for work."""
        return replace(self, budget=self.budget.with_reserved(num_bytes))

    def fits(self, num_bytes: int) -> bool:
        """Return whether ``num_bytes`` fit in the budget."""
        return num_bytes <= self.budget.work

    def remaining(self, num_bytes: int, min_bytes: int, purpose: str) -> int:
        """Return the bytes left beside ``num_bytes``. Raise ConfigError below ``min_bytes``."""
        needed = num_bytes + min_bytes
        if not self.fits(needed):
            raise ConfigError(f"{purpose} takes {format_bytes(needed)} or more; {self.budget.remedy(needed)}")
        return self.budget.work - num_bytes


def _compute_checksums(folder: Path) -> dict[str, object]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): asdict(checksum(path)) for path in paths}


def _find_damage(stage: Path, sums: Path) -> str | None:
    """Say what is damaged in a stage, or return None if all its files match their checksums."""
    try:
        checksums = _compute_checksums(stage)
        expected = json.loads(read_small_file(sums))
        # Files may have been added, such as a dataset's cache.
        differing = [name for name, file in expected.items() if checksums.get(name) != file]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return f"its files cannot be checked ({error})"
    if not expected:
        return f"{sums.name} is empty"
    if differing:
        return f"{differing[0]} is damaged"
    return None


@contextmanager
def shared_folder(
    target: Path, ranks: Ranks, place: Callable[[Path, Path], object] | None = None
) -> Iterator[Path]:
    """Yield the same new folder to all ranks. When all have filled it, rank 0 renames it to ``target``."""
    with partial_folder(target) if ranks.is_first else nullcontext(target) as own_folder:
        partial = Path(ranks.gather_objects(str(own_folder))[0])
        try:
            yield partial
            ranks.gather_objects(None)
        except PeerError:
            # This rank may have created files in the folder after rank 0 removed it.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except FileNotFoundError:
            if not partial.exists():
                ranks.gather_objects(None)  # This raises the error from the removing rank.
            raise

        if ranks.is_first:
            (place or publish)(partial, target)
        ranks.gather_objects(None)


_COPY_BYTES = 1 << 24
"""Bytes to copy at a time."""


@contextmanager
def join_rank_pieces(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield a folder for this rank's pieces of files. Rank 0 then joins the pieces in ``folder``, by rank.

    A file named indptr has the int64 ends of rows, counted within the rank's piece. On rank 0 it begins with
    a 0. When the pieces are joined, ends are shifted by the number of edges in earlier pieces.
    """
    if ranks.is_first:
        yield folder
    else:
        rank_folder = folder / f"rank{ranks.rank}"
        rank_folder.mkdir()
        yield rank_folder
    ranks.gather_objects(None)
    if not ranks.is_first:
        return

    for rank in range(1, ranks.count):
        for path in sorted((folder / f"rank{rank}").iterdir()):
            target = folder / path.name
            num_previous = 0
            if path.stem == "indptr":
                num_previous = int(np.fromfile(target, np.int64, 1, offset=target.stat().st_size - 8)[0])
            with path.open("rb") as piece, target.open("ab") as file:
                while data := piece.read(_COPY_BYTES):
                    if num_previous:
                        write_array(file, np.frombuffer(data, np.int64) + num_previous)
                    else:
                        file.write(data)
        shutil.rmtree(folder / f"rank{rank}")


def concatenate_chunks(
    workspace: Workspace | None, name: str, makers: Sequence[Callable[[], Iterator[Array]]], total: int
) -> list[Array]:
    """Concatenate the (k,) arrays that each of ``makers`` yields, in memory or mapped from a stage.

    Each maker must yield at least one array. ``name`` is the stage's name. ``total`` is how many values there
    are in all, for the progress.
    """
    if workspace is None:
        return [np.concatenate(list(make())) for make in makers]

    def write(folder: Path) -> None:
        with progress(f"Writing {name}", total, enabled=total >= SHOWN_FROM) as advance:
            for i, make in enumerate(makers):
                chunks = make()
                first_chunk = next(chunks)
                values = spill(folder, str(i), first_chunk.dtype)
                for chunk in chain([first_chunk], chunks):
                    values.append(chunk)
                    advance(len(chunk))

    folder = workspace.stage(name, write)
    return [map_spill(folder, str(i)) for i in range(len(makers))]


SHOWN_FROM = 1_000_000
"""Minimum number of values or nodes for which progress is shown."""
_KEY, _LOCK = "key.json", "lock"
_SOURCE_STAGES = (
    *("arrays", "edges", "features", "generator"),
    *("ids-", "reverse edges", "self-loops", "synthetic"),
)
"""Prefixes of stages that copy the source, or are quickly made from it."""
_MEMORY_FOLDER = Path("/dev/shm")  # A workspace there is refused.
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@contextmanager
def open_workspace(
    folder: Path, settings: Mapping[str, object], limit: int, ranks: Ranks | None = None
) -> Iterator[Workspace]:
    """Open a job's workspace with ``limit`` bytes of memory per rank, and remove it at the end.

    After an error or a kill, the finished stages are kept. A job with the same ``settings`` (JSON values)
    resumes and prints which stages it found. After a ConfigError or DatasetError, copies of the source alone
    are not kept, because the remedy changes the settings. All ``ranks`` must open the workspace. By default
    this process works alone. Raises ConfigError if ``folder`` is in memory, or ``limit`` is too small, and
    StorageError if ``folder`` has foreign files or stages with other settings, is in use, or is not writable.
    """
    folder = folder.absolute()
    ranks = ranks or Ranks()
    if folder.resolve().is_relative_to(_MEMORY_FOLDER):
        raise ConfigError(f"{folder} is in memory; choose a folder on a disk (--scratch DIR)")
    for rank, rank_settings in enumerate(ranks.gather_objects(dict(settings))):
        for name, value in settings.items():
            if rank_settings.get(name) != value:
                raise StorageError(
                    f"rank {rank} and rank {ranks.rank} differ in {name}; pass all the same DATA"
                )
    own_budget = open_budget(limit)
    # All ranks work with the smallest budget, so that they cut the same pieces.
    work, reserved = min(ranks.gather_objects([own_budget.work, own_budget.reserved]))
    budget = Budget(work=work, reserved=reserved)
    with _claim_folder(folder, settings) if ranks.is_first else nullcontext():
        ranks.gather_objects(None)
        if not (folder / _KEY).is_file():
            raise StorageError(
                f"rank {ranks.rank} does not see {folder}, which rank 0 has created; DATA, "
                "--out and --scratch must be on a file system that all ranks see"
            )
        yield Workspace(folder=folder, budget=budget, ranks=ranks)


@contextmanager
def _claim_folder(folder: Path, settings: Mapping[str, object]) -> Iterator[None]:
    """Lock the folder for this job, and remove it at the end unless it has stages to resume."""
    file_systems = {path.mountpoint: path.fstype for path in psutil.disk_partitions(all=True)}
    file_system = None
    resolved = folder.resolve()
    for path in (resolved, *resolved.parents):
        if str(path) in file_systems:
            file_system = file_systems[str(path)]
            break
    if file_system in _MEMORY_FILE_SYSTEMS:
        say(f"{folder} is in memory ({file_system}), which --memory does not limit; choose another --scratch")

    with ExitStack() as stack:
        with name_write_failures(folder):
            folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned_of(folder)
            names = {path.name for path in folder.iterdir()}

            # The key is written before the first stage.
            has_foreign = any(not name.startswith((_KEY, _LOCK)) for name in names)
            if has_foreign and not {_KEY, _LOCK} <= names:
                raise StorageError(f"{folder} has files of something else; choose another --scratch")
            (folder / _LOCK).touch()
            if not stack.enter_context(try_lock(folder / _LOCK)):
                raise StorageError(f"{folder} is in use by another process; wait for it")
            _check_key(folder, settings)
            remove_abandoned(folder)
            stages = _list_stages(folder)
            if stages:
                say(f"resuming in {folder}; finished before: {', '.join(stages)}")
        try:
            yield
        except BaseException as error:
            stages = _list_stages(folder)
            if isinstance(error, (ConfigError, DatasetError)):
                stages = [name for name in stages if not name.startswith(_SOURCE_STAGES)]
            if stages:
                say(f"finished stages are kept in {folder}; run the same command to resume, or remove it")
            else:
                discard(folder)
            raise
        discard(folder)


def _list_stages(folder: Path) -> list[str]:
    """Return the sorted names of the finished stages. An inner job's stages are in a folder NAME.work."""
    stages = []
    for path in folder.iterdir():
        if path.suffix == ".work":
            stages += [f"{path.name}/{stage}" for stage in _list_stages(path)]
        elif path.is_dir() and path.suffix != PARTIAL_SUFFIX:
            stages.append(path.name)
    return sorted(stages)


def _check_key(folder: Path, settings: Mapping[str, object]) -> None:
    """Write the settings to a new folder. Raise StorageError if a folder has other settings."""
    path = folder / _KEY
    expected = json.loads(json.dumps(settings))
    if not path.exists():
        with replace_atomically(path) as partial:
            partial.write_text(json.dumps(expected, indent=1))
        return

    try:
        stored = json.loads(read_small_file(path))
        differing = [key for key in expected.keys() | stored.keys() if expected.get(key) != stored.get(key)]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}); remove {folder}") from error

    if differing:
        changes = ", ".join(f"{name} was {stored.get(name)!r}" for name in sorted(differing))
        raise StorageError(
            f"{folder} holds unfinished work with other settings ({changes}); repeat that "
            "command to finish it, or remove the folder"
        )
