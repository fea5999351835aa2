"""Where each array of a dataset lies: the only file that knows the paths inside the folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from dglx_dist.records import ColumnInfo, EdgeType

MANIFEST = "manifest.json"
CACHE = "cache"
PARTIAL_SUFFIX = ".partial"
"""Ends the name of a folder that is still being written."""

_LONGEST = 80
"""Characters of one encoded name; three of them make an edge type's folder, and 255 is the limit."""


def safe_name(name: str) -> str:
    """Return ``name`` as a file name: letters, digits, ``_`` and ``-`` stay, the rest is %-encoded.

    Different names give different file names; none contains a dot or a slash, none is empty.
    """
    encoded = quote(name, safe="").replace(".", "%2E").replace("~", "%7E") or "%"
    if len(encoded) <= _LONGEST:
        return encoded
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{encoded[: _LONGEST - 34].rstrip('%')}%-{digest}"


def node_folder(part: int, ntype: str) -> str:
    """Return the folder of one node type in one part."""
    return f"part{part}/nodes/{safe_name(ntype)}"


def edge_folder(part: int, etype: EdgeType) -> str:
    """Return the folder of one edge type in one part."""
    return f"part{part}/edges/{edge_type_name(etype)}"


def edge_type_name(etype: EdgeType) -> str:
    """Return the edge type as one file name."""
    return ".".join(safe_name(piece) for piece in etype)


def data_path(folder: str, column: str) -> str:
    """Return the file of one feature, label, mask or weight."""
    return f"{folder}/data/{safe_name(column)}.arrow"


def part_files(
    part: int,
    node_columns: Mapping[str, Mapping[str, ColumnInfo]],
    edge_columns: Mapping[EdgeType, Mapping[str, ColumnInfo]],
    user_ids: tuple[str, ...],
) -> Iterator[str]:
    """Yield the path of every file of one part, relative to the dataset."""
    for ntype, columns in node_columns.items():
        folder = node_folder(part, ntype)
        yield f"{folder}/original_ids.arrow"
        if ntype in user_ids:
            yield f"{folder}/user_ids.arrow"
        yield from (data_path(folder, name) for name in columns)
    for etype, columns in edge_columns.items():
        folder = edge_folder(part, etype)
        yield from (f"{folder}/{name}.arrow" for name in ("indptr", "indices", "original_ids"))
        yield from (data_path(folder, name) for name in columns)
