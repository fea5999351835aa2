"""Words of the command line become values, and records become commands."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner, Result

from dglx_dist import options
from dglx_dist.cli.common import command
from dglx_dist.errors import ConfigError
from dglx_dist.options import at_least, option, parse_integers, parse_literals, path_option
from dglx_dist.planner.config import PlanConfig
from dglx_dist.training.config import TrainConfig


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (options.parse_names, "train, degree", ("train", "degree")),
        (options.parse_names, "", ()),
        (parse_integers, "25,10", (25, 10)),
        (parse_integers, "-1", (-1,)),
        (options.parse_fractions, "1,1,2.5", (1.0, 1.0, 2.5)),
        (options.parse_tolerances, "0.1", 0.1),
        (options.parse_tolerances, "train=0.1,degree=0.02", {"train": 0.1, "degree": 0.02}),
        (options.parse_tolerances, "", {}),
        (options.parse_by_name, "float16", "float16"),
        (options.parse_by_name, "feat=float16, x=bfloat16", {"feat": "float16", "x": "bfloat16"}),
        (parse_literals, ["a=1", "b=0.5", "c=true", "d=x=y"], {"a": 1, "b": 0.5, "c": True, "d": "x=y"}),
    ],
)
def test_words_become_values(read: Callable[[Any, str], object], text: Any, value: object) -> None:
    assert read(text, "--flag") == value


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        *[(parse_integers, text, "--flag '.*' must be") for text in ("", "a,b", "2.5", "-2")],
        (partial(parse_integers, like="0,1,2"), "0-2", "commas, like 0,1,2$"),
        (options.parse_fractions, "x", "--flag 'x'"),
        *[
            (options.parse_tolerances, text, "--flag '.*' must be")
            for text in ("a lot", "train=x", "0.1,degree=2")
        ],
        (options.parse_pairs, ["depth"], "--flag 'depth' must be NAME=VALUE"),
        (options.parse_by_name, "feat=float16,float16", "--flag 'float16' must be NAME=VALUE"),
    ],
)
def test_wrong_words_name_the_option(read: Callable[[Any, str], object], text: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(text, "--flag")


@dataclass(frozen=True, kw_only=True)
class Cake:
    place: str = path_option(..., "Where.", metavar="DIR")
    num_layers: int = option(2, "How high.", check=at_least(1))
    sizes: tuple[int, ...] | None = option(None, "How wide.", flag="--widths", parse=parse_integers)
    kind: str = option("round", "Shape.", panel="Form", check=options.one_of("round", "square", "long"))
    filling: Literal["jam", "cream"] = option("jam", "Inside.")
    extras: Mapping[str, object] = option(dict, "More.", flag="--extra", kind=list[str], parse=parse_literals)
    photo: str | None = path_option(None, "A picture.", metavar="FILE")
    iced: bool = option(False, "With icing.")
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        options.check_ranges(self)


def bake(*arguments: str) -> Result:
    @command(Cake)
    def cake(config: Cake) -> None:
        """Bake one."""
        print(json.dumps([asdict(replace(config, given=frozenset())), sorted(config.given)], default=list))

    app = typer.Typer()
    app.command()(cake)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def test_a_record_is_a_command() -> None:
    plain = {
        "place": "here", "num_layers": 2, "sizes": None, "kind": "round", "filling": "jam", "extras": {},
        "photo": None, "iced": False, "given": [],
    }  # fmt: skip
    assert json.loads(bake("here/").output) == [plain, ["place"]]
    words = ("--num-layers", "3", "--widths", "5,-1", "--extra", "a=1", "--extra", "b=x", "--iced")
    request = {"num_layers": 3, "sizes": [5, -1], "extras": {"a": 1, "b": "x"}, "iced": True}
    assert json.loads(bake("here", *words).output) == [plain | request, sorted([*request, "place"])]


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


@pytest.mark.parametrize("config", [TrainConfig, PlanConfig])
def test_no_two_options_of_a_command_have_the_same_flag(config: Any) -> None:
    flags = [options.find_flag(config, field.name) for field in fields(config) if field.metadata]
    assert len(flags) == len(set(flags))
