"""Memory budget, and files that hold what does not fit: buckets, spills, sorted edges, finished stages."""

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
"""Library code that is not loaded yet, and buffers that do not depend on the limit."""
PROGRAM_BYTES = 192 * 2**20
"""Approximate memory of Python and its libraries, :data:`LIBRARY_BYTES` included; used in messages."""
BUDGET_SHARES = 6
"""A bucket takes one of so many shares of the budget."""
MIN_WORK_BYTES = 24 * 2**20
"""Least budget beside the program itself; with less the pieces become too small."""


_ROUNDING_MB = 8


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory beside the program itself; steps run one at a time."""

    work: int
    reserved: int = PROGRAM_BYTES
    """What is taken already: the program, and what :meth:`with_reserved` is given."""

    def with_reserved(self, num_bytes: int) -> Budget:
        """Return what is left beside ``num_bytes``, which may be negative."""
        return Budget(work=self.work - num_bytes, reserved=self.reserved + num_bytes)

    def remedy(self, num_bytes: int) -> str:
        """Return what to grant for ``num_bytes`` of work; the next process may hold a little more."""
        return f"grant --memory {(self.reserved + num_bytes) // 10**6 + _ROUNDING_MB}MB"

    @property
    def batch(self) -> int:
        """Bytes of table rows read at a time; converting them takes a multiple of it."""
        return self.work // 32

    @property
    def bucket(self) -> int:
        """Bytes sorted or looked up at a time."""
        return self.work // BUDGET_SHARES


def open_budget(limit: int) -> Budget:
    """Return the budget, ``limit`` bytes minus the memory of this process now; ConfigError if too small.

    No more than the machine or the control group has; a lower limit for that reason is printed.
    """
    most, _ = machine_memory()
    if limit > most:
        say(f"--memory {format_bytes(limit)} is more than there is here; {format_bytes(most)} are used")
        limit = most
    used = resident_bytes() + LIBRARY_BYTES
    budget = Budget(work=limit - used, reserved=used)
    if budget.work < MIN_WORK_BYTES:
        raise ConfigError(
            f"--memory {limit // 10**6}MB leaves too little beside the {used // 10**6} MB of the program "
            f"itself; {budget.remedy(MIN_WORK_BYTES)} at least"
        )
    return budget


@contextmanager
def low_memory_allocators() -> Iterator[None]:
    """Make allocators return freed memory to the system instead of keeping it.

    Arrow's own pool keeps freed memory for a while, and glibc keeps pieces smaller than the largest one freed
    so far: reading a column of 9 MB in pieces of 1 MB held 40 MB. The glibc setting is not reverted.
    """
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    release_memory()
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def release_memory() -> None:
    """Return freed memory to the system; called between steps, since malloc does not reuse small pieces."""
    return_memory(1 << 17)


def iterate_runs(values: Array) -> Iterator[tuple[int, slice]]:
    """Yield each run of equal values in an ascending (K,) integer array: the value and its positions."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    for start, end in pairwise([*starts.tolist(), len(values)]):
        yield int(values[start]), slice(start, end)


