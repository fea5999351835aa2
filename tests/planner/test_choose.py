"""Predictions and choices on records made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dglx_dist.planner.choose import choose, enumerate_candidates, predict, works_of
from dglx_dist.planner.records import ChoiceOptions
from dglx_dist.strategies.cost import CacheHits, Candidate, PlanContext, ring_split
from dglx_dist.strategies.full_graph.cost import FullGraphScheme
from dglx_dist.strategies.serverless.strategy import GhostPairs
from tests.planner import hand_made
from tests.planner.hand_made import CLUSTER, RATES, SHAPE, known, shape_of_kind

ROWS = Candidate(strategy="data_parallel", unit="mini_batch")
COLUMNS = Candidate(strategy="push_pull", unit="mini_batch", options={"structure": "push"})
LATE = replace(COLUMNS, options={"structure": "push", "depth": 3}, exact=False)
WHOLE = Candidate(strategy="full_graph", unit="full_graph", works=(FullGraphScheme(0),))
PRELOADED = Candidate(strategy="shared_preload", unit="full_graph", works=(FullGraphScheme(2),))
WORKERS = Candidate(strategy="lambda", unit="full_graph", works=(FullGraphScheme(0), GhostPairs()))


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
    whole = predict(candidate, known())
    on_gpu = whole.memory_bytes - mapped
    for host, gpu, said in ((0, 1, ""), (-1, 1, "GB a rank, of 0"), (0, 0, "GB a rank on its GPU, of 0.0")):
        limits = {"memory_bytes": mapped + host, "device_memory_bytes": max(on_gpu - 1 + gpu, 1)}
        found = predict(candidate, known(cluster=replace(CLUSTER, **limits)))
        assert (found.memory_bytes, found.device_memory_bytes) == (whole.memory_bytes, on_gpu)
        assert (said in found.why_not) if said else found.feasible
    assert whole.device_memory_bytes == 0


def test_what_computes_on_cpus_is_no_choice_for_gpus() -> None:
    on_gpus = known(cluster=replace(CLUSTER, device_memory_bytes=10**12))
    assert predict(WORKERS, on_gpus).why_not == "computes on CPUs only"


def test_rows_cross_pcie_at_its_rate() -> None:
    """2000 rows of 400 bytes, of which nothing is hidden behind computing on the one core."""
    rates = replace(RATES, copy_byte_s=1e-6)
    assert predict(ROWS, known(rates=rates)).seconds.sampling == pytest.approx(2000 * 400 * 1e-6)


def test_seconds_of_rows_by_hand() -> None:
    """2500 edges carry 16 columns both ways, for F > H is projected first, and 2000 carry 10."""
    found = predict(ROWS, known()).seconds
    compute = (2500 * 16 * 2 + 2000 * 10 * 2) * 1e-8
    handled = (2000 * 408 + 10 * SHAPE.gradient_bytes) * 0.75e-9
    assert found.compute == pytest.approx(compute + handled)
    assert found.outside == pytest.approx(0.408 - 0.7 * found.compute)
    # In each step ranks that share their core with a loader wait 4 ms for each other.
    assert found.all_reduce == pytest.approx(5 * SHAPE.gradient_bytes / 1e6 + 5 * 4e-3)
    assert found.total == pytest.approx(found.compute + found.outside + found.all_reduce)


def test_a_cache_saves_its_hits_and_takes_memory() -> None:
    """600 of 2000 remote rows of 400 bytes are hits; 100 are fetched before the first epoch, or none."""
    ahead = CacheHits(policy="lookahead", alpha=0.1, hits=600, rank_bytes=25_000)
    scored = CacheHits(policy="vip", alpha=0.1, hits=600, once_rows=100, server_bytes=20_200)
    measured = known(batches=replace(hand_made.BATCHES, caches=(scored, ahead)))
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


@pytest.mark.parametrize(("cores", "share"), [(0.5, 0.35), (1.0, 0.7), (2.0, 0.9)])
def test_a_rank_of_more_cores_waits_less_for_what_is_fetched_ahead(cores: float, share: float) -> None:
    """There is less computing than waiting, and all of it has something to hide."""
    found = predict(ROWS, known(cluster=replace(CLUSTER, cores=cores))).seconds
    assert found.outside == pytest.approx(0.408 - share * found.compute)


def test_sums_are_waited_for() -> None:
    """500 rows of 16 numbers there and back, over two cards."""
    found = predict(COLUMNS, known())
    assert found.seconds.outside >= 2 * 500 * 16 * 4 / 2 / 1e6


def test_an_owner_more_is_a_block_more_in_each_step() -> None:
    """5 steps, each with a block of 1.5 ms of the other part; what is sent is handled on the one core too."""
    layers = (replace(SHAPE.layers[0], sums_sources=False), *SHAPE.layers[1:])
    shape = replace(SHAPE, layers=layers)
    rows, columns = predict(ROWS, known()), predict(COLUMNS, known(shape=shape))
    handled = (rows.inter_server_bytes - columns.inter_server_bytes) * 0.75e-9
    assert columns.seconds.compute == pytest.approx(rows.seconds.compute + 5 * 1.5e-3 - handled)
    # 2500 edges of layer 1, 4 heads of 50 columns.
    first = replace(SHAPE.inspected["push_pull"], logit_width=4)
    attends = replace(shape, inspected={"push_pull": first})
    without = columns.seconds.compute - columns.inter_server_bytes * 0.75e-9
    with_heads = predict(COLUMNS, known(shape=attends))
    more = with_heads.seconds.compute - with_heads.inter_server_bytes * 0.75e-9 - without
    assert more == pytest.approx(4 * 50 * 2500 * 1e-8)


@pytest.mark.parametrize(("targets", "sums_first"), [(250, True), (1900, False)])
def test_parts_sum_before_they_project_where_targets_are_few(targets: int, sums_first: bool) -> None:
    """2500 edges carry 100 columns forward, or 16 both ways; the products of the sources are the targets'."""
    batches = replace(hand_made.BATCHES, worked=((2000, 250), (targets, 50), (2500, 2000)))
    rates = replace(RATES, multiply_add_s=1e-9)
    found = predict(COLUMNS, known(batches=batches, rates=rates))
    projected = 2 * targets if sums_first else 2000 + targets
    products = 2 * 1600 * projected + 3 * (250 + 50) * 160
    sums = 2500 * 100 * 1e-8 / 3 if sums_first else 2500 * 2 * 16 * 1e-8
    handled = found.inter_server_bytes * 0.75e-9
    compute = products * 1e-9 + sums + 2000 * 10 * 2 * 1e-8
    assert found.seconds.compute == pytest.approx(compute + handled + 5 * 1.5e-3)


