"""Trains whole epochs of the user's model by graph servers, parameter servers and workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import cast, final

from torch import nn
from torch.optim import Optimizer

from dglx_dist.cluster.collectives import gather_int64, gather_json
from dglx_dist.cluster.ledger import LedgerRow
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.records import EpochRecord
from dglx_dist.strategies.base import EpochTrainer, Objective
from dglx_dist.strategies.bounded.account import NOTHING, Account, account_of_ranks, as_json
from dglx_dist.strategies.bounded.chain import Chain
from dglx_dist.strategies.bounded.engine import EpochTotals
from dglx_dist.strategies.bounded.live import Live
from dglx_dist.strategies.bounded.loader import IntervalLoader
from dglx_dist.strategies.bounded.opening import Wanted, open_part
from dglx_dist.strategies.bounded.running import Running, Start
from dglx_dist.strategies.bounded.settings import LambdaSettings
from dglx_dist.strategies.bounded.torch_update import update_of
from dglx_dist.strategies.bounded.weights import bring_back, fingerprint, weights_of

log = logging.getLogger(__name__)


@final
class LambdaTrainer(EpochTrainer):
    """One for each call of ``dx.fit``; every rank makes it, runs it and closes it, together.

    Args:
        model: The user's module; after each run it has the trained weights.
        optimizer: Read, never stepped; after each run it has the state of the update.
        chain: The model as steps.
        loader: Says who is trained on.
        objective: What is trained; checked by the caller.
        settings: Of the strategy.
        show: Called with lines of live progress; None: nobody looks.

    Raises:
        ConfigError: on all ranks: the optimizer, features or labels cannot be trained with.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        chain: Chain,
        loader: IntervalLoader,
        objective: Objective,
        settings: LambdaSettings,
        show: Callable[[str], None] | None,
    ) -> None:
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._settings, self._show = settings, show
        self._session = loader.g.session
        targets, self._num_train = loader.own_targets()
        self._program = chain.program(self._num_train)
        self._names = list(self._program.weight_shapes)
        together(self._session, lambda: update_of(optimizer, model, self._names), ConfigError)
        wanted = Wanted(
            program=self._program,
            factors=chain.factors,
            objective=objective,
            targets=targets,
            intervals=settings.options.intervals,
            want_in_edges=chain.want_in_edges,
        )
        self._part = open_part(loader.g, wanted)
        bounds = self._part.bounds
        self._interval_sizes = gather_int64((bounds[1:] - bounds[:-1]).tolist(), self._session).reshape(-1)
        self._running: Running | None = None
        self._left = ""
        self._synchronous_from: int | None = None
        self._past, self._simulated, self._warned = NOTHING, True, False

    def run(self, first: int, number: int) -> Sequence[EpochRecord]:
        """See :class:`EpochTrainer`."""
        running = self._from(first)
        counted, began = self._session.ledger.snapshot(), time.perf_counter()
        with Live(running, self._settings, self._past, self._show):
            totals = running.engine.run(number)
        parameters = running.engine.parameters
        bring_back(self._model, self._optimizer, parameters.latest(), parameters.state())
        self._past += Account(server_seconds=time.perf_counter() - began)
        self._left = fingerprint(self._model, self._optimizer)
        self._loader.advance(number)
        if self._synchronous_from is None:
            self._synchronous_from = running.engine.synchronous_from
        self._compare_kernels(running.engine.kernels)
        return self._records(totals, self._session.ledger.since(counted))

    def close(self, *, failed: bool = False) -> None:
        """See :class:`EpochTrainer`."""
        running, self._running = self._running, None
        if running is not None:
            self._simulated = running.crew.simulated
            self._past += Account(counts=running.close(failed=failed))

    def account(self) -> dict[str, object]:
        """See :class:`EpochTrainer`."""
        now, simulated = self._past, self._simulated
        if self._running is not None:
            now += Account(counts=self._running.crew.counts)
            simulated = self._running.crew.simulated
        rows = gather_json(as_json(now), self._session)
        total = account_of_ranks([row for row in rows if isinstance(row, dict)])
        settings = self._settings
        found = total.describe(settings.server, settings.prices, simulated=simulated, alone=settings.alone)
        if settings.options.switch_at:
            found["synchronous_from"] = self._synchronous_from
        return found

    def _from(self, epoch: int) -> Running:
        """Return what goes on at ``epoch``: made anew where the user changed weights, optimizer or epoch."""
        now = fingerprint(self._model, self._optimizer)
        # Each time: where only some ranks had changed something, the others would wait for them.
        self._check_equal(now)
        if self._running is not None and (self._running.engine.epoch != epoch or now != self._left):
            self.close()
        if self._running is None:
            self._running = Running(
                self._session,
                self._program,
                self._part,
                self._interval_sizes,
                self._settings,
                Start(
                    weights=weights_of(self._model, self._names),
                    update=update_of(self._optimizer, self._model, self._names),
                    epoch=epoch,
                    is_synchronous=self._synchronous_from is not None,
                ),
            )
        return self._running

    def _check_equal(self, mine: str) -> None:
        for rank, other in enumerate(gather_json(mine, self._session)):
            if other != mine:
                raise ConfigError(
                    f"rank {rank} has other weights or another optimizer than rank "
                    f"{self._session.topology.rank}; make them alike, and change them on all ranks"
                )

    def _compare_kernels(self, mine: Sequence[str]) -> None:
        """Warn once, on rank 0, where not all graph servers and workers compute with the same."""
        told = cast("list[list[str]]", gather_json(list(mine), self._session))
        kinds = {kind for rank in told for kind in rank}
        if len(kinds) > 1 and not self._warned and self._session.topology.rank == 0:
            log.warning(
                "graph servers and workers compute with different kernels, so another run may have other "
                "last bits; see 'Equal bits' in docs/strategies/lambda.md. Seen: %s",
                " | ".join(sorted(kinds)),
            )
        self._warned = self._warned or len(kinds) > 1

    def _records(self, totals: Sequence[EpochTotals], moved: Sequence[LedgerRow]) -> list[EpochRecord]:
        """Epochs that overlap share what moved evenly: in the end all have moved the same."""
        mine = [sum(row.num_bytes for row in moved if row.inside is inside) for inside in (True, False)]
        both = gather_int64(mine, self._session).sum(axis=0)
        inside, outside = (_shares(int(total), len(totals)) for total in both)
        return [
            EpochRecord(
                epoch=one.epoch,
                loss=one.loss_sum / self._num_train,
                train_accuracy=one.correct / self._num_train,
                val_accuracy=None,
                seconds=one.seconds,
                num_samples=self._num_train,
                sample_s=0.0,
                fetch_s=0.0,
                wait_s=0.0,
                compute_s=one.seconds,
                exchange_s=0.0,
                bytes_inside=inside[index],
                bytes_outside=outside[index],
            )
            for index, one in enumerate(totals)
        ]


def _shares(total: int, number: int) -> list[int]:
    return [total * (index + 1) // number - total * index // number for index in range(number)]
