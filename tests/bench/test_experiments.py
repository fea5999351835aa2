"""Tables of experiments: what each says, what it builds, and what is predicted."""

import re
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.planner.records import Rate
from scripts.bench import suites
from scripts.bench.experiments import data_parallel, fewer_bytes
from scripts.bench.notes import read_notes
from scripts.bench.records import BenchPlan, MatchedPhi
from scripts.bench.simulate import ComputeCost, Line
from tests.bench.helpers import experiment_of, jobs_of, plan_of, survey

COST = ComputeCost(forward=Line(base_s=0.0, per_edge_s=1e-6), backward=Line(base_s=0.0, per_edge_s=1e-6))


@pytest.mark.wide
def test_d1_predicts_from_counted_bytes_and_measures_both_at_the_rate_that_suits_random(
    bench: BenchPlan,
) -> None:
    size = data_parallel.Size(nodes=1200, degree=8, hidden=8, batch_size=8)
    small_d1 = data_parallel.partition(bench, size)
    jobs_of("D1", small_d1)
    by_name = {ratio.name: ratio for ratio in small_d1.ratios}
    bytes_of = small_d1.facts["payload bytes of an epoch"]
    assert by_name["bytes, random / metis"].predicted == pytest.approx(bytes_of["random"] / bytes_of["metis"])
    assert small_d1.facts["predicted at phi 0.65, all overlapped"] == pytest.approx(
        min(1 / 0.35, bytes_of["random"] / bytes_of["metis"]), abs=0.006
    )
    matched = by_name["random / metis at phi 0.65"]
    assert matched.low == 1.5
    assert matched.predicted == pytest.approx(1 / (0.35 + 0.65 * bytes_of["metis"] / bytes_of["random"]))
    share = small_d1.facts["remote share of input rows"]
    assert share["metis"] < share["random"] == pytest.approx(0.75, abs=0.03)
    rates = {variant.name: variant.rate for variant in small_d1.variants}
    assert rates["random"] == rates["metis"] == MatchedPhi(phi=0.65, baseline="random")
    assert rates["random, 1gbit"] == rates["metis, 1gbit"] == Rate.parse("1gbit")
    assert {variant.name for variant in small_d1.variants if variant.curve} == {"random", "metis"}


@pytest.mark.wide
def test_d2_is_uneven_without_constraints(bench: BenchPlan) -> None:
    plan = data_parallel.balance(
        bench, data_parallel.Size(nodes=4000, degree=8, train_rate=0.02, hidden=8, batch_size=8)
    )
    jobs_of("D2", plan)
    seeds = plan.facts["max / mean seeds of a server"]
    assert seeds["metis"] > 1.7
    assert seeds["metis + constraints"] < 1.2
    assert seeds["metis, even shares"] == 1.0
    assert plan.ratios[0].predicted == pytest.approx(seeds["metis"] / seeds["metis + constraints"], rel=0.01)


@pytest.mark.wide
def test_d3_gives_every_server_the_same(bench: BenchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "measure_compute_cost", lambda _: COST)
    size = data_parallel.Size(nodes=4000, degree=8, train_rate=0.08, hidden=8, batch_size=8, steps=8)
    plan = data_parallel.scaling(bench, size)
    jobs_of("D3", plan)
    assert set(plan.facts["steps of an epoch"].values()) == {8}
    edges = plan.facts["edges of a batch"].values()
    # Of work that differs no scaling can be told: one server's larger batches would make it above linear.
    assert max(edges) < 1.1 * min(edges)
    assert [variant.shape.servers for variant in plan.variants] == [1, 2, 4]
    assert len({variant.shape.cpus for variant in plan.variants}) == 1
    assert all("slept" in variant.simulated for variant in plan.variants)
    assert [ratio.quantity for ratio in plan.ratios] == ["samples_per_second"] * 2
    for count, ratio in zip((2, 4), plan.ratios, strict=True):
        assert 0 < ratio.predicted <= count


