"""``dx.fit`` under strategy ``lambda``: loader, wrapped model and epoch trainer."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch
from dgl.nn import GraphConv
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from dglx_dist.comm.collectives import (
    barrier,
    check_equal,
    gather_int64,
    gather_json,
    gather_rows,
    raise_for_missing,
    run_on_all_ranks,
    sum_over_ranks,
)
from dglx_dist.comm.ledger import CONTROL, WORKER, LedgerRow
from dglx_dist.comm.rpc import Handler
from dglx_dist.comm.session import Session, warn_user
from dglx_dist.comm.wire import payload_bytes
from dglx_dist.data.json_fields import printable
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import Items, LoaderTimes, read_items
from dglx_dist.errors import CheckpointError, ConfigError, PeerError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.partition_book import Ids
from dglx_dist.records import FEATURE, Array, EpochRecord
from dglx_dist.strategies.base import EpochTrainer, Objective, WrappedModel, check_one_type
from dglx_dist.strategies.replicated import broadcast_state, check_same_model
from dglx_dist.strategies.serverless.cost import Bill, Counts, bill, dollars
from dglx_dist.strategies.serverless.cut import CLASS_LABEL, Captured, capture
from dglx_dist.strategies.serverless.graph_partition import Part, open_part
from dglx_dist.strategies.serverless.graph_server import GraphServer, SubmitResult
from dglx_dist.strategies.serverless.options import LambdaOptions, Scheme
from dglx_dist.strategies.serverless.parameter_server import ParameterPlan, ParameterServer, Update, assign
from dglx_dist.strategies.serverless.parameter_service import ParameterClient, ParameterService, what_misses
from dglx_dist.strategies.serverless.program import EDGE_DATA, Program, Slot
from dglx_dist.strategies.serverless.scheduler import IntervalProgress, ThreadScheduler, WorkerPool
from dglx_dist.strategies.serverless.tasks import TaskKey, kernels, parse_attempt, parse_half
from dglx_dist.strategies.serverless.worker import GIVE, GRADIENTS, PROGRAM, PULL, WEIGHTS

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


def bill_of(used: Counts, options: LambdaOptions, *, simulated: bool) -> Bill:
    functions = Counts() if options.in_process else used
    return bill(functions, {options.server: used.server_seconds}, options.price_table, simulated=simulated)


def describe_costs(used: Counts, options: LambdaOptions, *, simulated: bool) -> dict[str, object]:
    """Return counts, dollars and labels as JSON values."""
    paid = bill_of(used, options, simulated=simulated)
    return {
        **asdict(used),
        "server": options.server,
        "dollars_functions": paid.functions,
        "dollars_servers": paid.servers,
        "dollars": paid.total,
        "label": paid.label,
        "text": str(paid),
    }


def _counts_of_ranks(own: Counts, session: Session) -> Counts:
    # Not as text: its length, and with it the bytes that are counted, would differ between runs.
    rows = gather_rows(torch.tensor([*vars(own).values()], dtype=torch.float64), session)
    sums = zip(vars(own).items(), rows.T.tolist(), strict=True)
    return Counts(**{name: type(value)(math.fsum(column)) for (name, value), column in sums})


# Ledger phases. Workers have no ledger, so the graph server counts their traffic.
PROGRAM_PHASE = "lambda_program"
DOWN = "lambda_down"
UP = "lambda_up"
_MOST_KERNELS, _LONGEST_KERNELS = 16, 400
_PEER_CHECK_S = 5.0


@final
class Engine:
    """Runs epochs on this rank together with all others. All methods but :meth:`abandon` are collective.

    ``weights``, to start from, are in the order of the program and, as ``update``, equal on all ranks; the
    others are as in :class:`IntervalProgress`.
    """

    def __init__(
        self,
        session: Session,
        program: Program,
        part: Part,
        options: LambdaOptions,
        weights: Sequence[Array],
        update: Update,
        first_epoch: int = 0,
        synchronous_from: int | None = None,
    ) -> None:
        self._session = session
        rank = session.topology.rank
        rpc = session.rpc
        self._peers = [peer for peer in range(session.topology.world_size) if peer != rank]
        num_servers = self._num_servers = options.parameter_servers
        plan = ParameterPlan(
            program=program,
            server_of_interval=assign(part.interval_sizes, num_servers),
            staleness=options.staleness,
            first_epoch=first_epoch,
        )
        self.progress = IntervalProgress(
            program, options, part.num_intervals, self._peers, first_epoch, synchronous_from
        )
        self._updated_at = {first_epoch: time.perf_counter()}
        self._show: Callable[[], None] = lambda: None
        self._program = np.frombuffer(program.to_json(), np.uint8)
        self.kernels = {kernels()}
        """Numerical kernels of this process and those that workers reported; see ``kernels`` of tasks."""
        self.epoch = first_epoch
        """The next epoch; all intervals have completed the one before it."""
        self._parameter_server = ParameterServer(plan, rank, weights, update) if rank < num_servers else None
        with ExitStack() as undo:
            handlers = self._answer_workers(undo)
            self.parameters = ParameterClient(rpc, plan, self._note_updates)
            """The latest weights and the optimizer's state, between runs."""
            undo.callback(self.parameters.close)
            number = 1 + session.next_number("run of lambda")
            self._server = server = GraphServer(
                part, program, options, self.parameters, run=number, seed=session.seed
            )
            if self._parameter_server is not None:
                world_size = session.topology.world_size
                timeline = session.timeline
                service = ParameterService(rpc, self._parameter_server, world_size, timeline, server.run)
                undo.callback(service.close)

            self.workers = WorkerPool(session, program, plan, options, handlers)
            undo.callback(self.workers.close)
            self.scheduler = ThreadScheduler(session, server, self.progress, self.workers)
            undo.callback(self.scheduler.close)
            self.workers.controller.watch(lambda: self.scheduler.queue_length)
            barrier(session, "making the engines of all graph servers")
            self.abandon = undo.pop_all().close
            """Releases everything after a failure, without waiting for other ranks."""

    def run(
        self,
        epochs: int,
        show: Callable[[], None] = lambda: None,
        rates: Mapping[int, Sequence[float]] = MappingProxyType({}),
    ) -> list[EpochRecord]:
        """Train ``epochs`` more epochs; no rank has work in flight afterwards. Collective.

        ``rates`` has the learning rates of the groups by epoch, where they are not the optimizer's.

        The records are of all ranks, without bytes. An epoch takes the time between the weight updates before
        and after it, on the slowest rank; epochs may overlap. Calls ``show`` every half a second. Raises
        PeerError, naming who is missing, if a rank is dead or there was no progress for the session's
        time-out; or if a task failed in all allowed attempts.
        """
        first = self.epoch
        end = self.epoch + epochs
        self._updated_at = {first: time.perf_counter()}
        self._show = show
        if self._parameter_server is not None:
            self._parameter_server.rates = dict(rates)
        self.scheduler.run(end, self._check)
        self.epoch = end
        barrier(self._session, f"the end of epoch {end - 1}")
        if self._parameter_server is not None:
            self._parameter_server.drain()
        own_statistics = [
            [*self._server.statistics(epoch), self._updated_at[epoch + 1] - self._updated_at[epoch]]
            for epoch in range(first, end)
        ]
        per_rank = gather_rows(torch.tensor(own_statistics, dtype=torch.float64), self._session).numpy()
        num_train = self._server.program.num_train
        return [
            EpochRecord(
                epoch=epoch,
                loss=math.fsum(losses) / num_train,
                train_accuracy=int(correct.sum()) / num_train,
                val_accuracy=None,
                seconds=float(seconds.max()),
                num_samples=num_train,
                compute_s=float(seconds.max()),
            )
            for epoch, (losses, correct, seconds) in enumerate(per_rank.transpose(1, 2, 0), first)
        ]

    def close(self) -> None:
        """Release everything once no rank needs another one. Collective."""
        # Workers first. A cloud function cannot be stopped: a late one sends this run's number, which the
        # servers of the next run reject.
        self.workers.close()
        barrier(self._session, "closing the engines of all graph servers")
        self.abandon()

    def _answer_workers(self, undo: ExitStack) -> dict[str, Handler]:
        handlers: dict[str, Handler] = {
            PROGRAM: self._send_program,
            PULL: lambda name, _arrays: self._server.pull(*parse_half(name)),
            GIVE: self._submit,
        }
        for op, handler in handlers.items():
            self._session.rpc.register(op, self._count_bytes(op, handler), for_clients=True)
            undo.callback(self._session.rpc.unregister, op)
        return {
            **handlers,
            WEIGHTS: lambda name, _arrays: self.parameters.weights(TaskKey.parse(name)),
            GRADIENTS: lambda name, arrays: self.parameters.gradients(TaskKey.parse(name), arrays),
        }

    def _count_bytes(self, op: str, handler: Handler) -> Handler:
        count, own = self._session.ledger.add, self._session.topology.rank

        def answer(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            layer = 0 if op == PROGRAM else TaskKey.parse(name.partition("/")[0]).step
            if op == GIVE:
                # First: these rows may end the epoch, and with it what is counted as the epoch's.
                count(UP, layer, WORKER, own, payload_bytes(arrays))
                return handler(name, arrays)
            answers = handler(name, arrays)
            count(PROGRAM_PHASE if op == PROGRAM else DOWN, layer, own, WORKER, payload_bytes(answers))
            return answers

        return answer

    def _send_program(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        if name and len(self.kernels) < _MOST_KERNELS:
            self.kernels.add(printable(name, _LONGEST_KERNELS).replace("\n", " "))
        return [self._program]

    def _submit(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        key, half, attempt = parse_attempt(name)
        result = self._server.submit(key, half, arrays)
        if result is SubmitResult.LAST:
            self.scheduler.task_done(key, attempt)
        elif result is SubmitResult.LATE and half == 1:
            self.scheduler.duplicate_done(key, attempt)
        return []

    def _note_updates(self, updates: int) -> None:
        now = time.perf_counter()
        for number in range(max(self._updated_at) + 1, updates + 1):
            self._updated_at[number] = now
        self.scheduler.weights_updated(updates)

    def _check(self, quiet_s: float, behind: Sequence[int]) -> None:
        self._show()
        self.parameters.raise_if_stopped()
        late = quiet_s >= self._session.timeout_s
        if not late and quiet_s < _PEER_CHECK_S:
            return

        # At the staleness bound no particular peer is late, but the update needs all of them.
        if missing := behind or self._peers:
            raise_for_missing(
                self._session,
                list(missing),
                "the rows of its next Scatter" if behind else "its gradients for the next update",
                advice="look at its output and its workers",
                late=late and bool(behind),
            )

        if late:
            open_tasks = [str(key) for key in self._server.open_tasks[:5]]
            tasks = f"no worker gave rows for {', '.join(open_tasks)}; " if open_tasks else ""
            misses = what_misses(self._session.rpc, range(self._num_servers))
            raise PeerError(
                f"graph server {self._server.rank} made no progress for {quiet_s:.0f} s: {tasks}{misses}; "
                "look at the output of the workers, or raise timeout_s (DGLX_TIMEOUT)"
            )


def progress_line(engine: Engine, options: LambdaOptions, used: Counts) -> str:
    """Return ``epoch 3 | AV1 3 GA1 2 | 4 workers | queue 2 | 0 relaunched | $0.0012 simulated``."""
    epoch, stages = engine.scheduler.state()
    workers = engine.workers.controller.workers
    paid = bill_of(used, options, simulated=engine.workers.simulated)
    return (
        f"epoch {epoch} | {stages} | {workers} worker{'' if workers == 1 else 's'} | "
        f"queue {engine.scheduler.queue_length} | {used.relaunched} relaunched | "
        f"{dollars(paid.total)}{' simulated' if paid.simulated else ''}"
    )


OWN_LOOP = (
    "under strategy 'lambda' epochs of different parts of the graph overlap, so no loop can own a step; call "
    "dx.fit(model, g, ...), or use strategy='data_parallel' for a loop of your own"
)
_IGNORED_OPTIONS = ("batch_size", "shuffle", "drop_last", "seed", "depth", "num_threads", "device")


@final
class IntervalLoader:
    """The training nodes of all ranks, for ``dx.fit``: this rank's ``indices``, (K,) ids or a mask.

    ConfigError on all ranks, when on any rank the sampler draws only some in-neighbours, an option is unknown
    or changes what is trained, or a node is given twice; or the graph has several types.
    """

    def __init__(self, g: DistGraph, indices: Ids, sampler: Any, options: Mapping[str, Any]) -> None:
        check_one_type("lambda", g)
        self.g, self._epoch = g, 0
        self._seeds: Items[str] = run_on_all_ranks(
            g.session, lambda: _check_items(g, indices, sampler, options), ConfigError
        )

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError(OWN_LOOP)

    def times(self, *, reset: bool = False) -> LoaderTimes:
        return LoaderTimes()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "step": 0, "seed": self.g.session.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after whole epochs; CheckpointError if the position is inside one, or invalid."""
        epoch, step = (state.get(name) if isinstance(state, Mapping) else None for name in ("epoch", "step"))
        if not isinstance(epoch, int) or step != 0:
            raise CheckpointError(
                f"{state!r} is not a position between epochs; load a checkpoint that was saved after one"
            )
        self._epoch = epoch

    def advance(self, epochs: int) -> None:
        self._epoch += epochs

    def own_targets(self) -> tuple[Array, int]:
        """Return which own nodes are trained on, (n,) bool, and M, their number over all ranks. Collective.

        Sends 16 bytes per training node that another rank owns. ConfigError on all ranks if two of them have
        the same node, or there is no training node.
        """
        g, (ntype,) = self.g, self.g.ntypes
        policy = g.get_node_partition_policy(ntype)
        seeds = self._seeds.ids[ntype]
        counts = DistTensor((g.num_nodes(ntype),), torch.int64, part_policy=policy, is_gdata=False, graph=g)
        counts.push(torch.from_numpy(seeds), torch.ones(len(seeds), dtype=torch.int64), accumulate=True)
        g.barrier()
        first, last = policy.owned_range
        own_counts: Array = counts[torch.arange(first, last)].numpy()
        counts.delete()

        def check_once() -> None:
            if len(twice := np.flatnonzero(own_counts > 1)):
                raise ConfigError(
                    f"node {first + int(twice[0])} is a training node of {int(own_counts[twice[0]])} ranks; "
                    "give each node to one rank, as dx.node_split(mask) does"
                )

        run_on_all_ranks(g.session, check_once, ConfigError)
        num_own = torch.tensor([int(own_counts.sum())])
        num_train = int(sum_over_ranks(num_own, g.session, phase=CONTROL)[0])
        if num_train == 0:
            raise ConfigError(
                "no rank has a training node; pass the loader dx.node_split(g.ndata['train_mask'])"
            )

        return own_counts > 0, num_train


def _check_items(g: DistGraph, indices: Ids, sampler: Any, options: Mapping[str, Any]) -> Items[str]:
    plan = read_sampler(sampler)
    if plan.fanouts is None or any(fanout != -1 for fanout in plan.fanouts):
        problem = f"{type(sampler).__name__} makes blocks with its own code"
        if plan.fanouts is not None:
            problem = f"the sampler draws {list(plan.fanouts)} in-neighbours per layer"
        raise ConfigError(
            f"{problem}, but strategy 'lambda' takes all in-neighbours of all training nodes in every step; "
            "give it dgl.dataloading.MultiLayerFullNeighborSampler(layers) (leave fanouts= and --fanout "
            "out), or use strategy='data_parallel'"
        )

    plan.check_takes_all("strategy 'lambda'")
    set_options = {name: value for name, value in options.items() if value is not None}
    for name in set_options:
        if name not in _IGNORED_OPTIONS:
            raise ConfigError(
                f"strategy 'lambda' has no loader option {name!r}, because it trains on the whole graph at "
                "once; leave it out, or use strategy='data_parallel'"
            )

    if set_options:
        ignored = ", ".join(f"{name}={value!r}" for name, value in set_options.items())
        warn_user(
            f"{ignored}: without effect, because strategy 'lambda' takes all training nodes in every step"
        )

    return read_items(indices, {ntype: g.num_nodes(ntype) for ntype in g.ntypes}, "node")


def weights_of(model: nn.Module, names: Sequence[str]) -> list[Array]:
    parameters = dict(model.named_parameters())
    return [parameters[name].detach().cpu().numpy().copy() for name in names]


def draw_weights(model: nn.Module, scheme: Scheme, seed: int) -> None:
    """Draw trained weights with torch's functions, He for rectifiers, and set biases to 0.

    What is frozen keeps its values, and so do vectors that are not a bias, such as a scale.
    """
    draw = getattr(nn.init, f"{scheme.replace('he_', 'kaiming_')}_")
    generator = torch.Generator().manual_seed(seed)
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        module, _, own_name = name.rpartition(".")
        drawn = torch.zeros(weight.shape, dtype=weight.dtype)
        if weight.dim() > 1 and scheme.startswith("he"):
            # DGL's GraphConv has (inputs, outputs), where torch's fan_in is of (outputs, inputs).
            mode = "fan_out" if isinstance(modules[module], GraphConv) else "fan_in"
            draw(drawn, 0, mode, "relu", generator)
        elif weight.dim() > 1:
            draw(drawn, generator=generator)
        if weight.requires_grad and (weight.dim() > 1 or own_name == "bias"):
            weight.detach().copy_(drawn)


def write_back(
    model: nn.Module, optimizer: Optimizer, weights: Mapping[str, Array], state: Mapping[str, Array]
) -> None:
    """Write trained weights and the state of their update into the user's model and optimizer, as copies."""
    parameter_of = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameter_of[name].copy_(torch.tensor(weight))
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        if name not in parameter_of:
            raise ConfigError(f"the state {path!r} belongs to no parameter: {sorted(parameter_of)}")
        parameter = parameter_of[name]
        # torch keeps step counts on the CPU, and all else where the parameter is.
        device = "cpu" if key == "step" else parameter.device
        optimizer.state[parameter][key] = torch.tensor(value, device=device)


def fingerprint(model: nn.Module, optimizer: Optimizer) -> str:
    """Return a digest of the training state: parameters, what is trained, the optimizer and its state."""
    saved = optimizer.state_dict()
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]

    # Learning rates are given anew with every run.
    groups = [
        {key: value for key, value in group.items() if "lr" not in key} for group in saved["param_groups"]
    ]
    digest = hashlib.sha256(repr([type(optimizer).__name__, trained, groups]).encode())
    state = {
        f"{number}/{key}": value
        for number, entries in sorted(saved["state"].items())
        for key, value in sorted(entries.items())
        if isinstance(value, Tensor)
    }
    for name, tensor in (*parameters.items(), *state.items()):
        array = tensor.detach().cpu().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


log = logging.getLogger(__name__)


@final
class LambdaTrainer(EpochTrainer):
    """Trainer of one call of ``dx.fit``; constructed, run and closed collectively.

    After each run ``model`` has the trained weights and ``optimizer``, which is never stepped, their state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        captured: Captured,
        loader: IntervalLoader,
        objective: Objective,
        options: LambdaOptions,
        show: Callable[[str], None] | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loader = loader
        self._objective = objective
        self._options, self._show = options, show
        self._session = loader.g.session
        targets, num_train = loader.own_targets()
        captured = run_on_all_ranks(
            self._session, lambda: _with_loss(captured, loader.g, objective, num_train), ConfigError
        )
        self._program = captured.program
        self._names = list(self._program.weight_shapes)
        run_on_all_ranks(self._session, self._make_update, ConfigError)
        self._part = open_part(loader.g, captured, objective, targets, options.intervals)
        self._engine: Engine | None = None
        self._last_fingerprint = ""
        self._synchronous_from: int | None = None
        self._past = Counts()
        self._simulated = True
        self._warned = False

    def run(self, first: int, number: int) -> tuple[list[EpochRecord], Sequence[LedgerRow]]:
        # Bytes are counted from here. As soon as another rank has begun, its workers call the parameter
        # servers of this one.
        counted = self._session.ledger.snapshot()
        engine = self._engine_from(first)
        began = time.perf_counter()

        def show() -> None:
            seconds = time.perf_counter() - began
            used = self._used() + Counts(server_seconds=seconds)
            if self._show is not None:
                self._show(progress_line(engine, self._options, used))

        records = engine.run(number, show, self._rates(range(first, first + number)))
        write_back(self._model, self._optimizer, engine.parameters.latest(), engine.parameters.state())
        self._past += Counts(server_seconds=time.perf_counter() - began)
        self._last_fingerprint = fingerprint(self._model, self._optimizer)
        self._loader.advance(number)
        if self._synchronous_from is None:
            self._synchronous_from = engine.progress.synchronous_from
        self._compare_kernels(sorted(engine.kernels.copy()))

        # Epochs overlap, so the bytes of a single epoch are not known. Each epoch gets an equal share.
        moved = self._session.ledger.since(counted, control=False)
        own_bytes = [sum(row.num_bytes for row in moved if row.inside is inside) for inside in (True, False)]
        both = gather_int64(own_bytes, self._session).sum(axis=0)
        ends = np.arange(number + 1)[:, None] * both // number
        return [
            replace(record, bytes_inside=int(inside), bytes_outside=int(outside))
            for record, (inside, outside) in zip(records, np.diff(ends, axis=0), strict=True)
        ], moved

    def _make_update(self) -> Update:
        parameters = dict(self._model.named_parameters())
        return Update(self._optimizer, parameters, self._names, self._objective.clip_norm)

    def _rates(self, epochs: range) -> dict[int, list[float]]:
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        factor = self._objective.rate_factor or (lambda _epoch: 1.0)
        return {epoch: [rate * factor(epoch) for rate in rates] for epoch in epochs}

    def close(self, *, failed: bool = False) -> None:
        if (engine := self._engine) is not None:
            if failed:
                engine.abandon()
            else:
                engine.close()
            self._past = self._used()
            self._engine = None

    def account(self) -> dict[str, object]:
        used = _counts_of_ranks(self._used(), self._session)
        costs = describe_costs(used, self._options, simulated=self._simulated)
        seconds = used.server_seconds / self._session.topology.world_size
        if seconds and (dollars_spent := float(str(costs["dollars"]))):
            # Performance for each dollar (Dorylus, section 7.2). Only ratios of it mean something.
            costs["value"] = 1 / (seconds * dollars_spent)
            costs["text"] = f"{costs['text']}; value {costs['value']:.4g}"

        if self._options.switch_at:
            costs["synchronous_from"] = self._synchronous_from
        return costs

    def _used(self) -> Counts:
        # By the engines so far.
        return self._past if self._engine is None else self._past + self._engine.workers.controller.counts

    def _engine_from(self, epoch: int) -> Engine:
        now = fingerprint(self._model, self._optimizer)
        # Checked each time: if only some ranks had changed something, the others would wait for them.
        remedy = "make weights and optimizer equal, and change them on all ranks"
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        check_equal(self._session, "the digest of weights and optimizer", f"{now} {rates}", remedy)

        # A new run where the user changed weights, optimizer or epoch.
        changed = now != self._last_fingerprint
        if self._engine is not None and (changed or self._engine.epoch != epoch):
            self.close()
        if self._engine is None:
            self._engine = Engine(
                self._session,
                self._program,
                self._part,
                self._options,
                weights_of(self._model, self._names),
                self._make_update(),
                epoch,
                # Once training became synchronous, as switch_at requests, it stays so.
                None if self._synchronous_from is None else epoch,
            )
            self._simulated = self._engine.workers.simulated

        return self._engine

    def _compare_kernels(self, local: list[str]) -> None:
        per_rank = cast("list[list[str]]", gather_json(local, self._session))
        kinds = {kind for rank in per_rank for kind in rank}
        if len(kinds) > 1 and not self._warned and self._session.topology.rank == 0:
            log.warning(
                "graph servers and workers compute with different kernels, so results of another run may "
                "differ in the last bits; see 'Equal bits' in docs/strategies/lambda.md. Seen: %s",
                " | ".join(sorted(kinds)),
            )

        self._warned = self._warned or len(kinds) > 1


@final
class LambdaModel(WrappedModel):
    """A model trained by graph servers, workers and parameter servers; its module is the user's, unchanged.

    Rank 0's weights are used. ConfigError on all ranks if the model has layers that workers do not know (the
    message has the place and a remedy), the graph has several types, or the ranks differ.
    """

    def __init__(self, model: nn.Module, g: DistGraph, options: LambdaOptions) -> None:
        super().__init__()
        check_one_type("lambda", g)
        check_same_model(model, g.session, str(options))
        if options.initialise != "keep":
            draw_weights(model, options.initialise, g.session.seed)
        broadcast_state(model, g.session)
        self.module = model
        self._options = options
        run_on_all_ranks(g.session, lambda: _capture(model, g, options), ConfigError)

    def exchange_seconds(self, *, reset: bool = False) -> float:
        return 0.0  # Epochs overlap, so no rank waits only for exchanges.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module, for evaluation; ConfigError where gradients are recorded."""
        if self.training and torch.is_grad_enabled():
            raise ConfigError(OWN_LOOP)
        return self.module(*args, **kwargs)

    def trainer(
        self,
        loader: Any,
        optimizer: Optimizer,
        objective: Objective,
        show: Callable[[str], None] | None = None,
    ) -> EpochTrainer:
        """Return the trainer; ConfigError if loader, loss, optimizer or participants are not supported."""
        if not isinstance(loader, IntervalLoader):
            raise ConfigError(
                f"the loader is a {type(loader).__name__}; make it with dx.DataLoader(g, nodes, sampler) "
                "after dx.init(strategy='lambda'), or leave it to dx.fit"
            )

        if objective.extra_terms:
            raise ConfigError(
                f"{' and '.join(objective.extra_terms)} would take part in a step, but strategy 'lambda' "
                "computes it from the features alone; leave it out, or use strategy='data_parallel'"
            )

        # Again, because the task may have changed buffers of the model, such as the scale of its result.
        captured = run_on_all_ranks(
            loader.g.session, lambda: _capture(self.module, loader.g, self._options), ConfigError
        )
        return LambdaTrainer(self.module, optimizer, captured, loader, objective, self._options, show)


def _capture(model: nn.Module, g: DistGraph, options: LambdaOptions) -> Captured:
    columns = {name: slot for name in g.edata if (slot := _edge_slot(name, g.edata[name])) is not None}
    widths = [g.ndata[name].shape[1] for name in (FEATURE, *g.ndata) if _is_features(g, name)]
    on_workers = {"auto": None, "workers": True, "servers": False}[options.edge_tasks]
    errors = []
    for width in dict.fromkeys(widths):
        try:
            return capture(model, width, columns, on_workers)
        except ConfigError as error:
            errors.append(error)

    raise errors[0] if errors else ConfigError("the nodes have no features: a matrix of floats")


def _is_features(g: DistGraph, name: str) -> bool:
    return name in g.ndata and len(g.ndata[name].shape) == 2 and g.ndata[name].dtype.is_floating_point


def _edge_slot(name: str, data: DistTensor) -> Slot | None:
    if data.dtype.is_complex or data.dtype is torch.bool:
        return None
    dtype: Any = "" if data.dtype.is_floating_point else "int64"
    return Slot(name=f"{EDGE_DATA}{name}", shape=tuple(data.shape[1:]), per="edge", dtype=dtype)


def _with_loss(captured: Captured, g: DistGraph, objective: Objective, num_train: int) -> Captured:
    if objective.label not in g.ndata:
        raise ConfigError(f"the nodes have no labels {objective.label!r} (known: {', '.join(g.ndata)})")
    labels = g.ndata[objective.label]
    label = CLASS_LABEL
    if labels.dtype.is_floating_point or len(labels.shape) > 1:
        label = Slot(name="label", shape=tuple(labels.shape[1:]), per="node")
    return captured.with_loss(objective.loss or cross_entropy, label, num_train)
