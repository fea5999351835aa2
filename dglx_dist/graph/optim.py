"""Optimisers of :class:`~dglx_dist.graph.embedding.DistEmbedding`; public as ``dglx_dist.optim``.

Their formulas are torch's: in mode "sync" the rows equal, step by step, those of
``torch.nn.Embedding(sparse=True)`` trained in one process on the batches of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch

from dglx_dist.comm.collectives import barrier, check_equal, run_on_all_ranks
from dglx_dist.comm.session import Session, current_session
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.shared_memory import check_memory
from dglx_dist.graph.sparse_gradient import Reduction, RowSum, weighted_sum
from dglx_dist.graph.sparse_gradient_exchange import (
    MAX_PARAMETERS,
    AsyncExchange,
    Exchange,
    StalenessReport,
    SyncExchange,
)
from dglx_dist.graph.sparse_state import SparseState, check_state, read_state, save_state
from dglx_dist.graph.sparse_update import AdagradRule, AdamRule, OwnedRows, SgdRule, UpdateRule

Mode: TypeAlias = Literal["sync", "async"]


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Combination of the gradients of all ranks.

    Raises:
        ConfigError: a value is invalid.
    """

    mode: Mode = "sync"
    """"sync": every step equals that of one process. "async": owners apply gradients as they arrive."""
    staleness: int = 1
    """Only for "async": most own steps that may not be applied yet when ``step()`` returns."""
    reduction: Reduction = "mean"
    """Of the loss over a rank's own targets."""

    def __post_init__(self) -> None:
        if self.mode not in ("sync", "async"):
            raise ConfigError(f"mode={self.mode!r} must be 'sync' or 'async'")
        if self.reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction={self.reduction!r} must be 'mean' or 'sum'")
        if self.staleness < 0:
            raise ConfigError(f"staleness={self.staleness} must be at least 0")


