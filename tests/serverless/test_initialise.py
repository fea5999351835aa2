"""First weights: spread as torch's, equal wherever they are drawn."""

import math

import numpy as np
import pytest
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.parameter_server import Scheme, initialise

F64 = np.dtype(np.float64)
TORCH = {
    "xavier_uniform": torch.nn.init.xavier_uniform_,
    "xavier_normal": torch.nn.init.xavier_normal_,
    "he_uniform": lambda weight: torch.nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    "he_normal": lambda weight: torch.nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}


@pytest.mark.parametrize("scheme", TORCH)
@pytest.mark.parametrize("shape", [(300, 100), (1, 8, 3000)], ids=str)
def test_the_spread_is_torchs(scheme: Scheme, shape: tuple[int, ...]) -> None:
    ours = initialise({"w": shape}, scheme, 0, F64)["w"]
    theirs = TORCH[scheme](torch.empty(shape, dtype=torch.float64)).numpy()
    assert abs(ours.std() / theirs.std() - 1) < 0.03
    assert abs(ours.mean()) < 5 * ours.std() / math.sqrt(ours.size)
    if scheme.endswith("uniform"):
        assert abs(np.abs(ours).max() / np.abs(theirs).max() - 1) < 0.001


def test_a_weight_depends_on_name_shape_and_seed_alone() -> None:
    shapes = {"a": (3, 4), "b": (3, 4), "bias": (4,), "number": ()}
    first = initialise(shapes, "xavier_uniform", 1, F64)
    again = initialise(dict(reversed(shapes.items())), "xavier_uniform", 1, F64)
    for name in shapes:
        np.testing.assert_array_equal(first[name], again[name])
    assert (first["a"] != first["b"]).all()
    assert (first["a"] != initialise(shapes, "xavier_uniform", 2, F64)["a"]).all()
    assert not first["bias"].any()
    assert first["number"] == 0
    narrow = initialise(shapes, "xavier_uniform", 1, np.dtype(np.float32))["a"]
    np.testing.assert_array_equal(narrow, first["a"].astype(np.float32))


def test_inputs_may_come_first() -> None:
    plain = initialise({"w": (400, 100)}, "he_normal", 0, F64)["w"]
    swapped = initialise({"w": (400, 100)}, "he_normal", 0, F64, inputs_first=["w"])["w"]
    np.testing.assert_allclose(plain, 2 * swapped)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'xavier_normal'"):
        initialise({}, "xavier_norm", 0, F64)  # type: ignore[arg-type]
