"""Sums gradients for replicated parameters over the ranks during backward, and averages buffers.

Only backward communicates, and only new gradients. docs/development/decisions.md explains why
``DistributedDataParallel`` is not used.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from dglx_dist.comm.collectives import count_all_reduce, report_failed_peers, sum_over_ranks
from dglx_dist.comm.session import Session, warn_user
from dglx_dist.comm.trace import COMPUTE, NETWORK, WAIT
from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import (
    NO_BACKWARD,
    call_after_backward,
    current_backward,
    get_version,
    has_gradient_hooks,
    replace_floats,
    watch_steps,
)
from dglx_dist.strategies.base import Reduction

log = logging.getLogger(__name__)

BUCKET_BYTES = 4 * 2**20
"""Default bucket size in bytes. The gradients in a bucket are sent together."""

PHASE = "gradients"

_MAX_SCORE = 10.0
"""Largest score that surely has a nonzero gradient in float32. A larger one's gradient may round to 0."""


class Bucket:
    """Contiguous gradients for parameters with equal dtype and device, followed by one flag for each.

    A flag is 1 if this rank computed the gradient. If it is still 0 after the sum over ranks, no rank
    computed the gradient, and the parameter must not be changed.

    ``indices`` are the parameters' positions in the exchange's parameter list.
    """

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        num_parameters = len(parameters)
        dtype, device = parameters[0].dtype, parameters[0].device
        self.indices = tuple(indices)
        self.flat = torch.zeros(sum(sizes) + num_parameters, dtype=dtype, device=device)
        *segments, self._flags = torch.split(self.flat, [*sizes, num_parameters])
        self.views: dict[int, Tensor] = {}
        """Views into ``flat``, one gradient each, by index. After the exchange they hold sums over ranks."""
        for index, segment, parameter in zip(indices, segments, parameters, strict=True):
            self.views[index] = segment.view(parameter.shape)
        self.missing = num_parameters
        """Number of gradients that have not been stored since the last :meth:`clear`."""
        self._num_computed = 0

    def clear(self) -> None:
        """Set all gradients to zero and mark them as not computed."""
        self.flat.zero_()
        self.missing = len(self.indices)
        self._num_computed = 0

    def put(self, index: int, gradient: Tensor, weight: float) -> None:
        """Store ``weight * gradient``. Weight 0 gives exact zeros, even if the gradient is not finite."""
        self.missing -= 1
        if weight != 0.0:
            torch.mul(gradient, weight, out=self.views[index])
            self._flags[self.indices.index(index)] = 1
            self._num_computed += 1

    def add(self, index: int, gradient: Tensor) -> None:
        """Add ``gradient``, which is already weighted, to the stored one."""
        self.views[index].add_(gradient)
        self._flags[self.indices.index(index)] = 1

    def find_used(self) -> dict[int, bool]:
        """Return whether any rank put a gradient, for each parameter index."""
        if self._num_computed == len(self.indices):
            # If this rank computed every gradient, other ranks' flags do not matter. Reading them would make
            # the host wait for the device.
            return dict.fromkeys(self.indices, True)
        is_used = (self._flags > 0).cpu().tolist()
        return dict(zip(self.indices, is_used, strict=True))


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Cut ``parameters`` into buckets of about ``bucket_bytes``, starting with the last parameters.

    Backward reaches the last layers first, so their bucket can be sent while the others are computed. A
    parameter larger than ``bucket_bytes`` gets its own bucket.
    """
    groups: list[list[int]] = []
    group_bytes = 0
    group_type: tuple[torch.dtype, torch.device] | None = None
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        parameter_type = (parameter.dtype, parameter.device)
        num_bytes = parameter.numel() * parameter.element_size()
        is_full = group_bytes + num_bytes > bucket_bytes
        if not groups or is_full or parameter_type != group_type:
            groups.append([])
            group_bytes = 0
            group_type = parameter_type
        groups[-1].append(index)
        group_bytes += num_bytes
    return [Bucket(group, [parameters[index] for index in group]) for group in groups]


class HeldGradient(NamedTuple):
    """A gradient that :meth:`GradientExchange.hold_gradients` kept on this rank."""

    local: Tensor
    """Gradient that was not sent."""
    before: Tensor | None
    """Gradient that was sent earlier."""
    shown: Tensor
    """Sum of the two, which the user sees as ``.grad``."""
    version: int | None
    """Version counter of ``shown`` when it was created. It tells whether the user has changed the tensor."""


class GradientExchange:
    """Sums gradients over all ranks in every ``backward`` that passes through :meth:`mark`.

    The sums are added to what ``.grad`` already holds, as in torch. A ``backward`` that does not pass a mark,
    and ``torch.autograd.grad``, stay on this rank. ``parameters`` must be the same list on every rank.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], session: Session, bucket_bytes: int
    ) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._session = session
        self._bucket_bytes = bucket_bytes
        self._graph_task = NO_BACKWARD
        self._weight = 1.0
        self._callback: weakref.ref[Callable[[], None]] | None = None
        self._sent_gradients: list[Tensor | None] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._layout: tuple[tuple[torch.dtype, torch.device], ...] = ()
        self._in_flight: list[Any] = []
        self.waited_s = 0.0
        """Seconds waited since the start or the last reset. Push-pull adds its waiting for shares."""
        self.after: Callable[[float], None] = lambda weight: None
        """Called with the weight when an exchanging backward ends, on every rank."""
        self.delay = 0
        """Number of later backward calls before a call's sums reach ``.grad``, to overlap compute."""
        self._pending: deque[tuple[list[Bucket], list[Any]]] = deque()
        """Buckets and running sums from finished backward calls, the oldest first. Empty without a delay."""
        self._in_hold_block = False
        """Whether forward calls run under :meth:`hold_gradients` now."""
        self._backward_is_held = False
        """Whether the running backward call keeps its gradients on this rank."""
        self._held: dict[int, HeldGradient] = {}
        self._hooks = [
            _on_accumulation(parameter, self._make_hook(index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._unwatch = watch_steps(GradientExchange.refuse_held, self)
        self._is_closed = False
        self.warns_of_gaps = True
        """Whether to warn the user about seeds without targets, which change a mean loss."""

    def mark(self, output: Any, weight: float) -> Any:
        """Return the (nested) ``output`` so that backward through its tensors exchanges with ``weight``.

        If one rank runs backward, every rank must run it. Raises ConfigError if the exchange is closed.
        """
        if self._is_closed:
            raise ConfigError(
                "the strategy that wrapped this model was closed, so its gradients would stay "
                "on this rank; wrap the model again"
            )

        # With a delay, sums from several backward calls may be running, so nothing is held.
        is_held = self._in_hold_block and not self.delay and self._session.topology.world_size > 1

        def mark_outputs(*outputs: Tensor) -> tuple[Tensor, ...]:
            anchor = torch.zeros((), requires_grad=True, device=outputs[0].device)
            # The anchor's gradient is accumulated by backward() but not by torch.autograd.grad(). So results
            # from torch.autograd.grad() are not summed.
            _on_accumulation(anchor, lambda _: self._begin(weight, is_held))

            # A user's hook on an unused parameter would be called with None, so such parameters are left out.
            parameters = [parameter for parameter in self._parameters if not has_gradient_hooks(parameter)]
            results = _Mark.apply(anchor, len(outputs), *outputs, *parameters)  # type: ignore[no-untyped-call]  # torch does not annotate this
            if len(outputs) == 1:
                self.watch_gaps(results[0])
            return cast("tuple[Tensor, ...]", results)

        return replace_floats(output, mark_outputs)

    def close(self) -> None:
        """Remove the hooks from parameters and optimizers, and free the buckets."""
        self._is_closed = True
        self._unwatch()
        for hook in self._hooks:
            hook.remove()
        self._buckets = []
        self._bucket_of = {}
        self._layout = ()
        self._in_flight.clear()
        self._pending.clear()

    @contextmanager
    def hold_gradients(self) -> Iterator[None]:
        """Keep gradients on this rank until a backward whose forward ran after the block sends them."""
        previous = self._in_hold_block
        self._in_hold_block = True
        try:
            yield
        finally:
            self._in_hold_block = previous

    def add_delayed(self) -> None:
        """Add the oldest pending sums to ``.grad``, if there are any. Every rank must call it."""
        for index, total in self._wait_oldest(0).items():
            parameter = self._parameters[index]
            if total is None:
                continue
            # The sum is a view into a bucket that will be used again.
            if parameter.grad is None:
                parameter.grad = total.clone()
            else:
                parameter.grad = parameter.grad + total

    def seconds(self, *, reset: bool = False) -> float:
        """Return the seconds waited for peers since the start or the last reset, without overlapped time."""
        waited = self.waited_s
        if reset:
            self.waited_s = 0.0
        return waited

    def watch_gaps(self, scores: Tensor) -> None:
        """Warn once, in backward, if some seeds in this step do not take part in a rank's mean loss.

        Such seeds get the gradient 0 in their rows of ``scores``, or NaN for a mean over no targets. Scores
        on a GPU are not checked, because steps must not wait for the device.
        """
        session = self._session
        session.is_loss_exact = False
        if not self.warns_of_gaps or session.topology.world_size == 1 or scores.device.type != "cpu":
            return
        share = session.model_share
        num_seeds = 0 if share is None else share.num_local
        if num_seeds == 0 or scores.shape[:1] != (num_seeds,):
            return
        # In half precision, gradients round to 0 for usual scores.
        if scores.element_size() < 4:
            return
        values = scores.detach()

        def check_gradient(gradient: Tensor) -> None:
            if session.is_loss_exact or not self.warns_of_gaps:
                return
            num_gaps = _count_gaps(values.reshape(num_seeds, -1), gradient.reshape(num_seeds, -1))
            if num_gaps > 0:
                self.warns_of_gaps = False
                self._warn_of_gaps(num_gaps, num_seeds)

        scores.register_hook(check_gradient)  # type: ignore[no-untyped-call]  # torch does not annotate this

    def _warn_of_gaps(self, num_gaps: int, num_seeds: int) -> None:
        rank = self._session.topology.rank
        message = (
            f"{num_gaps} of the {num_seeds} seeds in this batch of rank {rank} have no part "
            "in the loss (their gradient is 0 or NaN, as without a target); the mean is exact "
            "over all ranks as dx.global_mean(sum of the losses, number of targets)"
        )
        if rank == 0:
            warn_user(message)
        else:
            log.warning("rank %d: %s", rank, message)

    def _begin(self, weight: float, is_held: bool) -> None:
        """Prepare the buckets at the first mark in a backward call. Later marks must have the same weight."""
        graph_task = current_backward()
        if graph_task == self._graph_task:
            if weight != self._weight:
                raise ConfigError(
                    "one backward call spans forward calls of different steps, so their "
                    "gradients cannot be weighted separately (this rank's share of the "
                    f"targets is {self._weight:.6g} in one step and {weight:.6g} in another); "
                    "call backward() once after each forward call, the gradients add up in "
                    ".grad"
                )
            self._backward_is_held &= is_held
            return

        if self._graph_task != NO_BACKWARD:
            # An earlier backward raised an error. Its sums may still run, so its buckets cannot be reused.
            self._in_flight = []
            self._layout = ()
        self._graph_task = graph_task
        self._weight = weight
        self._backward_is_held = is_held
        self._sent_gradients = [self._get_sent_gradient(index) for index in range(len(self._parameters))]
        # This backward call's gradient must stay apart from earlier ones, because only this one is sent.
        for parameter in self._parameters:
            parameter.grad = None

        # The user may have moved the model to another dtype or device.
        layout = tuple((parameter.dtype, parameter.device) for parameter in self._parameters)
        if layout != self._layout:
            self._layout = layout
            self._buckets = make_buckets(self._parameters, self._bucket_bytes)
            self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        for bucket in self._buckets:
            bucket.clear()

        # Autograd drops the callback when the backward ends, even if it ends with an error.
        callback = self._finish
        self._callback = weakref.ref(callback)
        call_after_backward(callback)

    def _get_sent_gradient(self, index: int) -> Tensor | None:
        """Return the gradient that all ranks have, and forget a held gradient that the user has cleared.

        Raises ConfigError if the user has changed the held gradient.
        """
        gradient = self._parameters[index].grad
        held = self._held.get(index)
        if held is None:
            return gradient
        if gradient is held.shown and get_version(gradient) == held.version:
            return held.before

        del self._held[index]
        if gradient is not None and gradient.any():
            raise ConfigError(
                f"the gradient of {self._names[index]!r} was changed between a backward under "
                "no_sync() and the backward that sends it; clip or scale gradients after the "
                "last backward, outside of no_sync()"
            )
        return gradient

    def refuse_held(self, optimizer: Optimizer) -> None:
        """Raise ConfigError if ``optimizer`` steps by gradients that only this rank has."""
        name_by_gradient = {id(held.shown): self._names[index] for index, held in self._held.items()}
        if not name_by_gradient:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = name_by_gradient.get(id(parameter.grad))
                if name is not None:
                    raise ConfigError(
                        f"{type(optimizer).__name__} would step by the gradient of {name!r}, "
                        "which was computed under no_sync() and not sent to other ranks; run "
                        "the last forward and backward before each step() outside of no_sync()"
                    )

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        # The reference is weak, because the garbage collector does not follow references from torch's hooks.
        exchange_ref = weakref.ref(self)

        def add_gradient(parameter: Tensor) -> None:
            exchange = exchange_ref()
            if exchange is not None:
                exchange._add_gradient(index, parameter)

        return add_gradient

    def _add_gradient(self, index: int, parameter: Tensor) -> None:
        """Put the gradient that backward has just computed into its bucket, and send full buckets."""
        if self._graph_task == NO_BACKWARD:
            return
        if current_backward() != self._graph_task:
            is_running = self._callback is not None and self._callback() is not None
            if is_running:
                raise ConfigError(
                    f"the gradient of {self._names[index]!r} was computed by a backward call "
                    "inside the backward call of the loss (re-entrant checkpointing does "
                    "that), so it would not be summed; use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            return

        gradient = parameter.grad
        if gradient is None:
            # No output on this rank depends on the parameter. The hook runs because of the mark.
            return
        if gradient.layout != torch.strided:
            raise ConfigError(
                f"the gradient of {self._names[index]!r} is sparse, and a dense sum would be "
                "as large as the table; use dglx_dist.DistEmbedding with dglx_dist.optim, or "
                "sparse=False"
            )

        bucket = self._bucket_of[index]
        bucket.put(index, gradient, self._weight)
        held = self._held.pop(index, None)
        if held is not None:
            bucket.add(index, held.local)
        self._send_full_buckets(incomplete=False)

    def _send_full_buckets(self, *, incomplete: bool) -> None:
        """Send the buckets that have all their gradients, or all remaining buckets if ``incomplete``."""
        if self._backward_is_held:
            return
        # Buckets are sent in order, because the order must be the same on every rank.
        for bucket in self._buckets[len(self._in_flight) :]:
            if bucket.missing and not incomplete:
                return
            self._in_flight.append(self._send(bucket))

    def _send(self, bucket: Bucket) -> Any:
        """Begin to sum a bucket over the ranks. Return the handle to wait for, or None on one rank."""
        if self._session.topology.world_size == 1:
            return None
        count_all_reduce(self._session, PHASE, bucket.flat.nbytes)
        begin = time.perf_counter()
        with report_failed_peers(self._session, "the sum of gradients"):
            work = dist.all_reduce(bucket.flat, async_op=True)

        timeline = self._session.timeline
        if timeline.on:

            def trace(_: object) -> None:
                timeline.add("all-reduce D", NETWORK, begin, time.perf_counter())

            work.get_future().add_done_callback(trace)
        return work

    def _finish(self) -> None:
        """Write the sums to ``.grad`` at the end of a backward call, or hold this rank's gradients."""
        # Parameters that this backward call did not reach may have held gradients. They are sent, too.
        for index, held in self._held.items():
            self._bucket_of[index].add(index, held.local)
        self._held.clear()
        if self._backward_is_held:
            self._hold(_collect_sums(self._buckets))
        else:
            self._write_sums(self._exchange_buckets())
        self.after(self._weight)
        self._graph_task = NO_BACKWARD
        self._sent_gradients = []

    def _exchange_buckets(self) -> dict[int, Tensor | None]:
        """Send the remaining buckets. Return this backward call's sums, or those from an earlier one."""
        self._send_full_buckets(incomplete=True)
        self._pending.append((self._buckets, self._in_flight))
        self._in_flight = []
        if self.delay:
            # These buckets are in use until their sums have arrived, so the next call needs new ones.
            self._layout = ()
        return self._wait_oldest(self.delay)

    def _hold(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Keep this rank's gradients, and show the user their sum with what was sent before."""
        for index, (parameter, sent) in enumerate(zip(self._parameters, self._sent_gradients, strict=True)):
            gradient = gradients.get(index)
            parameter.grad = sent
            if gradient is None:
                continue
            # The gradient is a view into a bucket that will be used again.
            unsent = gradient.clone()
            shown = unsent if sent is None else sent + unsent
            parameter.grad = shown
            self._held[index] = HeldGradient(unsent, sent, shown, get_version(shown))

    def _write_sums(self, sums: Mapping[int, Tensor | None]) -> None:
        """Add ``sums`` to the gradients that earlier backward calls left."""
        for index, (parameter, sent) in enumerate(zip(self._parameters, self._sent_gradients, strict=True)):
            total = sums.get(index)
            if total is None:
                parameter.grad = sent
            elif sent is not None:
                parameter.grad = sent.add_(total)
            elif parameter.grad is not None:
                # Copying into the tensor that backward made saves an allocation.
                parameter.grad.copy_(total)
            else:
                parameter.grad = total.clone()

    def _wait_oldest(self, delay: int) -> dict[int, Tensor | None]:
        """Return the oldest backward call's sums, or {} if at most ``delay`` calls are pending.

        A sum is None if no rank has a gradient.
        """
        if len(self._pending) <= delay:
            return {}
        buckets, works = self._pending.popleft()
        begin = time.perf_counter()
        timeline = self._session.timeline
        span = timeline.span(f"{WAIT} for the all-reduce", COMPUTE) if timeline.on else nullcontext()
        with report_failed_peers(self._session, "the sum of gradients"), span:
            for work in works:
                if work is not None:
                    work.wait()
        self.waited_s += time.perf_counter() - begin
        return _collect_sums(buckets)


def _collect_sums(buckets: Iterable[Bucket]) -> dict[int, Tensor | None]:
    """Return the gradients in ``buckets`` by index. A gradient is None if no rank has computed it."""
    sums = {}
    for bucket in buckets:
        for index, is_used in bucket.find_used().items():
            sums[index] = bucket.views[index] if is_used else None
    return sums


def _count_gaps(scores: Tensor, gradients: Tensor) -> int:
    """Count the rows in ``gradients`` that are NaN, or that are 0 although their scores are not large."""
    is_zero = (gradients == 0).all(1)
    if is_zero.any():
        is_zero &= scores.abs().amax(1) <= _MAX_SCORE
    is_nan = gradients.isnan().any(1)
    return int((is_zero | is_nan).sum())


class _Mark(torch.autograd.Function):
    """Identity function on the outputs, with an anchor. The anchor's gradient signals that backward runs.

    The parameters get no gradient from here. But as they are inputs, their gradients are accumulated after
    the anchor's. That holds even for a penalty on a parameter that the outputs do not depend on.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, num_outputs: int, *outputs_and_parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.num_parameters = len(outputs_and_parameters) - num_outputs
        # The outputs are cloned, because users change them in place and autograd forbids that for views.
        return tuple(output.clone() for output in outputs_and_parameters[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].new_zeros(()), None, *gradients, *[None] * ctx.num_parameters


def _on_accumulation(leaf: Tensor, action: Callable[[Tensor], None]) -> Any:
    return leaf.register_post_accumulate_grad_hook(action)  # type: ignore[no-untyped-call]  # torch does not annotate this


def check_frozen(model: nn.Module, trained: Container[int]) -> None:
    """Raise ConfigError if a parameter is trained and its id() is not in ``trained``."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            raise ConfigError(
                f"parameter {name!r} was added or unfrozen after wrapping, so its gradient "
                "would stay on this rank; wrap the model again after changing which "
                "parameters are trained"
            )


@final
class BufferMeans:
    """Averages a model's floating-point buffers over the ranks, weighted like the gradients."""

    def __init__(self, model: nn.Module, session: Session, reduction: Reduction) -> None:
        self._model = model
        self._session = session
        self._reduction = reduction
        self._values: list[Tensor] = []
        self.note()

    def note(self) -> None:
        """Record the current values as equal on all ranks, after the model was loaded or moved."""
        self._values = [buffer.detach().clone() for buffer in self._make_floats()]

    def average(self, weight: float) -> None:
        """Average the changes since the last call over the ranks. Every rank must call it.

        ``weight`` is this rank's weight in the step if the loss is a mean.
        """
        # A model without buffers may get some in its first call, such as cached constants.
        world_size = self._session.topology.world_size
        if world_size == 1 or not self._values:
            return
        if self._reduction == "sum":
            weight = 1.0 / world_size

        for buffer, value in zip(self._make_floats(), self._values, strict=True):
            # Changes are averaged instead of values, so that constants stay equal to the last bit.
            change = torch.zeros_like(buffer)
            if weight != 0.0:
                change = (buffer - value) * weight
            value.add_(sum_over_ranks(change, self._session, phase="buffers", in_place=True))
            buffer.copy_(value)

    def _make_floats(self) -> list[Tensor]:
        return [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
