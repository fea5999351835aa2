import numpy as np
import pytest

from dglx_dist.dataloading.kernels import Workspace
from dglx_dist.dataloading.sampler import WholeSource
from dglx_dist.errors import ConfigError
from tests.dataloading.graphs import random_csc, request_for

SOURCE = WholeSource(random_csc(100, 5))
ROWS = np.arange(100, dtype=np.uint32).reshape(100, 1)


def test_slicing_samples_what_sampling_samples() -> None:
    request = request_for([1, 0, 50], [3, 4])
    plain = SOURCE.sample(request, Workspace(100))
    sliced, out = SOURCE.sample_and_slice(request, Workspace(100), ROWS, np.empty((0, 1), np.uint32))
    for one, other in zip(plain, sliced, strict=True):
        assert one.tolist() == other.tolist()
    assert out[: len(plain.nodes), 0].tolist() == plain.nodes.tolist()


def test_repeated_seeds_are_refused_with_the_first() -> None:
    with pytest.raises(ConfigError, match=r"node 4 more than once \(3 seeds, 2 distinct\)"):
        SOURCE.sample_and_slice(request_for([4, 9, 4], [2]), Workspace(100), ROWS, ROWS[:0])
