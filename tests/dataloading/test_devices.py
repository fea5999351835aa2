"""Loaders for a device: what is copied when and on which thread, with stand-ins, and the batches there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dgl.dataloading import NeighborSampler
from dgl.nn import GATConv, GraphConv, SAGEConv
from torch import Tensor, nn
from torch.nn import functional as F

from dglx_dist import negative
from dglx_dist.comm.devices import CopyStream, open_copy_stream
from dglx_dist.dataloading import step_loader
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.dist_graph import DistGraph
from tests.helpers.elsewhere import DEVICE, Elsewhere
from tests.helpers.streams import GARBAGE, LateEvent, LateStreams

FEATS, LABELS = {"prefetch_node_feats": ["feat"]}, {"prefetch_labels": ["label"]}


def nodes_of(g: DistGraph, **options: Any) -> Any:
    sampler = NeighborSampler([3, 4], prefetch_edge_feats=["source"], **FEATS, **LABELS)
    return DataLoader(g, torch.arange(60), sampler, batch_size=7, shuffle=True, **options)


def edges_of(g: DistGraph, **options: Any) -> Any:
    return DistEdgeDataLoader(
        g,
        torch.arange(100),
        NeighborSampler([3], **FEATS),
        negative_sampler=negative.Uniform(2),
        exclude="self",
        batch_size=30,
        **options,
    )


def of_types(g: DistGraph, **options: Any) -> Any:
    feats = {"user": ["feat"], "item": ["feat"]}
    sampler = NeighborSampler([2, 3], prefetch_node_feats=feats, prefetch_labels={"item": ["label"]})
    return DataLoader(
        g, {"item": torch.arange(50), "user": torch.arange(5)}, sampler, batch_size=20, **options
    )


def flat(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch: ids, structure and columns."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        yield from (tensor for key in sorted(batch) for tensor in flat(batch[key]))
    elif isinstance(batch, (tuple, list)):
        yield from (tensor for item in batch for tensor in flat(item))
    else:
        for etype in batch.canonical_etypes:
            yield from batch.edges(etype=etype)
            yield from flat(dict(batch.edges[etype].data))
        for side, ntypes in ((batch.srcnodes, batch.srctypes), (batch.dstnodes, batch.dsttypes)):
            yield from (tensor for ntype in ntypes for tensor in flat(dict(side[ntype].data)))


def contents(loader: Any) -> list[list[Tensor]]:
    return [[tensor.cpu().clone() for tensor in flat(batch)] for batch in loader]


def same(batches: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    return [len(batch) for batch in batches] == [len(batch) for batch in expected] and all(
        torch.equal(tensor, reference_tensor)
        for batch, reference in zip(batches, expected, strict=True)
        for tensor, reference_tensor in zip(batch, reference, strict=True)
    )


LOADERS = [("graph", nodes_of), ("graph", edges_of), ("shop_graph", of_types)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    streams = LateStreams()
    monkeypatch.setenv("DGLX_MESSAGE_PASSING", "torch")
    monkeypatch.setattr(step_loader, "open_copy_stream", lambda _device: CopyStream(streams))
    return streams


@pytest.mark.parametrize(("name", "make"), LOADERS)
@pytest.mark.parametrize("options", [{"num_threads": 0}, {}, {"num_threads": 2, "depth": 3}])
def test_a_batch_is_copied_from_where_it_was_made_and_waited_for_where_it_is_used(
    request: pytest.FixtureRequest,
    name: str,
    make: Callable[..., Any],
    options: dict[str, int],
) -> None:
    g = request.getfixturevalue(name)
    expected = contents(make(g, **options))
    streams = request.getfixturevalue("late")
    loader, batches = make(g, **options), []
    for number, batch in enumerate(loader):
        batches.append([tensor.clone() for tensor in flat(batch)])
        if options.get("num_threads", 1):
            # The next one is copied while this one is used.
            for _ in range(1 + (number == 0) - (number == len(loader) - 1)):
                assert streams.carried.acquire(timeout=60)
    assert same(batches, expected)
    threads = {
        kind: {thread for done, thread in streams.log if done == kind} for kind in ("copy", "event", "wait")
    }
    assert threads["wait"] == {"MainThread"}
    assert all(("dglx-loader" in thread) == bool(options.get("num_threads", 1)) for thread in threads["copy"])
    order = [kind for kind, _ in streams.log]
    assert order.count("event") == order.count("wait") == len(loader)


def test_a_batch_that_is_not_waited_for_is_garbage(
    graph: DistGraph, late: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateStreams, "wait", lambda *_: None)
    for nodes, _, blocks in nodes_of(graph):
        assert bool((nodes == GARBAGE).all())
        assert bool((blocks[0].srcdata["feat"] == GARBAGE).all())


def test_memory_that_is_given_up_before_its_copy_is_done_is_noticed(
    graph: DistGraph, late: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CopyStream, "_keep", lambda *_: None)
        with pytest.raises(AssertionError, match="freed before its copy was done"):
            contents(nodes_of(graph))
    copies, results = CopyStream(LateStreams()), []
    for number in range(3):
        rows = torch.full((3,), number)
        results.append(copies.copy_async(lambda copy, rows=rows: copy(rows)))
    del rows
    # Two batches later, as if every event were reached at once.
    assert results[1][1]() is None
    assert results[1][0].tolist() == [1] * 3
    monkeypatch.setattr(LateEvent, "query", lambda _: True)
    copies.copy_async(lambda copy: copy(torch.zeros(1)))
    with pytest.raises(AssertionError, match="freed before its copy was done"):
        results[2][1]()


@pytest.mark.parametrize(("name", "make"), LOADERS)
def test_batches_on_a_device_are_those_of_the_cpu(
    request: pytest.FixtureRequest, name: str, make: Callable[..., Any]
) -> None:
    g = request.getfixturevalue(name)
    expected = contents(make(g, num_threads=0))
    shapes = [[tensor.shape for tensor in batch] for batch in expected]
    with Elsewhere():
        loader = make(g, num_threads=0, device=DEVICE)
        batches = [list(flat(batch)) for batch in loader]
        assert {tensor.device for batch in batches for tensor in batch} == {DEVICE}
        assert same([[tensor.cpu() for tensor in batch] for batch in batches], expected)
    for batch, shapes_of in zip(make(g, device="meta"), shapes, strict=True):
        tensors = list(flat(batch))
        assert all(tensor.is_meta for tensor in tensors)
        assert [tensor.shape for tensor in tensors] == shapes_of


NETS: dict[str, Callable[[], list[nn.Module]]] = {
    "sage": lambda: [SAGEConv(3, 8, "mean"), SAGEConv(8, 7, "pool")],
    "gcn": lambda: [GraphConv(3, 8, allow_zero_in_degree=True), GraphConv(8, 7, allow_zero_in_degree=True)],
    "gat": lambda: [GATConv(3, 4, 2, allow_zero_in_degree=True), GATConv(8, 7, 1, allow_zero_in_degree=True)],
}


def train(g: DistGraph, kind: str, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    sampler = NeighborSampler([3, 3], **FEATS, **LABELS)
    loader = DataLoader(g, torch.arange(60), sampler, batch_size=16, seed=1, num_threads=0, device=device)
    layers = nn.ModuleList(NETS[kind]()).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    for _, _, blocks in loader:
        h = blocks[0].srcdata["feat"]
        for layer, block in zip(layers, blocks, strict=True):
            h = torch.relu(layer(block, h).flatten(1))
        loss = F.cross_entropy(h, blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in layers.parameters()]


@pytest.mark.parametrize("kind", list(NETS))
def test_a_step_mixes_no_devices_and_reads_nothing_from_one(
    graph: DistGraph, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Elsewhere():
        weights = train(graph, kind, DEVICE)
    monkeypatch.setenv("DGLX_MESSAGE_PASSING", "torch")
    expected = train(graph, kind, torch.device("cpu"))
    assert all(map(torch.equal, weights, expected))


class Noted:
    """A tensor, stream or event of CUDA that notes its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Noted:
            arguments = [getattr(argument, "_name", str(argument)) for argument in (*args, *kwargs.values())]
            self._calls.append(f"{self._name}.{method}({', '.join(arguments)})")
            return Noted(f"{self._name}.{method}", self._calls)

        return call


def test_on_cuda_the_consumers_stream_waits_and_the_copies_outlive_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    @contextmanager
    def current(stream: Noted) -> Iterator[None]:
        calls.append(f"use {stream._name}")
        yield
        calls.append("use the former")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Noted("copies", calls))
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Noted("compute", calls))
    copies = open_copy_stream(torch.device("cuda", 1))
    assert copies is not None
    rows: Any = Noted("rows", calls)
    _, arrive = copies.copy_async(lambda copy: copy(rows))
    arrive()
    assert calls == [
        "use copies",
        "rows.pin_memory()",
        "rows.pin_memory.to(cuda:1, True)",
        "copies.record_event()",
        "use the former",
        "compute.wait_event(copies.record_event)",
        "rows.pin_memory.to.record_stream(compute)",
    ]
