"""P3's pipeline: several mini-batches in flight, each with the weights that it began with.

With b the batch of the user's current iteration, one iteration does, with two or more in flight,
fM(b+1), fD(b), bD(b), bM(b) (with three: bM(b-1)) and the user's optimizer step. See algorithms 2.5.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from dglx_dist.cluster.session import Session
from dglx_dist.cluster.timeline import COMPUTE, WAIT
from dglx_dist.errors import ConfigError
from dglx_dist.layers.keyed_dropout import DropDraws
from dglx_dist.layers.staged import Staged, StageInput, Sums
from dglx_dist.strategies.buffers import BufferMeans
from dglx_dist.strategies.gradients import GradientExchange
from dglx_dist.strategies.push_pull.edge_values import share_edge_values
from dglx_dist.strategies.push_pull.flight import Flight, compute_shares, send_shares
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.options import PushPullOptions, Side
from dglx_dist.strategies.push_pull.origins import Features, Origin, Origins
from dglx_dist.strategies.push_pull.part_gradients import Computed, PartGradients
from dglx_dist.strategies.push_pull.recipe import Recipe, read_recipe
from dglx_dist.strategies.push_pull.stash import OwnerSide, PartSide
from dglx_dist.strategies.push_pull.steps import StepWatch
from dglx_dist.strategies.push_pull.transfer import Courier
from dglx_dist.strategies.push_pull.versions import VersionLog
from dglx_dist.strategies.push_pull.visit import PIPELINES, OwnersInput, Visit


@final
class Pipeline:
    """Takes batches through the first layer of one model, in lock-step with the other ranks.

    Args:
        session: The run.
        group: Who pushes and pulls.
        options: How many in flight, and with which weights.
        origins: Of the model's inputs.
        features: What of a batch the model may be given, one by one and all side by side.
        part: The parameters before the sum.
        gradients: What becomes of their gradients.
        by_rows: Parameters before the sum that are trained by rows, and so are not among ``part``.
        owner: The other trained parameters.
        exchange: Sums the owner side's gradients over the ranks.
        buffers: Of the model; averaged after each backward.
    """

    def __init__(  # noqa: PLR0913 - the model puts it together, nobody else
        self,
        session: Session,
        group: Group,
        options: PushPullOptions,
        origins: Origins,
        *,
        features: Sequence[Features],
        part: PartSide,
        gradients: PartGradients,
        by_rows: Sequence[nn.Parameter],
        owner: OwnerSide,
        exchange: GradientExchange,
        buffers: BufferMeans,
    ) -> None:
        self._session, self._group, self._options, self._origins = session, group, options, origins
        self._part, self._gradients, self._owner = part, gradients, owner
        self.exchange, self._buffers = exchange, buffers
        self._features, self._courier = tuple(features), Courier(session, group)
        self._whole = options.weights == "whole" and options.in_flight > 1
        exchange.be_late(options.late if self._whole else 0)
        exchange.finally_do(self._after_backward)
        self.log = VersionLog()
        self._steps = StepWatch([*part.parameters.values(), *by_rows], owner.parameters, self.log)
        self._recipe: Recipe | None = None
        self._flights: dict[int, Flight] = {}
        """Begun and not yet reached by the user's loop, by number."""
        self._landed: list[Flight] = []
        """Gone back to their owners' sums, but not through the parts."""
        self._computed: list[Computed] = []
        """Gone all the way back in the backward that is running."""
        self._current: Flight | None = None
        self._called: Callable[[], Visit | None] = _nothing
        """The batch that the model was called on last."""
        self._waited_s = 0.0
        pipelines = session.attached.setdefault(PIPELINES, [])
        assert isinstance(pipelines, list)
        pipelines.append(weakref.ref(self))
        self.weight = 1.0
        """What this rank's gradient counts in the step; set before each forward call."""

    def __deepcopy__(self, memo: object) -> Pipeline:
        """A copy of the model is of no other run."""
        return self

    @property
    def looks_ahead(self) -> bool:
        """Whether the next batch begins before the current one is used."""
        return self._options.in_flight > 1

    def begin(self, visit: Visit | None) -> None:
        """Prepare for the model's call on ``visit``; None where its blocks come from elsewhere."""
        self._owner.restore()
        self._origins.begin(visit, self._group.part)
        if visit is None:
            return
        for features in self._features:
            self._origins.add(features.rows(visit.inputs[self._group.part]), features)
        if not torch.is_grad_enabled():
            return
        flight = self._flights.get(visit.number)
        if flight is not None and flight.inputs is visit.inputs and flight.values is not None:
            self._owner.place(flight.values)

    def resume(self) -> None:
        """Go on with the batch whose backward is still to come, after a call without gradients."""
        if self._current is not None and self._current.values is not None:
            self._owner.place(self._current.values)

    def __call__(self, layer: Staged, given: StageInput) -> Sums:
        """Return the sums of all parts for this rank's block; forward and backward are collective.

        Raises:
            ConfigError: the block does not come from the strategy's loader, or the rows are not its own.
            PeerError: a rank is dead or did not take part within the time-out.
        """
        visit: Visit | None = getattr(given.block, "push_pull", None)
        if visit is None:
            raise ConfigError(
                "the first layer was given a block that does not come from the strategy's loader, so the "
                "other ranks do not know it; feed the model from dglx_dist.DataLoader, and compute without "
                "the other ranks by model.whole()"
            )
        if self.looks_ahead and torch.is_grad_enabled():
            self._check_first_call(visit)
        recipe = read_recipe(layer, given, self._origins)
        flight = self._taken(visit, recipe)
        if flight is None:
            flight = self._start(layer, visit, recipe, given.edges)
        if self.looks_ahead and torch.is_grad_enabled():
            self._begin_following(layer, visit, recipe)
        sums = self._waited(flight.sums, f"{WAIT} for the pull", flight.number)
        if not torch.is_grad_enabled():
            return sums
        flight.weight, self._current = self.weight, flight
        anchor = torch.zeros((), requires_grad=True)
        return cast("Sums", _Landing.apply(anchor, self, flight, *sums))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def drain(self) -> None:
        """Take every batch in flight to its step, or back to its beginning; every rank must call it.

        What was only begun is begun anew when its turn comes.
        """
        self._owner.restore()
        for flight in self._flights.values():
            flight.sums()
        self._flights.clear()
        while self._landed:
            with self._steps.own_step():
                self.exchange.add_late()
                self._add(self._go_back(self._landed.pop(0)))

    def exchange_seconds(self, *, reset: bool = False) -> float:
        """Seconds that this rank stood waiting for shares and gradients since the start or the last reset."""
        waited = self._waited_s + self.exchange.seconds(reset=reset)
        if reset:
            self._waited_s = 0.0
        return waited

    def land(self, flight: Flight | None, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of the sums on, and let the parts do the backward of the batch that is due.

        Raises:
            ConfigError: there is no flight, for it has landed before.
        """
        if flight is None:
            raise ConfigError(
                "backward went through the first layer twice for one batch; call the model once for each "
                "backward (retain_graph cannot be honoured here)"
            )
        flight.send_back(gradients, self._courier)
        self._landed.append(flight)
        while len(self._landed) > self._options.late:
            self._computed.append(self._go_back(self._landed.pop(0)))

    def _check_first_call(self, visit: Visit) -> None:
        # The weights of the first call are swapped for others in the second, before its backward.
        if self._called() is visit:
            raise ConfigError(
                f"the model was called twice for one batch, and with depth={self._options.depth} every batch "
                "has the weights that it began with; call it once for each batch, or use depth=1"
            )
        self._called = weakref.ref(visit)

    def _taken(self, visit: Visit, recipe: Recipe) -> Flight | None:
        """Return the flight of a batch that was begun ahead, if it was and was begun as it should be."""
        flight = self._flights.get(visit.number)
        if flight is None or flight.inputs is not visit.inputs or not torch.is_grad_enabled():
            return None
        del self._flights[visit.number]
        if self._recipe != recipe:
            raise ConfigError(
                "the model gave its first layer other inputs than in the batch before, which batches in "
                "flight do not allow; use depth=1"
            )
        return flight

    def _begin_following(self, layer: Staged, visit: Visit, recipe: Recipe) -> None:
        following = visit.following()
        if following is None:
            return
        begun = self._flights.get(following.number)
        if begun is not None and begun.inputs is following.inputs:
            return
        # What a loop that was left has begun will not be asked for again.
        self._flights.clear()
        self._recipe = recipe
        edges = recipe.edges(layer, following.inputs[self._group.part].block)
        self._flights[following.number] = self._start(layer, following, recipe, edges)

    def _start(self, layer: Staged, visit: Visit, recipe: Recipe, own_edges: Mapping[str, Tensor]) -> Flight:
        """Do fM of a batch and let its shares leave."""
        with self._session.timeline.span("forward M", COMPUTE, visit.number):
            flight = Flight(
                number=visit.number,
                inputs=visit.inputs,
                origin=recipe.origin,
                leaves=self._part.leaves(copied=self.looks_ahead and torch.is_grad_enabled()),
                read=dict(self.log.steps),
                values=self._owner.copies() if self._whole and torch.is_grad_enabled() else None,
            )
            edges = share_edge_values(own_edges, visit.inputs, self._group, self._courier)
            with self._part.placed(flight.leaves):
                flight.rows = [recipe.origin.rows(one) for one in visit.inputs]
                given = [
                    StageInput(block=one.block, x=x, edges=values, draws=self._draws(one, recipe.origin))
                    for one, x, values in zip(visit.inputs, flight.rows, edges, strict=True)
                ]
                flight.shares = compute_shares(layer, given, self._group, self._courier)
            flight.pulls = send_shares(flight.shares, self._courier, visit.number)
        return flight

    def _draws(self, one: OwnersInput, origin: Origin) -> DropDraws:
        return DropDraws(seed=self._session.seed, number=one.number, nodes=one.nodes, runs=origin.runs)

    def _go_back(self, flight: Flight) -> Computed:
        """Do bM of a batch."""
        for push in flight.pushes:
            self._waited(push.result, f"{WAIT} for the push", flight.number)
        with self._session.timeline.span("backward M", COMPUTE, flight.number):
            return self._gradients.compute(flight)

    def _add(self, computed: Computed) -> None:
        """Leave a batch's gradients for the next step."""
        self._gradients.add(computed)
        flight = computed.flight
        # A frozen side is never stepped.
        if computed.of_rows or any(leaf.requires_grad for leaf in flight.leaves.values()):
            self.log.computed(flight.number, "M", flight.read["M"])
        if self._whole:
            self.log.computed(flight.number, "D", flight.read["D"])

    def _after_backward(self, weight: float) -> None:
        # Not where they are computed: these sums must come after the owner side's, on every rank alike.
        self._owner.restore()
        self._buffers.average(weight)
        waiting: tuple[Side, ...] = ("M", "D") if self._whole else ("M",)
        self._steps.hold_back(waiting if self._landed and not self._computed else ())
        while self._computed:
            self._add(self._computed.pop(0))
        if self._current is not None and not self._whole:
            self.log.computed(self._current.number, "D", self.log.steps["D"])
        self._current = None

    def _waited(self, wait: Any, name: str, number: int) -> Any:
        begun = time.perf_counter()
        with self._session.timeline.span(name, COMPUTE, number):
            found = wait()
        self._waited_s += time.perf_counter() - begun
        return found


def _nothing() -> None:
    return None


class _Landing(torch.autograd.Function):
    """The sums as the owner's graph begins with them; backward sends their gradients to the parts."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: Pipeline, flight: Flight, *sums: Tensor) -> Any:
        ctx.pipeline, ctx.flight = pipeline, flight
        return tuple(total.view_as(total) for total in sums)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The graph lives as long as the user keeps the loss, the batch need not.
        flight, ctx.flight = ctx.flight, None
        ctx.pipeline.land(flight, gradients)
        return torch.zeros(()), None, None, *[None] * len(gradients)
