import numpy as np
import pytest

from dglx_dist.dataloading.kernels import Table, Workspace, check_seeds
from dglx_dist.dataloading.sampler import WholeSource
from dglx_dist.errors import ConfigError
from tests.dataloading.graphs import random_csc, request_for

CSC = random_csc(300, 5)


@pytest.mark.parametrize("direct_limit", [0, 300])
def test_a_used_workspace_samples_what_a_new_one_samples(direct_limit: int) -> None:
    used = Workspace(300, direct_limit=direct_limit)
    for epoch in range(20):
        request = request_for(np.arange(epoch, 300, 17), [4, 4], epoch=epoch)
        again = WholeSource(CSC).sample(request, used)
        fresh = WholeSource(CSC).sample(request, Workspace(300))
        assert again.nodes.tolist() == fresh.nodes.tolist()
        assert again.sources.tolist() == fresh.sources.tolist()


@pytest.mark.parametrize("direct_limit", [0, 300])
def test_numbers_that_would_overflow_start_again(direct_limit: int) -> None:
    workspace = Workspace(300, direct_limit=direct_limit)
    request = request_for([1, 2, 3], [4])
    expected = WholeSource(CSC).sample(request, workspace)
    workspace.keep(workspace.table._replace(base=(1 << 31) - 2))
    for _ in range(3):
        assert WholeSource(CSC).sample(request, workspace).sources.tolist() == expected.sources.tolist()
    assert workspace.table.base < 1000


def test_a_refused_batch_leaves_no_trace() -> None:
    workspace = Workspace(300)
    with pytest.raises(ConfigError, match="node 7 more than once"):
        WholeSource(CSC).sample(request_for([7, 5, 7], [4]), workspace)
    request = request_for([5, 6, 7], [4])
    fresh = WholeSource(CSC).sample(request, Workspace(300))
    assert WholeSource(CSC).sample(request, workspace).nodes.tolist() == fresh.nodes.tolist()


def test_memory_is_bounded_on_huge_graphs() -> None:
    assert Workspace(10**12).table.slots.nbytes < 1 << 20


def test_distinct_seeds_pass() -> None:
    check_seeds(np.array([4, 2]), 2)


def test_tables_start_with_nothing_known() -> None:
    table: Table = Workspace(10).table
    assert table.base > table.slots.max()
