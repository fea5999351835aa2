"""Each convolution that is split has the names and values of DGL's: in states, uncut, and in checkpoints."""

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training import checkpoint
from tests.helpers.ranks import run_ranks
from tests.layers.test_convolutions import CONVS
from tests.strategies import equality

MAKE = {**CONVS, "sgc": lambda width: dgl.nn.SGConv(width, 5)}


def first_of(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(MAKE[name](equality.WIDTH))
    net.load_state_dict({key: value + torch.rand(()) for key, value in net.state_dict().items()})
    return net


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    same = {name for name in left.keys() & right.keys() if torch.equal(left[name], right[name])}
    return sorted((left.keys() | right.keys()) - same)


def there_and_back(g: DistGraph, name: str, folder: Path) -> list[list[str]]:
    """Save rows, load them cut, save the cut model, load it uncut; return what differs from the first."""

    def wrap(strategy: str, seed: int) -> Any:
        return STRATEGIES.get(strategy)(g.session, {}).open(g).wrap(first_of(name, seed))

    expected = first_of(name, 1).state_dict()
    checkpoint.save(folder / "rows", model=wrap("data_parallel", 1))
    cut, back = wrap("push_pull", 2), wrap("data_parallel", 3)
    checkpoint.load(folder / "rows", model=cut)
    checkpoint.save(folder / "columns", model=cut)
    checkpoint.load(folder / "columns", model=back)
    plain = first_of(name, 4)
    plain.load_state_dict(cut.state_dict())
    return [differences(module.state_dict(), expected) for module in (cut, cut.whole(), back, plain)]


def on_rank(parts: str, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with start_session(timeout_s=60):
        g = DistGraph(parts)
        for name in MAKE:
            try:
                results[name] = there_and_back(g, name, Path(folder, name))
            except Exception as error:  # of this convolution; others are tested all the same
                results[name] = f"{type(error).__name__}: {error}"
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("convolutions")
    return run_ranks(on_rank, 2, args=(str(equality.write_parts(folder)), str(folder / "saved")))


@pytest.mark.parametrize("name", MAKE)
def test_a_split_convolution_has_the_state_of_dgls(name: str, results: list[dict[str, Any]]) -> None:
    assert [rank[name] for rank in results] == [[[]] * 4] * 2
