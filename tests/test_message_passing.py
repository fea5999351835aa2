"""The torch path against DGL's own kernels: outputs and gradients of every convolution and operator.

Float64, on the CPU or the device that DGLX_DEVICE names. What DGL's kernels do wrong is compared with a few
lines of plain torch.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.nn import pytorch as dglnn
from dgl.nn.pytorch import conv
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.internals import message_passing, segments
from dglx_dist.internals.message_passing import TorchIndex, create_block, gather_mm, place, segment_mm
from tests.helpers.convolutions import CASES

TOLERANCE = 1e-10
DEVICE = torch.device(os.environ.get("DGLX_DEVICE") or "cpu")


@pytest.fixture(autouse=True)
def _torch_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DGLX_MESSAGE_PASSING", "torch")
    monkeypatch.setattr(segments, "_PIECE", 50)  # gradients of weights in several pieces
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_ends(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """In no order, with parallel edges; the last destination has no in-edge."""
    drawn = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=drawn)
    return src, torch.randint(max(num_dst - 1, 1), (num_edges,), generator=drawn)


def block_in_csc_order(num_src: int, num_dst: int, num_edges: int) -> Any:
    src, dst = random_ends(num_src, num_dst, num_edges)
    offsets = torch.zeros(num_dst + 1, dtype=torch.int64)
    offsets[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
    ids = torch.randperm(num_edges, generator=torch.Generator().manual_seed(5))
    return dgl.create_block(("csc", (offsets, src, ids)), num_src, num_dst)


GRAPHS: dict[str, Callable[[], Any]] = {
    "graph": lambda: dgl.graph(random_ends(14, 14, 60), num_nodes=14),
    "int32 graph": lambda: dgl.graph(random_ends(14, 14, 60), num_nodes=14, idtype=torch.int32),
    "graph with loops": lambda: dgl.add_self_loop(GRAPHS["graph"]()),
    "one node": lambda: dgl.graph(([0], [0])),
    "no edges": lambda: dgl.graph(([], []), num_nodes=5),
    "block": lambda: dgl.create_block(random_ends(30, 12, 80), 30, 12),
    "block with loops": lambda: dgl.create_block(([4, 0, 1, 2, 3, 2], [0, 0, 1, 2, 3, 1]), 5, 4),
    "block in CSC order": lambda: block_in_csc_order(20, 6, 50),
    "block without edges": lambda: dgl.create_block(([], []), 6, 4),
}


def as_list(found: Any) -> list[Tensor]:
    return [*found.values()] if isinstance(found, dict) else [*found] if isinstance(found, tuple) else [found]


def outcome(
    graph: Any, compute: Callable[[Any, list[Tensor]], Any], leaves: list[Tensor]
) -> list[Tensor | None]:
    """Outputs of ``compute`` and gradients of ``leaves`` under a fixed random weighting of the outputs."""
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(2)
    outputs = [out + 0 for out in as_list(compute(graph, leaves))]  # some layers free theirs after backward
    loss = sum((out * torch.randn(out.shape, dtype=out.dtype, device="cpu").to(out)).sum() for out in outputs)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return [None if item is None else item.cpu() for item in (*outputs, *(leaf.grad for leaf in leaves))]


def operator(name: str) -> Callable[[Any, list[Tensor]], Tensor]:
    """One of dgl.ops, with the zeros of `update_all` where DGL's kernels leave an infinite number."""

    def compute(g: Any, rows: list[Tensor]) -> Tensor:
        out = getattr(dgl.ops, name)(g, *rows)
        return out.masked_fill(out.isinf(), 0)

    return compute


def difference(some: list[Tensor | None], others: list[Tensor | None]) -> float:
    def between(a: Tensor | None, b: Tensor | None) -> float:
        if a is None or b is None:  # one path may leave out what the other one sets to zero
            return float(sum(case.abs().sum() for case in (a, b) if case is not None))
        assert a.shape == b.shape
        same = (a == b) | (a.isnan() & b.isnan())
        return float(torch.where(same, 0, (a - b).abs()).detach().max()) if a.numel() else 0.0

    return max(between(a, b) for a, b in zip(some, others, strict=True))


def move_leaves(leaves: list[Tensor], device: torch.device | str) -> None:
    for item in leaves:
        item.grad, item.data = None, item.data.to(device)


