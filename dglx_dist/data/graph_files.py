"""Graphs in texts: NetworkX's formats, edge lists, triples, interactions and matrices."""

import codecs
import gzip
import importlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.data.array_graphs import build_graph_from_arrays, convert_matrix, warn_ignored
from dglx_dist.data.metis_text import read_metis
from dglx_dist.data.sources import LINE_FORMATS, DatasetSource, open_text, suffix_of
from dglx_dist.data.storage.files import read_small_file
from dglx_dist.data.table_graphs import build_graph_from_tables
from dglx_dist.data.tables import as_numpy, id_column
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.memory import format_bytes
from dglx_dist.records import EDGE_TYPE, LABEL, NODE_TYPE, SPLITS, Array, RawGraph

_LOG = logging.getLogger(__name__)

_MAX_BYTES = 1 << 28


@final
class NetworkxSource(DatasetSource):
    """A NetworkX file with at most 256 MiB: ``.graphml``, ``.gml`` or ``.json``, also with ``.gz``.

    An undirected graph's edges are stored in both directions. The second direction has no mask. Attributes
    have the same meaning as table columns (``TablesSource``). Texts, and attributes that some nodes or edges
    lack, are ignored. It has no options.
    """

    memory_per_byte = 20

    def load(self) -> RawGraph:
        where = str(self._path)
        suffix = suffix_of(self._path)
        try:
            content = read_small_file(self._path, _MAX_BYTES)
            if self._path.suffix == ".gz":
                with gzip.open(io.BytesIO(content)) as file:
                    content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise ValueError(f"it has more than {format_bytes(_MAX_BYTES)}; save its edges as a .txt")
            graph = _read_networkx(content.removeprefix(codecs.BOM_UTF8), suffix.removesuffix(".gz"))
        # Each reader raises its own errors for damaged files.
        except Exception as error:
            raise DatasetError(
                f"{where}: not a readable {suffix} of NetworkX, or cut off: {str(error) or repr(error)}"
            ) from error

        nodes = list(graph.nodes(data=True))
        edges = list(graph.edges(data=True))
        if not graph.is_directed():
            edges += [(v, u, _clear_split(data)) for u, v, data in edges if u != v]

        # In XML all ids are texts, even numbers.
        convert_id: Callable[[Any], int | str] = str
        if all(_is_plain_number(str(node)) for node, _ in nodes):
            convert_id = int
            nodes.sort(key=lambda node: int(node[0]))
        node_columns = _read_attributes([data for _, data in nodes], f"{where}, nodes")
        edge_columns = _read_attributes([data for *_, data in edges], f"{where}, edges")
        node_columns["id"] = pa.array([convert_id(node) for node, _ in nodes])
        edge_columns["src"] = pa.array([convert_id(u) for u, *_ in edges])
        edge_columns["dst"] = pa.array([convert_id(v) for _, v, _ in edges])
        return build_graph_from_tables(
            self._path.name.removesuffix(suffix),
            {NODE_TYPE: (where, pa.table(node_columns))},
            {EDGE_TYPE: (where, pa.table(edge_columns))},
        )


def _is_plain_number(text: str) -> bool:
    # A number such as 007 would not stay the same, and more digits do not fit int64.
    return len(text) < 19 and text.isdecimal() and str(int(text)) == text


def _read_networkx(content: bytes, suffix: str) -> Any:
    """Read a file's NetworkX graph. Raise an error from NetworkX or ValueError if it is damaged."""
    networkx = importlib.import_module("networkx")
    if suffix == ".json":
        value = json.loads(content)
        _check_node_link(value)
        json.dumps(value, ensure_ascii=False).encode()  # It fails for lone surrogates.
        graph = networkx.node_link_graph(value, edges="links" if "links" in value else "edges")
        ids = {json.dumps(node.get("id", [i])) for i, node in enumerate(value["nodes"])}
        return _check_declared(graph, len(ids))
    # Entities that refer to each other grow without limit. In UTF-16, zero bytes are between the characters.
    if b"<!ENTITY" in content.replace(b"\0", b""):
        raise ValueError("it declares entities (<!ENTITY), which are never expanded")

    # In .gml, nodes are named by their labels if there are any. Parallel edges need the key multigraph.
    has_labels = re.search(rb"node\s*\[[^\]]*?\blabel\s", content)
    options = {}
    if suffix == ".gml":
        options["label"] = "label" if has_labels else "id"
        if not re.search(rb"\bmultigraph\s", content):
            content = re.sub(rb"\bgraph\s*\[", b"graph [ multigraph 1 ", content, count=1)
    read_graph = getattr(networkx, f"read_{suffix[1:]}")
    try:
        graph = read_graph(io.BytesIO(content), **options)
    except networkx.NetworkXError as error:
        if not has_labels or "label" not in str(error):
            raise
        _LOG.warning("nodes are named by id, because their labels are not unique: %s", error)
        graph = read_graph(io.BytesIO(content), label="id")
    if suffix != ".gml":
        _check_declared(graph, len(re.findall(rb"<(?:\w+:)?node[\s>]", content)))
    return graph


