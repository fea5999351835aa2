"""Every name that DGL has is in the table, and is what the table says."""

import inspect
import re
from pathlib import Path

import dgl.distributed
import pytest

from dglx_dist.compat.names import REFUSED, SUPPORTED, offered
from dglx_dist.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
ROWS = [
    line.split("|")[1:3] for line in PAGE.split("## Every name")[1].splitlines() if line.startswith("| `")
]
TABLE = {name: text for names, text in ROWS for name in re.findall(r"`(\w+)`", names)}
NOT_DGLS = {"backend_name", "expand_as_pair", "importlib", "os", "sys", "pytorch", "sparse_emb"}


def public(owner: object) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def test_every_name_of_the_installed_dgl_is_in_the_table() -> None:
    assert public(dgl.distributed) <= TABLE.keys()


def test_names_are_supported_refused_or_not_of_the_package() -> None:
    submodules = {
        name for name in public(dgl.distributed) if inspect.ismodule(getattr(dgl.distributed, name))
    }
    assert public(dgl.distributed) - SUPPORTED.keys() - REFUSED.keys() <= submodules | NOT_DGLS
    assert not SUPPORTED.keys() & REFUSED.keys()


def test_the_table_says_of_each_name_what_is_so() -> None:
    assert {name for name, text in TABLE.items() if text.strip().startswith("refused")} == REFUSED.keys()
    assert SUPPORTED.keys() <= TABLE.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_names_raise_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"dgl.distributed.{name} is not available: "):
        offered()[name](1, two=2)


def test_deriving_from_a_refused_class_raises() -> None:
    with pytest.raises(ConfigError, match="register a handler"):
        type("Mine", (offered()["Request"],), {})


@pytest.mark.parametrize(
    "name",
    ["DistGraph", "DistTensor", "DistEmbedding", "GraphPartitionBook", "PartitionPolicy", "KVClient"],
)
def test_classes_have_every_public_attribute(name: str) -> None:
    mine = SUPPORTED["RangePartitionBook" if name == "GraphPartitionBook" else name]
    assert public(getattr(dgl.distributed, name)) <= public(mine)


def test_the_book_of_ranges_has_every_public_attribute() -> None:
    from dgl.distributed.graph_partition_book import RangePartitionBook

    assert public(RangePartitionBook) <= public(SUPPORTED["RangePartitionBook"])


@pytest.mark.parametrize("name", ["SparseAdagrad", "SparseAdam"])
def test_optimizers_have_what_scripts_call(name: str) -> None:
    # update() is what DGL's own step() calls.
    stock = public(getattr(dgl.distributed.optim, name)) - {"update"}
    assert stock <= public(getattr(SUPPORTED["optim"], name))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in SUPPORTED
        if name not in ("optim", "DistConnectError", "KVClient", "GraphPartitionBook")
    ],
)
def test_arguments_have_dgls_names(name: str) -> None:
    stock = getattr(dgl.distributed, name, None) or getattr(dgl.dataloading, name, None)
    if stock is None:
        pytest.skip(f"DGL {dgl.__version__} has no {name}")
    mine = inspect.signature(SUPPORTED[name]).parameters
    if any(one.kind is one.VAR_POSITIONAL for one in inspect.signature(stock).parameters.values()):
        return
    assert set(inspect.signature(stock).parameters) <= set(mine)