def assert_alike(
    graph: Any, compute: Callable[[Any, list[Tensor]], Any], leaves: list[Tensor], layer: Any = None
) -> None:
    """The same on DGL's kernels and on the torch path, used twice, as by two layers on one block."""
    expected, placed = outcome(graph, compute, leaves), place(graph, DEVICE)
    assert isinstance(placed._graph, TorchIndex)
    move_leaves(leaves, DEVICE)
    if layer is not None:
        layer.to(DEVICE)
    with DEVICE:
        for _ in range(2):
            assert difference(outcome(placed, compute, leaves), expected) <= TOLERANCE
    move_leaves(leaves, "cpu")


def leaf(*shape: int, ties: bool = False, seed: int = 1) -> Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (rows.round() if ties else rows).requires_grad_()


WITHOUT_GRAPH = {"DenseChebConv", "DenseGraphConv", "DenseSAGEConv"}
CUGRAPH = {"CuGraphGATConv", "CuGraphRelGraphConv", "CuGraphSAGEConv"}
"""Need the package pylibcugraphops."""


def test_every_convolution_of_dgl_is_in_the_table() -> None:
    classes = {name for name in dir(conv) if isinstance(getattr(conv, name), type)}
    assert classes - {name.split()[0] for name in CASES} == WITHOUT_GRAPH | CUGRAPH


@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str) -> None:
    case, done = CASES[name], []
    for kind, make in GRAPHS.items():
        graph = make()
        if graph.is_block and not case.blocks:
            continue
        torch.manual_seed(1)
        layer = case.make()
        leaves = [leaf(graph.num_src_nodes(), 8), leaf(graph.num_edges(), 4), *layer.parameters()]

        def compute(g: Any, rows: list[Tensor], layer: Any = layer) -> Any:
            return case.call(layer, g, rows[0], rows[1])

        if not graph.num_edges() and ("max" in name or "pool" in name):
            continue  # DGL gives the gradient of these zeros to node 0
        try:
            outcome(graph, compute, leaves)
        except (dgl.DGLError, RuntimeError, IndexError, ValueError, KeyError):
            continue  # on this graph DGL's own path has none
        assert_alike(graph, compute, leaves, layer)
        done.append(kind)
    assert {"graph with loops", *(["block with loops"] if case.blocks else [])} <= {*done}
    assert len(done) >= 3


@pytest.mark.parametrize("name", CASES)
def test_convolution_without_data(name: str) -> None:
    """On the device `meta` whatever goes through the CPU fails."""
    case = CASES[name]
    graph = GRAPHS["block" if case.blocks else "graph"]()
    with torch.device("meta"):
        layer = case.make().to("meta")
        x = torch.randn(graph.num_src_nodes(), 8, requires_grad=True)
        e = torch.randn(graph.num_edges(), 4, requires_grad=True)
        placed = place(graph, "meta")

        def run() -> None:
            outputs = as_list(case.call(layer, placed, x, e))
            assert {out.device.type for out in outputs} == {"meta"}
            sum(out.sum() for out in outputs if out.is_floating_point()).backward()

        if case.not_on_meta:
            with pytest.raises((RuntimeError, NotImplementedError), match=r"[mM]eta|nonzero"):
                run()
        else:
            run()


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((3,), (3,)),
    ((3,), (1,)),
    ((1,), (4,)),
    ((2, 3), (2, 1)),
    ((2, 3), (3,)),
    ((2, 1, 3), (2, 4, 1)),
    ((12, 2), (12, 1)),
]
"""Trailing dimensions of two operands."""