class SparseOptimizer:
    """Updates the rows of embeddings that have gradients since the last step, and no others.

    Creating it is collective, with the same arguments. The owner of a row updates it from the sum over all
    ranks of the gradients, weighted like those of the model (the gradient rule, docs/design/contracts.md):
    the share of a call is the ``session.step_share`` at that time. Rows without gradients, and their state,
    stay unchanged. Of several optimisers of one embedding, the first to step takes the gradients.

    Args:
        params: The embeddings.
        configure: Returns the formula and the options; called where an error is raised on all ranks.

    Raises:
        ConfigError: on all ranks: ``params`` are no distinct DistEmbeddings of one graph, the ranks differ,
            or memory for the state is short.
    """

    def __init__(
        self, params: Sequence[DistEmbedding], configure: Callable[[], tuple[UpdateRule, UpdateOptions]]
    ) -> None:
        self.session = _session_of(params)
        self.params, (self._rule, self.options) = run_on_all_ranks(
            self.session, lambda: (_checked(params), configure()), ConfigError
        )
        store = self.params[0].kvstore
        self._check_equal()
        number = store.next_number()
        for param in self.params:
            check_memory(
                self.session,
                param.part_policy.bounds,
                len(self._rule.state_names) * param.compute_dtype.itemsize * param.embedding_dim,
                f"the state of {type(self).__name__} for {param.name!r}",
                "use SparseSGD, which has none, or more servers on more machines",
            )
        self.tables = [self._table(param, number) for param in self.params]
        """The rows of each embedding that this rank owns."""
        op = f"{store.label}.sparse-{number}"
        self._exchange: Exchange = (
            SyncExchange(self.session, op, self.tables)
            if self.options.mode == "sync"
            else AsyncExchange(self.session, op, self.tables, self.options.staleness)
        )
        barrier(self.session, f"making {type(self).__name__}")

    @property
    def lr(self) -> float:
        return self._rule.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._rule.lr = lr

    @property
    def settings(self) -> Mapping[str, float]:
        """The formula's settings without the learning rate."""
        return self._rule.settings()

    def step(self) -> None:
        """Apply the gradients since the last step, and drop them.

        In mode "sync" every rank must call it, also one without gradients, and it returns when all owners
        have applied the step. In mode "async" a rank may call it alone.

        Sends 8 bytes and one row of the compute dtype for each distinct row of another rank.

        Raises:
            ConfigError: on all ranks, when on one an embedding was called in a step with an unknown number of
                targets, and the loss is a mean.
            PeerError: a rank is dead, or did not call it within the time-out; the message names it.
        """
        taken = [param.take_gradients() for param in self.params]
        used = [bool(gradients) for gradients in taken]
        world_size = self.session.topology.world_size
        sums: list[RowSum | None] = []
        problem: DglxError | None = None
        try:
            sums = [weighted_sum(gradients, self.options.reduction, world_size) for gradients in taken]
        except ConfigError as error:
            problem = error
        self._exchange.step(sums, used, str(problem or ""))
        if problem is not None:
            raise problem

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step; a later ``backward`` of an earlier call still counts.

        Args:
            set_to_none: Accepted for torch, without effect.
        """
        for param in self.params:
            param.reset_trace()

    def flush(self) -> None:
        """Wait until the gradients of all ranks are applied, as needed before evaluation in mode "async".

        Collective.

        Raises:
            PeerError: a rank is dead or did not call it within the time-out.
        """
        self._exchange.flush()

    def staleness_report(self) -> StalenessReport:
        return self._exchange.report()

    def local_state_dict(self) -> dict[str, Any]:
        """Return the settings, and the state of the rows that this rank owns, as DGL lays it out.

        ``{"params": {"lr", ..., "world_size"}, "emb_states": {name: {"ids": (k,) int64, "steps": int,
        "states": {state name: (k, d)}}}}``
        """
        states = {}
        for table in self.tables:
            ids = torch.arange(table.first, table.last)
            states[table.embedding.name] = {
                "ids": ids,
                "steps": table.steps,
                "states": {state.name: state[ids] for state in table.states},
            }
        params = {"lr": self.lr, **self.settings, "world_size": self.session.topology.world_size}
        return {"params": params, "emb_states": states}

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`local_state_dict` returned on some rank, with rows of any rank.

        Call it on all ranks, and a barrier afterwards. Of the settings it loads only ``lr``.

        Raises:
            ConfigError: it is of other embeddings or of another kind of optimiser; nothing has changed.
        """
        tables = {table.embedding.name: table for table in self.tables}
        for name, entry in state["emb_states"].items():
            known = sorted(tensor.name for tensor in tables[name].states) if name in tables else None
            if known != sorted(entry["states"]):
                raise ConfigError(
                    f"the state holds {sorted(entry['states'])} of {name!r}, this optimiser has "
                    f"{known if known is not None else f'no embedding {name!r}'}; build it as it was"
                )
        for name, entry in state["emb_states"].items():
            for tensor in tables[name].states:
                tensor[entry["ids"]] = entry["states"][tensor.name]
            tables[name].steps = int(entry["steps"])
        self.lr = float(state["params"]["lr"])

    @property
    def saved_state(self) -> SparseState:
        return SparseState(
            kind=type(self).__name__,
            lr=self.lr,
            settings=self.settings,
            dataset=self.params[0].dataset,
            tables=self.tables,
        )

    def save(self, folder: str | Path) -> None:
        """Write the embeddings and the optimiser's state as ``folder``; collective.

        Each rank writes the rows it owns. All ranks must see the folder; it replaces an earlier one whole or
        not at all.

        Raises:
            StorageError: on all ranks, when one cannot write.
        """
        self.flush()
        target = run_on_all_ranks(self.session, lambda: Path(folder))
        save_state(self.saved_state, target, self.session)

    def load(self, folder: str | Path) -> None:
        """Load what :meth:`save` wrote on any number of ranks and servers; collective.

        Raises:
            StorageError: on all ranks, when on one it is missing, damaged, or of another dataset, optimiser
                or embeddings; nothing has changed.
        """
        self.flush()
        state = self.saved_state
        run_on_all_ranks(self.session, lambda: check_state(state, Path(folder)))
        self.lr = read_state(state, Path(folder), self.session)

    def close(self) -> None:
        """Free the state and stop serving; collective. The embeddings stay."""
        self.flush()
        barrier(self.session, f"closing {type(self).__name__}")
        self._exchange.close()
        for table in self.tables:
            for state in table.states:
                state.delete()

    def _check_equal(self) -> None:
        local = [
            type(self).__name__,
            self.lr,
            self._rule.settings(),
            [self.options.mode, self.options.staleness, self.options.reduction],
            [[param.name, list(param.weight.shape), str(param.weight.dtype)] for param in self.params],
        ]
        check_equal(self.session, "a sparse optimiser", local, "build it alike on all ranks")

    def _table(self, param: DistEmbedding, number: int) -> OwnedRows:
        states = tuple(
            DistTensor(
                param.weight.shape,
                param.compute_dtype,
                f"{param.name}_{name}" + (f"-{number}" if _is_taken(param, name) else ""),
                part_policy=param.part_policy,
                is_gdata=False,
            )
            for name in self._rule.state_names
        )
        param.optm_state = states
        return OwnedRows(param, states, self._rule)


