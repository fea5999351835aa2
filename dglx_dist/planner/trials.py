"""Timed trials of candidates in a running job. They train in turns, and the slower half is dropped."""

from __future__ import annotations

import copy
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, final

import dgl
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dglx_dist.comm.collectives import barrier, broadcast_json, gather_json
from dglx_dist.comm.devices import synchronize
from dglx_dist.data.storage.arrays import ArrayCache
from dglx_dist.data.storage.columns import CACHE
from dglx_dist.data.storage.files import partial_name
from dglx_dist.errors import ConfigError, first_sentence
from dglx_dist.graph.cache import TRAIN_MASK
from dglx_dist.graph.column import Column
from dglx_dist.graph.split import node_split
from dglx_dist.planner.choose import NEAR
from dglx_dist.planner.measure import make_optimizer, take_step
from dglx_dist.planner.records import ChoiceOptions, Draws, Prediction, Trial
from dglx_dist.records import FEATURE, LABEL
from dglx_dist.registry import AUTO
from dglx_dist.strategies.base import STRATEGIES, Objective, OpenedStrategy, find_float_parameter
from dglx_dist.strategies.candidate import Candidate
from dglx_dist.training.relational import EntityInputs
from dglx_dist.training.tasks import check_inputs, gather_input_rows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

LEAST_S, MOST_SHARE = 15.0, 0.02
"""Minimum time for opening candidates, and its share of the training. The rounds take as long again."""
_TURN_S = 0.1
"""Minimum duration of a first turn."""
_LEAST_STEPS = 3
"""Minimum number of steps of a first turn."""
_WARM_STEPS = 2
"""Number of steps before a turn that begins within an epoch."""
_TURNS_OF_ROUND, _MOST_ROUNDS = 3, 4
_CLEARLY = 1.2
"""Candidates slower by this factor are dropped at once. Epochs of the same run differ by a tenth."""
_LEAST_TRIED = 2
"""Number of candidates that are always tried, whatever the time."""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Training run whose steps the trials time."""

    g: DistGraph
    model: nn.Module
    """The user's model. Each trial trains a copy."""
    num_layers: int
    draws: Draws | None
    """Options of the mini-batches. None: the training has no mini-batches."""
    epochs: int
    constraints: ChoiceOptions
    memory_bytes: int
    """Memory of a rank for all candidates that are open at a time."""
    inputs: EntityInputs | None = None
    """Input rows by node type. None: the features of the only type."""
    ntype: str
    """Type of the training nodes."""
    base_bytes: int
    """Part of ``memory_bytes`` that all candidates share: the program, the structure and the features."""


@final
@dataclass(kw_only=True)
class _Contestant:
    place: int
    """Index of the candidate among the predictions."""
    run: CandidateRun
    seconds: list[float] = field(default_factory=list)
    """Seconds of an epoch by turn."""
    steps: int = 0

    @property
    def steps_of_turn(self) -> int:
        """Number of steps that take at least ``_TURN_S``, equal on all ranks."""
        return max(_WARM_STEPS, math.ceil(_TURN_S * self.run.num_steps / self.seconds[0]))

    @property
    def trial(self) -> Trial:
        # The first turn is a short one, just after the candidate was opened.
        seconds = self.seconds[1:] or self.seconds
        median = statistics.median(seconds)
        return Trial(seconds=median, low=min(seconds), high=max(seconds), steps=self.steps)


def run_trials(
    predictions: Sequence[Prediction], config: TrialConfig, notify: Callable[[str], None] = lambda _: None
) -> tuple[list[Prediction], list[str]]:
    """Time the candidates of ``predictions``, the simplest first, and return them with their trials.

    Every rank must call this. Call it within :func:`leave_unchanged`.

    Returns:
        The predictions with trials, or with reasons why they were not tried, and the names of the candidates
        among which the trials did not decide.

    Raises:
        ConfigError: a candidate failed on this rank alone, for instance because memory is short.
        PeerError: a rank ended or stayed silent in a trial.
    """
    with ExitStack() as stack:
        race = _Race([*predictions], config, notify, stack)
        try:
            race.open_all()
            race.halve()
        except BaseException:
            # Closing the open candidates would wait for ranks that have failed.
            stack.pop_all()
            raise
        return race.predictions, [race.predictions[index].candidate.name for index in race.finalists]