def _check_node_link(value: Any) -> None:
    """Raise ValueError unless the JSON value has nodes and links in the format that NetworkX and D3 use."""
    keys: Mapping[str, Any] = value if isinstance(value, dict) else {}
    is_sound = True
    links = keys.get("links", keys.get("edges"))
    for rows in (keys.get("nodes"), links):
        is_sound = is_sound and isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not is_sound or not all({"source", "target"} <= link.keys() for link in links):
        raise ValueError(
            "it needs a list 'nodes' of objects with an id, and a list 'links' or 'edges' of objects with "
            f"source and target (it has {', '.join(map(repr, keys)) or 'no keys'}); write "
            "networkx.node_link_data, or a text with two ids per line"
        )


def _check_declared(graph: Any, num_declared: int) -> Any:
    """Return ``graph``. Raise ValueError if edges have ends other than the ``num_declared`` nodes."""
    if len(graph) > num_declared:
        raise ValueError(f"an edge ends in {list(graph)[num_declared]!r}, which is not among the nodes")
    return graph


def _clear_split(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes without a split. Only one direction of an edge may be a target."""
    columns = {name: value for name, value in data.items() if name != "split"}
    for name in SPLITS:
        if name in columns:
            columns[name] = type(columns[name])()  # Empty values by type: False, 0, 0.0 or "".
    return columns


def _read_attributes(rows: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Return the attributes that all ``rows`` have as numbers, and labels and splits, as Arrow columns."""
    columns = {}
    ignored = []
    for name in dict.fromkeys(chain.from_iterable(rows)):
        try:
            column = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError):
            column = pa.nulls(len(rows))
        dtype = getattr(column.type, "value_type", column.type)
        is_number = pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)
        is_given = name in (LABEL, "split") and not pa.types.is_null(dtype)
        if (is_number and not column.null_count) or is_given:
            columns[name] = column
        else:
            ignored.append(str(name))
    warn_ignored(where, ignored, "not a number in each")
    return columns


