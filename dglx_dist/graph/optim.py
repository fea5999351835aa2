"""Optimizers for :class:`~dglx_dist.graph.embedding.DistEmbedding`, public as ``dglx_dist.optim``.

Their formulas are torch's. In mode "sync" the rows equal, step by step, those that one process trains with
``torch.nn.Embedding(sparse=True)`` on the batches from all ranks together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike, fsdecode
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast, final

import torch

from dglx_dist.comm.collectives import barrier, check_equal, gather_int64, run_on_all_ranks
from dglx_dist.comm.session import Session, current_session
from dglx_dist.data.storage.row_files import RowFile, check_rows, read_index, read_rows, write_rows
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.dist_tensor import DistTensor, view_owned_rows
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.row_kernels import make_column_info, view_as_numpy
from dglx_dist.graph.shared_memory import WriteOwn, check_memory, save_folder
from dglx_dist.graph.sparse_gradient import Reduction, RowSum, weighted_sum
from dglx_dist.graph.sparse_update import (
    MAX_PARAMETERS,
    OwnedRows,
    SparseExchange,
    StalenessReport,
    UpdateRule,
    adagrad_rule,
    adam_rule,
    check_at_least_0,
    sgd_rule,
)

Mode: TypeAlias = Literal["sync", "async"]


class SparseOptimizer:
    """Updates the embedding rows that have gradients since the last step.

    Creating it is collective, with the same arguments. A row's owner updates it with the summed gradients
    from all ranks. They are weighted like the model's gradients (the gradient rule,
    docs/development/contracts.md). Each call's gradients get the weight of the ``session.step_share`` at that
    time. Rows without gradients and their state stay unchanged. If several optimizers have the same
    embedding, the first one that steps takes the gradients.

    Args:
        rule: Function that returns the formula. Its errors are raised on all ranks.
        mode: "sync": every step equals the step in one process. "async": owners apply gradients on arrival.
        staleness: Only for "async": maximum number of own steps that may be unapplied when ``step()``
            returns.
        reduction: How the loss reduces a rank's own targets, ``mean`` or ``sum``.

    Raises:
        ConfigError: on all ranks, if ``params`` are not distinct DistEmbeddings on one graph, an option is
            invalid, the ranks differ, or memory for the state is short.
    """

    saved_as: ClassVar[str] = ""
    """Optimizer kind in saved states. The default is the class's name."""

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        rule: Callable[[], UpdateRule],
        mode: Mode = "sync",
        staleness: int = 1,
        reduction: Reduction = "mean",
    ) -> None:
        self.session = _find_session(params)
        self._reduction = reduction

        def check_options() -> tuple[tuple[DistEmbedding, ...], UpdateRule]:
            if mode not in ("sync", "async"):
                raise ConfigError(f"mode={mode!r} must be 'sync' or 'async'")
            if reduction not in ("mean", "sum"):
                raise ConfigError(f"reduction={reduction!r} must be 'mean' or 'sum'")
            if staleness < 0:
                raise ConfigError(f"staleness={staleness} must be at least 0")
            return _check_params(params), rule()

        self.params, self._rule = run_on_all_ranks(self.session, check_options, ConfigError)
        class_name = type(self).__name__
        options = [mode, staleness, reduction]
        arguments = [class_name, self.lr, self.settings, options, self._facts()]
        remedy = "use the same arguments on all ranks"
        check_equal(self.session, "a sparse optimizer", arguments, remedy)

        store = self.params[0].kvstore
        optimizer_id = store.next_number()
        remedy = "use SparseSGD, which has no state, or more servers on more machines"
        for param in self.params:
            state_bytes = len(self._rule.state_names) * param.compute_dtype.itemsize * param.embedding_dim
            what = f"the state of {class_name} for {param.name!r}"
            check_memory(self.session, param.part_policy.bounds, state_bytes, what, remedy)
        self.tables = [self._open_table(param, optimizer_id) for param in self.params]
        """Rows that this rank owns, for each embedding."""
        op = f"{store.label}.sparse-{optimizer_id}"
        max_lag = staleness if mode == "async" else None
        self._exchange = SparseExchange(self.session, op, self.tables, max_lag)
        barrier(self.session, f"making {class_name}")

    @property
    def lr(self) -> float:
        return self._rule.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._rule.lr = float(check_at_least_0("lr", lr))

    @property
    def settings(self) -> Mapping[str, float]:
        return self._rule.settings

    def step(self) -> None:
        """Apply the gradients since the last step, and drop them.

        In mode "sync" every rank must call this, also without gradients. The call returns when all owners
        have applied the step. In mode "async" a rank may call this alone. Sends 8 bytes and one row in the
        compute dtype for each distinct row on another rank.

        Raises ConfigError on all ranks, if the loss is a mean and an embedding was called in a step with an
        unknown target count. Raises PeerError that names a rank which is dead, or did not call this within
        the time limit.
        """
        gradients_by_param = [param.take_gradients() for param in self.params]
        is_used = [bool(gradients) for gradients in gradients_by_param]
        world_size = self.session.topology.world_size
        sums: list[RowSum | None] = []
        try:
            for gradients in gradients_by_param:
                sums.append(weighted_sum(gradients, self._reduction, world_size))
        except ConfigError as error:
            # The other ranks wait for a message from this rank, so tell them before raising.
            self._exchange.step([], is_used, str(error))
            raise
        self._exchange.step(sums, is_used)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step. A later ``backward`` for an earlier call still counts."""
        for param in self.params:
            param.reset_trace()

    def flush(self) -> None:
        """Wait until all ranks' gradients are applied. All ranks call this, for example before evaluation."""
        self._exchange.flush()

    def staleness_report(self) -> StalenessReport:
        return self._exchange.report()

    def local_state_dict(self) -> dict[str, Any]:
        """Return the settings, and the state for the rows that this rank owns, in DGL's layout.

        ``{"params": {"lr", ..., "world_size"}, "emb_states": {name: {"ids": (k,) int64, "steps": int,
        "states": {state name: (k, d)}}}}``
        """
        embedding_states = {}
        for table in self.tables:
            ids = torch.arange(table.first, table.last)
            states = {state.name: state[ids] for state in table.states}
            embedding_states[table.embedding.name] = {"ids": ids, "steps": table.steps, "states": states}
        world_size = self.session.topology.world_size
        params = {"lr": self.lr, **self.settings, "world_size": world_size}
        return {"params": params, "emb_states": embedding_states}

    def load_local_state_dict(self, local_state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`local_state_dict` returned on any rank. The rows may belong to any rank.

        Call this on all ranks, and then a barrier. From the settings, only ``lr`` is loaded. Raises
        ConfigError if the state belongs to other embeddings or another optimizer kind. After an error,
        nothing has changed.
        """
        tables = {table.embedding.name: table for table in self.tables}
        embedding_states = local_state_dict["emb_states"]
        for name, entry in embedding_states.items():
            present: object = f"no embedding {name!r}"
            if name in tables:
                present = sorted(state.name for state in tables[name].states)
            saved_names = sorted(entry["states"])
            if saved_names != present:
                raise ConfigError(
                    f"the state holds {saved_names} of {name!r}, but this optimizer has "
                    f"{present}. Build the same optimizer."
                )

        for name, entry in embedding_states.items():
            for state in tables[name].states:
                state[entry["ids"]] = entry["states"][state.name]
            tables[name].steps = int(entry["steps"])
        self.lr = float(local_state_dict["params"]["lr"])

    def save(self, f: str | bytes | PathLike[str]) -> None:
        """Write the embeddings and the state as the folder ``f``. Every rank must call this.

        Each rank writes the rows that it owns. All ranks must see the folder. Raises StorageError on all
        ranks, if a rank cannot write, or if ``f`` holds something other than saved rows. After an error,
        ``f`` is unchanged.
        """
        target = run_on_all_ranks(self.session, lambda: Path(fsdecode(f)))
        save_folder(self.session, target, *self.rows_to_save())

    def load(self, f: str | bytes | PathLike[str]) -> None:
        """Load a folder that :meth:`save` wrote on any number of ranks. Every rank must call this.

        Raises StorageError on all ranks if the folder is missing or damaged for one of them, or belongs to
        another dataset, optimizer or embeddings. After an error, nothing has changed.
        """
        self.flush()
        run_on_all_ranks(self.session, lambda: self.check_saved(Path(fsdecode(f))))
        self.read_saved(Path(fsdecode(f)))

    @property
    def own_rows(self) -> list[torch.Tensor]:
        """Rows that this rank saves, from embeddings and states, as views of shared memory."""
        return [view_owned_rows(tensor) for _, _, tensor in self._tensors()]

    def rows_to_save(
        self, copy: Callable[[str, torch.Tensor], torch.Tensor] = lambda _name, rows: rows
    ) -> tuple[WriteOwn, Mapping[str, object]]:
        """Return a function that writes this rank's rows, and facts for the index. All ranks call this.

        ``copy`` maps a name and rows to copied rows. Training can then continue during the writing.
        """
        self.flush()
        writers = []
        for name, table, tensor in self._tensors():
            info = make_column_info(tensor.dtype, tensor.shape[1:])
            rows = view_as_numpy(copy(name, view_owned_rows(tensor)))
            writers.append(partial(write_rows, name=name, first=table.first, rows=rows, info=info))

        def write_own(folder: Path) -> list[RowFile]:
            return [write(folder) for write in writers]

        # All ranks wait here until the rows are copied. In mode "async" a rank that continued earlier would
        # change rows on other ranks. The number of steps differs between ranks in this mode.
        steps = gather_int64([table.steps for table in self.tables], self.session).max(axis=0)
        facts = {"lr": self.lr, "embeddings": self._facts(), "steps": steps.tolist()}
        return write_own, {**self._identity(), **facts}

    def check_saved(self, folder: Path) -> None:
        """Raise StorageError if ``folder`` has other tensors, or a damaged file with this rank's rows."""
        index = read_index(folder)
        facts = index.facts
        for key, value in self._identity().items():
            saved_value = facts.get(key)
            if saved_value == value:
                continue
            remedy = "Use the dataset and the optimizer that it was saved with."
            if key == "dataset":
                remedy = "Use the dataset that it was saved with (dx.distribute cuts another one for "
                remedy += "another number of servers, unless parts= is given)."
            raise StorageError(f"{folder} has {key} {saved_value!r}, this run has {value!r}. {remedy}")

        saved_embeddings = facts.get("embeddings")
        if saved_embeddings != self._facts():
            raise StorageError(
                f"{folder} holds the embeddings {saved_embeddings}, but this optimizer has "
                f"{self._facts()}. Make the same embeddings, with name= and in the same order."
            )
        steps = facts.get("steps")
        lr = facts.get("lr")
        if not isinstance(lr, int | float) or not self._are_step_counts(steps):
            raise StorageError(f"{folder} is damaged: lr is {lr!r} and steps {steps!r}. Use another copy.")
        for name, table, _ in self._tensors():
            check_rows(folder, index.tensor(name, folder), table.first, table.last)

    def read_saved(self, folder: Path) -> None:
        """Load this rank's rows and settings from ``folder`` after :meth:`check_saved`. Collective."""

        def read_owned_rows() -> Mapping[str, object]:
            index = read_index(folder)
            for name, table, tensor in self._tensors():
                rows = view_as_numpy(view_owned_rows(tensor))
                read_rows(folder, index.tensor(name, folder), table.first, table.last, rows)
            return index.facts

        facts = cast("dict[str, Any]", run_on_all_ranks(self.session, read_owned_rows))
        for table, steps in zip(self.tables, facts["steps"], strict=True):
            table.steps = int(steps)
        self.lr = float(facts["lr"])
        barrier(self.session, f"loading {folder}")

    def close(self) -> None:
        """Free the state and stop serving. The embeddings stay. Every rank must call this."""
        self.flush()
        barrier(self.session, f"closing {type(self).__name__}")
        self._exchange.close()
        for table in self.tables:
            for state in table.states:
                state.delete()

    def _facts(self) -> list[dict[str, Any]]:
        """Return facts about each embedding that all ranks, and a saved state to load, must agree on."""
        weights = [param.weight for param in self.params]
        return [{"name": w.name, "shape": list(w.shape), "dtype": str(w.dtype)} for w in weights]

    def _identity(self) -> dict[str, object]:
        """Return further facts that must be equal when a state is loaded."""
        kind = self.saved_as or type(self).__name__
        dataset = self.params[0].dataset
        return {"kind": kind, "dataset": dataset, "settings": dict(self.settings)}

    def _are_step_counts(self, steps: object) -> bool:
        """Return whether ``steps`` from a saved state has a count for each embedding."""
        if not isinstance(steps, list) or len(steps) != len(self.tables):
            return False
        return all(isinstance(count, int) and count >= 0 for count in steps)

    def _tensors(self) -> Iterator[tuple[str, OwnedRows, DistTensor]]:
        """Yield (name in the folder, owned rows, tensor)."""
        for index, table in enumerate(self.tables):
            yield f"{index}.weight", table, table.embedding.weight
            for name, state in zip(table.rule.state_names, table.states, strict=True):
                yield f"{index}.{name}", table, state

    def _open_table(self, param: DistEmbedding, optimizer_id: int) -> OwnedRows:
        """Create the state tensors for an embedding, and return this rank's rows. Every rank calls this.

        If a name is taken, for example by another optimizer for the embedding, ``optimizer_id`` is appended.
        """
        policy = param.part_policy
        shape, dtype = param.weight.shape, param.compute_dtype
        states = []
        for state_name in self._rule.state_names:
            name = f"{param.name}_{state_name}"
            if policy.store.has(policy.hidden_key(name)):
                name = f"{name}-{optimizer_id}"
            states.append(DistTensor(shape, dtype, name, part_policy=policy, is_gdata=False))
        param.optm_state = tuple(states)
        return OwnedRows(param, states, self._rule)


def _find_session(params: object) -> Session:
    for param in params if isinstance(params, list | tuple) else (params,):
        if isinstance(param, DistEmbedding):
            return param.kvstore.session
    return current_session()


def _check_params(params: Sequence[DistEmbedding]) -> tuple[DistEmbedding, ...]:
    """Return ``params`` as a tuple. Raise ConfigError unless they are distinct embeddings on one graph."""
    if isinstance(params, DistEmbedding):
        raise ConfigError("params is a DistEmbedding. Pass a list: [embedding].")
    embeddings = tuple(params)
    for position, param in enumerate(embeddings):
        if not isinstance(param, DistEmbedding):
            raise ConfigError(
                f"params[{position}] is a {type(param).__name__}. Pass DistEmbeddings here, "
                "and the parameters of the model to an optimizer of torch.optim."
            )
        if param.kvstore is not embeddings[0].kvstore:
            raise ConfigError(f"{param.name!r} belongs to another graph. Make one optimizer for each graph.")
    if not 1 <= len(embeddings) <= MAX_PARAMETERS:
        raise ConfigError(f"params has {len(embeddings)} embeddings. Pass 1 to {MAX_PARAMETERS}.")

    names = [param.name for param in embeddings]
    keys = {param.weight.kvstore_key for param in embeddings}
    if len(keys) < len(embeddings):
        raise ConfigError(f"params contains an embedding twice: {names}")
    return embeddings


@final
class SparseSGD(SparseOptimizer):
    """``torch.optim.SGD`` without momentum, for embeddings. For ``options`` see :class:`SparseOptimizer`."""

    def __init__(self, params: Sequence[DistEmbedding], lr: float, **options: Any) -> None:
        super().__init__(params, lambda: sgd_rule(lr), **options)


@final
class SparseAdagrad(SparseOptimizer):
    """``torch.optim.Adagrad`` for embeddings. Keeps one row of squares per row. Adds ``eps`` to the root."""

    def __init__(
        self, params: Sequence[DistEmbedding], lr: float, eps: float = 1e-10, **options: Any
    ) -> None:
        super().__init__(params, lambda: adagrad_rule(lr, eps), **options)


@final
class SparseAdam(SparseOptimizer):
    """``torch.optim.SparseAdam`` for embeddings. Keeps two rows with moments for each row.

    In mode "async" the bias correction's step is the number of pushes that the owner has applied.

    Args:
        betas: Decay rates for the moments.
        eps: Value to add to the second moment's root.
        options: Options as for :class:`SparseSGD`.
    """

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        super().__init__(params, lambda: adam_rule(lr, betas, eps), **options)
