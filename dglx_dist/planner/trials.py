"""Time candidates in a running job. They train in turns, and the slower half is dropped."""

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
from dglx_dist.planner.choose import TIE_FACTOR
from dglx_dist.planner.measure import make_optimizer, take_step, update_weights
from dglx_dist.planner.records import ChoiceOptions, Draws, Prediction, Trial
from dglx_dist.records import FEATURE, LABEL, EdgeType
from dglx_dist.registry import AUTO
from dglx_dist.strategies.base import STRATEGIES, Objective, OpenedStrategy, find_float_parameter
from dglx_dist.strategies.candidate import Candidate
from dglx_dist.training.link import link_loader
from dglx_dist.training.relational import EntityInputs
from dglx_dist.training.tasks import LinkPrediction, check_inputs, gather_input_rows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

MIN_TRIAL_S = 15.0
"""Seconds that opening the candidates may always take. The rounds take as long again."""
MAX_SHARE = 0.02
"""Share of the training time that opening the candidates may take, if longer than :data:`MIN_TRIAL_S`."""
_MIN_FIRST_TURN_S = 0.1
"""Minimum length of a first turn, in seconds."""
_MIN_STEPS = 3
"""Minimum number of steps in a first turn."""
_WARM_STEPS = 2
"""Steps before a turn that begins within an epoch."""
_TURNS_OF_ROUND = 3
_MAX_ROUNDS = 4
_CLEARLY_SLOWER = 1.2
"""Candidates slower by this factor are dropped at once. Epochs in the same run differ by a tenth."""
_MIN_TRIED = 2
"""Candidates that are always tried, however long it takes."""


@dataclass(frozen=True, kw_only=True)
class LinkTrial:
    """Training on edges. The trials time its steps."""

    targets: Sequence[EdgeType]
    task: LinkPrediction
    negatives: int
    """Negatives per edge and replaced end."""
    has_encoder: bool
    """Whether the model passes messages."""
    num_edges: int
    """Training edges on all ranks together."""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """A training run. The trials time its steps."""

    g: DistGraph
    model: nn.Module
    """The user's model. Each trial trains a copy."""
    num_layers: int
    draws: Draws | None
    """Parameters for mini-batches. None: the training has no mini-batches."""
    batch_size: int
    """Target edges per rank and batch."""
    epochs: int
    constraints: ChoiceOptions
    memory_bytes: int
    """Memory that a rank has for all candidates that are open at a time."""
    inputs: EntityInputs | None = None
    """Input rows by node type. None: the only type's features."""
    links: LinkTrial | None = None
    """Training on edges. None: the training is on nodes."""
    ntype: str
    """Node type to train on."""
    base_bytes: int
    """Bytes of ``memory_bytes`` that all candidates share: the program, the structure and the features."""


@final
@dataclass(kw_only=True)
class _Contestant:
    """An open candidate and how long its turns took."""

    index: int
    """Index of the candidate among the predictions."""
    run: CandidateRun
    seconds: list[float] = field(default_factory=list)
    """By turn, seconds per epoch."""
    steps: int = 0
    """Number of timed steps."""

    @property
    def steps_of_turn(self) -> int:
        """Steps that take at least ``_MIN_FIRST_TURN_S``, equal on all ranks."""
        num_steps = math.ceil(_MIN_FIRST_TURN_S * self.run.num_steps / self.seconds[0])
        return max(_WARM_STEPS, num_steps)

    @property
    def trial(self) -> Trial:
        # The first turn is a short one, just after the candidate was opened.
        seconds = self.seconds[1:] or self.seconds
        median = statistics.median(seconds)
        return Trial(seconds=median, low=min(seconds), high=max(seconds), steps=self.steps)


