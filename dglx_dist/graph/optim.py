"""Optimizers of :class:`~dglx_dist.graph.embedding.DistEmbedding`, public as ``dglx_dist.optim``.

Their formulas are those of torch. In mode "sync" the rows equal, step by step, those of
``torch.nn.Embedding(sparse=True)`` trained in one process on the batches of all ranks together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike, fsdecode
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast, final

import torch

from dglx_dist.comm.collectives import barrier, check_equal, gather_int64, run_on_all_ranks
from dglx_dist.comm.session import Session, current_session
from dglx_dist.data.storage.row_files import RowFile, check_rows, read_index, read_rows, write_rows
from dglx_dist.errors import ConfigError, DglxError, StorageError
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
    """Updates the rows of embeddings that have gradients since the last step.

    Creating it is collective, with the same arguments. The owner of a row updates it from the sum of the
    gradients of all ranks. They are weighted like those of the model (the gradient rule,
    docs/development/contracts.md). The share of a call is the ``session.step_share`` at that time. Rows
    without gradients and their state stay unchanged. If several optimizers have the same embedding, the first
    one that steps takes the gradients.

    Args:
        rule: Function that returns the formula. Its errors are raised on all ranks.
        mode: "sync": every step equals the step of one process. "async": owners apply gradients on arrival.
        staleness: Only for "async": maximum number of own steps that may be unapplied when ``step()``
            returns.
        reduction: Reduction of the loss over a rank's own targets, ``mean`` or ``sum``.

    Raises:
        ConfigError: on all ranks, if ``params`` are no distinct DistEmbeddings of one graph, an option is
            invalid, the ranks differ, or memory for the state is short.
    """

    saved_as: ClassVar[str] = ""
    """Kind of the optimizer in saved states. The default is the name of the class."""

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

        def check() -> tuple[tuple[DistEmbedding, ...], UpdateRule]:
            if mode not in ("sync", "async"):
                raise ConfigError(f"mode={mode!r} must be 'sync' or 'async'")
            if reduction not in ("mean", "sum"):
                raise ConfigError(f"reduction={reduction!r} must be 'mean' or 'sum'")
            if staleness < 0:
                raise ConfigError(f"staleness={staleness} must be at least 0")
            return _check_params(params), rule()

        self.params, self._rule = run_on_all_ranks(self.session, check, ConfigError)
        arguments = [type(self).__name__, self.lr, self.settings, [mode, staleness, reduction], self._facts()]
        check_equal(self.session, "a sparse optimizer", arguments, "use the same arguments on all ranks")
        store = self.params[0].kvstore
        number = store.next_number()
        for param in self.params:
            check_memory(
                self.session,
                param.part_policy.bounds,
                len(self._rule.state_names) * param.compute_dtype.itemsize * param.embedding_dim,
                f"the state of {type(self).__name__} for {param.name!r}",
                "use SparseSGD, which has no state, or more servers on more machines",
            )
        self.tables = [self._open_table(param, number) for param in self.params]
        """Rows of each embedding that this rank owns."""
        op = f"{store.label}.sparse-{number}"
        lag = staleness if mode == "async" else None
        self._exchange = SparseExchange(self.session, op, self.tables, lag)
        barrier(self.session, f"making {type(self).__name__}")

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

        In mode "sync" every rank must call this, also without gradients. It returns when all owners have
        applied the step. In mode "async" a rank may call it alone. Sends 8 bytes and one row of the compute
        dtype for each distinct row of another rank. Raises ConfigError on all ranks, if the loss is a mean
        and an embedding was called in a step with an unknown number of targets, and PeerError if a rank is
        dead, or did not call this within the time limit. The message names the rank.
        """
        gradients_by_param = [param.take_gradients() for param in self.params]
        used = [bool(gradients) for gradients in gradients_by_param]
        world_size = self.session.topology.world_size
        sums: list[RowSum | None] = []
        problem: DglxError | None = None
        try:
            sums = [weighted_sum(gradients, self._reduction, world_size) for gradients in gradients_by_param]
        except ConfigError as error:
            problem = error
        self._exchange.step(sums, used, str(problem or ""))
        if problem is not None:
            raise problem

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step. A later ``backward`` of an earlier call still counts."""
        for param in self.params:
            param.reset_trace()

    def flush(self) -> None:
        """Wait until the gradients of all ranks are applied. All ranks call this, like before evaluation."""
        self._exchange.flush()

    def staleness_report(self) -> StalenessReport:
        return self._exchange.report()

    def local_state_dict(self) -> dict[str, Any]:
        """Return the settings and the state of the rows that this rank owns, in the layout of DGL.

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

    def load_local_state_dict(self, local_state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`local_state_dict` of any rank, with rows of any rank.

        Call it on all ranks, and a barrier afterwards. Of the settings it loads only ``lr``. Raises
        ConfigError if the state belongs to other embeddings or another kind of optimizer. Nothing has changed
        then.
        """
        tables = {table.embedding.name: table for table in self.tables}
        for name, entry in local_state_dict["emb_states"].items():
            state_names = sorted(tensor.name for tensor in tables[name].states) if name in tables else None
            present = f"no embedding {name!r}" if state_names is None else state_names
            if state_names != sorted(entry["states"]):
                raise ConfigError(
                    f"the state holds {sorted(entry['states'])} of {name!r}, but this optimizer has "
                    f"{present}. Build the same optimizer."
                )
        for name, entry in local_state_dict["emb_states"].items():
            for tensor in tables[name].states:
                tensor[entry["ids"]] = entry["states"][tensor.name]
            tables[name].steps = int(entry["steps"])
        self.lr = float(local_state_dict["params"]["lr"])

    def save(self, f: str | bytes | PathLike[str]) -> None:
        """Write the embeddings and the state as the folder ``f``. Every rank must call this.

        Each rank writes the rows that it owns. All ranks must see the folder. It replaces an earlier one
        completely or not at all. Raises StorageError on all ranks if one cannot write, or if ``f`` holds
        something other than saved rows. Its former content is unchanged.
        """
        target = run_on_all_ranks(self.session, lambda: Path(fsdecode(f)))
        save_folder(self.session, target, *self.rows_to_save())

    def load(self, f: str | bytes | PathLike[str]) -> None:
        """Load the result of :meth:`save` on any number of ranks and servers. Every rank must call this.

        Raises StorageError on all ranks if the folder is missing or damaged for one, or belongs to another
        dataset, optimizer or embeddings. Nothing has changed then.
        """
        self.flush()
        run_on_all_ranks(self.session, lambda: self.check_saved(Path(fsdecode(f))))
        self.read_saved(Path(fsdecode(f)))

    @property
    def own_rows(self) -> list[torch.Tensor]:
        """Rows that this rank saves, of embeddings and states, as views of shared memory."""
        return [view_owned_rows(tensor) for _, _, tensor in self._tensors()]

    def rows_to_save(
        self, copy: Callable[[str, torch.Tensor], torch.Tensor] = lambda _name, rows: rows
    ) -> tuple[WriteOwn, Mapping[str, object]]:
        """Return a function that writes this rank's rows, and the facts of the index. All ranks call this.

        ``copy`` maps a name and rows to a copy of them, so that training can go on while they are written.
        """
        self.flush()
        rows = [
            (
                name,
                table.first,
                make_column_info(tensor.dtype, tensor.shape[1:]),
                copy(name, view_owned_rows(tensor)),
            )
            for name, table, tensor in self._tensors()
        ]

        def write_own(folder: Path) -> list[RowFile]:
            return [
                write_rows(folder, name, first, view_as_numpy(owned_rows), info=info)
                for name, first, info, owned_rows in rows
            ]

        # This follows the copies. In mode "async" a rank that went on would change rows of others, and the
        # number of steps differs between ranks.
        steps = gather_int64([table.steps for table in self.tables], self.session).max(axis=0)
        facts = {"lr": self.lr, "embeddings": self._facts(), "steps": steps.tolist()}
        return write_own, {**self._identity(), **facts}

    def check_saved(self, folder: Path) -> None:
        """Raise StorageError unless ``folder`` has this optimizer's tensors and this rank's rows are intact.

        The message names the first difference, or the missing or damaged file.
        """
        index = read_index(folder)
        facts = index.facts
        for key, value in self._identity().items():
            if facts.get(key) != value:
                remedy = "Use the dataset and the optimizer that it was saved with."
                if key == "dataset":
                    remedy = "Use the dataset that it was saved with (dx.distribute cuts another one for "
                    remedy += "another number of servers, unless parts= is given)."
                raise StorageError(f"{folder} has {key} {facts.get(key)!r}, this run has {value!r}. {remedy}")
        if facts.get("embeddings") != self._facts():
            raise StorageError(
                f"{folder} holds the embeddings {facts.get('embeddings')}, but this optimizer has "
                f"{self._facts()}. Make the same embeddings, with name= and in the same order."
            )
        steps: Any = facts.get("steps")
        lr = facts.get("lr")
        are_counts = isinstance(steps, list) and all(isinstance(count, int) and count >= 0 for count in steps)
        if not isinstance(lr, int | float) or not are_counts or len(steps) != len(self.tables):
            raise StorageError(f"{folder} is damaged: lr is {lr!r} and steps {steps!r}. Use another copy.")
        for name, table, _ in self._tensors():
            check_rows(folder, index.tensor(name, folder), table.first, table.last)

    def read_saved(self, folder: Path) -> None:
        """Load this rank's rows and settings from ``folder``, after :meth:`check_saved`. All ranks call this.

        Raises StorageError if a file cannot be read any more.
        """

        def read_own() -> Mapping[str, object]:
            index = read_index(folder)
            for name, table, tensor in self._tensors():
                rows = view_as_numpy(view_owned_rows(tensor))
                read_rows(folder, index.tensor(name, folder), table.first, table.last, rows)
            return index.facts

        facts = cast("dict[str, Any]", run_on_all_ranks(self.session, read_own))
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
        """Return facts about each embedding that must be equal on all ranks, and when the rows are read."""
        weights = [param.weight for param in self.params]
        return [{"name": w.name, "shape": list(w.shape), "dtype": str(w.dtype)} for w in weights]

    def _identity(self) -> dict[str, object]:
        """Return further facts that must be equal when a state is read."""
        kind = self.saved_as or type(self).__name__
        dataset = self.params[0].dataset
        return {"kind": kind, "dataset": dataset, "settings": dict(self.settings)}

    def _tensors(self) -> Iterator[tuple[str, OwnedRows, DistTensor]]:
        """Yield (name in the folder, owned rows, tensor)."""
        for number, table in enumerate(self.tables):
            yield f"{number}.weight", table, table.embedding.weight
            for name, state in zip(table.rule.state_names, table.states, strict=True):
                yield f"{number}.{name}", table, state

    def _open_table(self, param: DistEmbedding, number: int) -> OwnedRows:
        """Create the state tensors of an embedding, and return the rows of this rank. Collective.

        A name that is taken, for example by another optimizer of the embedding, gets ``number`` as a suffix.
        """
        policy = param.part_policy
        weight = param.weight
        states = []
        for state_name in self._rule.state_names:
            name = f"{param.name}_{state_name}"
            if policy.store.has(policy.hidden_key(name)):
                name = f"{name}-{number}"
            states.append(
                DistTensor(weight.shape, param.compute_dtype, name, part_policy=policy, is_gdata=False)
            )
        param.optm_state = tuple(states)
        return OwnedRows(param, states, self._rule)


def _find_session(params: object) -> Session:
    for param in params if isinstance(params, list | tuple) else (params,):
        if isinstance(param, DistEmbedding):
            return param.kvstore.session
    return current_session()


def _check_params(params: Sequence[DistEmbedding]) -> tuple[DistEmbedding, ...]:
    if isinstance(params, DistEmbedding):
        raise ConfigError("params is a DistEmbedding. Pass a list: [embedding].")
    embeddings = tuple(params)
    for position, param in enumerate(embeddings):
        if not isinstance(param, DistEmbedding):
            raise ConfigError(
                f"params[{position}] is a {type(param).__name__}. Pass DistEmbeddings here, and the "
                "parameters of the model to an optimizer of torch.optim."
            )
        if param.kvstore is not embeddings[0].kvstore:
            raise ConfigError(f"{param.name!r} belongs to another graph. Make one optimizer for each graph.")
    if not 1 <= len(embeddings) <= MAX_PARAMETERS:
        raise ConfigError(f"params has {len(embeddings)} embeddings. Pass 1 to {MAX_PARAMETERS}.")
    keys = [param.weight.kvstore_key for param in embeddings]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"params contains an embedding twice: {[param.name for param in embeddings]}")
    return embeddings


@final
class SparseSGD(SparseOptimizer):
    """``torch.optim.SGD`` without momentum, for embeddings.

    ``options`` are ``mode``, ``staleness`` and ``reduction``, see :class:`SparseOptimizer`.
    """

    def __init__(self, params: Sequence[DistEmbedding], lr: float, **options: Any) -> None:
        super().__init__(params, lambda: sgd_rule(lr), **options)


@final
class SparseAdagrad(SparseOptimizer):
    """``torch.optim.Adagrad`` for embeddings. Keeps one row of squares for each row.

    ``eps`` is added to the root of the sum of squares. ``options`` are those of :class:`SparseSGD`.
    """

    def __init__(
        self, params: Sequence[DistEmbedding], lr: float, eps: float = 1e-10, **options: Any
    ) -> None:
        super().__init__(params, lambda: adagrad_rule(lr, eps), **options)


@final
class SparseAdam(SparseOptimizer):
    """``torch.optim.SparseAdam`` for embeddings. Keeps two rows of moments for each row.

    In mode "async" the step of the bias correction is the number of pushes that the owner has applied.
    ``betas`` are the decay rates of the moments, and ``eps`` is added to the root of the second moment.
    ``options`` are those of :class:`SparseSGD`.
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
