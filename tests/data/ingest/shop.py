"""A small shop: users with text ids, items with whole-number ids, purchases and friendships."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.data.raw_graphs import write

USERS: dict[str, Any] = {
    "id": ["ann", "bob", "cid", "dan", "eve"],
    "age": [20.0, 30.0, 40.0, 60.0, 50.0],
    "city": ["Ulm", "Bonn", "Ulm", None, "Jena"],
    "emb": [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0], [3.5, 4.0], [4.5, 5.0]],
    "segment": ["gold", "iron", "gold", "", "iron"],
}
FIRST_USERS = {name: values[:3] for name, values in USERS.items()}
LAST_USERS = {name: values[3:] for name, values in USERS.items()}
ITEMS = {"number": [70, 5_000_000_000, 9], "price": [1.0, 3.0, 4.0]}
BUYS = {
    "who": ["eve", "ann", "bob", "ann", "dan", "eve"],
    "what": [70, 9, 70, 70, 5_000_000_000, 9],
    "count": [3, 1, 2, 5, 4, 6],
}
TABLES = {
    "users-0.parquet": FIRST_USERS,
    "users-1.parquet": LAST_USERS,
    "items.parquet": ITEMS,
    "buys.parquet": BUYS,
    "knows.csv": "a;b\nann;bob\ncid;ann\ndan;ann\n",
}


def describe() -> dict[str, Any]:
    user = {
        "node_type": "user",
        "format": {"name": "parquet"},
        "files": ["users-*.parquet"],
        "node_id_col": "id",
        "features": [
            {"feature_col": "age", "feature_name": "feat", "transform": {"name": "max_min_norm"}},
            {"feature_col": "city", "feature_name": "feat", "transform": {"name": "to_categorical"}},
            {"feature_col": "emb"},
        ],
        "labels": [{"task_type": "classification", "label_col": "segment", "split_pct": [0.5, 0.25, 0.25]}],
    }
    item = {
        "node_type": "item",
        "format": {"name": "parquet"},
        "files": "items.parquet",
        "node_id_col": "number",
        "features": [{"feature_col": "price", "transform": {"name": "standard"}}],
    }
    buys = {
        "relation": ["user", "buys", "item"],
        "format": {"name": "parquet"},
        "files": ["buys.parquet"],
        "source_id_col": "who",
        "dest_id_col": "what",
        "features": [{"feature_col": "count"}],
    }
    knows = {
        "relation": ["user", "knows", "user"],
        "format": {"name": "csv", "separator": ";"},
        "files": ["knows.csv"],
        "source_id_col": "a",
        "dest_id_col": "b",
    }
    return {"version": "gconstruct-v0.1", "nodes": [user, item], "edges": [buys, knows]}


def one_type(kind: str, node: dict[str, Any], edge: dict[str, Any]) -> dict[str, Any]:
    return {
        "nodes": [{"node_type": kind, "node_id_col": "id"} | node],
        "edges": [{"relation": [kind, "e", kind], "source_id_col": "s", "dest_id_col": "d"} | edge],
    }


def put_at(description: Any, path: str, value: object) -> None:
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    for step in steps:
        description = description[step]
    description[last] = value


def write_shop(
    folder: Path, description: dict[str, Any] | None = None, tables: Mapping[str, Any] = TABLES
) -> Path:
    return write(folder, {**tables, "shop.json": json.dumps(description or describe())}) / "shop.json"
