"""Words of the command line become values, and records become commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner, Result

from dglx_dist.cli.common import by_name, fractions, literals, names, pairs, tolerances, whole_numbers
from dglx_dist.cli.options import (
    at_least,
    check_ranges,
    command,
    common_fields,
    flag_of,
    one_of,
    option,
    path_option,
)
from dglx_dist.cli.plan_config import PlanConfig
from dglx_dist.cli.train_config import TrainConfig
from dglx_dist.errors import ConfigError
from dglx_dist.planner.choose import FULL_GRAPH_EPOCHS
from dglx_dist.planner.workload import DRY_BATCHES


def test_names_are_split_at_commas() -> None:
    assert (names("train, degree"), names("")) == (("train", "degree"), ())


def test_fan_outs() -> None:
    assert whole_numbers("25,10", "--fanout") == (25, 10)
    assert whole_numbers("-1", "--fanout") == (-1,)


@pytest.mark.parametrize("text", ["", "a,b", "2.5", "-2"])
def test_a_wrong_fan_out_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--fanout"):
        whole_numbers(text, "--fanout")


def test_shares() -> None:
    assert fractions("1,1,2.5", "--target-weights") == (1.0, 1.0, 2.5)
    with pytest.raises(ConfigError, match="--target-weights 'x'"):
        fractions("x", "--target-weights")


def test_tolerance_for_all_or_for_each() -> None:
    assert tolerances("0.1", "--tolerance") == 0.1
    assert tolerances("train=0.1,degree=0.02", "--tolerance") == {"train": 0.1, "degree": 0.02}
    assert tolerances("", "--tolerance") == {}


@pytest.mark.parametrize("text", ["a lot", "train=x", "0.1,degree=2"])
def test_a_wrong_tolerance_shows_right_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        tolerances(text, "--tolerance")


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
    assert by_name("float16", "--feature-dtype") == "float16"
    assert by_name("feat=float16, x=bfloat16", "--feature-dtype") == {"feat": "float16", "x": "bfloat16"}
    with pytest.raises(ConfigError, match="--feature-dtype 'float16' must be NAME=VALUE"):
        by_name("feat=float16,float16", "--feature-dtype")


@dataclass(frozen=True, kw_only=True)
class Cake:
    place: str = path_option(..., "Where.", metavar="DIR")
    num_layers: int = option(2, "How high.", check=at_least(1))
    sizes: tuple[int, ...] | None = option(None, "How wide.", flag="--widths", parse=whole_numbers)
    kind: str = option("round", "Shape.", panel="Form", check=one_of("round", "square", "long"))
    filling: Literal["jam", "cream"] = option("jam", "Inside.")
    extras: Mapping[str, object] = option(dict, "More.", flag="--extra", kind=list[str], parse=literals)
    photo: str | None = path_option(None, "A picture.", metavar="FILE")
    iced: bool = option(False, "With icing.")

    def __post_init__(self) -> None:
        check_ranges(self)


def bake(*arguments: str) -> Result:
    @command(Cake)
    def cake(config: Cake, given: Set[str]) -> None:
        """Bake one."""
        print(json.dumps([asdict(config), sorted(given)]))

    app = typer.Typer()
    app.command()(cake)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def test_a_record_is_a_command() -> None:
    plain = {
        "place": "here", "num_layers": 2, "sizes": None, "kind": "round", "filling": "jam", "extras": {},
        "photo": None, "iced": False,
    }  # fmt: skip
    assert json.loads(bake("here/").output) == [plain, ["place"]]
    words = ("--num-layers", "3", "--widths", "5,-1", "--extra", "a=1", "--extra", "b=x", "--iced")
    asked = {"num_layers": 3, "sizes": [5, -1], "extras": {"a": 1, "b": "x"}, "iced": True}
    assert json.loads(bake("here", *words).output) == [plain | asked, sorted([*asked, "place"])]


def test_its_help_has_every_option_with_default_and_heading() -> None:
    shown = bake("--help").output
    for part in ("Bake one.", "--widths", "[default: 2]", "Form", "--iced", "FILE", "How wide."):
        assert part in shown
    assert "--no-iced" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num-layers", "0"), "--num-layers 0 must be at least 1"),
        (("--kind", "flat"), "--kind flat must be round, square or long"),
        (("--filling", "sand"), "--filling sand must be jam or cream"),
        (("--widths", "a"), "--widths 'a' must be whole numbers"),
    ],
)
def test_a_value_out_of_range_names_its_option(words: tuple[str, str], said: str) -> None:
    refused = bake("here", *words).exception
    assert isinstance(refused, ConfigError)
    assert said in str(refused)


def test_a_record_is_made_from_another_by_name() -> None:
    @dataclass
    class Box:
        photo: str | None
        ribbon: bool = True

    assert common_fields(Cake(place="d", photo="p"), Box) == {"photo": "p"}
    assert flag_of(Cake, "sizes") == "--widths"


@pytest.mark.parametrize("config", [TrainConfig, PlanConfig])
def test_no_two_options_of_a_command_have_the_same_flag(config: Any) -> None:
    flags = [flag_of(config, one.name) for one in fields(config) if one.metadata]
    assert len(flags) == len(set(flags))


def test_defaults_are_those_of_the_planner() -> None:
    plan = PlanConfig(data="d")
    assert (plan.dry_batches, plan.full_graph_epochs) == (DRY_BATCHES, FULL_GRAPH_EPOCHS)
