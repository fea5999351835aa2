"""Each convolution that is split has the names and values of DGL's: in states, uncut, and in checkpoints."""

from __future__ import annotations

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
from tests.layers.test_convolutions import BY_ROWS, CONVS
from tests.strategies import equality

MAKE: dict[str, Any] = {name: make for name, (make, _) in (CONVS | BY_ROWS).items()}
MAKE["sgc"] = lambda width: dgl.nn.SGConv(width, 5)


class Net(nn.Module):
    """What a seed draws, buffers included."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = MAKE[name](equality.WIDTH)
        self.load_state_dict({key: value + torch.rand(()) for key, value in self.state_dict().items()})


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names that only one has, or whose values differ."""
    both = found.keys() & wanted.keys()
    return sorted(found.keys() ^ wanted.keys()) + [
        name for name in both if not torch.equal(found[name], wanted[name])
    ]


def there_and_back(g: DistGraph, name: str, folder: Path) -> list[list[str]]:
    """Differences to the state that data_parallel saved: of push_pull's, of its uncut model's, back again."""

    def wrapped(strategy: str, seed: int) -> Any:
        options = {"sync": "inputs"} if name in BY_ROWS and strategy == "push_pull" else {}
        return STRATEGIES.get(strategy)(g.session, options).wrap(Net(name, seed), g)

    wanted = Net(name, 1).state_dict()
    checkpoint.save(folder / "rows", model=wrapped("data_parallel", 1))
    cut, back = wrapped("push_pull", 2), wrapped("data_parallel", 3)
    checkpoint.load(folder / "rows", model=cut)
    checkpoint.save(folder / "columns", model=cut)
    checkpoint.load(folder / "columns", model=back)
    return [differences(one.state_dict(), wanted) for one in (cut, cut.whole(), back)]


def on_rank(parts: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with start_session(timeout_s=60):
        g = DistGraph(parts)
        for name in MAKE:
            try:
                found[name] = there_and_back(g, name, Path(folder, name))
            except Exception as error:  # of this convolution; others are tested all the same
                found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("convolutions")
    return run_ranks(on_rank, 2, args=(str(equality.write_parts(folder)), str(folder / "saved")))


@pytest.mark.parametrize("name", MAKE)
def test_a_split_convolution_has_the_state_of_dgls(name: str, found: list[dict[str, Any]]) -> None:
    assert [rank[name] for rank in found] == [[[], [], []]] * 2
