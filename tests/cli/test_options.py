import pytest

from dglx_dist.cli.common import by_name, fractions, literals, names, pairs, tolerances, whole_numbers
from dglx_dist.errors import ConfigError


def test_names_are_split_at_commas() -> None:
    assert (names("train, degree"), names(None), names("")) == (("train", "degree"), (), ())


def test_fan_outs() -> None:
    assert whole_numbers("25,10", "--fanout") == (25, 10)
    assert whole_numbers("-1", "--fanout") == (-1,)


@pytest.mark.parametrize("text", ["", "a,b", "2.5", "-2"])
def test_a_wrong_fan_out_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--fanout"):
        whole_numbers(text, "--fanout")


def test_shares() -> None:
    assert fractions("1,1,2.5", "--target-weights") == (1.0, 1.0, 2.5)
    assert fractions(None, "--target-weights") is None
    with pytest.raises(ConfigError, match="--target-weights 'x'"):
        fractions("x", "--target-weights")


def test_tolerance_for_all_or_for_each() -> None:
    assert tolerances("0.1") == 0.1
    assert tolerances("train=0.1,degree=0.02") == {"train": 0.1, "degree": 0.02}
    assert tolerances(None) == {}


@pytest.mark.parametrize("text", ["a lot", "train=x", "0.1,degree=2"])
def test_a_wrong_tolerance_shows_right_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        tolerances(text)


def test_values_become_what_they_look_like() -> None:
    assert literals(["a=1", "b=0.5", "c=true", "d=x=y"], "--option") == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": "x=y",
    }


def test_a_word_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="--option 'depth' must be NAME=VALUE"):
        pairs(["depth"], "--option")


def test_one_value_for_all_or_one_by_name() -> None:
    assert by_name(None, "--feature-dtype") is None
    assert by_name("float16", "--feature-dtype") == "float16"
    assert by_name("feat=float16, x=bfloat16", "--feature-dtype") == {"feat": "float16", "x": "bfloat16"}
    with pytest.raises(ConfigError, match="--feature-dtype 'float16' must be NAME=VALUE"):
        by_name("feat=float16,float16", "--feature-dtype")
