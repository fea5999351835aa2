"""The updates of the parameter servers beside torch's own optimizers, bit for bit."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.records import Array
from dglx_dist.serverless.parameter_updates import Update, fused_multiply_add, make_update

# More than one block and more than one vector, with a tail; a matrix; one element; a number; nothing.
SHAPES = {"wide": (91, 103), "row": (1, 7), "one": (1,), "number": (), "none": (0, 3)}
TORCH = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.013}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
    ("SGD", {"lr": 0.1, "momentum": 0.7, "dampening": 0.3, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": (0.3, 0.99), "eps": 1e-7, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.02}),
]


def torch_root(values: Array) -> Array:
    return torch.from_numpy(np.ascontiguousarray(values)).sqrt().numpy()


def bits(values: Array) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def start(dtype: str, seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


class Pair:
    """The same weights under one of torch's optimizers and under ours."""

    def __init__(self, kind: str, settings: dict[str, Any], dtype: str) -> None:
        self.torch_weights = {name: torch.tensor(value) for name, value in start(dtype).items()}
        self.theirs = TORCH[kind](list(self.torch_weights.values()), **settings)
        groups = [{**settings, "params": list(SHAPES)}]
        self.ours = make_update(kind, groups, list(SHAPES), root=torch_root)
        self.weights: Sequence[Array] = tuple(start(dtype).values())

    def step(self, gradients: Mapping[str, Array]) -> None:
        for name, gradient in gradients.items():
            self.torch_weights[name].grad = torch.tensor(gradient)
        self.theirs.step()
        self.weights = self.ours.apply(self.weights, tuple(gradients.values()))

    def check(self) -> None:
        for name, ours in zip(SHAPES, self.weights, strict=True):
            assert bits(ours) == bits(self.torch_weights[name].numpy()), name
            assert ours.dtype == self.torch_weights[name].numpy().dtype


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch does not fuse here")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
def test_twenty_steps_are_torchs_to_the_last_bit(kind: str, settings: dict[str, Any], dtype: str) -> None:
    pair = Pair(kind, settings, dtype)
    for step in range(20):
        scale = 10.0 ** (step % 7 - 5)
        pair.step({name: (value * scale).astype(dtype) for name, value in start(dtype, step + 1).items()})
        pair.check()
    state = pair.theirs.state_dict()["state"]
    for position, name in enumerate(SHAPES):
        for key, value in state.get(position, {}).items():
            if value is not None:
                ours = pair.ours.state[f"{name}/{key}"]
                assert bits(ours) == bits(value.numpy()), (name, key)
                assert ours.shape == tuple(value.shape)


def test_with_numpys_root_adam_is_torchs_but_for_the_last_bits() -> None:
    groups = [{"lr": 0.01, "params": ["w"]}]
    ours, theirs = make_update("Adam", groups, ["w"]), make_update("Adam", groups, ["w"], root=torch_root)
    first = second = (np.linspace(-1, 1, 1001),)
    for step in range(20):
        gradient = (np.random.default_rng(step).standard_normal(1001),)
        first, second = ours.apply(first, gradient), theirs.apply(second, gradient)
    np.testing.assert_allclose(first[0], second[0], rtol=1e-13)


def split(settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**settings, "lr": 0.01, "params": ["a"]}, {**settings, "lr": 0.0, "params": ["b"]}]