def run_trials(
    predictions: Sequence[Prediction], config: TrialConfig, notify: Callable[[str], None] = lambda _: None
) -> tuple[list[Prediction], list[str]]:
    """Time the candidates, the simplest first. Every rank must call this within :func:`leave_unchanged`.

    Returns:
        The predictions with trials, or with reasons why they were not tried, and the names of the candidates
        between which the trials did not decide.

    Raises:
        ConfigError: If a candidate failed on this rank alone, for instance because memory is short.
        PeerError: If a rank ended or stayed silent in a trial.
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
        finalists = [race.predictions[index].candidate.name for index in race.finalists]
        return race.predictions, finalists


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
        self._notify = notify
        self._stack = stack
        self._session = config.g.session
        self.running: list[_Contestant] = []
        self._closed_for_memory: list[int] = []
        self._num_opened = 0
        self._begin = time.perf_counter()
        self._elapsed_s = 0.0
        """Seconds since ``_begin`` on rank 0's clock."""

    @property
    def finalists(self) -> list[int]:
        """Indices into ``predictions`` for the candidates that no turn has shown to be slower."""
        return [contestant.index for contestant in self.running] + self._closed_for_memory

    def open_all(self) -> None:
        """Open the feasible candidates and let each take a first turn.

        The simplest candidate comes first. The others follow by their seconds on the network, shortest first.
        """
        indices = [index for index, prediction in enumerate(self.predictions) if prediction.feasible]
        indices[1:] = sorted(indices[1:], key=lambda index: self.predictions[index].network_s)
        for index in indices:
            prediction = self.predictions[index]
            reason = self._find_obstacle(prediction)
            if reason:
                self.predictions[index] = replace(prediction, not_tried=reason)
                continue

            self._make_room(prediction)
            self._notify(f"trying {prediction.candidate.name}")
            refusal = self._open(index)
            if refusal:
                self.predictions[index] = replace(prediction, why_not=refusal)

    def halve(self) -> None:
        """Let the candidates alternate, and drop the slower half, until the remaining ones are equal."""
        turn_factor = 1
        self._begin = time.perf_counter()
        self._elapsed_s = 0.0

        for round_index in range(_MAX_ROUNDS):
            if self._are_equal() or self._is_over():
                break
            self._notify(f"round {round_index + 1}: {len(self.running)} candidates")
            for contestant in self.running * _TURNS_OF_ROUND:
                # First turns are not reliable, because opening has read files and allocated memory. So each
                # candidate takes a second turn, even if the time is over.
                is_late = self._is_over() and len(contestant.seconds) > 1
                if is_late or contestant not in self.running:
                    continue
                self._time_turn(contestant, turn_factor * contestant.steps_of_turn)

            self._drop_slower()
            turn_factor *= 2

        for contestant in self.running:
            self._record_trial(contestant)

    def _drop_slower(self) -> None:
        """Drop the slower half, and those that are much slower than the fastest."""
        ordered = sorted(self.running, key=self._weigh_seconds)
        if not ordered:  # the strategies have refused all candidates in this round
            return

        # The negations round up, so that the larger half stays.
        num_kept = -(-len(ordered) // 2)
        best = ordered[0]
        slow_limit = _CLEARLY_SLOWER * best.trial.high * self._weight(best)
        tie_limit = TIE_FACTOR * self._weigh_seconds(best)
        for index, contestant in enumerate(ordered):
            is_much_slower = contestant.trial.low * self._weight(contestant) > slow_limit
            # If several candidates are equally fast, the simplest will win, so all of them stay.
            is_slower = index >= num_kept and self._weigh_seconds(contestant) > tie_limit
            if is_much_slower or is_slower:
                self._drop(contestant)

    def _are_equal(self) -> bool:
        """Return whether at most one candidate is left, or all are timed and equally fast."""
        if len(self.running) < 2:
            return True
        for contestant in self.running:
            if len(contestant.seconds) <= _TURNS_OF_ROUND:
                return False
        seconds = [self._weigh_seconds(contestant) for contestant in self.running]
        return max(seconds) <= TIE_FACTOR * min(seconds)

    def _drop(self, contestant: _Contestant) -> None:
        self._record_trial(contestant)
        contestant.run.close()
        self.running.remove(contestant)

    def _weight(self, contestant: _Contestant) -> float:
        return self._config.constraints.weight(self.predictions[contestant.index].candidate)

    def _weigh_seconds(self, contestant: _Contestant) -> float:
        return contestant.trial.seconds * self._weight(contestant)

    def _record_trial(self, contestant: _Contestant) -> None:
        index = contestant.index
        self.predictions[index] = replace(self.predictions[index], trial=contestant.trial)

    def _is_over(self) -> bool:
        """Return whether the time for the choice is over, equally on all ranks."""
        # A choice needs at least two candidates.
        if self._num_opened < _MIN_TRIED:
            return False
        fastest_s = min((contestant.trial.seconds for contestant in self.running), default=0.0)
        return self._elapsed_s > max(MIN_TRIAL_S, MAX_SHARE * self._config.epochs * fastest_s)

    def _find_obstacle(self, prediction: Prediction) -> str:
        """Say why the candidate need not be tried, or return ""."""
        best_s = min(map(self._weigh_seconds, self.running), default=math.inf)
        network_s = prediction.network_s * self._config.constraints.weight(prediction.candidate)
        # Rows between accelerators do not use the measured links.
        is_lower_bound = prediction.bytes_exact and self._session.device.type == "cpu"
        if is_lower_bound and network_s > best_s:
            return f"its bytes alone take {prediction.network_s:.3g} s, longer than the fastest candidate"
        return "the time for the choice is over" if self._is_over() else ""

    def _make_room(self, prediction: Prediction) -> None:
        """Close the slowest candidates until the memory is large enough for one more."""
        config = self._config
        while self.running:
            # The memory that all candidates share exists once.
            needed_bytes = config.base_bytes
            open_predictions = [self.predictions[contestant.index] for contestant in self.running]
            for candidate in (prediction, *open_predictions):
                needed_bytes += max(candidate.memory_bytes - config.base_bytes, 0)
            if needed_bytes <= config.memory_bytes:
                return

            slowest = max(self.running, key=self._weigh_seconds)
            self._drop(slowest)
            self._closed_for_memory.append(slowest.index)

    def _open(self, index: int) -> str:
        """Open a candidate and time its first turn. If a rank refuses it, return why."""
        runs: list[CandidateRun] = []

        def open_run() -> tuple[float, int]:
            run = CandidateRun(self.predictions[index].candidate, self._config)
            runs.append(run)
            self._stack.callback(run.close)
            return run.take_turn(_MIN_STEPS)

        seconds, num_steps, refusal = self._run_turn(index, open_run)
        self._num_opened += 1
        if not refusal:
            self.running.append(_Contestant(index=index, run=runs[0], seconds=[seconds], steps=num_steps))
        elif runs:
            # Another rank has refused the candidate that this rank has opened.
            runs[0].close()
        return refusal

    def _time_turn(self, contestant: _Contestant, num_steps: int) -> None:
        """Time about ``num_steps`` steps. Drop the candidate if its strategy refuses on a rank."""
        index = contestant.index
        seconds, num_timed, refusal = self._run_turn(index, lambda: contestant.run.take_turn(num_steps))
        if refusal:
            self._drop(contestant)
            self.predictions[index] = replace(self.predictions[index], why_not=refusal)
            return
        contestant.seconds.append(seconds)
        contestant.steps += num_timed

    def _run_turn(self, index: int, take_turn: Callable[[], tuple[float, int]]) -> tuple[float, int, str]:
        """Let the candidate at ``index`` take a turn on all ranks.

        Returns:
            Seconds per epoch on the slowest rank, the number of timed steps, and why a rank refuses the
                candidate
            ("" if none does).
        """
        seconds = 0.0
        num_steps = 0
        refusal = ""
        try:
            seconds, num_steps = take_turn()
        except ConfigError as error:
            # A strategy raises this error on all ranks.
            refusal = first_sentence(error)
        except (MemoryError, RuntimeError) as error:
            # Other ranks may be in an exchange with this one, so the job must end.
            name = self.predictions[index].candidate.name
            raise ConfigError(
                f"the trial of {name} failed: {type(error).__name__}: {error}. Name a strategy instead of "
                f"{AUTO!r}, or exclude candidates with its option memory."
            ) from error

        elapsed_s = time.perf_counter() - self._begin
        reports = gather_json([seconds, num_steps, refusal, elapsed_s], self._session)
        all_seconds, all_steps, refusals, all_elapsed_s = zip(*reports, strict=True)
        # Rank 0's clock decides for all ranks whether the time is over.
        self._elapsed_s = float(all_elapsed_s[0])
        first_refusal = next(filter(None, refusals), "")
        return max(map(float, all_seconds)), int(all_steps[0]), str(first_refusal)


@final
class CandidateRun:
    """A candidate that is open in the job, with its own copy of the model, its own loader and its own cache.

    Every rank must create, use and close it. ConfigError if the strategy refuses the model or the graph.
    """

    def __init__(self, candidate: Candidate, config: TrialConfig) -> None:
        self._g = config.g
        self._device = find_float_parameter(config.model).device
        self._inputs = config.inputs
        self._ntype = config.ntype
        self._links = config.links
        check_inputs(config.g, config.inputs, candidate.strategy)
        strategy = STRATEGIES.get(candidate.strategy)
        self._cache = None
        if candidate.cache is not None:
            self._cache = self._fill_cache(candidate, config.draws)

        with ExitStack() as stack:
            opened = strategy(self._g.session, candidate.options).open(self._g)
            stack.callback(opened.close)
            self._loader = _open_loader(opened, candidate, config)
            self._model = opened.wrap(copy.deepcopy(config.model).train())
            self._optimizer = make_optimizer(self._model)
            self._trainer = None
            self._num_epochs = 0
            if not strategy.traits.own_loop:
                objective = Objective(loss=cross_entropy)
                self._trainer = self._model.trainer(self._loader, self._optimizer, objective)
                assert self._trainer is not None, "a strategy without support for own loops has a trainer"
                stack.callback(self._trainer.close)

            # The first steps allocate memory, compile kernels and read files.
            with self._install_cache():
                if self._trainer is not None or self.num_steps == 1:
                    self._take_epochs(1)
                else:
                    self._train_on(islice(iter(self._loader), 1))
            self._stack = stack.pop_all()

    @property
    def num_steps(self) -> int:
        """Steps per epoch."""
        return len(self._loader)

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        self._stack.close()
        self._cache = None

    def take_turn(self, num_steps: int) -> tuple[float, int]:
        """Train for about ``num_steps`` steps. Return the seconds per epoch, and how many steps were timed.

        A trainer always takes whole epochs. So does a turn that is at least as long as an epoch.
        """
        epoch_steps = self.num_steps
        with self._install_cache():
            if self._trainer is not None or epoch_steps <= num_steps:
                num_epochs = math.ceil(num_steps / epoch_steps)
                seconds = self._time(lambda: self._take_epochs(num_epochs))
                return seconds / num_epochs, num_epochs * epoch_steps

            num_timed = min(num_steps, epoch_steps - _WARM_STEPS)
            batches = iter(self._loader)
            self._train_on(islice(batches, _WARM_STEPS))
            seconds = self._time(lambda: self._train_on(islice(batches, num_timed)))
            return seconds / num_timed * epoch_steps, num_timed

    def _time(self, action: Callable[[], None]) -> float:
        synchronize(self._device)
        barrier(self._g.session, "a trial")
        begin = time.perf_counter()
        action()
        synchronize(self._device)
        return time.perf_counter() - begin

    def _take_epochs(self, num_epochs: int) -> None:
        if self._trainer is not None:
            self._trainer.run(self._num_epochs, num_epochs)
            self._num_epochs += num_epochs
            return
        for _ in range(num_epochs):
            self._train_on(self._loader)

    def _train_on(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            try:
                if self._links is None:
                    blocks = batch[-1]
                    rows = gather_input_rows(self._model, blocks[0], FEATURE, self._inputs)
                    take_step(self._model, self._optimizer, blocks, rows, self._ntype)
                else:
                    update_weights(self._optimizer, self._links.task(self._model, batch).loss)
            finally:
                # Embedding rows are not trained, so that they stay as they are.
                if self._inputs is not None:
                    self._inputs.drop_gradients()

    def _fill_cache(self, candidate: Candidate, draws: Draws | None) -> tuple[Any, Any]:
        """Fill a cache for ``candidate`` and return it. The column keeps the cache that it had before."""
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
    def _install_cache(self) -> Iterator[None]:
        """Use this candidate's cache in the block. All candidates share the store's columns."""
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
    """Fill the cache that ``candidate`` names, for neighbour-sampled batches. Every rank must call it."""
    assert candidate.cache is not None
    options: dict[str, Any] = {}
    if candidate.cache == "vip":
        options = {"fanouts": list(fanouts), "batch_size": batch_size}
    g.cache_rows(FEATURE, alpha=candidate.cache_alpha, policy=candidate.cache, **options)


def _open_loader(opened: OpenedStrategy, candidate: Candidate, config: TrialConfig) -> Any:
    """Return the loader that ``candidate`` uses for the training nodes or edges."""
    g = config.g
    draws = config.draws
    ntype = config.ntype
    options: dict[str, Any] = {}
    device = find_float_parameter(config.model).device
    if device != g.session.device:
        options["device"] = device
    if STRATEGIES.get(candidate.strategy).traits.unit == "full_graph":
        draws = None
    fanouts = [-1] * config.num_layers if draws is None else list(draws.fanouts)

    if config.links is not None:
        # Strategies on whole graphs also have batches with edges.
        return link_loader(
            g,
            config.links.targets,
            fanouts=fanouts if config.links.has_encoder else None,
            batch_size=config.batch_size,
            negatives=config.links.negatives,
            inputs=config.inputs,
            opened=opened,
            **options,
        )

    if draws is not None:
        options |= {"batch_size": draws.batch_size, "shuffle": True}
    features = {ntype: [FEATURE]}
    if config.inputs is not None:
        features = {name: [config.inputs.feature] for name in config.inputs.feature_widths}
    labels = None
    if LABEL in g.nodes[ntype].data:
        labels = {ntype: [LABEL]}
    sampler = dgl.dataloading.NeighborSampler(fanouts, prefetch_node_feats=features, prefetch_labels=labels)
    seeds: Any = node_split(g.nodes[ntype].data[TRAIN_MASK], g.get_partition_book(), ntype)
    if len(g.ntypes) > 1:
        seeds = {ntype: seeds}
    return opened.loader(seeds, sampler, **options)


@contextmanager
def leave_unchanged(g: DistGraph, device: torch.device) -> Iterator[None]:
    """Restore random state, ledger, counters and files after the block. Every rank must enter the block.

    Training draws the same random numbers as without trials. Files that strategies store beside the dataset
    go to a separate folder, which is removed.
    """
    session = g.session
    cache = g.dataset.cache
    trace = session.trace
    ledger_before = session.ledger.snapshot()
    step_share = session.step_share
    model_share = session.model_share

    # All ranks use rank 0's folder.
    parent = g.dataset.folder / CACHE
    folder = parent / str(broadcast_json(partial_name(parent / "trials").name, session))
    g.dataset.cache = ArrayCache(folder, g.dataset.manifest.checksum, trusted=True)
    session.trace = None
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus), g.kvstore.pause_counting():
            yield
    finally:
        g.dataset.cache = cache
        session.trace = trace
        session.step_share = step_share
        session.model_share = model_share
        session.ledger.restore(ledger_before)

    barrier(session, "the end of the trials")
    if session.is_first_on_machine:
        shutil.rmtree(folder, ignore_errors=True)
    barrier(session, "their files")
