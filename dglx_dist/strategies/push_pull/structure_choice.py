"""Whether structure is pushed or drawn again by every part: what the user says, or what costs less."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, final

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.sampling.blocks import BlockBuilder
from dglx_dist.sampling.stepping import StepLoader
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.options import StructureChoice
from dglx_dist.strategies.push_pull.resample import ResampledStructure, open_resampled
from dglx_dist.strategies.push_pull.structure import Brought, OwnersBlock, Place, StructureSource
from dglx_dist.strategies.push_pull.structure_push import PushedStructure

log = logging.getLogger(__name__)

_MEASURED = 1000
_WARM_UP = 2
"""Batches that are not measured where there are more: compiled code is loaded, connections are made."""


@dataclass(frozen=True, kw_only=True)
class ChosenStructure:
    """How the parts of a group know the blocks of other owners."""

    way: Literal["none", "push", "resample"]
    """None in a group of one rank."""
    reason: str
    resample_s: float | None = None
    """Seconds a batch that drawing for the other owners takes on the slowest rank, where it was compared."""
    push_s: float | None = None
    """Seconds a batch that the push takes there."""


@final
class ChoosingStructure(StructureSource):
    """Goes the way that was asked for, or after a first iteration that measures both, the cheaper one.

    Making one is collective; so is :meth:`begin` until the choice is made.

    Args:
        loader: This rank's.
        session: The run.
        group: Whose blocks are needed.
        label: Of the loader, the same on all ranks and of no other one.
        asked: What the user says.
        builder: Of the blocks.
        wide: Whether ids of nodes need 8 bytes.

    Raises:
        ConfigError: on all ranks, when "resample" is asked for and cannot be.
    """

    def __init__(
        self,
        loader: StepLoader[Any, Any, Any],
        session: Session,
        group: Group,
        label: str,
        *,
        asked: StructureChoice,
        builder: BlockBuilder,
        wide: bool,
    ) -> None:
        self._loader, self._session, self._group, self._label = loader, session, group, label
        self._builder = builder
        self._costs: deque[tuple[float, float]] = deque(maxlen=_MEASURED)
        self._open = asked == "auto" and group.size > 1
        self._source: StructureSource = PushedStructure(
            session, group, f"{label}.structure", builder, wide=wide
        )
        self.choice = ChosenStructure(
            way="none" if group.size == 1 else "push",
            reason="a group of one rank"
            if group.size == 1
            else "not compared yet"
            if self._open
            else "asked for",
        )
        if asked == "resample" and group.size > 1:
            self._source = self._resampled()
            self.choice = ChosenStructure(way="resample", reason="asked for")

    def begin(self, visit: int) -> None:
        """See :meth:`StructureSource.begin`; collective while nothing is chosen.

        Raises:
            PeerError: a rank is dead or did not take part within the time-out.
        """
        if self._open and visit > 0:
            self._choose()
        self._source.begin(visit)

    def measured(self, sample_s: float, push_s: float) -> None:
        """Note seconds of one batch: this rank's sampling, and bringing the others' blocks; any thread."""
        if self._open:
            self._costs.append((sample_s, push_s))

    def of_others(self, place: Place, own: OwnersBlock) -> Brought:
        """See :meth:`StructureSource.of_others`."""
        return self._source.of_others(place, own)

    def leave(self, visit: int, reason: BaseException | None = None) -> None:
        """See :meth:`StructureSource.leave`."""
        self._source.leave(visit, reason)

    def _choose(self) -> None:
        """Compare on all ranks, and go the cheaper way: the slowest rank counts, as all wait for it."""
        costs = list(self._costs)
        costs = costs[_WARM_UP:] or costs
        others = self._group.size - 1
        sample_s, push_s = (
            (statistics.median(column) for column in zip(*costs, strict=True)) if costs else (0.0, 0.0)
        )
        mine = [len(costs), round(sample_s * others * 1e9), round(push_s * 1e9)]
        rows = gather_int64(mine, self._session)
        if not rows[:, 0].any():
            return
        self._open = False
        self._costs.clear()
        resample_s, push_s = rows[:, 1].max() / 1e9, rows[:, 2].max() / 1e9
        way: Literal["push", "resample"] = "resample" if resample_s < push_s else "push"
        reason = "costs less"
        if way == "resample":
            try:
                self._source = self._resampled()
            except ConfigError as error:
                way, reason = "push", f"the only way: {error}"
        self.choice = ChosenStructure(way=way, reason=reason, resample_s=resample_s, push_s=push_s)
        if self._session.topology.rank == 0:
            log.info(
                "push_pull structure: %s (%s); a batch: drawing for %d other owners %.4f s, push %.4f s",
                way,
                reason,
                others,
                resample_s,
                push_s,
            )

    def _resampled(self) -> ResampledStructure:
        return open_resampled(self._loader, self._session, self._group, f"{self._label}.seeds", self._builder)