@final
class BucketFiles:
    """Records of one dtype in numbered files of a folder."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.dtype = folder, np.dtype(dtype)

    def append(self, buckets: Array, records: Array) -> None:
        """Append (K,) ``records``, each to the file that (K,) ``buckets`` names; their order is kept."""
        # NumPy sorts 16-bit keys in linear time.
        buckets = buckets.astype(np.uint16) if buckets.max(initial=0) < 1 << 16 else buckets
        order = np.argsort(buckets, kind="stable")
        records = records[order]
        for number, run in iterate_runs(buckets[order].astype(np.int64)):
            with (self._folder / str(number)).open("ab") as file:
                write_array(file, records[run])

    def take(self, bucket: int) -> Array:
        """Return the records of one file, and delete it."""
        path = self._folder / str(bucket)
        if not path.exists():
            return np.empty(0, self.dtype)
        records = np.fromfile(path, self.dtype)
        path.unlink()
        return records


@final
class ScatteredRows:
    """Random writes to rows on disk, in files of position ranges that fit into ``memory`` bytes.

    Rows that are never put have the value ``fill``.
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
        self._num_rows, self._fill = num_rows, fill
        self._row = np.dtype((dtype, row_shape))
        self._files = BucketFiles(folder, [("at", np.int64), ("row", dtype, row_shape)])
        # The entries that are read and the rows that they become are in memory at the same time.
        self._range = max(1, memory // (self._files.dtype.itemsize + self._row.itemsize))

    def put(self, positions: Array, rows: Array) -> None:
        """Put (k, *row) at ``positions`` ((k,) integers); the last row at a position wins."""
        entries = np.empty(len(positions), self._files.dtype)
        entries["at"], entries["row"] = positions, rows
        self._files.append(positions // self._range, entries)

    def chunks(self) -> Iterator[Array]:
        """Yield all rows in order, a range at a time, and delete its file."""
        for first in range(0, self._num_rows, self._range):
            count = min(self._range, self._num_rows - first)
            rows = np.full((count, *self._row.shape), self._fill, dtype=self._row.base)
            entries = self._files.take(first // self._range)
            rows[entries["at"] - first] = entries["row"]
            del entries
            yield rows


def write_array(file: BinaryIO, rows: Array) -> None:
    """Append the values of ``rows``; OSError says what is wrong with the disk."""
    # Not tofile, whose error on a full disk does not say so.
    file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


@final
class Spill:
    """Rows in one new file, none in memory."""

    def __init__(self, path: Path, dtype: Any, chunks: Iterable[Array] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self.path, self._dtype, self.num_rows = path, np.dtype(dtype), 0
        for rows in chunks:
            self.append(rows)

    def append(self, rows: Array) -> None:
        with self.path.open("ab") as file:
            write_array(file, rows.astype(self._dtype, copy=False))
        self.num_rows += len(rows)

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows, single values, in order, at most ``num_rows`` at a time."""
        with self.path.open("rb") as file:
            for first in range(0, self.num_rows, num_rows):
                yield np.fromfile(file, self._dtype, min(num_rows, self.num_rows - first))


def spill(folder: Path, name: str, dtype: Any, chunks: Iterable[Array] = ()) -> Spill:
    """Return a new file of :func:`map_spill`; ``dtype`` is part of its name."""
    return Spill(folder / f"{name}.{np.dtype(dtype).str}", dtype, chunks)


def map_spill(folder: Path, name: str) -> Array:
    """Return the (K,) values of a :func:`spill`, memory-mapped; FileNotFoundError if there is none."""
    for path in folder.glob(f"{name}.*"):
        dtype = np.dtype(path.suffix[1:])
        # Opened for writing, so that compiled code does not have a second variant for read-only arrays.
        return np.memmap(path, dtype, "r+") if path.stat().st_size else np.empty(0, dtype)
    raise FileNotFoundError(f"there is no {name} in {folder}")


class Ranks:
    """The processes that share one job; this class is a job of one process.

    All ranks call every method, in the same order. Where one ends, the others raise PeerError.
    """

    rank, count = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does alone what is not shared."""
        return self.rank == 0

    def gather(self, local: Array) -> list[Array]:
        """Return the arrays (k, *row) of all ranks, which differ in k only."""
        return [local]

    def union(self, marks: Array) -> Array:
        """Return the (K,) bool that is true where ``marks`` of any rank is."""
        packed = np.bitwise_or.reduce(self.gather(np.packbits(marks)))
        return np.unpackbits(packed, count=len(marks)).view(np.bool_)

    def gather_objects(self, value: object) -> list[Any]:
        """Return the JSON values of all ranks."""
        return [value]


Chunks: TypeAlias = Callable[[int], Iterator[Array]]
"""Number of rows -> all rows in order, at most so many at a time."""

_SLOTS = 1 << 16
_KEY_BYTES = 24
"""Keys of an edge that is sorted, its position, and what NumPy's sort takes beside them."""
_HUB_SHARES = 5
"""Memory shares that the edges of a hub may take; nothing else is in memory then."""


class EdgeColumn(NamedTuple):
    """Rows that belong to the edges."""

    info: ColumnInfo
    rows: Chunks


@dataclass(frozen=True, kw_only=True)
class EdgeStream:
    """E edges as they are read, in their order."""

    sources: Chunks
    destinations: Chunks
    columns: Sequence[EdgeColumn]
    num_sources: int
    num_destinations: int

    @property
    def record(self) -> np.dtype[np.void]:
        """One edge in a bucket."""
        infos = enumerate(one.info for one in self.columns)
        ends = [("destination", id_dtype(self.num_destinations)), ("source", id_dtype(self.num_sources))]
        return np.dtype([*ends, *((str(i), numpy_dtype(one.dtype), one.row_shape) for i, one in infos)])


@dataclass(frozen=True, kw_only=True)
class SortedEdges:
    """CSC in files: edges ordered by (destination, source, position in the stream)."""

    indptr: Spill
    """(N_dst + 1,) int64."""
    indices: Spill
    """(E,) sources; int32 where N_src fits."""
    columns: Sequence[Spill]
    """Of each of :attr:`EdgeStream.columns`, all values of a row one after the other."""


def argsort_edges(destinations: Array, sources: Array) -> Array:
    """Return (K,) positions that sort edges by (destination, source); of equal ones the first comes first."""
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
    """Sort edges by (destination, source, position), and what they carry with them.

    All ``ranks`` (None: this process) call it with the same edges and budget, and each sorts some ranges of
    destinations; what is returned is then this rank's, but the files in ``folder`` have all edges.

    Writes ``indptr``, ``indices``, ``carried0``, ``carried1`` ... for :func:`map_spill`. Sorts the in-edges
    of as many consecutive destinations as fit into ``budget.bucket`` bytes, but at least those of one of
    65,536 slots of destinations, with up to five times that; ConfigError if that is too little. ``order``
    gives the positions of one bucket's edges, and ``advance`` is called with 3 for each edge.
    """
    record = edges.record
    each = record.itemsize + _KEY_BYTES + max(record[name].itemsize for name in record.names or ())
    width, step = max(-(-edges.num_destinations // _SLOTS), 1), max(1, budget.bucket // each)
    counts = _count_slots(edges, width, step, advance)
    _check_fits(counts, width, each, budget)
    ranks = ranks or Ranks()
    total = int(counts.sum()) + width * len(counts)
    firsts = _first_destinations(counts, width, min(step, -(-total // ranks.count)))
    own = range(*(len(firsts) * rank // ranks.count for rank in (ranks.rank, ranks.rank + 1)))
    ends = [*firsts[1:], edges.num_destinations]
    with join_rank_pieces(folder, ranks) as piece:
        buckets = _write_buckets(edges, firsts, own, piece / "buckets", step, advance)
        result = SortedEdges(
            indptr=spill(piece, "indptr", np.int64, [np.zeros(int(ranks.is_first))]),
            indices=spill(piece, "indices", record["source"]),
            columns=[spill(piece, f"carried{i}", record[str(i)].base) for i in range(len(edges.columns))],
        )
        written = 0
        for number in own:
            found = buckets.take(number)
            found["destination"] -= firsts[number]
            counts = np.bincount(found["destination"], minlength=ends[number] - firsts[number])
            # The edges of a bucket are in the order of the stream already.
            positions = order(found["destination"], found["source"])
            result.indices.append(found["source"][positions])
            for i, carried in enumerate(result.columns):
                carried.append(found[str(i)][positions])
            result.indptr.append(written + np.cumsum(counts))
            written += len(found)
            advance(len(found))
            del found, positions
            release_memory()
        shutil.rmtree(piece / "buckets")
    return result


def _count_slots(edges: EdgeStream, width: int, step: int, advance: Callable[[int], None]) -> Array:
    counts = np.zeros(max(-(-edges.num_destinations // width), 1), np.int64)
    for destinations in edges.destinations(step):
        counts += np.bincount(destinations // width, minlength=len(counts))
        advance(len(destinations))
    return counts


def _first_destinations(counts: Array, width: int, step: int) -> list[int]:
    # A bucket has at most ``step`` edges and destinations, of which each is counted, unless it is one slot.
    firsts, held = [0], 0
    for slot, num_edges in enumerate(counts.tolist()):
        if held and held + num_edges + width > step:
            firsts.append(slot * width)
            held = 0
        held += num_edges + width
    return firsts


def _check_fits(counts: Array, width: int, each: int, budget: Budget) -> None:
    slot = int(np.argmax(counts))
    if counts[slot] * each > _HUB_SHARES * budget.bucket:
        nodes = f"nodes {slot * width} to {(slot + 1) * width - 1}" if width > 1 else f"node {slot}"
        needed = (int(counts[slot]) * each // _HUB_SHARES + 1) * BUDGET_SHARES
        raise ConfigError(
            f"{counts[slot]} edges end at {nodes}, and are sorted together; {budget.remedy(needed)}"
        )


def _write_buckets(
    edges: EdgeStream, firsts: list[int], own: range, folder: Path, step: int, advance: Callable[[int], None]
) -> BucketFiles:
    buckets, is_all = BucketFiles(folder, edges.record), len(own) == len(firsts)
    ends = zip(edges.sources(step), edges.destinations(step), strict=True)
    for (sources, destinations), *carried in zip(
        ends, *(one.rows(step) for one in edges.columns), strict=True
    ):
        records = np.empty(len(sources), edges.record)
        records["source"], records["destination"] = sources, destinations
        for i, rows in enumerate(carried):
            records[str(i)] = rows
        numbers = np.searchsorted(firsts, destinations, side="right") - 1
        kept = slice(None) if is_all else (own.start <= numbers) & (numbers < own.stop)
        buckets.append(numbers[kept], records[kept])
        advance(len(records))
    return buckets


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where a graph larger than memory is worked on: a folder on disk, and the memory granted.

    Arrays of all nodes are in memory; those of edges are files in ``folder``, memory-mapped and read in
    order. The kernel drops pages of files when memory is short, so they do not count.
    """

    folder: Path
    budget: Budget
    """Equal on all ranks."""
    ranks: Ranks = field(default_factory=Ranks)
    intact: set[Path] = field(default_factory=set)
    """Stages of this process, or of an earlier one and compared with their checksums."""

    def stage(self, name: str, make: Callable[[Path], object], *, shared: bool = False) -> Path:
        """Return ``folder / name``, which ``make`` fills unless it exists; it is complete or absent.

        Rank 0 makes it, or, if it is ``shared``, all ranks make the same folder. A stage of an earlier
        process that does not match its checksums is made again, which is printed.
        """
        target, sums = self.folder / name, self.folder / f"{name}.json"

        def place(partial: Path, target: Path) -> None:
            with replace_atomically(sums) as file:
                file.write_text(json.dumps(_checksums(partial)))
            publish(partial, target)

        if not self.ranks.gather_objects(self.ranks.is_first and self._is_intact(target, sums))[0]:
            with name_write_failures(self.folder), shared_folder(target, self.ranks, place) as partial:
                if shared or self.ranks.is_first:
                    make(partial)
        self.intact.add(target)
        return target

    def _is_intact(self, stage: Path, sums: Path) -> bool:
        with name_write_failures(self.folder):
            if not stage.is_dir() or stage in self.intact or not (problem := _damage(stage, sums)):
                return stage.is_dir()
            say(f"{stage} is made again: {problem}")
            discard(stage)
            return False

    def array(self, name: str, make: Callable[[], Array], *, shared: bool = False) -> Array:
        """Return what ``make`` does on rank 0, read from the :meth:`stage` once it is finished."""

        def save(folder: Path) -> None:
            values = make()
            if self.ranks.is_first:
                spill(folder, "array", values.dtype, [values])

        return np.array(map_spill(self.stage(name, save, shared=shared), "array"))

    def with_reserved(self, num_bytes: int) -> Workspace:
        """Return this workspace with ``num_bytes`` less of memory."""
        return replace(self, budget=self.budget.with_reserved(num_bytes))

    def fits(self, num_bytes: int) -> bool:
        """Return whether ``num_bytes`` are within the memory granted."""
        return num_bytes <= self.budget.work

    def remaining(self, num_bytes: int, least: int, what: str) -> int:
        """Return the bytes granted beside ``num_bytes``; ConfigError if they are fewer than ``least``."""
        if not self.fits(num_bytes + least):
            needed = num_bytes + least
            raise ConfigError(
                f"{what} takes {format_bytes(needed)} of memory at least; {self.budget.remedy(needed)}"
            )
        return self.budget.work - num_bytes


def _checksums(folder: Path) -> dict[str, object]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): asdict(checksum(path)) for path in paths}


def _damage(stage: Path, sums: Path) -> str | None:
    try:
        found, noted = _checksums(stage), json.loads(read_small_file(sums))
        # Others may have been added, such as the cache of a dataset.
        differing = [name for name, file in noted.items() if found.get(name) != file]
    except (OSError, ValueError, AttributeError, RecursionError) as problem:
        return f"its files cannot be checked ({problem})"
    if not noted:
        return f"{sums.name} is empty"
    return f"{differing[0]} is damaged" if differing else None


@contextmanager
def shared_folder(
    target: Path, ranks: Ranks, place: Callable[[Path, Path], object] | None = None
) -> Iterator[Path]:
    """Yield to all ranks the same new folder; when all have filled it, rank 0 puts it in its place."""
    with partial_folder(target) if ranks.is_first else nullcontext(target) as own:
        partial = Path(ranks.gather_objects(str(own))[0])
        try:
            yield partial
            ranks.gather_objects(None)
        except PeerError:
            # Rank 0 may have removed it before this one has made files in it again.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except FileNotFoundError:
            if not partial.exists():
                ranks.gather_objects(None)  # raises the reason of the rank that has failed, and removed it
            raise
        if ranks.is_first:
            (place or publish)(partial, target)
        ranks.gather_objects(None)


_COPIED = 1 << 24  # bytes at a time


@contextmanager
def join_rank_pieces(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield to each rank a folder for its piece of files, which rank 0 then joins in ``folder``, by rank.

    Files of the name indptr hold the ends (int64) of rows in the rank's own piece, after a 0 on rank 0.
    """
    if ranks.is_first:
        yield folder
    else:
        (own := folder / f"rank{ranks.rank}").mkdir()
        yield own
    ranks.gather_objects(None)
    for rank in range(1, ranks.count) if ranks.is_first else ():
        for path in sorted((folder / f"rank{rank}").iterdir()):
            target, before = folder / path.name, 0
            if path.stem == "indptr":
                before = int(np.fromfile(target, np.int64, 1, offset=target.stat().st_size - 8)[0])
            with path.open("rb") as piece, target.open("ab") as file:
                while data := piece.read(_COPIED):
                    ends = np.frombuffer(data, np.int64 if before else np.uint8)
                    write_array(file, ends + before if before else ends)
        shutil.rmtree(folder / f"rank{rank}")


def concatenate_chunks(
    workspace: Workspace | None, name: str, makers: Sequence[Callable[[], Iterator[Array]]], total: int
) -> list[Array]:
    """Return what each of ``makers`` yields (at least one (k,) array), in memory or mapped from a stage.

    ``name`` is that of the stage, and ``total`` the number of all values, for the progress.
    """
    if workspace is None:
        return [np.concatenate(list(make())) for make in makers]

    def write(folder: Path) -> None:
        with progress(f"Writing {name}", total, enabled=total >= SHOWN_FROM) as advance:
            for number, make in enumerate(makers):
                chunks = make()
                first = next(chunks)
                values = spill(folder, str(number), first.dtype)
                for chunk in chain([first], chunks):
                    values.append(chunk)
                    advance(len(chunk))

    folder = workspace.stage(name, write)
    return [map_spill(folder, str(number)) for number in range(len(makers))]


SHOWN_FROM = 1_000_000
"""Progress is shown for as many values, or nodes, or more."""
_KEY, _LOCK = "key.json", "lock"
_OF_SOURCE = ("arrays", "edges", "features", "generator", "ids-", "reverse edges", "self-loops", "synthetic")
"""Stages that are only copies of the source, or soon made from it."""
_IN_MEMORY = Path("/dev/shm")  # refused, not used
_KINDS_IN_MEMORY = ("tmpfs", "ramfs")


@contextmanager
def open_workspace(
    folder: Path, settings: Mapping[str, object], limit: int, ranks: Ranks | None = None
) -> Iterator[Workspace]:
    """Open the workspace of one job of ``limit`` bytes of memory, and remove it at the end.

    After an error or a kill its finished stages stay, and a job with the same ``settings`` (JSON values)
    takes them up; which ones is printed. Copies of the source do not stay after a ConfigError or DatasetError
    alone: the remedy has other settings, which would be refused. All ``ranks`` (None: this process) open it,
    with a limit for each.

    Raises:
        ConfigError: ``folder`` is in memory, or ``limit`` is too small.
        StorageError: it holds stages of other settings or something else, is in use, or cannot be written.
    """
    folder, ranks = folder.absolute(), ranks or Ranks()
    if folder.resolve().is_relative_to(_IN_MEMORY):
        raise ConfigError(f"{folder} is in memory; choose a folder on a disk (--scratch DIR)")
    for rank, others in enumerate(ranks.gather_objects(dict(settings))):
        for name in (name for name, value in settings.items() if others.get(name) != value):
            raise StorageError(
                f"rank {rank} has another {name} than rank {ranks.rank}; DATA must be the same for all ranks"
            )
    own = open_budget(limit)
    work, held = min(ranks.gather_objects([own.work, own.reserved]))
    budget = Budget(work=work, reserved=held)
    with _claimed(folder, settings) if ranks.is_first else nullcontext():
        ranks.gather_objects(None)
        if not (folder / _KEY).is_file():
            raise StorageError(
                f"rank {ranks.rank} does not see {folder}, which rank 0 has made; DATA, --out and --scratch "
                "must be on a file system that all ranks see"
            )
        yield Workspace(folder=folder, budget=budget, ranks=ranks)


@contextmanager
def _claimed(folder: Path, settings: Mapping[str, object]) -> Iterator[None]:
    kinds, place = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}, folder.resolve()
    kind = next((kinds[str(one)] for one in (place, *place.parents) if str(one) in kinds), None)
    if kind in _KINDS_IN_MEMORY:
        say(f"{folder} is in memory ({kind}), which --memory does not limit; better choose another --scratch")
    with ExitStack() as stack:
        with name_write_failures(folder):
            folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned_of(folder)
            names = {path.name for path in folder.iterdir()}
            # The key is there before the first stage.
            if not {_KEY, _LOCK} <= names and any(not name.startswith((_KEY, _LOCK)) for name in names):
                raise StorageError(
                    f"{folder} holds something else than unfinished work; choose another --scratch"
                )
            (folder / _LOCK).touch()
            if not stack.enter_context(try_lock(folder / _LOCK)):
                raise StorageError(f"{folder} is in use by another process; wait for it")
            _check_key(folder, settings)
            remove_abandoned(folder)
            if stages := _stages(folder):
                say(f"resuming in {folder}; finished before: {', '.join(stages)}")
        try:
            yield
        except BaseException as problem:
            stages = _stages(folder)
            if isinstance(problem, (ConfigError, DatasetError)):
                stages = [name for name in stages if not name.startswith(_OF_SOURCE)]
            if stages:
                say(f"finished stages are kept in {folder}: the same command resumes, or remove it")
            else:
                discard(folder)
            raise
        discard(folder)


def _stages(folder: Path) -> list[str]:
    # Those of an inner job are in a folder NAME.work.
    inner = [f"{path.name}/{stage}" for path in folder.glob("*.work") for stage in _stages(path)]
    own = [path for path in folder.iterdir() if path.is_dir()]
    return sorted([*(path.name for path in own if path.suffix not in (PARTIAL_SUFFIX, ".work")), *inner])


def _check_key(folder: Path, settings: Mapping[str, object]) -> None:
    path, asked = folder / _KEY, json.loads(json.dumps(settings))
    if not path.exists():
        with replace_atomically(path) as partial:
            partial.write_text(json.dumps(asked, indent=1))
        return
    try:
        found = json.loads(read_small_file(path))
        differing = [name for name in asked.keys() | found.keys() if asked.get(name) != found.get(name)]
    except (OSError, ValueError, AttributeError, RecursionError) as problem:
        raise StorageError(f"{path} is damaged ({problem}); remove {folder}") from problem
    if differing:
        what = ", ".join(f"{name} was {found.get(name)!r}" for name in sorted(differing))
        raise StorageError(
            f"{folder} holds unfinished work with other settings ({what}); repeat that command to finish it, "
            "or remove the folder"
        )