def test_layers_of_whole_graphs_wait_for_rows() -> None:
    """The features of layer 1 are kept; 100 rows of 16 numbers through a card, there and back."""
    assert predict(WHOLE, known()).seconds.outside == pytest.approx(2 * 100 * 16 * 4 / 1e6)
    assert predict(PRELOADED, known()).seconds.outside == 0.0


COVERS = replace(WHOLE, options={"aggregate": "cover"})


def test_covers_move_sums_of_fewer_rows() -> None:
    """Layer 2: 50 rows, not 200, 25 of them through a card; 10 columns, as 16 are projected first."""
    cover = replace(
        hand_made.WHOLE, worked=((700, 540), (500, 50), (5000, 500)), outside=(400, 50), card_rows=(200, 25)
    )
    counted = known(works={FullGraphScheme(0): replace(hand_made.WHOLE, cover=cover)})
    plain, found = predict(WHOLE, counted), predict(COVERS, counted)
    for one, rows, columns in ((plain, 200, 16), (found, 50, 10)):
        assert {one.outside[phase] for phase in ("halo", "halo_gradients")} == {rows * columns * 4}
        assert one.bytes_exact
    assert found.seconds.outside == pytest.approx(2 * 25 * 10 * 4 / 1e6)
    # Features are fetched once either way.
    assert found.once_bytes == plain.once_bytes == 400 * 400
    assert found.memory_bytes > plain.memory_bytes
    constraints = ChoiceOptions(unit="full_graph")
    for one in (COVERS, WHOLE):
        assert predict(one, replace(counted, shape=shape_of_kind("gat", 100, 16, 10, 2))).feasible is (
            one is WHOLE
        )
        assert predict(one, known()).feasible is (one is WHOLE)
    slow = choose([WHOLE, COVERS], counted, constraints)
    fast = choose(
        [WHOLE, COVERS], replace(counted, cluster=replace(CLUSTER, external_bytes_per_s=1e12)), constraints
    )
    assert [one.taken and one.taken.candidate for one in (slow, fast)] == [COVERS, WHOLE]


