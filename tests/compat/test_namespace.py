"""Every name that DGL has is in the table, and behaves as the table says."""

import inspect
import re
from pathlib import Path
from typing import Any

import dgl.distributed
import pytest
from dgl.distributed import graph_partition_book

from dglx_dist.compat.namespace import CONSTANTS, REFUSED, SUPPORTED, build_replacements
from dglx_dist.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "compat.md").read_text()
ROWS = [
    line.split("|")[1:3] for line in PAGE.split("## Every name")[1].splitlines() if line.startswith("| `")
]
TABLE = {name: text for names, text in ROWS for name in re.findall(r"`(\w+)`", names)}
NOT_DGLS = {"backend_name", "expand_as_pair", "importlib", "os", "sys", "pytorch", "sparse_emb"}


def public(owner: object) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def test_every_name_of_dgl_is_in_the_table_which_says_what_is_so() -> None:
    stock = public(dgl.distributed)
    submodules = {name for name in stock if inspect.ismodule(getattr(dgl.distributed, name))}
    assert stock | SUPPORTED.keys() | CONSTANTS.keys() <= TABLE.keys()
    assert stock - SUPPORTED.keys() - REFUSED.keys() - CONSTANTS.keys() <= submodules | NOT_DGLS
    assert not SUPPORTED.keys() & REFUSED.keys()
    assert {name for name, text in TABLE.items() if text.strip().startswith("refused")} == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_names_raise_the_reason(name: str) -> None:
    refused = build_replacements()[name]
    for use in (lambda: refused(1, two=2), lambda: type("Mine", (refused,), {})):
        with pytest.raises(ConfigError, match=f"dgl.distributed.{name} is not available: "):
            use()


@pytest.mark.parametrize(
    "name",
    [
        *("DistGraph", "DistTensor", "DistEmbedding", "PartitionPolicy", "KVClient"),
        *("GraphPartitionBook", "RangePartitionBook", "SparseAdagrad", "SparseAdam"),
    ],
)
def test_classes_have_every_public_attribute(name: str) -> None:
    own = vars(SUPPORTED["optim"]).get(name) or SUPPORTED[name.replace("GraphP", "RangeP")]
    # An optimizer's update() is what DGL's own step() calls.
    assert public(stock_of(name)) - {"update"} <= public(own)


def test_names_of_later_versions_are_there() -> None:
    """The names are in the sources of DGL 2.4 and later, less those that only GraphBolt's files need."""
    later = {"DistNodeDataLoader", "DistEdgeDataLoader", "NodeCollator", "EdgeCollator"}
    later |= {"dgl_partition_to_graphbolt", "gb_convert_single_dgl_partition"}
    later |= {"DEFAULT_NTYPE", "DEFAULT_ETYPE", "MAX_QUEUE_SIZE"}
    assert later <= build_replacements().keys()
    assert {name: getattr(dgl.distributed.constants, name) for name in CONSTANTS} == dict(CONSTANTS)


CALLED = {
    **{
        name: value
        for name, value in SUPPORTED.items()
        if name not in ("optim", "DistConnectError", "KVClient")
    },
    **{name: getattr(SUPPORTED["optim"], name) for name in ("SparseAdagrad", "SparseAdam")},
    **{
        f"{owner}.{name}": getattr(SUPPORTED[owner], name)
        for owner in ("DistGraph", "DistTensor", "DistEmbedding", "RangePartitionBook", "KVClient")
        for name in sorted(public(SUPPORTED[owner]))
        if inspect.isfunction(getattr(SUPPORTED[owner], name))
    },
}
"""Functions, classes and methods."""

INSERTED = {"sample_neighbors": "replace", "sample_etype_neighbors": "replace"}
"""Arguments of DGL 1.1.3 that later versions moved back by one; a bool in their place is still accepted."""


def stock_of(name: str) -> Any:
    owner, _, method = name.partition(".")
    for module in (dgl.distributed, dgl.dataloading, dgl.distributed.optim, graph_partition_book):
        if hasattr(module, owner):
            result = getattr(module, owner)
            return getattr(result, method, None) if method else result
    return None


@pytest.mark.parametrize("name", sorted(CALLED))
def test_arguments_have_dgls_names_order_and_defaults(name: str) -> None:
    stock = stock_of(name)
    if stock is None:
        return
    reference, ours = inspect.signature(stock).parameters, inspect.signature(CALLED[name]).parameters
    assert [value for value in ours if value in reference] == list(reference)
    first = [*reference][: [*reference].index(INSERTED[name]) if name in INSERTED else None]
    first = [item for item in first if reference[item].kind is not inspect.Parameter.VAR_KEYWORD]
    assert [*ours][: len(first)] == first
    for argument, their in reference.items():
        default = ours[argument].default
        if their.default is their.empty:
            assert ours[argument].kind is their.kind
        elif (name, argument) == ("initialize", "net_type"):
            # From 2.x on; "socket", as in 1.1.3, is the same.
            assert default is None
        elif their.default == dgl.ALL:
            assert default is None
        else:
            assert str(default) == str(their.default)
