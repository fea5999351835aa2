import pytest

from dglx_dist.dataloading.row_buffers import Precision
from dglx_dist.dataloading.sampler_spec import SamplePlan, find_columns
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from tests.dataloading.shop import BUYS, KNOWS


def found(g: DistGraph, **names):
    return find_columns(g, SamplePlan(fanouts=(1,), **names), Precision())


def test_a_list_is_for_the_only_type(graph: DistGraph) -> None:
    columns = found(graph, node_feats=("feat",), labels=("label",), edge_feats=("odd",))
    assert columns.inputs == {"_N": {"feat": graph.ndata["feat"].kvstore_key}}
    assert columns.targets == {"_N": {"label": graph.ndata["label"].kvstore_key}}
    assert columns.edges == {("_N", "_E", "_N"): {"odd": graph.edata["odd"].kvstore_key}}


def test_names_by_type_and_edge_types_by_relation_or_triple(shop_graph: DistGraph) -> None:
    columns = found(
        shop_graph,
        node_feats={"item": ("feat", "label"), "user": ("feat",)},
        edge_feats={"knows": ("weight",), BUYS: ("weight",)},
    )
    assert {ntype: list(keys) for ntype, keys in columns.inputs.items()} == {
        "item": ["feat", "label"],
        "user": ["feat"],
    }
    assert columns.inputs["user"]["feat"] == shop_graph.nodes["user"].data["feat"].kvstore_key
    assert set(columns.edges) == {KNOWS, BUYS}
    assert columns.targets == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"node_feats": ("feat",)}, r"prefetch_node_feats is the list \['feat'\].*ghost, item, user.*\{type"),
        ({"edge_feats": ("weight",)}, r"prefetch_edge_feats.*\('user', 'knows', 'user'\).*\{type"),
        ({"labels": {"buyer": ("label",)}}, r"no node type 'buyer' \(known: ghost, item, user\)"),
        ({"labels": {"user": ("age",)}}, r"prefetch_labels names 'age'.*nodes\['user'\].*'feat', 'label'"),
        ({"edge_feats": {"sells": ("weight",)}}, "'sells'"),
        ({"edge_feats": {"buys": ("price",)}}, "prefetch_edge_feats names 'price'.*'weight'"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(shop_graph: DistGraph, names, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(shop_graph, **names)