# It also matches times and dates.
_NUMBER = re.compile(rb"[-+.:/\d]+([eT][-+.:\dZ]+)?")
_ENTRY = re.compile(r"'(?!(?:src|dst)')([^']+)': (?:(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)(?=[,}]))?")
"""Pattern for a key in NetworkX's dictionaries, and for its value if that is a number."""
_TEXT = re.compile(r""": ("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
"""Pattern for a text value in such a dictionary. It may contain text that looks like an entry."""
INTERACTION = ("user", "interacts", "item")
_CODE_OF_FILE = {"train": 0, "valid": 1, "val": 1, "dev": 1, "test": 2}


@final
class EdgeListSource(DatasetSource):
    """A text with one edge per line, such as SNAP's ``.txt.gz``.

    A line has two ids and any columns of numbers. They are separated by spaces, tabs, commas or ``::``. ``#``
    starts a comment, or ``%`` if the text begins with it. Numbers in NetworkX's dictionary at the end of a
    line become columns. Texts, and ids other than 0..N-1, are kept as the user's ids. One further column is
    called ``weight``. More are called ``column2``, ``column3`` ... No reverse edges are added. For lists with
    each edge once, use ``--add-reverse-edges``.

    The option ``format`` gives the meaning of a line: ``edges``, ``triples`` or ``interactions``.
    Interactions are edges ("user", "interacts", "item") with separate ids of users and items. In a folder,
    each line has a user and all its items. Lines of three whole numbers are ambiguous and need the option.

    Lines with three texts, or a text between two numbers, are head, relation and tail of a knowledge graph.
    Ids stay texts, and each relation is an edge type. A folder with ``train.txt``, ``valid.txt`` (``val``,
    ``dev``) and ``test.txt``, or ``.tsv``, is a knowledge graph with its split.

    A text that begins with ``%%MatrixMarket`` (``.mtx``) is a square matrix. Row u, column v, counted from 1,
    is an edge from u - 1 to v - 1, in both directions if the matrix is symmetric. A ``.graph`` is in METIS's
    format. Its edges have both directions, and its node weights are called ``node_weight``.
    """

    known_options = ("format",)

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        super().__init__(location, options)
        self._format = options.get("format")
        if self._format not in (None, *LINE_FORMATS):
            raise ConfigError(f"format is {self._format!r}; it is one of {', '.join(LINE_FORMATS)}")

    def load(self) -> RawGraph:
        if self._path.is_dir():
            return self._load_folder()
        suffix = suffix_of(self._path)
        read_arrays = read_metis if suffix.removesuffix(".gz") == ".graph" else _read_matrix_market
        arrays = read_arrays(self._path)
        if arrays is None:
            return self._load_lines()
        if self._format is not None:
            raise ConfigError(f"{self._path} defines its own format; leave out --format {self._format}")
        return build_graph_from_arrays(arrays, self._path.name.removesuffix(suffix), str(self._path))

    def _load_folder(self) -> RawGraph:
        files = self._find_split_files()
        name = self._path.resolve().name
        if self._format == "interactions":
            return _build_from_item_lists(files, name)
        if self._format == "edges":
            raise ConfigError(
                f"{self._path} is a folder of splits, which holds triples or interactions; "
                "give --format triples or interactions, or one file of edges"
            )

        def read_tables() -> Iterator[tuple[Path, Any, str]]:
            for path in files.values():
                table, lines, _ = _read_lines(path, is_triples=True)
                yield path, table, lines[0]

        return _build_from_triples(read_tables(), list(files), name, str(self._path))

    def _load_lines(self) -> RawGraph:
        import pandas as pd

        where = str(self._path)
        name = self._path.name.removesuffix(suffix_of(self._path))
        is_triples = None
        if self._format is not None:
            is_triples = self._format == "triples"
        rows, lines, are_triples = _read_lines(self._path, is_triples)
        line = lines[0]
        _refuse_header(rows, where, line)
        # Relation names may be any text, but a -> b is an edge.
        signs: tuple[str, ...] = (_SIGNS, _SIGNS)
        if all(are_triples) and 2 in rows:
            signs = (_SIGNS, _ARROW, _SIGNS)
        for column, refused_signs in zip(rows.columns, signs, strict=False):
            _refuse_signs(rows[column], where, refused_signs)
        if all(are_triples):
            return _build_from_triples([(self._path, rows, line)], [-1], name, where)

        _refuse_column_names(rows, where, line)
        if are_triples[0] and not rows.dtypes[2:].map(pd.api.types.is_numeric_dtype).all():
            raise DatasetError(
                f"{where}: the line {lines[1]} is not head, relation and tail like {line}; "
                "if that line is a header, begin it with #"
            )

        names = {0: "src", 1: "dst", 2: "weight"}
        if rows.shape[1] > 3:
            names |= {column: f"column{column}" for column in range(2, rows.shape[1])}
        if 2 in rows and self._format is None:
            _explain_columns(rows, where, line)
        table = pa.Table.from_pandas(rows.rename(columns=names))
        for end in ("src", "dst"):
            ids = id_column(table, end, where)
            if ids.is_integer:
                ids.refuse(as_numpy(pc.less(ids.values, 0)), "is negative; ids are 0 or more", "node id ")
        etype = INTERACTION if self._format == "interactions" else EDGE_TYPE
        return build_graph_from_tables(name, {}, {etype: (where, table)})

    def _find_split_files(self) -> dict[int, Path]:
        """Find a folder's files by split. Raise DatasetError if there are none, or a split has two."""
        files: dict[int, Path] = {}
        for path in sorted(self._path.glob("*.t[xs][tv]")):
            code = _CODE_OF_FILE.get(path.stem, -1)
            if code in files:
                raise DatasetError(
                    f"{self._path}: {files[code].name} and {path.name} are the same split; remove one"
                )
            if code >= 0:
                files[code] = path
        if not files:
            raise DatasetError(f"{self._path} has no train.txt, valid.txt or test.txt; give a file")
        return files


def _read_matrix_market(path: Path) -> dict[str, Array] | None:
    with open_text(path, "list of edges or matrix, or cut off") as file:
        if not file.readline().removeprefix(codecs.BOM_UTF8).lower().startswith(b"%%matrixmarket"):
            return None
        file.seek(0)
        matrix = importlib.import_module("scipy.io").mmread(file)
    matrix = importlib.import_module("scipy.sparse").coo_array(matrix)
    message = "%s: read as a MatrixMarket matrix of shape %s with %d entries; nodes are counted from 0"
    _LOG.warning(message, path, matrix.shape, matrix.nnz)
    return convert_matrix(matrix, path)


def _refuse_column_names(rows: Any, where: str, line: str) -> None:
    """Refuse a first line without numbers, if the second line has two numbers."""
    if rows.shape[1] < 2:
        raise DatasetError(f"{where}: the line {line} does not have two ids")
    are_numbers = []
    for ends in rows.iloc[:2, :2].to_numpy():
        are_numbers.append([bool(re.fullmatch(r"-?\d+", str(end))) for end in ends])
    if len(are_numbers) == 2 and all(are_numbers[1]) and not any(are_numbers[0]):
        raise DatasetError(f"{where}: the line {line} is a header; begin it with #")


def _refuse_header(rows: Any, where: str, line: str) -> None:
    """Refuse a first line that counts nodes and edges, as in METIS's and other formats."""
    num_rows = len(rows) - 1
    if num_rows == 0 or rows.shape[1] < 2 or "f" in {dtype.kind for dtype in rows.dtypes[:2]}:
        return
    sizes = []
    for number in rows.iloc[0, :3]:
        text = str(number)
        sizes.append(int(text) if re.fullmatch(r"\d+", text) else -1)
    try:
        max_id = int(rows.iloc[1:, :2].to_numpy(dtype=np.int64).max(initial=0))
    except (ValueError, TypeError, OverflowError):
        return

    # The line may have nodes and edges, or the sizes of two node types and edges.
    is_size = sizes[1] == num_rows
    if len(sizes) == 3 and sizes[1] >= max_id and sizes[2] == num_rows:
        is_size = True
    # METIS has a line for each node, and each edge twice.
    is_metis = sizes[0] == num_rows and 2 * sizes[1] == num_rows * rows.shape[1]
    if sizes[0] >= max_id and (is_size or is_metis):
        raise DatasetError(
            f"{where}: the line {line} could be a header with the numbers of nodes and edges, because "
            f"{num_rows} lines follow; if it is a header, begin it with #, and if it is an edge, move it "
            "behind the other lines (if it is a METIS file, rename it to end in .graph)"
        )


_ARROW = r"^(?:[-=~]*>|<[-=~]*|[-=]+|\u2192)$|\t"
"""Pattern for an arrow instead of an id, or for a tab in an id."""
_SIGNS = rf"""{_ARROW}|^[-=]+>|^["'].|.["',;:]$|^<.+>$|^\([^)]*\)$|^\[[^\]]*\]$|""" + "|".join(
    rf"{begin}[^{end}]*$|^[^{begin}]*{end}" for begin, end in ((r"\(", r"\)"), (r"\[", r"\]"), (r"\{", r"\}"))
)
"""Pattern that also matches ids with quotes, separators or brackets."""


def _refuse_signs(ids: Any, where: str, signs: str = _SIGNS) -> None:
    if ids.dtype.kind in "iuf":
        return
    texts = ids.astype(str)
    has_sign = texts.str.contains(signs, regex=True)
    if has_sign.any():
        raise DatasetError(
            f"{where}: {texts[has_sign].iloc[0]!r} is not an id; write the ids of an edge with a space, tab "
            "or comma between them, without brackets, quotes, arrows or other signs"
        )


def _explain_columns(rows: Any, where: str, line: str) -> None:
    """Log how further edge columns are read. Raise DatasetError if their meaning is ambiguous."""
    sources, destinations, values = rows[0], rows[1], rows[2]
    has_one_dtype = sources.dtype == destinations.dtype == values.dtype
    is_whole = rows.shape[1] == 3 and has_one_dtype and values.dtype.kind in "iuf"
    for column in (sources, destinations, values):
        is_whole = is_whole and (column % 1 == 0).all()
    # A constant, or numbers larger than all ids, are a weight or a time.
    if is_whole and values.nunique() > 1 and values.min() <= max(sources.max(), destinations.max()):
        line = f"three whole numbers like {line}"
    elif "::" in line:  # MovieLens writes ratings in this format.
        line = f"lines like {line}"
    else:
        names = "column2, column3 and so on" if rows.shape[1] > 3 else "a weight"
        message = "%s: columns 1 and 2 are read as the ends of edges, and further columns as %s"
        _LOG.warning(f"{message}; give --format triples or interactions to change that", where, names)
        return
    raise DatasetError(
        f"{where}: {line} may be an edge and a weight, head, relation and tail, or user, item and rating; "
        "give --format edges, triples or interactions (in Python load_dataset(path, format=...))"
    )


def _build_from_item_lists(files: Mapping[int, Path], name: str) -> RawGraph:
    """Build interactions from texts with a user and all its items per line, as in LightGCN's data."""
    rows: list[tuple[bytes, bytes, int]] = []
    for code, path in files.items():
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        lines = []
        for line in content.splitlines():
            words = line.split()
            if words and not words[0].startswith((b"#", b"%")):
                lines.append(words)
        widths = {len(words) for words in lines}
        if len(widths) == 1 and max(widths) > 2:
            raise DatasetError(
                f"{path}: each line has {max(widths)} fields, and some may be ratings or "
                "times; write a user and an item in each line"
            )
        rows += [(user, item, code) for user, *items in lines for item in items]
    where = str(next(iter(files.values())).parent)
    if not rows:
        raise DatasetError(f"{where}: no line has a user and an item; write both in each line")
    users, items, splits = zip(*rows, strict=True)
    table = {"split": pa.array(splits)}
    for end, ids in (("src", users), ("dst", items)):
        texts = pa.array([node_id.decode(errors="replace") for node_id in ids])
        is_number = pc.all(pc.match_substring_regex(texts, r"^(0|[1-9]\d{0,17})$")).as_py()
        table[end] = texts.cast(pa.int64()) if is_number else texts
    return build_graph_from_tables(name, {}, {INTERACTION: (where, pa.table(table))})


def _read_lines(path: Path, is_triples: bool | None = None) -> tuple[Any, list[str], list[bool]]:
    """Read ``path`` as a pandas table. Return it, its first two lines, and which look like triples.

    ``is_triples`` is whether all lines are triples, or None to find it by the first two lines.
    """
    import pandas as pd

    entries: dict[str, Any] = {}
    with open_text(path, "list of edges, or cut off") as file:
        comments, begin = _read_begin(file)
        file.seek(0)
        source: Any = file
        if not is_triples and re.search(rb"\s\{(['\"].*)?\}$", begin[0]):
            content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                limit = format_bytes(_MAX_BYTES)
                raise ValueError(f"it has dictionaries and over {limit}; use write_edgelist(data=['weight'])")
            text, entries = _separate_dictionaries(content.decode(), str(path))
            source = io.BytesIO(text.encode())
            comments = []
            begin = [line.partition(b"{")[0].strip() for line in begin]

        first = begin[0]
        if re.fullmatch(rb"[^\s,]+(::[^\s,]+)+", first):
            source = io.BytesIO(file.read().replace(b"::", b"\t"))
        separator = "," if b"," in first else r"\s+"
        triple_separator = "\t" if first.count(b"\t") == 2 else separator
        are_triples = [bool(is_triples)] * len(begin)
        if is_triples is None:
            are_triples = []
            for line in begin:
                words = re.split(triple_separator.encode(), line.replace(b"::", b"\t"))
                are_triples.append(_is_triple(words))
        is_triples = all(are_triples)

        # An IRI may contain a #, so triples have no comments.
        comment_sign = None
        if not is_triples:
            comment_sign = "%" if b"".join(comments).startswith(b"%") else "#"
        try:
            table = pd.read_csv(
                source,
                sep=triple_separator if is_triples else separator,
                skiprows=len(comments),
                comment=comment_sign,
                header=None,
                dtype=str if is_triples else None,
                low_memory=False,
                skipinitialspace=True,
                # Quotes, and texts such as NA, belong to ids.
                quoting=3,
                keep_default_na=False,
                na_values=[""],
            )
        except pd.errors.ParserError as error:
            reason = str(error).removeprefix("Error tokenizing data. C error: ")
            if first.isdigit():
                reason = (
                    f"line {first.decode()} is a count, as in OpenKE's files of head, tail and relation; "
                    "remove it, and put relations between head and tail (--format triples)"
                )
            elif path.stem in _CODE_OF_FILE:
                reason += "; if each line is a user and all its items, add --format interactions"
            raise ValueError(reason) from error
    return table.assign(**entries), [repr(line.decode(errors="replace")) for line in begin], are_triples


def _read_begin(file: IO[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the comments that begin a text, and then one or two lines. Raise ValueError if there is none."""
    comments: list[bytes] = []
    lines = map(bytes.strip, file)
    for line in lines:
        if not comments:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line and not line.startswith((b"#", b"%")):
            return comments, [line, *filter(None, islice(lines, 1))]
        comments.append(line)
    raise ValueError("it has no line with two ids; write the edges")


def _separate_dictionaries(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Separate the ends of edges in ``networkx.write_edgelist`` lines from the dictionaries behind them.

    Returns:
        The lines without dictionaries, and the numbers of all dictionaries as columns by name.
        ``where`` names the file in errors.
    """
    lines = []
    rows = []
    for line in text.splitlines():
        # A dictionary in braces may follow at the end of the line.
        parts = re.split(r"\s(?=\{.*\}$)", line.strip(), maxsplit=1)
        ends = parts[0]
        dictionary = parts[1] if len(parts) > 1 else ""
        is_comment = ends.startswith(("#", "%"))
        if not ends or is_comment:
            continue
        lines.append(ends)
        # A string value may contain text that looks like an entry, so strings are replaced first.
        entries = _ENTRY.findall(_TEXT.sub(": ?", dictionary))
        # An entry without a number had a string, and becomes None.
        rows.append({name: json.loads(number or "null") for name, number in entries})
    columns = _read_attributes(rows, where)
    return "\n".join(lines), {name: as_numpy(column) for name, column in columns.items()}


def _is_triple(words: Sequence[bytes]) -> bool:
    """Return whether a line looks like head, relation and tail instead of an edge with a number."""
    if len(words) != 3:
        return False
    first, second, third = (bool(_NUMBER.fullmatch(word.strip())) for word in words)
    if third:
        return first and not second
    return not (first and second)


def _build_from_triples(
    files: Iterable[tuple[Path, Any, str]], splits: Sequence[int], name: str, where: str
) -> RawGraph:
    """Build the graph from several files. ``files`` has each file's path, table and first line."""
    import pandas as pd

    tables = []
    for path, table, line in files:
        if table.shape[1] != 3 or str(table.iloc[0, 1]).lower() in ("relation", "predicate"):
            # In a folder, two columns are a user with one item.
            is_edge = table.shape[1] == 2 and splits == [-1]
            meaning = "edges if it is an edge" if is_edge else "interactions if it is a user and its items"
            raise DatasetError(
                f"{path}: the line {line} is not head, relation and tail; remove a header, "
                f"or add --format {meaning}"
            )
        table = table.apply(lambda column: column.str.rstrip())
        tables.append(table.set_axis(["head", "relation", "tail"], axis=1))
        for column in tables[-1]:
            id_column(pa.table({column: tables[-1][column]}), column, str(path))

    triples = pd.concat(tables)
    ends, entities = pd.factorize(pd.concat([triples["head"], triples["tail"]]), sort=True)
    relation, relations = pd.factorize(triples["relation"], sort=True)

    if len(relations) > max(100, triples["tail"].nunique()):
        _LOG.warning("%s: more relations than tails; check that lines are head, relation, tail", where)

    arrays = {
        "head": ends[: len(triples)],
        "tail": ends[len(triples) :],
        "rel": relation,
        "relation_names": np.array(relations, dtype=np.str_),
        "triple_split": np.repeat(splits, [len(table) for table in tables]),
    }
    user_ids = {NODE_TYPE: np.array(entities, dtype=np.str_)}
    return replace(build_graph_from_arrays(arrays, name, where), user_ids=user_ids)