def _is_taken(param: DistEmbedding, name: str) -> bool:
    policy = param.part_policy
    return policy.store.has(policy.hidden_key(f"{param.name}_{name}"))


def _session_of(params: object) -> Session:
    for param in params if isinstance(params, list | tuple) else (params,):
        if isinstance(param, DistEmbedding):
            return param.kvstore.session
    return current_session()


def _checked(params: Sequence[DistEmbedding]) -> tuple[DistEmbedding, ...]:
    if isinstance(params, DistEmbedding):
        raise ConfigError("params is a DistEmbedding; give a list of them: [embedding]")
    checked = tuple(params)
    for position, param in enumerate(checked):
        if not isinstance(param, DistEmbedding):
            raise ConfigError(
                f"params[{position}] is a {type(param).__name__}; give DistEmbeddings here, and the "
                "parameters of the model to an optimiser of torch.optim"
            )
        if param.kvstore is not checked[0].kvstore:
            raise ConfigError(f"{param.name!r} is of another graph; make one optimiser for each graph")
    if not 1 <= len(checked) <= MAX_PARAMETERS:
        raise ConfigError(f"params has {len(checked)} embeddings; give 1 to {MAX_PARAMETERS}")
    keys = [param.weight.kvstore_key for param in checked]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"params has an embedding twice: {[param.name for param in checked]}")
    return checked


@final
class SparseSGD(SparseOptimizer):
    """``torch.optim.SGD`` without momentum, for embeddings.

    ``mode``, ``staleness`` and ``reduction`` are explained at :class:`~dglx_dist.graph.optim.UpdateOptions`,
    errors at :class:`~dglx_dist.graph.optim.SparseOptimizer`.
    """

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        *,
        mode: Mode = "sync",
        staleness: int = 1,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            params, lambda: (SgdRule(lr), UpdateOptions(mode=mode, staleness=staleness, reduction=reduction))
        )


@final
class SparseAdagrad(SparseOptimizer):
    """``torch.optim.Adagrad`` for embeddings; keeps one row of squares beside each row.

    ``eps`` is added to the root of the sum of squares; the other arguments are as for :class:`SparseSGD`.
    """

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        eps: float = 1e-10,
        *,
        mode: Mode = "sync",
        staleness: int = 1,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            params,
            lambda: (
                AdagradRule(lr, eps),
                UpdateOptions(mode=mode, staleness=staleness, reduction=reduction),
            ),
        )


@final
class SparseAdam(SparseOptimizer):
    """``torch.optim.SparseAdam`` for embeddings; keeps two rows of moments beside each row.

    In mode "async" the step of the bias correction is the number of pushes that the owner has applied.

    ``betas`` are the decay rates of the moments, ``eps`` is added to the root of the second one; the other
    arguments are as for :class:`SparseSGD`.
    """

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        mode: Mode = "sync",
        staleness: int = 1,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            params,
            lambda: (
                AdamRule(lr, betas, eps),
                UpdateOptions(mode=mode, staleness=staleness, reduction=reduction),
            ),
        )
