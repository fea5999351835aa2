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
from dglx_dist.strategies.serverless.worker import GRADIENTS, PROGRAM, PULL, SUBMIT, WEIGHTS

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


def bill_of(used: Counts, options: LambdaOptions, *, simulated: bool) -> Bill:
    """Return the bill for the counted work. Workers in this process are no functions that are paid for."""
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


def _sum_counts(own_counts: Counts, session: Session) -> Counts:
    """Sum the counts from all ranks. Collective."""
    # Numbers have the same size in each run. A text would not, and the ledger counts its bytes.
    own_values = vars(own_counts)
    rows = gather_rows(torch.tensor([*own_values.values()], dtype=torch.float64), session)
    sums = {}
    for (name, value), column in zip(own_values.items(), rows.T.tolist(), strict=True):
        sums[name] = type(value)(math.fsum(column))
    return Counts(**sums)


# Ledger phases. Workers have no ledger, so the graph server counts their traffic.
PROGRAM_PHASE = "lambda_program"
DOWN = "lambda_down"
UP = "lambda_up"
_MAX_KERNELS, _LONGEST_KERNELS = 16, 400
_PEER_CHECK_INTERVAL_S = 5.0


@final
class Engine:
    """Runs epochs on this rank together with all other ranks. All methods but :meth:`abandon` are collective.

    Args:
        weights: The first weights, in program order. They are equal on all ranks.
        update: A copy of the optimizer, equal on all ranks.
        first_epoch: See :class:`IntervalProgress`.
        synchronous_from: See :class:`IntervalProgress`.
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
        self._num_servers = options.parameter_servers
        plan = ParameterPlan(
            program=program,
            server_of_interval=assign(part.interval_sizes, self._num_servers),
            staleness=options.staleness,
            first_epoch=first_epoch,
        )
        self.progress = IntervalProgress(
            program, options, part.num_intervals, self._peers, first_epoch, synchronous_from
        )
        self._updated_at = {first_epoch: time.perf_counter()}
        """Time at which each epoch's weights were known, starting with the last run's first epoch."""
        self._show: Callable[[], None] = lambda: None
        self._program_bytes = np.frombuffer(program.to_json(), np.uint8)
        self.kernels = {kernels()}
        """Descriptions of the numerical kernels that this process and the workers use.

        See ``kernels`` in the tasks module.
        """
        self.epoch = first_epoch
        """The next epoch. All intervals have completed the epoch before."""
        self._parameter_server: ParameterServer | None = None
        if rank < self._num_servers:
            self._parameter_server = ParameterServer(plan, rank, weights, update)

        # If a later step fails, the earlier parts are closed again.
        with ExitStack() as resources:
            handlers = self._register_handlers(resources)
            self.parameters = ParameterClient(rpc, plan, self._note_updates)
            """The latest weights and the optimizer's state, between runs."""
            resources.callback(self.parameters.close)
            run = 1 + session.next_number("run of lambda")
            self._server = GraphServer(part, program, options, self.parameters, run=run, seed=session.seed)
            if self._parameter_server is not None:
                world_size = session.topology.world_size
                service = ParameterService(rpc, self._parameter_server, world_size, session.timeline, run)
                resources.callback(service.close)

            self.workers = WorkerPool(session, program, plan, options, handlers)
            resources.callback(self.workers.close)
            self.scheduler = ThreadScheduler(session, self._server, self.progress, self.workers)
            resources.callback(self.scheduler.close)
            self.workers.controller.watch(lambda: self.scheduler.queue_length)
            barrier(session, "making the engines of all graph servers")
            self.abandon = resources.pop_all().close
            """Releases everything after a failure, without waiting for other ranks."""

    def run(
        self,
        epochs: int,
        show: Callable[[], None] = lambda: None,
        rates: Mapping[int, Sequence[float]] = MappingProxyType({}),
    ) -> list[EpochRecord]:
        """Train ``epochs`` more epochs, and return their records over all ranks, without bytes. Collective.

        No rank has work in flight afterwards. Epochs may overlap, so an epoch takes the time between the
        weight updates before and after it, on the slowest rank.

        Args:
            show: Called every half a second.
            rates: Learning rates for the optimizer's groups by epoch, if they differ from its own.

        Raises:
            PeerError: a rank is dead, there was no progress for the session's time-out, or a task failed in
                all allowed attempts. The message names what is missing.
        """
        first_epoch = self.epoch
        end = self.epoch + epochs
        self._updated_at = {first_epoch: time.perf_counter()}
        self._show = show
        if self._parameter_server is not None:
            self._parameter_server.rates = dict(rates)
        self.scheduler.run(end, self._check)
        self.epoch = end
        barrier(self._session, f"the end of epoch {end - 1}")
        # After the barrier no task is in flight, so no stashed weights are needed.
        if self._parameter_server is not None:
            self._parameter_server.drain()
        return self._make_records(first_epoch, end)

    def _make_records(self, first_epoch: int, end: int) -> list[EpochRecord]:
        """Return the records for the epochs from ``first_epoch`` up to ``end``. Collective."""
        # Each row has one epoch's summed losses, correct node count and seconds.
        own_rows = []
        for epoch in range(first_epoch, end):
            seconds = self._updated_at[epoch + 1] - self._updated_at[epoch]
            own_rows.append([*self._server.statistics(epoch), seconds])
        own_tensor = torch.tensor(own_rows, dtype=torch.float64)
        rows_of_ranks = gather_rows(own_tensor, self._session).numpy()

        num_train = self._server.program.num_train
        records = []
        for epoch, rows in enumerate(rows_of_ranks.transpose(1, 0, 2), first_epoch):
            loss_sums, correct_counts, seconds_of_ranks = rows.T
            slowest_s = float(seconds_of_ranks.max())
            record = EpochRecord(
                epoch=epoch,
                loss=math.fsum(loss_sums) / num_train,
                train_accuracy=int(correct_counts.sum()) / num_train,
                val_accuracy=None,
                seconds=slowest_s,
                num_samples=num_train,
                compute_s=slowest_s,
            )
            records.append(record)
        return records

    def close(self) -> None:
        """Release everything once no rank needs the others. Collective."""
        # Workers are closed first. A cloud function cannot be stopped, but the next run's servers reject a
        # late function, because it sends this run's number.
        self.workers.close()
        barrier(self._session, "closing the engines of all graph servers")
        self.abandon()

    def _register_handlers(self, resources: ExitStack) -> dict[str, Handler]:
        """Register handlers for calls from worker processes. ``resources`` unregisters them when it closes.

        Return the handlers for worker threads in this process. These threads also call the parameter server,
        and their calls are not counted as traffic.
        """
        handlers: dict[str, Handler] = {
            PROGRAM: self._send_program,
            PULL: lambda name, _arrays: self._server.pull(*parse_half(name)),
            SUBMIT: self._submit,
        }
        for op, handler in handlers.items():
            self._session.rpc.register(op, self._with_counted_bytes(op, handler), for_clients=True)
            resources.callback(self._session.rpc.unregister, op)
        return {
            **handlers,
            WEIGHTS: lambda name, _arrays: self.parameters.weights(TaskKey.parse(name)),
            GRADIENTS: lambda name, arrays: self.parameters.gradients(TaskKey.parse(name), arrays),
        }

    def _with_counted_bytes(self, op: str, handler: Handler) -> Handler:
        """Return a handler that calls ``handler`` and counts its arrays' bytes in the ledger."""
        add_to_ledger = self._session.ledger.add
        rank = self._session.topology.rank

        def answer(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            layer = 0
            if op != PROGRAM:
                key_text, _, _ = name.partition("/")
                layer = TaskKey.parse(key_text).step

            if op == SUBMIT:
                # These rows may end the epoch, so they are counted before the handler gets them.
                add_to_ledger(UP, layer, WORKER, rank, payload_bytes(arrays))
                return handler(name, arrays)
            answers = handler(name, arrays)
            phase = PROGRAM_PHASE if op == PROGRAM else DOWN
            add_to_ledger(phase, layer, rank, WORKER, payload_bytes(answers))
            return answers

        return answer

    def _send_program(self, worker_kernels: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        if worker_kernels and len(self.kernels) < _MAX_KERNELS:
            self.kernels.add(printable(worker_kernels, _LONGEST_KERNELS).replace("\n", " "))
        return [self._program_bytes]

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
        for epoch in range(max(self._updated_at) + 1, updates + 1):
            self._updated_at[epoch] = now
        self.scheduler.weights_updated(updates)

    def _check(self, quiet_s: float, awaited_peers: Sequence[int]) -> None:
        """Raise PeerError if a rank is dead, or if ``quiet_s`` seconds without progress are too many."""
        self._show()
        self.parameters.raise_if_stopped()
        is_late = quiet_s >= self._session.timeout_s
        if not is_late and quiet_s < _PEER_CHECK_INTERVAL_S:
            return

        advice = "look at its output and its workers"
        if awaited_peers:
            activity = "the rows of its next Scatter"
            raise_for_missing(self._session, list(awaited_peers), activity, advice=advice, late=is_late)
        elif self._peers:
            # At the staleness bound no particular peer is late, but the update needs all peers.
            activity = "its gradients for the next update"
            raise_for_missing(self._session, self._peers, activity, advice=advice, late=False)
        if not is_late:
            return

        causes = what_misses(self._session.rpc, range(self._num_servers))
        open_tasks = self._server.open_tasks[:5]
        if open_tasks:
            causes = f"no worker gave rows for {', '.join(map(str, open_tasks))}; {causes}"
        raise PeerError(
            f"graph server {self._server.rank} made no progress for {quiet_s:.0f} s: "
            f"{causes}; look at the output of the workers, or raise timeout_s (DGLX_TIMEOUT)"
        )


def progress_line(engine: Engine, options: LambdaOptions, used: Counts) -> str:
    """Return ``epoch 3 | AV1 3 GA1 2 | 4 workers | queue 2 | 0 relaunched | $0.0012 simulated``."""
    epoch, stages = engine.scheduler.state()
    num_workers = engine.workers.controller.workers
    plural = "" if num_workers == 1 else "s"
    costs = bill_of(used, options, simulated=engine.workers.simulated)
    label = " simulated" if costs.simulated else ""
    return (
        f"epoch {epoch} | {stages} | {num_workers} worker{plural} | queue {engine.scheduler.queue_length} | "
        f"{used.relaunched} relaunched | {dollars(costs.total)}{label}"
    )


OWN_LOOP = (
    "under strategy 'lambda' epochs of different parts of the graph overlap, so no loop can own a step; call "
    "dx.fit(model, g, ...), or use strategy='data_parallel' for a loop of your own"
)
_IGNORED_OPTIONS = ("batch_size", "shuffle", "drop_last", "seed", "depth", "num_threads", "device")


@final
class IntervalLoader:
    """The training nodes on all ranks, for ``dx.fit``. ``indices`` has this rank's nodes: (K,) ids or a mask.

    Raises ConfigError on all ranks if the graph has several types. It also raises it if on any rank the
    sampler draws only some in-neighbours, an option is unknown or changes what is trained, or a node is given
    twice.
    """

    def __init__(self, g: DistGraph, indices: Ids, sampler: Any, options: Mapping[str, Any]) -> None:
        check_one_type("lambda", g)
        self.g = g
        self._epoch = 0
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
        """Resume between epochs. Raises CheckpointError if the position is inside an epoch, or invalid."""
        is_valid = isinstance(state, Mapping) and isinstance(state.get("epoch"), int)
        if not is_valid or state.get("step") != 0:
            raise CheckpointError(
                f"{state!r} is not a position between epochs; load a checkpoint that was saved after one"
            )
        self._epoch = state["epoch"]

    def advance(self, epochs: int) -> None:
        self._epoch += epochs

    def own_targets(self) -> tuple[Array, int]:
        """Find this rank's training nodes, and check that no node is given twice. Collective.

        Sends 16 bytes per training node that another rank owns.

        Returns:
            Which own nodes are trained on, (n,) bool, and M, the number of training nodes on all ranks.

        Raises:
            ConfigError: two ranks have the same node, or there is no training node. It is raised on all
                ranks.
        """
        g = self.g
        (ntype,) = g.ntypes
        policy = g.get_node_partition_policy(ntype)
        seeds = torch.from_numpy(self._seeds.ids[ntype])

        # Each rank adds 1 at its training nodes, so that a node's owner knows how many ranks train it.
        size = (g.num_nodes(ntype),)
        num_trainers = DistTensor(size, torch.int64, part_policy=policy, is_gdata=False, graph=g)
        num_trainers.push(seeds, torch.ones(len(seeds), dtype=torch.int64), accumulate=True)
        g.barrier()
        first, last = policy.owned_range
        own_trainers: Array = num_trainers[torch.arange(first, last)].numpy()
        num_trainers.delete()

        def check_once() -> None:
            duplicates = np.flatnonzero(own_trainers > 1)
            if len(duplicates):
                node = int(duplicates[0])
                raise ConfigError(
                    f"node {first + node} is a training node of {int(own_trainers[node])} "
                    "ranks; give each node to one rank, as dx.node_split(mask) does"
                )

        run_on_all_ranks(g.session, check_once, ConfigError)
        num_own = torch.tensor([int(own_trainers.sum())])
        num_train = int(sum_over_ranks(num_own, g.session, phase=CONTROL)[0])
        if num_train == 0:
            raise ConfigError(
                "no rank has a training node; pass the loader dx.node_split(g.ndata['train_mask'])"
            )
        return own_trainers > 0, num_train


def _check_items(g: DistGraph, indices: Ids, sampler: Any, options: Mapping[str, Any]) -> Items[str]:
    """Return the training nodes. Raises ConfigError if sampler, options or nodes are not supported."""
    plan = read_sampler(sampler)
    problem = ""
    if plan.fanouts is None:
        problem = f"{type(sampler).__name__} makes blocks with its own code"
    elif any(fanout != -1 for fanout in plan.fanouts):
        problem = f"the sampler draws {list(plan.fanouts)} in-neighbours per layer"
    if problem:
        raise ConfigError(
            f"{problem}, but strategy 'lambda' takes all in-neighbours of all training nodes "
            "in every step; give it dgl.dataloading.MultiLayerFullNeighborSampler(layers) "
            "(leave fanouts= and --fanout out), or use strategy='data_parallel'"
        )

    plan.check_takes_all("strategy 'lambda'")
    set_options = {name: value for name, value in options.items() if value is not None}
    for name in set_options:
        if name not in _IGNORED_OPTIONS:
            raise ConfigError(
                f"strategy 'lambda' has no loader option {name!r}, because it trains on the "
                "whole graph at once; leave it out, or use strategy='data_parallel'"
            )

    if set_options:
        ignored = ", ".join(f"{name}={value!r}" for name, value in set_options.items())
        warn_user(
            f"{ignored}: without effect, because strategy 'lambda' takes all training nodes in every step"
        )

    return read_items(indices, {ntype: g.num_nodes(ntype) for ntype in g.ntypes}, "node")


def weights_of(model: nn.Module, names: Sequence[str]) -> list[Array]:
    """Copy the parameters in ``names``."""
    parameters = dict(model.named_parameters())
    return [parameters[name].detach().cpu().numpy().copy() for name in names]


def draw_weights(model: nn.Module, scheme: Scheme, seed: int) -> None:
    """Draw trained weights with torch's functions, He for rectifiers, and set biases to 0.

    Frozen weights keep their values, and so do vectors that are not a bias, such as a scale.
    """
    fill = getattr(nn.init, f"{scheme.replace('he_', 'kaiming_')}_")
    generator = torch.Generator().manual_seed(seed)
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        module_name, _, weight_name = name.rpartition(".")
        values = torch.zeros(weight.shape, dtype=weight.dtype)

        # Frozen weights are drawn, too, so that the others do not depend on what is frozen.
        if weight.dim() > 1 and scheme.startswith("he"):
            # DGL's GraphConv has (inputs, outputs), while torch's fan_in assumes (outputs, inputs).
            mode = "fan_out" if isinstance(modules[module_name], GraphConv) else "fan_in"
            fill(values, 0, mode, "relu", generator)
        elif weight.dim() > 1:
            fill(values, generator=generator)
        if weight.requires_grad and (weight.dim() > 1 or weight_name == "bias"):
            weight.detach().copy_(values)


def write_back(
    model: nn.Module, optimizer: Optimizer, weights: Mapping[str, Array], state: Mapping[str, Array]
) -> None:
    """Copy trained weights and their update's state into the user's model and optimizer."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(torch.tensor(weight))

    for path, value in state.items():
        name, _, key = path.rpartition("/")
        if name not in parameters:
            raise ConfigError(f"the state {path!r} belongs to no parameter: {sorted(parameters)}")
        parameter = parameters[name]
        # torch keeps step counts on the CPU, and all other state where the parameter is.
        device = "cpu" if key == "step" else parameter.device
        optimizer.state[parameter][key] = torch.tensor(value, device=device)


def fingerprint(model: nn.Module, optimizer: Optimizer) -> str:
    """Return a digest over the training state: parameters, what is trained, the optimizer and its state."""
    optimizer_state = optimizer.state_dict()
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    groups = []
    for group in optimizer_state["param_groups"]:
        # Learning rates are left out, because each run gets its own.
        groups.append({key: value for key, value in group.items() if "lr" not in key})
    digest = hashlib.sha256(repr([type(optimizer).__name__, trained, groups]).encode())

    tensors: dict[str, Tensor] = dict(parameters)
    for index, entries in sorted(optimizer_state["state"].items()):
        for key, value in sorted(entries.items()):
            if isinstance(value, Tensor):
                tensors[f"{index}/{key}"] = value
    for name, tensor in tensors.items():
        array = tensor.detach().cpu().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


log = logging.getLogger(__name__)


@final
class LambdaTrainer(EpochTrainer):
    """Trains for one ``dx.fit`` call. All ranks construct, run and close it together.

    After each run ``model`` has the trained weights, and ``optimizer`` has their update's state. The
    optimizer itself never makes a step.
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
        self._options = options
        self._show = show
        self._session = loader.g.session
        targets, num_train = loader.own_targets()
        # A loss that is not supported is refused on all ranks.
        captured = run_on_all_ranks(
            self._session, lambda: _with_loss(captured, loader.g, objective, num_train), ConfigError
        )
        self._program = captured.program
        self._weight_names = list(self._program.weight_shapes)
        # An optimizer that is not supported is refused before any data is read.
        run_on_all_ranks(self._session, self._make_update, ConfigError)
        self._part = open_part(loader.g, captured, objective, targets, options.intervals)
        self._engine: Engine | None = None
        self._last_fingerprint = ""
        self._synchronous_from: int | None = None
        self._past_counts = Counts()
        """Counts from closed engines, and seconds from all graph servers' runs."""
        self._simulated = True
        self._has_warned = False

    def run(self, first: int, number: int) -> tuple[list[EpochRecord], Sequence[LedgerRow]]:
        # Bytes are counted from here. As soon as another rank has begun, its workers call the parameter
        # servers on this rank.
        ledger_start = self._session.ledger.snapshot()
        engine = self._open_engine(first)
        start_s = time.perf_counter()

        def show() -> None:
            seconds = time.perf_counter() - start_s
            used = self._count_used() + Counts(server_seconds=seconds)
            if self._show is not None:
                self._show(progress_line(engine, self._options, used))

        records = engine.run(number, show, self._compute_rates(range(first, first + number)))
        parameters = engine.parameters
        write_back(self._model, self._optimizer, parameters.latest(), parameters.state())
        self._past_counts += Counts(server_seconds=time.perf_counter() - start_s)
        self._last_fingerprint = fingerprint(self._model, self._optimizer)
        self._loader.advance(number)
        if self._synchronous_from is None:
            self._synchronous_from = engine.progress.synchronous_from
        self._compare_kernels(sorted(engine.kernels.copy()))
        ledger_rows = self._session.ledger.since(ledger_start, control=False)
        return self._add_bytes(records, ledger_rows), ledger_rows

    def _add_bytes(self, records: Sequence[EpochRecord], rows: Sequence[LedgerRow]) -> list[EpochRecord]:
        """Return ``records`` with all ranks' bytes. ``rows`` are this rank's ledger. Collective.

        Epochs overlap, so a single epoch's bytes are not known. Each epoch gets an equal share.
        """
        own_inside = sum(row.num_bytes for row in rows if row.inside)
        own_outside = sum(row.num_bytes for row in rows if not row.inside)
        total_bytes = gather_int64([own_inside, own_outside], self._session).sum(axis=0)
        # Whole numbers up to each epoch, so that the shares add up to the total.
        bytes_until = np.arange(len(records) + 1)[:, None] * total_bytes // len(records)
        shares = np.diff(bytes_until, axis=0).tolist()
        return [
            replace(record, bytes_inside=inside, bytes_outside=outside)
            for record, (inside, outside) in zip(records, shares, strict=True)
        ]

    def _make_update(self) -> Update:
        parameters = dict(self._model.named_parameters())
        return Update(self._optimizer, parameters, self._weight_names, self._objective.clip_norm)

    def _read_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _compute_rates(self, epochs: range) -> dict[int, list[float]]:
        """Return the learning rates by epoch, one for each optimizer group."""
        rates = {}
        for epoch in epochs:
            factor = 1.0
            if self._objective.rate_factor is not None:
                factor = self._objective.rate_factor(epoch)
            rates[epoch] = [rate * factor for rate in self._read_rates()]
        return rates

    def close(self, *, failed: bool = False) -> None:
        if self._engine is None:
            return
        if failed:
            self._engine.abandon()
        else:
            self._engine.close()
        self._past_counts = self._count_used()
        self._engine = None

    def account(self) -> dict[str, object]:
        used = _sum_counts(self._count_used(), self._session)
        costs = describe_costs(used, self._options, simulated=self._simulated)
        seconds = used.server_seconds / self._session.topology.world_size
        dollars_spent = float(str(costs["dollars"]))
        if seconds and dollars_spent:
            # The value is the performance for each dollar (Dorylus, section 7.2). Only ratios between values
            # have a meaning.
            costs["value"] = 1 / (seconds * dollars_spent)
            costs["text"] = f"{costs['text']}; value {costs['value']:.4g}"
        if self._options.switch_at:
            costs["synchronous_from"] = self._synchronous_from
        return costs

    def _count_used(self) -> Counts:
        """Return the counts from all engines so far."""
        if self._engine is None:
            return self._past_counts
        return self._past_counts + self._engine.workers.controller.counts

    def _open_engine(self, epoch: int) -> Engine:
        """Return the engine, a new one if the user changed weights, optimizer or epoch. Collective."""
        # The ranks are compared each time. If only some of them had a change, these would open new engines,
        # and wait for the others.
        current_fingerprint = fingerprint(self._model, self._optimizer)
        digest = f"{current_fingerprint} {self._read_rates()}"
        remedy = "make weights and optimizer equal, and change them on all ranks"
        check_equal(self._session, "the digest of weights and optimizer", digest, remedy)

        has_changed = current_fingerprint != self._last_fingerprint
        if self._engine is not None and (has_changed or self._engine.epoch != epoch):
            self.close()
        if self._engine is None:
            self._engine = Engine(
                self._session,
                self._program,
                self._part,
                self._options,
                weights_of(self._model, self._weight_names),
                self._make_update(),
                epoch,
                # Once training became synchronous, as switch_at requests, it stays so.
                None if self._synchronous_from is None else epoch,
            )
            self._simulated = self._engine.workers.simulated
        return self._engine

    def _compare_kernels(self, own_kernels: list[str]) -> None:
        """Warn once on rank 0 if the run's processes have different numerical kernels. Collective."""
        kernels_of_ranks = cast("list[list[str]]", gather_json(own_kernels, self._session))
        distinct_kernels = {description for rank in kernels_of_ranks for description in rank}
        if len(distinct_kernels) < 2 or self._has_warned:
            return

        self._has_warned = True
        if self._session.topology.rank == 0:
            log.warning(
                "graph servers and workers compute with different kernels, so results of another run may "
                "differ in the last bits; see 'Equal bits' in docs/strategies/lambda.md. Seen: %s",
                " | ".join(sorted(distinct_kernels)),
            )


@final
class LambdaModel(WrappedModel):
    """A model trained by graph servers, workers and parameter servers. Its module is the user's, unchanged.

    Rank 0's weights are used. Raises ConfigError on all ranks if the model has layers that workers do not
    know, the graph has several types, or the ranks differ. The message has the place and a remedy.
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
        """Call the user's module for evaluation. Raises ConfigError if gradients are recorded."""
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
        """Return the trainer. Raises ConfigError if loader, loss, optimizer or a term is not supported."""
        if not isinstance(loader, IntervalLoader):
            raise ConfigError(
                f"the loader is a {type(loader).__name__}; make it with dx.DataLoader(g, "
                "nodes, sampler) after dx.init(strategy='lambda'), or leave it to dx.fit"
            )

        if objective.extra_terms:
            raise ConfigError(
                f"{' and '.join(objective.extra_terms)} would take part in a step, but strategy 'lambda' "
                "computes it from the features alone; leave it out, or use strategy='data_parallel'"
            )

        # The model is captured again, because the task may have changed its buffers, such as a scale.
        captured = run_on_all_ranks(
            loader.g.session, lambda: _capture(self.module, loader.g, self._options), ConfigError
        )
        return LambdaTrainer(self.module, optimizer, captured, loader, objective, self._options, show)


def _capture(model: nn.Module, g: DistGraph, options: LambdaOptions) -> Captured:
    """Capture ``model`` with the first node data matrix that has a fitting width.

    If the model accepts none, raises the ConfigError for the first width.
    """
    edge_slots = {}
    for name in g.edata:
        slot = _make_edge_slot(name, g.edata[name])
        if slot is not None:
            edge_slots[name] = slot

    widths = [g.ndata[name].shape[1] for name in (FEATURE, *g.ndata) if _is_features(g, name)]
    if not widths:
        raise ConfigError("the nodes have no features: a matrix of floats")
    on_workers = {"auto": None, "workers": True, "servers": False}[options.edge_tasks]
    errors = []
    for width in dict.fromkeys(widths):
        try:
            return capture(model, width, edge_slots, on_workers)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _is_features(g: DistGraph, name: str) -> bool:
    return name in g.ndata and len(g.ndata[name].shape) == 2 and g.ndata[name].dtype.is_floating_point


def _make_edge_slot(name: str, data: DistTensor) -> Slot | None:
    """Return the slot for edge data that a program may read, or None for complex numbers and flags."""
    if data.dtype.is_complex or data.dtype is torch.bool:
        return None
    dtype: Any = "" if data.dtype.is_floating_point else "int64"
    return Slot(name=f"{EDGE_DATA}{name}", shape=tuple(data.shape[1:]), per="edge", dtype=dtype)


def _with_loss(captured: Captured, g: DistGraph, objective: Objective, num_train: int) -> Captured:
    """Return ``captured`` with the loss and the labels from ``objective``."""
    if objective.label not in g.ndata:
        raise ConfigError(f"the nodes have no labels {objective.label!r} (known: {', '.join(g.ndata)})")
    labels = g.ndata[objective.label]
    label = CLASS_LABEL
    if labels.dtype.is_floating_point or len(labels.shape) > 1:
        label = Slot(name="label", shape=tuple(labels.shape[1:]), per="node")
    return captured.with_loss(objective.loss or cross_entropy, label, num_train)