@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("kind", ["graph", "block in CSC order"])
def test_operators(kind: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Every message with every reduction, and every operator on edges; with ties."""
    graph = GRAPHS[kind]()
    u = leaf(graph.num_src_nodes(), *left, ties=True)
    v = leaf(graph.num_dst_nodes(), *right, ties=True, seed=3)
    e = leaf(graph.num_edges(), *right, ties=True, seed=4)
    for name in (f"u_{op}_e_{how}" for op in ("add", "sub", "mul") for how in ("sum", "max", "min", "mean")):
        assert_alike(graph, operator(name), [u, e])
    for name, rows in (("copy_u", u), ("copy_v", v)):
        assert_alike(graph, operator(name), [rows])
    divisor = leaf(graph.num_edges(), *right)
    assert_alike(graph, operator("u_div_e_sum"), [u, divisor])
    for how in ("sum", "max", "min", "mean"):
        assert_alike(graph, operator(f"copy_u_{how}"), [u])
        assert_alike(graph, operator(f"copy_e_{how}"), [e])
    of = {"u": u, "v": v, "e": e}
    for op in ("add", "sub", "mul", "dot"):
        for a, b in ("uv", "vu", "ue", "eu", "ve", "ev"):
            if op == "dot" and (left or (1,))[-1] != (right or (1,))[-1]:
                continue
            assert_alike(graph, operator(f"{a}_{op}_{b}"), [of[a], of[b]])


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_edge_softmax(kind: str, norm_by: str) -> None:
    graph = GRAPHS[kind]()
    scores = leaf(graph.num_edges(), 3, 1)
    assert_alike(graph, lambda g, rows: dgl.ops.edge_softmax(g, rows[0], norm_by=norm_by), [scores])
    some = torch.arange(0, graph.num_edges(), 2, dtype=graph.idtype)
    if len(some):
        few = leaf(len(some), 2)
        assert_alike(graph, lambda g, rows: dgl.ops.edge_softmax(g, rows[0], some, norm_by), [few])


def test_without_edges_there_are_zeros_and_no_gradient() -> None:
    """DGL's own gives the gradient of these zeros to node 0."""
    graph, x = place(GRAPHS["no edges"](), "cpu"), leaf(5, 3)
    for how in ("sum", "max", "min", "mean"):
        out = getattr(dgl.ops, f"copy_u_{how}")(graph, x)
        out.sum().backward()
        assert not out.any()
        assert x.grad is not None
        assert not x.grad.any()


@pytest.mark.parametrize("how", ["sum", "max", "min"])
def test_rows_without_a_value_stay_to_be_seen(how: str) -> None:
    graph = place(dgl.graph(([0, 1, 2], [1, 1, 0]), num_nodes=3), "cpu")
    x = torch.tensor([[1.0], [torch.nan], [3.0]])
    assert getattr(dgl.ops, f"copy_u_{how}")(graph, x).isnan().tolist() == [[False], [True], [False]]


LENGTHS = torch.tensor([3, 0, 70, 1, 130, 0])


def test_operators_on_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph, tensors decide: DGL's own run on the CPU unless the variable says otherwise."""
    rows, matrices = leaf(int(LENGTHS.sum()), 5), leaf(len(LENGTHS), 5, 4)
    targets = torch.randint(9, (len(rows),), generator=torch.Generator().manual_seed(0))
    backend = dgl.backend.pytorch.sparse
    message_passing.install()
    of_matrices, of_rows = targets % len(matrices), targets * 3
    pairs: list[tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = [
        *(
            (lambda x, _, how=how: dgl.ops.segment_reduce(LENGTHS, x, how), partial(plain_segments, how=how))
            for how in ("sum", "max", "min", "mean")
        ),
        (
            lambda x, _: backend.scatter_add(x, targets, 10),
            lambda x, _: x.new_zeros(10, 5).index_add(0, targets, x),
        ),
        (lambda x, y: segment_mm(x, y, LENGTHS), lambda x, y: backend.segment_mm(x, y, LENGTHS)),
        *(
            (
                lambda x, y, of=of: gather_mm(x, y, of, of_matrices),
                lambda x, y, of=of: backend.gather_mm(x, y, of, of_matrices),
            )
            for of in (None, of_rows)
        ),
    ]
    for ours, pair in pairs:
        result, expected = (
            outcome(None, lambda _, x, case=case: case(*x), [rows, matrices]) for case in (ours, pair)
        )
        assert difference(result, expected) <= TOLERANCE
    monkeypatch.delenv("DGLX_MESSAGE_PASSING")
    stock = dgl.ops.segment_reduce(LENGTHS, rows, "sum")
    assert difference([stock], [plain_segments(rows, how="sum")]) <= TOLERANCE


def plain_segments(rows: Tensor, _: Tensor | None = None, *, how: str) -> Tensor:
    def reduce_part(part: Tensor) -> Tensor:
        if not len(part):
            return part.sum(0)
        return {"sum": part.sum(0), "mean": part.mean(0), "max": part.amax(0), "min": part.amin(0)}[how]

    return torch.stack([reduce_part(part) for part in rows.split(LENGTHS.tolist())])


TYPES = {"a": 20, "b": 9, "c": 10}


def typed_graph(*, empty: bool) -> Any:
    """Relation 0 has no edges where ``empty``."""

    def ends(source: str, destination: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
        return random_ends(TYPES[source], TYPES[destination], count, seed)

    edges = {
        ("a", "r0", "b"): ends("a", "b", 0 if empty else 15, 1),
        ("a", "r1", "b"): ends("a", "b", 30, 2),
        ("b", "r3", "a"): ends("b", "a", 25, 3),
        ("c", "r2", "b"): ends("c", "b", 12, 4),
    }
    return dgl.heterograph(edges, TYPES)


def plain_update(
    graph: Any, rows: dict[str, Tensor], weights: dict[Any, Tensor], op: str, how: str
) -> list[Tensor]:
    """Compute node by node what every node receives over all edge types."""
    out = []
    for ntype in ("a", "b"):
        carried, ends = [], []
        for etype in graph.canonical_etypes:
            if etype[2] == ntype:
                source, destination = graph.edges(etype=etype)
                u, e = rows[etype[0]][source], weights[etype]
                carried.append({"copy_u": u, "copy_e": e, "mul": u * e}[op])
                ends.append(destination)
        messages, places = torch.cat(carried), torch.cat(ends)
        of_nodes = [messages[places == node] for node in range(graph.num_nodes(ntype))]
        zeros = torch.zeros(messages.shape[1:])
        reduce_rows = {"sum": lambda m: m.sum(0), "max": lambda m: m.max(0)[0], "min": lambda m: m.min(0)[0]}[
            how
        ]
        out.append(torch.stack([reduce_rows(m) if len(m) else zeros for m in of_nodes]))
    return out


MESSAGES = {"copy_u": fn.copy_u("h", "m"), "copy_e": fn.copy_e("w", "m"), "mul": fn.u_mul_e("h", "w", "m")}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("op", MESSAGES)
def test_update_of_all_edge_types_at_once(op: str, empty: bool) -> None:
    """Also where relation 0 has no edges, which DGL's own gets wrong."""
    graph = typed_graph(empty=empty)
    rows = {ntype: leaf(count, 5, seed=number) for number, (ntype, count) in enumerate(TYPES.items())}
    weights = {etype: leaf(graph.num_edges(etype), 5, seed=7) for etype in graph.canonical_etypes}
    leaves = [*rows.values(), *weights.values()]

    def ours(g: Any, _: Any, how: str) -> tuple[Tensor, ...]:
        g.ndata["h"], g.edata["w"] = rows, weights
        g.update_all(MESSAGES[op], getattr(fn, how)("m", "out"))
        return tuple(g.ndata["out"][ntype] for ntype in ("a", "b"))

    for how in ("sum", "max", "min"):
        expected = outcome(
            graph, lambda g, _, how=how: tuple(plain_update(g, rows, weights, op, how)), leaves
        )
        result = outcome(place(graph, "cpu"), lambda g, _, how=how: ours(g, _, how), leaves)
        assert difference(result, expected) <= TOLERANCE


def test_operators_on_edges_of_all_types() -> None:
    graph = typed_graph(empty=False)
    rows = {ntype: leaf(count, 5, seed=number) for number, (ntype, count) in enumerate(TYPES.items())}
    scores = {etype: leaf(graph.num_edges(etype), 3, seed=7) for etype in graph.canonical_etypes}

    def dots(g: Any, _: Any) -> tuple[Tensor, ...]:
        g = g.local_var()
        g.ndata["h"] = rows
        g.apply_edges(fn.u_dot_v("h", "h", "dot"))
        return tuple(g.edges[etype].data["dot"] for etype in g.canonical_etypes)

    assert_alike(graph, dots, [*rows.values()])
    for norm_by in ("dst", "src"):
        assert_alike(
            graph, lambda g, _, by=norm_by: dgl.ops.edge_softmax(g, scores, norm_by=by), [*scores.values()]
        )


def typed_block(*, empty: bool) -> Any:
    graph = typed_graph(empty=empty)
    seeds = {"a": torch.arange(6), "b": torch.arange(8)}
    return dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("make", [typed_graph, typed_block])
@pytest.mark.parametrize("aggregate", ["sum", "max", "stack"])
def test_typed_convolutions(make: Any, empty: bool, aggregate: str) -> None:
    graph = make(empty=empty)
    torch.manual_seed(1)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: dglnn.SAGEConv(5, 4, "mean"),
        lambda: dglnn.GraphConv(5, 4, norm="both", allow_zero_in_degree=True),
        lambda: dglnn.GATConv((5, 5), 4, 1, allow_zero_in_degree=True),
        # DGL's gradient of the largest of no edges is wrong.
        lambda: dglnn.GINConv(nn.Linear(5, 4), "sum" if empty else "max"),
    ]
    kinds = kinds if aggregate == "sum" else kinds[:1]
    for kind in kinds:
        layer = dglnn.HeteroGraphConv({f"r{number}": kind() for number in range(4)}, aggregate)
        rows = {ntype: leaf(graph.num_src_nodes(ntype), 5) for ntype in graph.srctypes}
        assert_alike(
            graph,
            lambda g, _, rows=rows, layer=layer: {
                name: out.flatten(1) for name, out in layer(g, rows).items()
            },
            [*rows.values(), *layer.parameters()],
        )


@pytest.mark.parametrize("cross", ["sum", "max", "min", "mean", "stack"])
def test_update_by_edge_type(cross: str) -> None:
    graph = typed_block(empty=True)
    rows = {ntype: leaf(graph.num_src_nodes(ntype), 5) for ntype in graph.srctypes}

    def update(g: Any, _: Any) -> dict[str, Tensor]:
        g = g.local_var()
        g.srcdata["h"] = rows
        single = (fn.copy_u("h", "m"), fn.mean("m", "out"))
        g.multi_update_all(dict.fromkeys(g.canonical_etypes, single), cross)
        return g.dstdata["out"]

    assert_alike(graph, update, [*rows.values()])


@pytest.mark.parametrize("kind", ["graph", "block", "block in CSC order", "int32 graph"])
def test_functions_of_the_user(kind: str) -> None:
    """Messages, reductions and functions of edges, of all and of some edges."""
    graph = GRAPHS[kind]()
    x, y, e = leaf(graph.num_src_nodes(), 3), leaf(graph.num_dst_nodes(), 3), leaf(graph.num_edges(), 3)

    def compute(g: Any, _: Any) -> tuple[Tensor, ...]:
        g = g.local_var()
        g.srcdata["x"], g.edata["e"] = x, e
        g.dstdata["y"] = y
        g.update_all(
            lambda edges: {"m": edges.src["x"] * edges.data["e"] + edges.dst["y"]},
            lambda nodes: {"first": nodes.mailbox["m"][:, 0], "sum": nodes.mailbox["m"].cumsum(1)[:, -1]},
        )
        some = torch.tensor([5, 2, 9], dtype=g.idtype)
        g.apply_edges(lambda edges: {"f": edges.src["x"] - edges.dst["y"]})
        g.apply_edges(lambda edges: {"f": edges.src["x"].exp()}, some)
        return g.dstdata["first"], g.dstdata["sum"], g.edata["f"]

    assert_alike(graph, compute, [x, y, e])


@pytest.mark.parametrize("kind", GRAPHS)
def test_structure(kind: str) -> None:
    """A placed graph returns DGL's values, with DGL's types."""
    graph = GRAPHS[kind]()
    placed = place(graph, "cpu")
    assert (placed.device, placed.idtype, type(placed)) == (graph.device, graph.idtype, type(graph))
    nodes = torch.tensor([1, 0, 1], dtype=graph.idtype)[: min(3, graph.num_dst_nodes() + 1)]
    nodes = nodes if graph.num_dst_nodes() > 1 else nodes[:0]
    some = torch.arange(0, graph.num_edges(), 3, dtype=graph.idtype)
    answers = {
        "edges": lambda g: g.edges(form="all", order="eid"),
        "sorted edges": lambda g: g.edges(form="all", order="srcdst")[:2],
        "find_edges": lambda g: g.find_edges(some),
        "in_edges": lambda g: tuple(in_edge.sort()[0] for in_edge in g.in_edges(nodes, form="all")),
        "out_edges": lambda g: tuple(out_edge.sort()[0] for out_edge in g.out_edges(nodes, form="all")),
        "in_degrees": lambda g: (g.in_degrees(), g.in_degrees(nodes), g.in_degrees(v=nodes)),
        "out_degrees": lambda g: (g.out_degrees(), g.out_degrees(nodes), g.out_degrees(u=nodes, etype="_E")),
        "offsets": lambda g: g.adj_tensors("csc")[:1],
        "ends": lambda g: g.adj_tensors("coo"),
    }
    for name, ask in answers.items():
        for ours, dgls in zip(ask(placed), ask(graph), strict=True):
            assert torch.equal(ours, dgls), name
            assert ours.dtype == dgls.dtype, name


def test_place_moves_every_tensor_once_and_leaves_the_graph_as_it_was() -> None:
    block = GRAPHS["block"]()
    block.srcdata["x"], block.edata["w"] = torch.ones(30, 2), torch.ones(80)
    block.step_share = "kept"
    copied: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        copied.append(tensor)
        return tensor.to("meta")

    placed = place(block, "meta", copy=copy)
    assert len(copied) == 4  # both ends of the edges, and two columns
    assert placed.step_share == "kept"
    assert {placed.device.type, placed.srcdata["x"].device.type, placed.edges()[0].device.type} == {"meta"}
    assert place(placed, "meta") is placed
    assert not isinstance(block._graph, TorchIndex)
    assert block.device.type == "cpu"


def test_to_the_cpu_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = dgl.batch([GRAPHS["graph"](), GRAPHS["one node"]()])
    placed = place(batch, "cpu")
    assert torch.equal(placed.batch_num_nodes(), batch.batch_num_nodes())
    monkeypatch.setenv("DGLX_MESSAGE_PASSING", "dgl")
    back = place(placed, "cpu")
    assert not isinstance(back._graph, TorchIndex)
    assert torch.equal(back.edges()[0], batch.edges()[0])
    assert place(batch, "cpu") is batch


def test_a_block_made_on_its_device() -> None:
    source, destination = random_ends(9, 5, 20)
    offsets, order = torch.zeros(6, dtype=torch.int64), destination.argsort(stable=True)
    offsets[1:] = torch.bincount(destination, minlength=5).cumsum(0)
    x = leaf(9, 3)
    for made in (
        create_block("coo", destination, source, num_src=9, num_dst=5),
        create_block("csc", offsets, source[order], num_src=9, num_dst=5),
    ):
        assert isinstance(made._graph, TorchIndex)
        assert made.num_edges() == 20
        expected = torch.zeros(5, 3).index_add(0, destination, x[source])
        assert torch.allclose(dgl.ops.copy_u_sum(made, x), expected, atol=TOLERANCE)
        made.edata["w"] = torch.ones(20)
        with pytest.raises(ConfigError, match="made on its device"):
            made.to("meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    star = dgl.create_block((torch.arange(5000), torch.zeros(5000, dtype=torch.int64)), 5000, 1)
    x, weight = torch.ones(5000, 2, dtype=dtype, requires_grad=True), torch.ones(5000, 1, dtype=dtype)
    placed = place(star, "cpu")
    wide = torch.ones(5000, 2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = [
            dgl.ops.copy_u_sum(placed, x),
            dgl.ops.copy_e_sum(placed, x),
            dgl.ops.u_mul_e_sum(placed, x, weight),
            dgl.ops.u_add_e_sum(placed, x * 0, x),
            dgl.ops.u_mul_e_sum(placed, wide, weight),
        ]
        softmax = dgl.ops.edge_softmax(placed, x)
        assert dgl.ops.copy_u_max(placed, x).tolist() == [[1, 1]]
    for out in sums:
        assert out.tolist() == [[torch.tensor(5000.0, dtype=out.dtype).item()] * 2]
    assert torch.allclose(softmax.float(), torch.full((5000, 2), 1 / 5000, dtype=torch.float32), rtol=1e-2)
    sums[0].sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 1).all())


def test_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert message_passing.is_on_torch_path("cpu")
    monkeypatch.setenv("DGLX_MESSAGE_PASSING", "dgl")
    assert not message_passing.is_on_torch_path("cuda:1")
    monkeypatch.delenv("DGLX_MESSAGE_PASSING")
    assert (message_passing.is_on_torch_path("cpu"), message_passing.is_on_torch_path("meta")) == (
        False,
        True,
    )
    monkeypatch.setenv("DGLX_MESSAGE_PASSING", "cuda")
    with pytest.raises(ConfigError, match=r"DGLX_MESSAGE_PASSING='cuda' must be 'torch' .* or 'dgl'"):
        place(GRAPHS["graph"](), "cpu")