@pytest.mark.parametrize(
    ("kind", "settings"), [("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True})], ids=str
)
def test_a_state_goes_on_where_it_was_left(kind: str, settings: dict[str, Any]) -> None:
    def steps(update: Update, weights: Sequence[Array], numbers: range) -> Sequence[Array]:
        for number in numbers:
            weights = update.apply(weights, tuple(np.full(2, float(number + 1)) for _ in range(2)))
        return weights

    first = make_update(kind, split(settings), ["a", "b"])
    whole = steps(first, (np.ones(2), np.ones(2)), range(4))
    early = make_update(kind, split(settings), ["a", "b"])
    half = steps(early, (np.ones(2), np.ones(2)), range(2))
    late = make_update(kind, split(settings), ["a", "b"], early.state)
    again = steps(late, half, range(2, 4))
    assert [bits(one) for one in again] == [bits(one) for one in whole]
    assert {key: bits(one) for key, one in late.state.items()} == {
        key: bits(one) for key, one in first.state.items()
    }
    # A group of its own has its own learning rate, and 0 means that the weight stays.
    assert bits(whole[1]) == bits(np.ones(2))
    assert bits(whole[0]) != bits(np.ones(2))


def test_a_weight_that_the_optimizer_lacks_stays() -> None:
    update = make_update("Adam", [{"lr": 1.0, "params": ["b"]}], ["a", "b"])
    a, b = update.apply((np.ones(2), np.ones(2)), (np.ones(2), np.ones(2)))
    assert bits(a) == bits(np.ones(2)) != bits(b)
    assert not [key for key in update.state if key.startswith("a/")]
    assert not b.flags.writeable


@pytest.mark.parametrize(
    ("kind", "group", "says"),
    [
        ("RMSprop", {"lr": 0.1}, "no optimizer 'RMSprop'"),
        ("SGD", {"lr": 0.1, "momentun": 0.9}, "did you mean 'momentum'"),
        ("SGD", {"lr": -0.1}, "lr=-0.1"),
        ("SGD", {"lr": torch.tensor(0.1)}, "plain number"),
        ("SGD", {"lr": 0.1, "nesterov": True}, "nesterov"),
        ("SGD", {"lr": 0.1, "differentiable": True}, "differentiable"),
        ("Adam", {"lr": 0.1, "betas": (0.9, 1.0)}, "betas"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(kind: str, group: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_update(kind, [{**group, "params": ["a"]}], ["a"])


def test_groups_and_states_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="'b'"):
        make_update("SGD", [{"lr": 0.1, "params": ["b"]}], ["a"])
    with pytest.raises(ConfigError, match="two parameter groups"):
        make_update("SGD", [{"lr": 0.1, "params": ["a", "a"]}], ["a"])
    for path in ("b/exp_avg", "a/momentum_buffer"):
        with pytest.raises(CheckpointError, match=path):
            make_update("Adam", [{"lr": 0.1, "params": ["a"]}], ["a"], {path: np.zeros(1)})


def nearest(value: Fraction, dtype: type[np.floating[Any]]) -> float:
    """``value`` rounded once, to even where two are as near."""
    guess = dtype(float(value))
    around = [np.nextafter(guess, dtype(-np.inf)), guess, np.nextafter(guess, dtype(np.inf))]
    return min(
        around, key=lambda one: (abs(Fraction(float(one)) - value), int(one.view(f"i{one.itemsize}")) & 1)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_rounding(dtype: type[np.floating[Any]]) -> None:
    draw = np.random.default_rng(3)
    digits = np.finfo(dtype).nmant
    small = [(1 + k * 2.0**-digits) * sign for k in (0, 1, 2, 3) for sign in (1, -1)]
    # Few-bit numbers make ties and near ties, where rounding twice goes wrong.
    a = np.concatenate([draw.choice(small, 400), draw.standard_normal(400)]).astype(dtype)
    b = np.concatenate([draw.choice(small, 400), draw.standard_normal(400)]).astype(dtype)
    far = 2.0 ** draw.integers(-digits - 2, digits + 2, 400)
    c = np.concatenate([draw.choice(small, 400) * far, -a[400:] * b[400:]]).astype(dtype)
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)
    ]
    found = fused_multiply_add(a, b, c)
    assert [float(one) for one in found] == [float(nearest(one, dtype)) for one in exact]
    assert (found != a * b + c).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_or_zero_is_as_in_ieee(dtype: type[np.floating[Any]]) -> None:
    big = np.finfo(dtype).max
    a = np.array([big, np.inf, np.nan, -1.0, 1.0, big / 2], dtype)
    b = np.array([2.0, 1.0, 1.0, 0.0, 0.0, 1.0], dtype)
    c = np.array([0.0, -np.inf, 0.0, -0.0, -0.0, 1.0], dtype)
    found = fused_multiply_add(a, b, c)
    assert np.isinf(found[0])
    assert np.isnan(found[1:3]).all()
    assert found[3:5].tolist() == [0, 0]
    assert np.signbit(found[3:5]).tolist() == [True, False]
    assert found[5] == big / 2