def test_what_a_card_lets_pass_after_a_pause_is_not_waited_for() -> None:
    """Both of the two messages find the bucket as full as computing lasted, or as large as it is."""
    plain = predict(WHOLE, known()).seconds
    large = predict(WHOLE, known(cluster=replace(CLUSTER, burst_bytes=10**9))).seconds
    computing = (5000 * 16 * 2 + 500 * 10 * 2) * 1e-8
    assert large.outside == pytest.approx(plain.outside - computing)
    small = predict(WHOLE, known(cluster=replace(CLUSTER, burst_bytes=100))).seconds
    assert small.outside == pytest.approx(plain.outside - 2 * 100 / 1e6)
    assert small.all_reduce == pytest.approx(plain.all_reduce - 100 / 1e6)


def test_cooperative_batches_are_read_from_disk_in_each_epoch() -> None:
    """3000 rows of 400 bytes and 5000 edges of 16 to check, and 5 ms for each of 3 cooperative batches."""
    scheme = FullGraphScheme(2, cooperative_batches=3)
    work = replace(hand_made.WHOLE, steps=3, card_rows=(0, 0), read_rows=3000)
    rates = replace(RATES, check_byte_s=1e-6)
    co = Candidate(strategy="cooperative", unit="full_graph", works=(scheme,))
    found = predict(co, known(works={scheme: work}, plan_rates=rates)).seconds
    assert found.sampling == pytest.approx((3000 * 400 + 5000 * 16) * 1e-6 + 3 * 5e-3)
    # Where there are cores for it, as much as is computed meanwhile is hidden.
    many = known(works={scheme: work}, plan_rates=rates, cluster=replace(CLUSTER, cores=8.0))
    assert predict(co, many).seconds.sampling < found.sampling
    assert predict(PRELOADED, known(plan_rates=rates)).seconds.sampling == 0.0


def test_steps_of_whole_graphs_have_rates_of_their_own() -> None:
    slow = known(plan_rates=RATES.slowed(3.0))
    usual = predict(PRELOADED, known()).seconds.compute
    assert predict(PRELOADED, slow).seconds.compute > 2.5 * usual
    assert predict(ROWS, slow).seconds.compute == predict(ROWS, known()).seconds.compute


def test_the_fastest_that_is_exact_and_fits_is_taken() -> None:
    every = (ROWS, COLUMNS, LATE, WHOLE, PRELOADED)
    found = choose(every, known(), ChoiceOptions())
    assert found.taken.candidate == COLUMNS
    assert any("data_parallel takes" in line and "more between servers" in line for line in found.why)
    # What was asked for is above what would be faster, and that says what it takes to have it.
    assert [one.barred for one in found.predictions[:2]] == ["", ""]
    assert found.picked == 0
    barred = {one.candidate.name: one.barred for one in found.predictions}
    assert (barred[LATE.name], barred[WHOLE.name]) == ("--allow-estimators", "--unit full_graph")
    fast = replace(CLUSTER, external_bytes_per_s=1e12)
    assert choose(every, known(cluster=fast), ChoiceOptions()).taken.candidate.unit == "mini_batch"  # type: ignore[union-attr]
    whole = choose(every, known(), ChoiceOptions(unit="full_graph"))
    assert whole.taken.candidate == PRELOADED
    # Sixteen times the epochs, and it is no longer worth it.
    many = choose(every, known(), ChoiceOptions(unit="any", full_graph_epochs=1e6))
    assert many.taken.candidate.unit == "mini_batch"
    assert any("1e+06 epochs of whole graphs" in line for line in many.assumptions)


