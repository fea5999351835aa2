"""Predictions and choices on records made by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest

from dglx_dist.options import parse_literals
from dglx_dist.planner.choose import choose, enumerate_candidates, list_works, predict
from dglx_dist.planner.costs.base import COSTS, CacheHits, Traffic, ring_split
from dglx_dist.planner.costs.full_graph import FullGraphScheme
from dglx_dist.planner.records import ChoiceOptions, Prediction, Trial
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from tests.planner import hand_made
from tests.planner.hand_made import CLUSTER, SHAPE, make_counts, shape_of_kind

ROWS = Candidate(strategy="data_parallel", unit="mini_batch")
COLUMNS = Candidate(strategy="push_pull", unit="mini_batch", options={"structure": "push"})
LATE = replace(COLUMNS, options={"structure": "push", "depth": 3}, exact=False)
WHOLE = Candidate(strategy="full_graph", unit="full_graph")
PRELOADED = Candidate(strategy="shared_preload", unit="full_graph")
WORKERS = Candidate(strategy="lambda", unit="full_graph")


PROGRAM, STRUCTURE, OWN_FEATURES = 10**8, hand_made.GRAPH.structure_bytes, 500 * 400


@pytest.mark.parametrize(
    ("candidate", "mapped"),
    [
        (ROWS, PROGRAM + STRUCTURE + OWN_FEATURES),
        (COLUMNS, PROGRAM + STRUCTURE + OWN_FEATURES + 1000 * 400 // 2),
        (WHOLE, PROGRAM + OWN_FEATURES),
    ],
)
def test_memory_of_gpus_is_a_limit_of_its_own(candidate: Candidate, mapped: int) -> None:
    """On the GPU is what is not the program, the features, the columns or the structure as it is mapped."""
    full = predict(candidate, make_counts())
    on_gpu = full.memory_bytes - mapped
    for host, gpu, message in (
        (0, 1, ""),
        (-1, 1, "GB a rank, but there are 0"),
        (0, 0, "GB a rank on its GPU, but there are 0.0"),
    ):
        limits = {"memory_bytes": mapped + host, "device_memory_bytes": max(on_gpu - 1 + gpu, 1)}
        prediction = predict(candidate, make_counts(cluster=replace(CLUSTER, **limits)))
        assert (prediction.memory_bytes, prediction.device_memory_bytes) == (full.memory_bytes, on_gpu)
        assert (message in prediction.why_not) if message else prediction.feasible
    assert full.device_memory_bytes == 0


def test_what_computes_on_cpus_is_no_choice_for_gpus() -> None:
    on_gpus = make_counts(cluster=replace(CLUSTER, device_memory_bytes=10**12))
    assert predict(WORKERS, on_gpus).why_not == "computes on CPUs only"


def test_a_cache_saves_its_hits_and_takes_memory() -> None:
    """600 of 2000 remote rows of 400 bytes are hits; 100 are fetched before the first epoch, or none."""
    ahead = CacheHits(policy="lookahead", alpha=0.1, hits=600, rank_bytes=25_000)
    scored = CacheHits(policy="vip", alpha=0.1, hits=600, once_rows=100, server_bytes=20_200)
    measured = make_counts(batches=replace(hand_made.BATCHES, caches=(scored, ahead)))
    plain, vip, looking = (
        predict(replace(ROWS, cache=policy, cache_alpha=0.1 if policy else 0.0), measured)
        for policy in (None, "vip", "lookahead")
    )
    assert plain.outside["features"] - looking.outside["features"] == 600 * 408
    assert vip.outside == looking.outside
    assert (vip.once_bytes, looking.once_bytes) == (100 * 408, 0)
    assert (vip.memory_bytes, looking.memory_bytes) == (
        plain.memory_bytes + 20_200,
        plain.memory_bytes + 25_000,
    )


def test_network_seconds_are_bytes_by_bandwidth() -> None:
    """Each server has 1 MB/s outside and 1 GB/s inside to itself."""
    single = predict(COLUMNS, make_counts())
    assert single.network_s == pytest.approx(single.inter_server_bytes / 2e6)
    traffic = Traffic(outside={"halo": 4_000_000}, inside={"halo": 2_000_000_000})
    assert traffic.seconds(CLUSTER) == pytest.approx(2.0)


COVERS = replace(WHOLE, options={"aggregate": "cover"})


def test_covers_move_sums_of_fewer_rows() -> None:
    """Layer 2: 50 rows, not 200, and 10 columns, as 16 are projected first."""
    cover = replace(hand_made.WHOLE, outside=(400, 50))
    known = make_counts(works={FullGraphScheme(0): replace(hand_made.WHOLE, cover=cover)})
    plain, covered = predict(WHOLE, known), predict(COVERS, known)
    for item, rows, columns in ((plain, 200, 16), (covered, 50, 10)):
        assert {item.outside[phase] for phase in ("halo", "halo_gradients")} == {rows * columns * 4}
        assert item.bytes_exact
    # Features are fetched once either way.
    assert covered.once_bytes == plain.once_bytes == 400 * 400
    assert covered.memory_bytes > plain.memory_bytes
    for candidate in (COVERS, WHOLE):
        attends = replace(known, shape=shape_of_kind("gat", 100, 16, 10, 2))
        assert predict(candidate, attends).feasible is (candidate is WHOLE)
        assert predict(candidate, make_counts()).feasible is (candidate is WHOLE)


def predict_with_seconds(candidate: Candidate, compute_s: float) -> Prediction:
    return replace(predict(candidate, make_counts()), compute_s=compute_s)


def predict_with_trial(candidate: Candidate, seconds: float) -> Prediction:
    trial = Trial(seconds=seconds, low=0.9 * seconds, high=1.1 * seconds, steps=6)
    return replace(predict(candidate, make_counts()), trial=trial)


def test_the_fastest_that_is_exact_and_fits_is_taken() -> None:
    every = [predict_with_seconds(case, 0.1) for case in (ROWS, COLUMNS, LATE, WHOLE, PRELOADED)]
    choice = choose(every, make_counts(), ChoiceOptions())
    assert choice.chosen_prediction.candidate == COLUMNS
    assert any("data_parallel takes" in line and "more between servers" in line for line in choice.why)
    # What was asked for is above what would be faster, and that says what it takes to have it.
    assert [prediction.barred for prediction in choice.predictions[:2]] == ["", ""]
    assert choice.picked == 0
    barred = {prediction.candidate.name: prediction.barred for prediction in choice.predictions}
    assert (barred[LATE.name], barred[WHOLE.name]) == ("--allow-estimators", "--unit full_graph")
    assert (
        choose(every, make_counts(), ChoiceOptions(unit="full_graph")).chosen_prediction.candidate
        == PRELOADED
    )
    # A million times the epochs, and it is no longer worth it.
    many = choose(every, make_counts(), ChoiceOptions(unit="any", full_graph_epochs=1e6))
    assert many.chosen_prediction.candidate.unit == "mini_batch"
    assert any("1e+06 epochs of whole graphs" in line for line in many.assumptions)


def test_measured_seconds_decide_where_there_are_trials() -> None:
    """Columns move fewer bytes, but take longer here."""
    every = [predict_with_trial(ROWS, 1.0), predict_with_trial(COLUMNS, 1.2)]
    choice = choose(every, make_counts(), ChoiceOptions(), finalists=[ROWS.name, COLUMNS.name])
    assert choice.chosen_prediction.candidate == ROWS
    assert "took 1 s an epoch here" in choice.why[0]
    # A candidate that was dropped in an earlier round is not taken, whatever its few steps took.
    late = choose(every, make_counts(), ChoiceOptions(), finalists=[COLUMNS.name])
    assert late.chosen_prediction.candidate == COLUMNS


@pytest.mark.parametrize(("seconds", "expected"), [(0.98, ROWS), (0.9, COLUMNS)])
def test_a_tie_goes_to_the_simpler(seconds: float, expected: Candidate) -> None:
    choice = choose(
        [predict_with_trial(ROWS, 1.0), predict_with_trial(COLUMNS, seconds)], make_counts(), ChoiceOptions()
    )
    assert choice.chosen_prediction.candidate == expected
    assert any("simplest is taken" in line for line in choice.why) is (expected is ROWS)


def test_a_strategy_without_a_cost_model_has_unknown_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(COSTS._paths, "push_pull")
    single = predict(COLUMNS, make_counts())
    assert (single.feasible, single.outside, single.bytes_exact, single.memory_bytes) == (True, {}, False, 0)


def test_what_does_not_fit_says_so() -> None:
    small = replace(CLUSTER, memory_bytes=1000)
    limited = make_counts(cluster=small)
    result = choose([predict(case, limited) for case in (ROWS, COLUMNS)], limited, ChoiceOptions())
    assert result.chosen_prediction is None
    assert result.picked == -1
    assert all("GB a rank" in prediction.why_not for prediction in result.predictions)
    assert "nearest is" in result.why[0]
    assert "--memory" in result.why[0]
    uncounted = Candidate(strategy="shared_preload", unit="full_graph", options={"hops": 1})
    assert (
        predict(uncounted, make_counts()).why_not
        == "its plans are too large to be counted; name the strategy"
    )


def test_gradients_go_around_a_ring() -> None:
    """4 ranks on 2 servers send 6 / 4 of 100 bytes each; ranks 1 and 3 send across."""
    assert ring_split(100, (0, 0, 1, 1), 3) == (900, 900)
    assert ring_split(100, (0,) * 4, 3) == (0, 1800)
    assert ring_split(100, (0,), 3) == (0, 0)


def test_candidates_follow_the_servers() -> None:
    alone = enumerate_candidates(CandidateContext(ranks=1, servers=1, num_layers=2, steps=3))
    assert {item.strategy for item in alone} == {"data_parallel", "full_graph", "lambda"}
    context = CandidateContext(ranks=4, servers=2, num_layers=3, steps=3)
    many = enumerate_candidates(context)
    for candidate in many:
        words = candidate.arguments.split()
        values = [value for flag, value in pairwise(words) if flag == "--option"]
        assert parse_literals(values, "--option") == candidate.options
        assert ("--cache" in words) == (candidate.cache is not None)
    assert {item.options.get("hops") for item in many if item.strategy == "shared_preload"} == {None, 1, 2}
    assert {item.options.get("group_size") for item in many if item.strategy == "push_pull"} == {None, 1, 2}
    assert FullGraphScheme(3, cooperative_batches=3) in list_works(many, context)
    # Sixteen cooperative batches are no epoch of a hundred steps.
    long = enumerate_candidates(CandidateContext(ranks=4, servers=2, num_layers=3, steps=100))
    assert {item.unit for item in long if item.strategy == "cooperative"} == {"full_graph"}
    wide = enumerate_candidates(CandidateContext(ranks=32, servers=4, num_layers=2, steps=3))
    assert {item.options.get("group_size") for item in wide if item.strategy == "push_pull"} == {
        None,
        1,
        8,
        16,
    }
    assert not any(
        enumerate_candidate.unit == "mini_batch"
        for enumerate_candidate in enumerate_candidates(
            CandidateContext(ranks=4, servers=2, num_layers=9, steps=0)
        )
    )


@pytest.mark.parametrize("candidate", [WHOLE, COLUMNS, WORKERS], ids=lambda one: one.name)
def test_what_a_model_cannot_be_is_no_choice(candidate: Candidate) -> None:
    assert predict(candidate, make_counts()).feasible
    refused = make_counts(shape=replace(SHAPE, refusals={candidate.strategy: "'norm' is a BatchNorm1d"}))
    result = predict(candidate, refused)
    assert (result.why_not, result.epoch_seconds) == ("'norm' is a BatchNorm1d", 0.0)
    assert predict(ROWS, refused).feasible


def test_bytes_of_a_model_that_is_guessed_are_expected_where_its_layers_exchange() -> None:
    guessed = make_counts(shape=replace(SHAPE, is_guessed=True))
    assert not predict(WHOLE, guessed).bytes_exact
    assert predict(PRELOADED, guessed).bytes_exact
    assert predict(ROWS, guessed).bytes_exact
    # Its first layer may take values of edges, which are sent.
    assert not predict(COLUMNS, guessed).bytes_exact


def test_unknown_bytes_are_not_shown_as_zero() -> None:
    unknown = replace(predict_with_trial(COLUMNS, 0.1), outside={}, inside={}, memory_bytes=0)
    choice = choose([predict_with_trial(ROWS, 1.0), unknown], make_counts(), ChoiceOptions())
    assert choice.chosen_prediction.candidate == COLUMNS
    assert "unknown number of bytes" in choice.why[0]
    assert not any("0 B" in line or "more between servers" in line for line in choice.why)
