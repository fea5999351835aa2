"""Models and batches on wrong devices; ``meta`` stands in for a GPU, as its tensors mix with no other."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import dgl
import pytest
import torch

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.replicated import check_same_model
from dglx_dist.training import checkpoint
from tests.helpers import refusal
from tests.helpers.ranks import run_ranks
from tests.strategies import equality


def half_on(device: str, g: DistGraph) -> torch.nn.Module:
    model = equality.model_of("sage", g)
    own = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    own[-1].to(device)
    return model


def on_gpus(numbers: list[int]) -> torch.nn.Module:
    """A model whose buffers say that they are on these GPUs."""
    model = torch.nn.Module()
    like = {"shape": (1,), "dtype": torch.float32}
    buffers = [
        (f"buffer {at}", SimpleNamespace(device=torch.device("cuda", number), **like))
        for at, number in enumerate(numbers)
    ]
    model.named_buffers = lambda: buffers  # type: ignore[method-assign,assignment,return-value]
    return model


def _refusals(folder: str) -> list[str]:
    session = start_session(timeout_s=60)
    g, odd = DistGraph(folder), os.environ["RANK"] == "1"
    session.device = torch.device("meta")
    results = []
    for name in STRATEGIES.names():
        wrap = STRATEGIES.get(name)(session, {}).open(g).wrap
        results.append(refusal(lambda wrap=wrap: wrap(half_on("meta", g)), ConfigError))  # type: ignore[misc]
        single = half_on("meta" if odd else "cpu", g)
        results.append(refusal(lambda wrap=wrap, single=single: wrap(single), ConfigError))  # type: ignore[misc]
    spread = on_gpus([0, int(odd)])
    return [*results, refusal(lambda: check_same_model(spread, session), ConfigError)]


def test_a_model_in_halves_is_refused_on_all_ranks_by_every_strategy(dataset: str) -> None:
    first, second = run_ranks(_refusals, 2, args=(dataset,))
    assert first == second
    assert "rank 0 has all of it on one device, rank 1 has parts on 2 devices (wrap model.to(" in first.pop()
    halves, odd = set(first[::2]), set(first[1::2])
    assert len(halves) == len(odd) == 1
    (text,) = halves
    assert "the model is on several devices (" in text
    assert " on cpu, " in text
    assert "wrap model.to(dx.local_device())" in text
    (text,) = odd
    assert "ranks disagree on the wrapped model" in text
    assert " on meta" in text


def test_batches_on_another_device_are_an_error_with_the_remedy(dataset: str) -> None:
    with start_session() as session:
        g = DistGraph(dataset)
        sampler = dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["feat"])
        _, _, blocks = next(iter(dx.DataLoader(g, torch.arange(5), sampler, batch_size=5)))
        session.device = torch.device("meta")
        model = dx.wrap(equality.model_of("sage", g).to("meta"), g)
        message = refusal(lambda: model(blocks, blocks[0].srcdata["feat"]), ConfigError)
    assert message == (
        "the model is on meta, but its inputs are on cpu; wrap model.to(dx.local_device()), or give the "
        "loader device='meta'"
    )


def test_errors_of_the_model_itself_stay(dataset: str) -> None:
    with start_session():
        g = DistGraph(dataset)
        model = dx.wrap(torch.nn.Linear(3, 2), g)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(2, 4))
        model.module.forward = mock.Mock(side_effect=PeerError("rank 1 is silent"))
        with pytest.raises(PeerError, match="rank 1 is silent"):
            model(torch.ones(2, 3, device="meta"))


def test_random_states_of_gpus_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a GPU loads on a CPU and the other way round."""
    state, restored = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, device: restored.append((value, device)))
    model, gpu, cpu = torch.nn.Linear(2, 2), torch.device("cuda", 0), torch.device("cpu")
    with start_session() as session:
        for saved_on in (gpu, cpu):
            session.device = saved_on
            checkpoint.save(tmp_path / saved_on.type, model=model)
            for loaded_on in (gpu, cpu):
                session.device = loaded_on
                checkpoint.load(tmp_path / saved_on.type, model=model)
    ((value, device),) = restored
    assert torch.equal(value, state)
    assert device == gpu