def test_another_sampler_is_ranked_and_never_taken() -> None:
    """LABOR fetches no row here, so it is faster; but the sampler is the user's."""
    drawn = replace(hand_made.BATCHES, survey=replace(hand_made.SURVEY, feature_bytes=0))
    labor = replace(ROWS, labor=True, exact=False)
    found = choose((ROWS, labor), known(labor=(drawn, 1.0)), ChoiceOptions(allow_estimators=True))
    assert found.taken.candidate == ROWS
    barred = found.predictions[1]
    assert (barred.candidate, barred.barred) == (labor, "LaborSampler(fanouts) passed to dx.DataLoader")
    assert 0 < barred.epoch_seconds < found.taken.epoch_seconds
    assert found.why[-1].endswith(
        "is another estimator, only with LaborSampler(fanouts) passed to dx.DataLoader"
    )


def test_a_tie_goes_to_the_simpler() -> None:
    free = replace(CLUSTER, external_bytes_per_s=1e15)
    slow = known(cluster=free)
    found = choose((ROWS, replace(ROWS, options={"bucket_bytes": 1})), slow, ChoiceOptions())
    assert found.taken.candidate == ROWS
    # Where the other is faster by less than 5 %, that is said.
    several = (replace(CLUSTER, external_bytes_per_s=float(rate)) for rate in np.geomspace(1e6, 1e12, 300))
    choices = [choose((ROWS, COLUMNS), known(cluster=one), ChoiceOptions()) for one in several]
    near = [one for one in choices if one.picked == 1]
    assert near
    assert all(one.predictions[1].candidate == ROWS for one in near)
    assert all("simplest is taken" in one.why[1] for one in near)
    assert not any("simplest" in line for one in choices if one.picked == 0 for line in one.why)


def test_of_uncertain_rates_the_least_regret_is_taken_and_that_is_said() -> None:
    """Where the links may be twice as slow or faster by half, and rows cost about as much as columns."""
    every, uncertain, worst = (ROWS, COLUMNS), 0, 0.0
    for rate in np.geomspace(1e6, 1e12, 60):
        cluster = replace(CLUSTER, external_bytes_per_s=float(rate))
        found = choose(every, known(cluster=replace(cluster, link_spread=0.5)), ChoiceOptions())
        ends = [replace(cluster, external_bytes_per_s=factor * float(rate)) for factor in (1.0, 0.5, 1.5)]
        seconds = np.array(
            [[predict(one, known(cluster=end)).epoch_seconds for one in every] for end in ends]
        )
        regret = (seconds / seconds.min(axis=1, keepdims=True)).max(axis=0)
        taken = regret[every.index(found.taken.candidate)]  # type: ignore[union-attr]
        assert taken <= 1.05 * regret.min()
        said = [line for line in found.why if line.startswith("uncertain")]
        assert bool(said) == (taken > 1.05)
        if said:
            uncertain, worst = uncertain + 1, max(worst, taken)
            assert "the links by +-50 %" in said[0]
            assert f"to {taken:.2f} x as long" in said[0]
    assert 0 < uncertain < 60
    # The simpler of two that cannot be told apart is not the simpler whatever it costs.
    assert worst < 1.5
    # Mini-batches and whole graphs are timed apart; where links cost nothing, only that can change the order.
    fast = replace(CLUSTER, external_bytes_per_s=1e15)
    free = known(cluster=fast, plan_rates=RATES, spread=0.3)
    batches, graphs = (predict(one, free).epoch_seconds for one in (ROWS, PRELOADED))
    told = ChoiceOptions(unit="any", full_graph_epochs=batches / graphs)
    (said,) = (line for line in choose((ROWS, PRELOADED), free, told).why if line.startswith("uncertain"))
    assert "repeated steps differ by +-30 %" in said
    assert "data_parallel or shared_preload is the fastest, and this one takes 1.00 to" in said
    narrow = known(cluster=replace(CLUSTER, link_spread=0.05), spread=0.05)
    assert choose(every, narrow, ChoiceOptions()).why == choose(every, known(), ChoiceOptions()).why