@final
class _Race:
    def __init__(
        self,
        predictions: list[Prediction],
        config: TrialConfig,
        notify: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        self.predictions = predictions
        self._config = config
        self._begin = time.perf_counter()
        self._notify, self._stack = notify, stack
        self._session = config.g.session
        self.running: list[_Contestant] = []
        self._closed_for_memory: list[int] = []
        self._elapsed, self._num_opened = 0.0, 0

    @property
    def finalists(self) -> list[int]:
        """Indices into ``predictions`` of the candidates that no turn has shown to be slower."""
        return [*(contestant.place for contestant in self.running), *self._closed_for_memory]

    def open_all(self) -> None:
        """Open the feasible candidates and let each take a first turn.

        The simplest candidate comes first. The others follow by their seconds on the network, shortest first.
        """
        indices = [index for index, prediction in enumerate(self.predictions) if prediction.feasible]
        indices[1:] = sorted(indices[1:], key=lambda index: self.predictions[index].network_s)
        for index in indices:
            prediction = self.predictions[index]
            if reason := self._find_obstacle(prediction):
                self.predictions[index] = replace(prediction, not_tried=reason)
                continue
            self._make_room(prediction)
            self._notify(f"trying {prediction.candidate.name}")
            if problem := self._open(index):
                self.predictions[index] = replace(prediction, why_not=problem)

    def halve(self) -> None:
        """Let the candidates alternate, and drop the slower half, until the remaining ones are equal."""
        # First turns are not reliable, because opening has read files and allocated memory.
        turn_factor = 1
        self._begin = time.perf_counter()
        self._elapsed = 0.0

        for round_index in range(_MOST_ROUNDS):
            if self._are_equal() or self._is_over():
                break
            self._notify(f"round {round_index + 1}: {len(self.running)} candidates")
            for contestant in self.running * _TURNS_OF_ROUND:
                is_late = self._is_over() and len(contestant.seconds) > 1
                if is_late or contestant not in self.running:
                    continue
                self._time_turn(contestant, turn_factor * contestant.steps_of_turn)

            self._drop_slower()
            turn_factor *= 2

        for contestant in self.running:
            self._record_trial(contestant)

    def _drop_slower(self) -> None:
        ordered = sorted(self.running, key=self._weigh_seconds)
        if not ordered:  # the strategies have refused all candidates in this round
            return

        # The negations round up, so that the larger half stays.
        half = -(-len(ordered) // 2)
        best = ordered[0]
        high = _CLEARLY * best.trial.high * self._weight(best)
        limit = NEAR * self._weigh_seconds(best)
        for index, contestant in enumerate(ordered):
            is_slower = contestant.trial.low * self._weight(contestant) > high
            # The simplest of several equal candidates will win, so all of them stay.
            if is_slower or (index >= half and self._weigh_seconds(contestant) > limit):
                self._drop(contestant)

    def _are_equal(self) -> bool:
        costs = [self._weigh_seconds(contestant) for contestant in self.running]
        is_timed = all(len(contestant.seconds) > _TURNS_OF_ROUND for contestant in self.running)
        return len(costs) < 2 or (is_timed and max(costs) <= NEAR * min(costs))

    def _drop(self, contestant: _Contestant) -> None:
        self._record_trial(contestant)
        contestant.run.close()
        self.running.remove(contestant)

    def _weight(self, contestant: _Contestant) -> float:
        return self._config.constraints.weight(self.predictions[contestant.place].candidate)

    def _weigh_seconds(self, contestant: _Contestant) -> float:
        return contestant.trial.seconds * self._weight(contestant)

    def _record_trial(self, contestant: _Contestant) -> None:
        index = contestant.place
        self.predictions[index] = replace(self.predictions[index], trial=contestant.trial)

    def _is_over(self) -> bool:
        # A choice needs at least two candidates.
        if self._num_opened < _LEAST_TRIED:
            return False
        fastest = min((contestant.trial.seconds for contestant in self.running), default=0.0)
        return self._elapsed > max(LEAST_S, MOST_SHARE * self._config.epochs * fastest)

    def _find_obstacle(self, prediction: Prediction) -> str:
        best = min(map(self._weigh_seconds, self.running), default=math.inf)
        # Rows between accelerators do not use the measured links.
        is_bound = prediction.bytes_exact and self._config.g.session.device.type == "cpu"
        if is_bound and prediction.network_s * self._config.constraints.weight(prediction.candidate) > best:
            return f"its bytes alone take {prediction.network_s:.3g} s, longer than the fastest candidate"
        return "the time for the choice is over" if self._is_over() else ""

    def _make_room(self, prediction: Prediction) -> None:
        # The memory that all candidates share exists once.
        config = self._config
        free_bytes = config.memory_bytes - config.base_bytes

        def sum_needs() -> int:
            candidates = (prediction, *(self.predictions[contestant.place] for contestant in self.running))
            return sum(max(candidate.memory_bytes - config.base_bytes, 0) for candidate in candidates)

        while self.running and sum_needs() > free_bytes:
            slowest = max(self.running, key=self._weigh_seconds)
            self._drop(slowest)
            self._closed_for_memory.append(slowest.place)

    def _open(self, index: int) -> str:
        """Open a candidate and time its first turn. Return the reason if a rank refuses it."""
        runs: list[CandidateRun] = []

        def open_run() -> tuple[float, int]:
            runs.append(CandidateRun(self.predictions[index].candidate, self._config))
            self._stack.callback(runs[0].close)
            return runs[0].take_turn(_LEAST_STEPS)

        seconds, steps, problem = self._run_turn(index, open_run)
        self._num_opened += 1
        if not problem:
            self.running.append(_Contestant(place=index, run=runs[0], seconds=[seconds], steps=steps))
        elif runs:
            runs[0].close()

        return problem

    def _time_turn(self, contestant: _Contestant, steps: int) -> None:
        index = contestant.place
        seconds, steps_taken, problem = self._run_turn(index, lambda: contestant.run.take_turn(steps))
        if problem:
            self._drop(contestant)
            self.predictions[index] = replace(self.predictions[index], why_not=problem)
            return
        contestant.seconds.append(seconds)
        contestant.steps += steps_taken

    def _run_turn(self, index: int, time_turn: Callable[[], tuple[float, int]]) -> tuple[float, int, str]:
        """Return the seconds of the slowest rank, the steps, and the reason if the strategy refuses."""
        seconds = 0.0
        steps = 0
        refusal = ""
        try:
            seconds, steps = time_turn()
        except ConfigError as error:
            # Strategies raise it on all ranks alike.
            refusal = first_sentence(error)
        except (MemoryError, RuntimeError) as error:
            # Other ranks may be in an exchange with this one, so the job must end.
            name = self.predictions[index].candidate.name
            raise ConfigError(
                f"the trial of {name} failed: {type(error).__name__}: {error}. Name a strategy instead of "
                f"{AUTO!r}, or exclude candidates with its option memory."
            ) from error

        elapsed = time.perf_counter() - self._begin
        reports = gather_json([seconds, steps, refusal, elapsed], self._session)

        # The clock of rank 0 decides for all ranks whether the time is over.
        self._elapsed = float(reports[0][3])
        refusal = next((str(report[2]) for report in reports if report[2]), "")
        return max(float(report[0]) for report in reports), int(reports[0][1]), refusal


@final
class CandidateRun:
    """A candidate that is open in the job, with its own copy of the model, loader and cache.

    Every rank must create, use and close it. ConfigError if the strategy refuses the model or the graph.
    """

    def __init__(self, candidate: Candidate, config: TrialConfig) -> None:
        self._g = config.g
        self._device = find_float_parameter(config.model).device
        self._inputs, self._ntype = config.inputs, config.ntype
        check_inputs(config.g, config.inputs, candidate.strategy)
        strategy = STRATEGIES.get(candidate.strategy)
        self._cache = None if candidate.cache is None else self._fill_cache(candidate, config.draws)

        with ExitStack() as stack:
            opened = strategy(self._g.session, candidate.options).open(self._g)
            stack.callback(opened.close)
            self._loader = _open_loader(opened, candidate, config)
            self._model = opened.wrap(copy.deepcopy(config.model).train())
            self._optimizer = make_optimizer(self._model)
            self._trainer, self._epochs = None, 0
            if not strategy.traits.own_loop:
                objective = Objective(loss=cross_entropy)
                self._trainer = self._model.trainer(self._loader, self._optimizer, objective)
                assert self._trainer is not None, "a strategy without support for own loops has a trainer"
                stack.callback(self._trainer.close)

            # The first steps allocate memory, compile kernels and read files.
            with self._cache_in_use():
                self._take_epochs(1) if self._trainer or len(self._loader) == 1 else self._take_steps(1)
            self._stack = stack.pop_all()

    @property
    def num_steps(self) -> int:
        """Number of steps of an epoch."""
        return len(self._loader)

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        self._stack.close()
        self._cache = None

    def take_turn(self, steps: int) -> tuple[float, int]:
        """Return the seconds of an epoch, measured over ``steps`` steps or epochs, and the timed steps."""
        num_steps = self.num_steps
        with self._cache_in_use():
            if self._trainer is not None or num_steps <= steps:
                epochs = -(-steps // num_steps)
                seconds = self._time(lambda: self._take_epochs(epochs)) / epochs
                steps = epochs * num_steps
            else:
                steps = min(steps, num_steps - _WARM_STEPS)
                batches = iter(self._loader)
                self._train_on(islice(batches, _WARM_STEPS))
                seconds = self._time(lambda: self._train_on(islice(batches, steps))) / steps * num_steps
        return seconds, steps

    def _time(self, action: Callable[[], None]) -> float:
        synchronize(self._device)
        barrier(self._g.session, "a trial")
        begin = time.perf_counter()
        action()
        synchronize(self._device)
        return time.perf_counter() - begin

    def _take_epochs(self, num_epochs: int) -> None:
        if self._trainer is not None:
            self._trainer.run(self._epochs, num_epochs)
            self._epochs += num_epochs
            return
        for _ in range(num_epochs):
            self._train_on(self._loader)

    def _take_steps(self, num_steps: int) -> None:
        self._train_on(islice(iter(self._loader), num_steps))

    def _train_on(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            blocks = batch[-1]
            try:
                rows = gather_input_rows(self._model, blocks[0], FEATURE, self._inputs)
                take_step(self._model, self._optimizer, blocks, rows, self._ntype)
            finally:
                # Rows of embeddings are not trained, so that they stay as they are.
                if self._inputs is not None:
                    self._inputs.drop_gradients()

    def _fill_cache(self, candidate: Candidate, draws: Draws | None) -> tuple[Any, Any]:
        assert draws is not None, "caches belong to mini-batches"
        uncached = self._find_column()
        fill_cache(self._g, candidate, draws.fanouts, draws.batch_size)
        column = self._find_column()
        self._g.kvstore.set_cache(uncached.name, uncached.cache, uncached.ahead)
        return column.cache, column.ahead

    def _find_column(self) -> Column:
        key = self._g.get_node_partition_policy(self._g.ntypes[0]).key(FEATURE)
        return self._g.kvstore.column(key)

    @contextmanager
    def _cache_in_use(self) -> Iterator[None]:
        # All candidates share the columns, so each installs its cache only during its turns.
        if self._cache is None:
            yield
            return
        store = self._g.kvstore
        column = self._find_column()
        store.set_cache(column.name, *self._cache)

        try:
            yield
        finally:
            store.set_cache(column.name, column.cache, column.ahead)


def fill_cache(g: DistGraph, candidate: Candidate, fanouts: Sequence[int], batch_size: int | None) -> None:
    """Fill the cache that ``candidate`` names for batches of a neighbour sampler. Every rank must call it."""
    assert candidate.cache is not None
    options: dict[str, Any] = {}
    if candidate.cache == "vip":
        options = {"fanouts": list(fanouts), "batch_size": batch_size}
    g.cache_rows(FEATURE, alpha=candidate.cache_alpha, policy=candidate.cache, **options)


def _open_loader(opened: OpenedStrategy, candidate: Candidate, config: TrialConfig) -> Any:
    g = config.g
    draws = config.draws
    inputs = config.inputs
    ntype = config.ntype
    takes_all = draws is None or STRATEGIES.get(candidate.strategy).traits.unit == "full_graph"
    fanouts = [-1] * config.num_layers if draws is None or takes_all else list(draws.fanouts)
    labels = {ntype: [LABEL]} if LABEL in g.nodes[ntype].data else None
    feats = {ntype: [FEATURE]}
    if inputs is not None:
        feats = {name: [inputs.feature] for name in inputs.feature_widths}
    sampler = dgl.dataloading.NeighborSampler(fanouts, prefetch_node_feats=feats, prefetch_labels=labels)
    options: dict[str, Any] = {}
    if draws is not None and not takes_all:
        options |= {"batch_size": draws.batch_size, "shuffle": True}
    if (device := find_float_parameter(config.model).device) != g.session.device:
        options["device"] = device
    seeds: Any = node_split(g.nodes[ntype].data[TRAIN_MASK], g.get_partition_book(), ntype)
    if len(g.ntypes) > 1:
        seeds = {ntype: seeds}
    return opened.loader(seeds, sampler, **options)


@contextmanager
def leave_unchanged(g: DistGraph, device: torch.device) -> Iterator[None]:
    """Restore random state, ledger, counters and files after the block. Every rank must enter it.

    Training draws the same random numbers as without trials. Files that strategies store beside the dataset
    go to a separate folder, which is removed.
    """
    session, cache = g.session, g.dataset.cache
    ledger_before = session.ledger.snapshot()
    trace = session.trace
    shares = session.step_share, session.model_share
    parent = g.dataset.folder / CACHE
    folder = parent / str(broadcast_json(partial_name(parent / "trials").name, session))
    g.dataset.cache = ArrayCache(folder, g.dataset.manifest.checksum, trusted=True)
    session.trace = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), g.kvstore.pause_counting():
            yield
    finally:
        g.dataset.cache, session.trace = cache, trace
        session.step_share, session.model_share = shares
        session.ledger.restore(ledger_before)

    barrier(session, "the end of the trials")
    if session.is_first_on_machine:
        shutil.rmtree(folder, ignore_errors=True)
    barrier(session, "their files")