@pytest.mark.wide
def test_b1_compares_policies_at_equal_memory_and_b2_ways_of_one_graph(bench: BenchPlan) -> None:
    size = fewer_bytes.Size(nodes=3000, full_graph_nodes=2500, batch_size=8)
    plan = fewer_bytes.caches(bench, size)
    jobs_of("B1", plan)
    by_name = {variant.name: variant for variant in plan.variants}
    for label, places in (("alpha", fewer_bytes.ALPHAS), ("rate", (300, 1000, 10_000))):
        lines = [line for line in plan.lines if line.what == label]
        assert [tuple(place for place, _ in line.points) for line in lines] == [places] * len(lines)
    params = {name: by_name[name].job.params for name in by_name}
    assert [params[name]["alpha"] for name in ("vip 0.05", "lookahead 0.2")] == [0.05, 0.2]
    assert "cache" not in params["no cache"]
    assert by_name["lookahead 0.1, 300mbit"].rate == Rate.parse("300mbit")
    assert by_name["vip 0.1, 4 servers at random"].shape.servers == 4
    full = fewer_bytes.whole_graphs(bench, size)
    jobs_of("B2", full)
    assert {variant.rate for variant in full.variants} == {MatchedPhi(phi=0.8, baseline="sources, random")}


def test_weak_scaling_by_hand() -> None:
    rate = Rate.parse("8mbit")  # a megabyte per second
    # Two servers, ten steps: 0.1 MB of pulls per step and server hide behind 0.2 s of compute.
    assert data_parallel.weak_scaling(0.2, survey(feature_bytes=2_000_000), rate) == pytest.approx(2.0)
    # 0.4 s of them do not.
    assert data_parallel.weak_scaling(0.2, survey(feature_bytes=8_000_000), rate) == pytest.approx(1.0)
    # Gradients always come on top: 0.2 s of them.
    assert data_parallel.weak_scaling(0.2, survey(gradient_bytes=4_000_000), rate) == pytest.approx(1.0)


def test_the_experiment_of_the_docs_can_be_copied(bench: BenchPlan, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "development" / "bench.md").read_text()
    (code,) = re.findall(r"```python\n(\"\"\".*?)```", page, flags=re.DOTALL)
    results: dict[str, Any] = {}
    exec(compile(code, "x1.py", "exec"), results)
    jobs_of("X1", results["BUILDS"]["X1"](bench))
    (section,) = re.findall(r"```\n## X1\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "notes.md").write_text(f"## X1\n{section}")
    message = read_notes(tmp_path / "notes.md").experiments["X1"]
    experiment = suites.experiment_of("X1", message, results["BUILDS"]["X1"])
    assert suites.why_absent(experiment) == ""
    assert (experiment.suites, experiment.title) == (("papers",), "a larger fan-out")


PLAN = plan_of("a", "b")


def test_every_experiment_has_one_id_a_suite_and_what_is_claimed_and_predicted() -> None:
    everything = suites.everything()
    assert [suites.find(experiment.id.lower()) for experiment in everything] == everything
    for experiment in everything:
        assert experiment.suites
        assert experiment.build is not None
        for text in (
            experiment.title,
            experiment.claim.paper,
            experiment.claim.says,
            experiment.claim.setting,
            experiment.prediction,
        ):
            assert text.strip()
    assert {"D1", "D2", "D3"} <= {experiment.id for experiment in suites.suite("quick")}


def test_an_experiment_is_absent_without_its_strategies_its_modules_or_its_code() -> None:
    assert suites.why_absent(experiment_of(PLAN)) == ""
    assert suites.why_absent(experiment_of(PLAN, needs=("no_such_module|json",))) == ""
    lacking = experiment_of(PLAN, strategies=("data_parallel", "never_written"))
    assert suites.why_absent(lacking) == "this release has no strategy never_written"
    missing = suites.why_absent(experiment_of(PLAN, needs=("json", "no_such_module|nor_this")))
    assert missing == "not installed here: no_such_module or nor_this"
    assert "not written" in suites.why_absent(experiment_of(None))