def test_what_does_not_fit_says_so() -> None:
    small = replace(CLUSTER, memory_bytes=1000)
    found = choose((ROWS, COLUMNS), known(cluster=small), ChoiceOptions())
    assert found.taken is None
    assert found.picked == -1
    assert all("GB a rank" in one.why_not for one in found.predictions)
    assert "nearest is" in found.why[0]
    assert "--memory" in found.why[0]
    uncounted = replace(WHOLE, works=(FullGraphScheme(1),))
    assert predict(uncounted, known()).why_not == "its plans are too large to be counted; name the strategy"


def test_gradients_go_around_a_ring() -> None:
    """4 ranks on 2 servers send 6 / 4 of 100 bytes each; ranks 1 and 3 send across."""
    assert ring_split(100, (0, 0, 1, 1), 3) == (900, 900)
    assert ring_split(100, (0,) * 4, 3) == (0, 1800)
    assert ring_split(100, (0,), 3) == (0, 0)


def test_candidates_follow_the_servers() -> None:
    alone = enumerate_candidates(PlanContext(ranks=1, servers=1, num_layers=2, steps=3))
    assert {one.strategy for one in alone} == {"data_parallel", "full_graph", "lambda"}
    many = enumerate_candidates(PlanContext(ranks=4, servers=2, num_layers=3, steps=3))
    assert {one.options.get("hops") for one in many if one.strategy == "shared_preload"} == {None, 1, 2}
    assert {one.options.get("group_size") for one in many if one.strategy == "push_pull"} == {None, 1, 2}
    assert FullGraphScheme(3, cooperative_batches=3) in works_of(many)
    # Sixteen cooperative batches are no epoch of a hundred steps.
    long = enumerate_candidates(PlanContext(ranks=4, servers=2, num_layers=3, steps=100))
    assert {one.unit for one in long if one.strategy == "cooperative"} == {"full_graph"}
    wide = enumerate_candidates(PlanContext(ranks=32, servers=4, num_layers=2, steps=3))
    assert {one.options.get("group_size") for one in wide if one.strategy == "push_pull"} == {None, 1, 8, 16}
    assert not any(
        one.unit == "mini_batch"
        for one in enumerate_candidates(PlanContext(ranks=4, servers=2, num_layers=9, steps=0))
    )


@pytest.mark.parametrize("candidate", [WHOLE, COLUMNS, WORKERS], ids=lambda one: one.name)
def test_what_a_model_cannot_be_is_no_choice(candidate: Candidate) -> None:
    assert predict(candidate, known()).feasible
    refused = known(shape=replace(SHAPE, refused={candidate.strategy: "'norm' is a BatchNorm1d"}))
    found = predict(candidate, refused)
    assert (found.why_not, found.epoch_seconds) == ("'norm' is a BatchNorm1d", 0.0)
    assert predict(ROWS, refused).feasible


def test_bytes_of_a_model_that_is_guessed_are_expected_where_its_layers_exchange() -> None:
    guessed = known(shape=replace(SHAPE, guessed=True))
    assert not predict(WHOLE, guessed).bytes_exact
    assert predict(PRELOADED, guessed).bytes_exact
    assert predict(ROWS, guessed).bytes_exact
    # Its first layer may take values of edges, which are sent.
    assert not predict(COLUMNS, guessed).bytes_exact
