"""Base classes and the registry of training strategies."""

from __future__ import annotations

import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.ledger import LedgerRow
from dglx_dist.comm.session import Session, SessionField, if_alive, start_session
from dglx_dist.comm.topology import read_settings
from dglx_dist.dataloading.step_loader import WRAPPED_MODELS, EpochLoader
from dglx_dist.errors import ConfigError, DglxError, shorten_list
from dglx_dist.internals.message_passing import correct_kernels
from dglx_dist.internals.pytorch import leave_to_python, remove_hooks_without_owner
from dglx_dist.records import FEATURE, LABEL, EpochRecord, StepShare
from dglx_dist.registry import AUTO, Registry
from dglx_dist.strategies.candidate import Candidate, CandidateContext, Unit

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


T = TypeVar("T")
Reduction: TypeAlias = Literal["mean", "sum"]
"""The user's loss: the mean over this rank's own targets, or their sum."""

CACHE_CHOICE: SessionField[dict[str, object] | None] = SessionField(lambda _: None)
"""Policy and alpha of the row cache that ``strategy="auto"`` has filled."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties that a strategy declares, so that no code depends on its name."""

    unit: Unit
    """The data of one step."""
    features: Literal["rows", "columns"] = "rows"
    """The cut of the node features over the servers."""
    summary: str
    """The network traffic, in one line."""
    own_loop: bool = True
    """Whether a user's loop can take the steps; False: only an :class:`EpochTrainer` can."""
    on_edges: bool = False
    """Whether it trains on batches of edges, too."""
    on_gpus: bool = True
    """Whether it trains models on GPUs."""
    complexity: int = 100
    """Of candidates that are about equally fast, the planner takes the one with the least."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parameters of a wrapped model by their placement, as uncut names of the user's module."""

    replicated: tuple[str, ...]
    """Equal on every rank, gradients summed over the ranks."""
    local: tuple[str, ...]
    """Each rank holds its own piece; their gradients are not exchanged."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The training objective of an :class:`EpochTrainer`."""

    loss: Callable[[Tensor, Tensor], Tensor] | None
    """(B, C) scores and (B,) labels to their mean loss; None: a task of the user's own."""
    feature: str = FEATURE
    """The model's input node data."""
    label: str = LABEL
    beside: tuple[str, ...] = ()
    """Names of options that add something else to a step."""


class EpochTrainer(ABC):
    """Trains whole epochs, under a strategy whose epochs overlap so that no user loop can own a step."""

    @abstractmethod
    def run(self, first: int, number: int) -> tuple[list[EpochRecord], Sequence[LedgerRow]]:
        """Train ``number`` epochs from ``first`` on; every rank must call it.

        Afterwards nothing is in flight, and the model's parameters and the optimizer's state are those of the
        last epoch on every rank.

        Returns:
            One record per epoch, over all ranks, not evaluated; and the bytes in them that this rank counted.

        Raises:
            PeerError: a rank is dead or silent.
        """

    @abstractmethod
    def account(self) -> dict[str, object]:
        """Return the costs of the run beside time, over all ranks, JSON values; every rank must call it.

        With ``dollars``, a ``label`` that says how to read them, and both as a ``text``.
        """

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Release all resources; every rank must call it. With ``failed`` it waits for no other rank."""


_PREFETCH = (
    "have the sampler bring it, as in NeighborSampler(..., prefetch_edge_feats=[{name}]), or name it in "
    "dx.local_graph(g, edge_columns=[{name}])"
)


@contextmanager
def edge_data_named(advice: str = _PREFETCH) -> Iterator[None]:
    """Replace DGL's KeyError for missing edge data of a block, which has only the name, by a ConfigError.

    Args:
        advice: The remedy in the message; ``{name}`` is replaced.
    """
    try:
        yield
    except KeyError as error:
        from dgl.view import HeteroEdgeDataView

        places = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        data = next((place for place in places if isinstance(place, HeteroEdgeDataView)), None)
        if data is None:
            raise
        known = ", ".join(map(repr, data)) or "none"
        raise ConfigError(
            f"the model reads edge data {error} of its block, which has none of that name (known: {known}); "
            f"{advice.format(name=error)}"
        ) from error


class WrappedModel(nn.Module, ABC):
    """The user's model, wrapped by a strategy to train together with the other ranks.

    Call it like the user's module. Backward is collective, and so is forward under strategies that exchange
    activations, on the thread of the training loop. Attributes of the user's module can be read through it;
    what computes (submodules, parameters, methods) only without gradients, as those would stay on this rank.
    Names and shapes in ``state_dict`` are those of the user's module, uncut, under every strategy, so that a
    checkpoint of one loads under another.
    """

    module: nn.Module
    """The user's module. Calling it directly, past the wrapper, leaves its gradients on this rank."""

    def __init__(self) -> None:
        super().__init__()
        correct_kernels()
        leave_to_python()
        WRAPPED_MODELS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module.

        Raises:
            ConfigError: the model reads edge data that its block does not have, or is on another device than
                its inputs; the message has the remedy.
        """
        # Autocast keeps converted weights until its block ends, over the steps of a loop that lies in it.
        torch.clear_autocast_cache()
        try:
            with edge_data_named():
                return super().__call__(*args, **kwargs)
        except DglxError:
            raise
        except Exception as error:
            # Not .module: reading it may be collective, and other ranks may not fail.
            _raise_for_devices(self.parameters(), (*args, *kwargs.values()), error)
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, or copied where the strategy has no ``__deepcopy__``."""
        raise ConfigError(
            f"{type(self).__name__} is connected to the other ranks, so it cannot be pickled or copied here; "
            "call model.state_dict() on all ranks and save that, or copy.deepcopy(model.whole())"
        )

    def _inside(self) -> nn.Module | None:
        # None while it is made, copied or unpickled.
        modules = self.__dict__.get("_modules", {})
        found: nn.Module | None = modules.get("module", modules.get("inner"))
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_ddp_params_and_buffers_to_ignore":  # DistributedDataParallel looks for it
                raise ConfigError(
                    "DistributedDataParallel around a wrapped model would average its gradients again; "
                    "leave it out, as dx.wrap exchanges the gradients"
                ) from None
            if name.startswith("_") or (inside := self._inside()) is None:
                raise
        value = getattr(inside, name)
        if torch.is_grad_enabled() and (isinstance(value, Tensor) or callable(value)):
            raise AttributeError(
                f"{name!r} is of the wrapped module, and gradients of what it computes would stay on this "
                f"rank: call it in forward(), or take model.module.{name} where it does not train"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        inside = None if name.startswith("_") or hasattr(type(self), name) else self._inside()
        if inside is not None and name not in (*vars(self), *self._modules) and hasattr(inside, name):
            raise AttributeError(f"{name!r} is of the wrapped module; set model.module.{name}")
        super().__setattr__(name, value)

    @property
    def parts(self) -> Parts:
        """The replicated and the cut parameters."""
        return Parts(replicated=tuple(name for name, _ in self.module.named_parameters()), local=())

    @property
    def overlaps_steps(self) -> bool:
        """Whether a batch begins before the step of the one before, until its loader's pass ends."""
        return False

    @abstractmethod
    def exchange_seconds(self, *, reset: bool = False) -> float:
        """Seconds this rank stood waiting for exchanges since the start or the last reset."""

    def whole(self) -> nn.Module:
        """Return the user's module with its current weights, uncut; every rank must call it.

        For computation without the other ranks, as evaluation; training it does not train the wrapped model.
        """
        return self.module

    def join_state(self, name: str, piece: Tensor) -> Tensor:
        """Return the uncut tensor of which each rank has a piece, cut like parameter ``name``; collective.

        For optimizer state. Returns ``piece`` itself where the parameter is replicated.
        """
        return piece

    def cut_state(self, name: str, uncut: Tensor) -> Tensor:
        """Return this rank's piece of the result of :meth:`join_state`; sends nothing."""
        return uncut

    def rank_state(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps of this rank beside its parameters, by name; collective."""
        return {}

    def load_rank_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what :meth:`rank_state` returned on this rank, {} of another number of ranks; collective."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over the uncut model, as torch's function does; collective.

        Returns:
            () the norm before clipping, equal on every rank.
        """
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def trainer(
        self,
        loader: Any,
        optimizer: Optimizer,
        objective: Objective,
        show: Callable[[str], None] | None = None,
    ) -> EpochTrainer | None:
        """Return the trainer that replaces a loop over ``loader``, or None, as here. Collective.

        Args:
            optimizer: Over the parameters of this model.
            show: Called now and then with one line of progress; from any thread.

        Raises:
            ConfigError: the strategy cannot train this.
        """
        return None

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for accumulation: backward of forward calls inside keeps the gradients on this rank.

        As in DistributedDataParallel, the next backward of a call outside sends the sum of all, so that k
        backwards send gradients once. An optimizer's step before that is a ConfigError. Activations are
        exchanged in each call, and gradients in each backward where mini-batches overlap (push_pull with
        ``weights="whole"``) or replicas of the first layer are summed.
        """
        return nullcontext()

    def join(self) -> AbstractContextManager[None]:
        """Context for a loop over a loader; does nothing, as loaders give all ranks equal steps."""
        return nullcontext()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's module, without a prefix.

        All ranks must call it when ``parts.local`` is not empty.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of an unwrapped module; every rank must load the same.

        Raises:
            RuntimeError: names or shapes differ (torch's own error).
        """
        result = self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        self.note_buffers()
        return result

    def note_buffers(self) -> None:
        """Called when buffers have changed on all ranks alike: after loading or moving the model."""

    def close(self) -> None:
        """Release what connects the model to the other ranks; it is not called any more."""
        WRAPPED_MODELS.discard(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Called by .to(), .double() and the like.
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it bare
        self.note_buffers()
        return result


def _raise_for_devices(parameters: Iterable[Tensor], arguments: Iterable[Any], error: Exception) -> None:
    own = next((one.device for one in parameters), None)
    flat = unpacked([*one.values()] if isinstance(one, Mapping) else one for one in arguments)
    other = next((one.device for one in flat if getattr(one, "device", own) != own), None)
    if own is not None and other is not None:
        raise ConfigError(
            f"the model is on {own}, its inputs on {other}; wrap model.to(dx.local_device()), or give the "
            f"loader device={str(own)!r}"
        ) from error


def float_of(model: nn.Module) -> Tensor:
    """Return a tensor of the floating-point dtype and the device of the model's parameters."""
    floats = (p for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.zeros(()))


class Strategy(ABC):
    """One placement of a model's stages over the ranks: its options, checked for one session.

    Raises:
        ConfigError: an option is unknown or has a value that is not supported.
    """

    traits: ClassVar[Traits]

    @staticmethod
    def read_options(options: Mapping[str, object]) -> Any:
        """Return ``options`` checked, as far as that needs no session; called before any rank is started.

        Raises:
            ConfigError: see the class. This default accepts everything.
        """
        return options

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        self.session, self.options = session, self.read_options(options)

    def is_same(self, strategy: Strategy) -> bool:
        return type(self) is type(strategy) and bool(self.options == strategy.options)

    @abstractmethod
    def open(self, g: DistGraph) -> OpenedStrategy:
        """Return what makes loaders and models for ``g``; every rank must call it.

        Several may be open for one graph, of this strategy or of others: they share nothing.

        Raises:
            ConfigError: the strategy does not train on this graph.
        """

    @classmethod
    def candidates(cls, context: CandidateContext) -> Iterator[Candidate]:
        """Yield what ``dglx plan`` and ``auto`` compare, the simplest first; by default without options.

        Options must be those of the constructor. A candidate's name in tables and in checkpoints is made of
        the registered name and its options.
        """
        if context.steps or cls.traits.unit == "full_graph":
            yield Candidate(unit=cls.traits.unit)


class OpenedStrategy(ABC):
    """A strategy on one graph. It makes loaders and models, and holds all that they share."""

    def __init__(self, strategy: Strategy, g: DistGraph) -> None:
        self.strategy, self.g, self.session, self.options = strategy, g, g.session, strategy.options
        self.on_close: list[Callable[[], None]] = []
        """Called on all ranks alike when the graph or this is closed, the last one first."""
        self.is_closed = False
        self._share = g.session.model_share
        self._models: list[weakref.ref[WrappedModel]] = []
        g.on_close.append(self._release)

    @abstractmethod
    def make_loader(self, indices: Tensor, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Return the iterable of :meth:`loader`."""

    def make_edge_loader(self, eids: Any, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Return the iterable of :meth:`edge_loader`, for a strategy with ``traits.on_edges``."""
        raise NotImplementedError

    @abstractmethod
    def make_model(self, model: nn.Module, reduction: Reduction) -> WrappedModel:
        """Return the model of :meth:`wrap`."""

    @final
    def loader(self, indices: Tensor, sampler: Any, **loader_options: Any) -> Any:
        """Return an iterable of ``(input_nodes, output_nodes, blocks)``; every rank must call it.

        Args:
            indices: (K,) int64, this rank's seeds; may be empty.
            sampler: A sampler of ``dgl.dataloading``.
        """
        return self._keep_loader(self.make_loader(indices, sampler, **loader_options))

    @final
    def edge_loader(self, eids: Any, sampler: Any, **loader_options: Any) -> Any:
        """Return an iterable of ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``; collective.

        ``eids`` are this rank's edges, ids or a dict of them by edge type; may be empty. All else is as for
        :meth:`loader` and ``dglx_dist.DistEdgeDataLoader``.

        Raises:
            ConfigError: the strategy trains on nodes only.
        """
        if not self.strategy.traits.on_edges:
            raise ConfigError(
                f"strategy {self.session.strategy!r} trains on nodes, not on batches of edges; use "
                "strategy='data_parallel'"
            )
        return self._keep_loader(self.make_edge_loader(eids, sampler, **loader_options))

    @final
    def wrap(self, model: nn.Module, reduction: Reduction = "mean") -> WrappedModel:
        """Return ``model``, wrapped to train with the other ranks; every rank must call it.

        Args:
            model: The user's model; all ranks build the same one, rank 0's weights win.

        Raises:
            ConfigError: the strategy cannot train this model exactly.
        """
        wrapped = self.make_model(model, reduction)
        self._models.append(weakref.ref(wrapped))
        return wrapped

    def _keep_loader(self, loader: T) -> T:
        # Weakly: what the user drops is gone, also while the graph is open.
        if isinstance(loader, EpochLoader):
            self.on_close.append(if_alive(loader.close))
        return loader

    @final
    def close(self) -> None:
        """Release the loaders and models, and all that they share; every rank must call it.

        Afterwards the session is as it was before, and the models cannot be trained any more. A second call
        does nothing. ``g.close()`` does the same but for the models, which may go on with another graph.
        """
        for model in [reference() for reference in self._models]:
            if model is not None:
                model.close()
        self._models.clear()
        if not self.is_closed:
            self.session.model_share = self._share
        self._release()

    def _release(self) -> None:
        self.is_closed = True
        while self.on_close:
            self.on_close.pop()()
        remove_hooks_without_owner()
        if self._release in self.g.on_close:
            self.g.on_close.remove(self._release)


def check_one_type(strategy: str, g: DistGraph) -> None:
    if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"{strategy} trains on graphs of one node and one edge type, but this graph has the node types "
            f"{shorten_list(g.ntypes)} and the edge types {shorten_list(g.canonical_etypes)}; use "
            "strategy='data_parallel'"
        )


DEFAULT_STRATEGY = "data_parallel"
"""Without a name; its fan-outs and batch size are the defaults of mini-batches."""

STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    Strategy,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "cooperative": "dglx_dist.strategies.full_graph.strategies:Cooperative",
        "data_parallel": "dglx_dist.strategies.data_parallel:DataParallel",
        "full_graph": "dglx_dist.strategies.full_graph.strategies:FullGraph",
        "lambda": "dglx_dist.strategies.serverless.strategy:Lambda",
        "push_pull": "dglx_dist.strategies.push_pull.strategy:PushPull",
        "shared_preload": "dglx_dist.strategies.full_graph.strategies:SharedPreload",
    },
    aliases={
        "cob": "cooperative",
        "distdgl": "data_parallel",
        "dorylus": "lambda",
        "dp": "data_parallel",
        "fb": "full_graph",
        "flx": "shared_preload",
        "granndis": "shared_preload",
        "p3": "push_pull",
    },
    group="dglx_dist.strategies",
)


_OPENED: SessionField[WeakValueDictionary[str, OpenedStrategy]] = SessionField(
    lambda _: WeakValueDictionary()
)
"""The session's strategy on each of its graphs, by the label of the graph's store."""


def open_strategy(g: DistGraph) -> OpenedStrategy:
    """Return the session's strategy on ``g``, the same object at each call; every rank must call it.

    Raises:
        ConfigError: as :func:`strategy_of`, or the strategy does not train on this graph.
    """
    strategy, opened = strategy_of(g.session), _OPENED.get(g.session)
    known = opened.get(g.kvstore.label)
    if known is None or known.is_closed or not known.strategy.is_same(strategy):
        known = opened[g.kvstore.label] = strategy.open(g)
    return known


def strategy_of(session: Session) -> Strategy:
    """Return the strategy of the session.

    Raises:
        ConfigError: an option of the session is unknown, or ``auto`` has not chosen yet.
    """
    if session.strategy == AUTO:
        raise ConfigError(
            "strategy 'auto' chooses once it has seen model and graph: call dx.choose_strategy(model, g, "
            "fanouts=..., batch_size=...) before the first loader and dx.wrap; dx.fit does it by itself"
        )
    return STRATEGIES.get(session.strategy)(session, session.options)


def resolve_strategy(strategy: str | None, *, auto: bool = False) -> str:
    """Return the canonical name of ``strategy``; of None: DGLX_STRATEGY, else the default.

    Args:
        auto: Whether ``auto`` is allowed, as a strategy is chosen later.

    Raises:
        UnknownNameError: there is no such strategy; the message has the nearest name.
        ConfigError: ``auto`` where it is not allowed.
    """
    name = strategy or read_settings().strategy or DEFAULT_STRATEGY
    if name != AUTO:
        return STRATEGIES.resolve(name, also=(AUTO,) if auto else ())
    if not auto:
        raise ConfigError(
            "strategy 'auto' chooses in dx.fit or dx.choose_strategy, which a script of dgl.distributed does "
            "not call; ask `dglx plan` which strategy suits, and name that one"
        )
    return AUTO


def begin(
    strategy: str,
    options: Mapping[str, object],
    *,
    timeout_s: float = 300.0,
    seed: int = 0,
    backend: str | None = None,
    device: torch.device | str = "auto",
    check: Callable[[Session], object] = strategy_of,
) -> Session:
    """Join the other ranks for ``strategy``; every rank must call it.

    Args:
        options: The strategy's own, merged over those of DGLX_OPTIONS.
        backend: Of the process group, if there is none yet.
        check: Raises ConfigError for the session's options.

    Raises:
        ConfigError: the strategy does not know an option, ranks disagree or lack the device, or a session is
            open already.
        PeerError: ranks are missing after the time-out.
    """
    merged = {**read_settings().options, **options}
    session = start_session(
        strategy=strategy, options=merged, timeout_s=timeout_s, seed=seed, backend=backend, device=device
    )
    try:
        check(session)
    except BaseException as error:
        session.fail(error)
        session.close(failed=True)
        raise
    return session


def count_targets(num_local: int, session: Session) -> StepShare:
    """Return the share of a rank with ``num_local`` targets; every rank must call it.

    For loops without ``dglx_dist.DataLoader``: set ``session.step_share`` to the result.
    """
    counts = gather_int64([num_local], session)
    return StepShare(num_local=num_local, num_global=int(counts.sum()))


def unpacked(arguments: Iterable[object]) -> Iterator[Any]:
    """Yield ``arguments``, and in place of lists and tuples what is in them, as the blocks of a batch."""
    for one in arguments:
        yield from one if isinstance(one, list | tuple) else (one,)


def find_share(arguments: Iterable[object], session: Session) -> StepShare | None:
    """Return the share stamped on the blocks among ``arguments``, else the session's, else None.

    It is kept as ``session.model_share``.
    """
    last = (one[-1] if isinstance(one, list | tuple) and one else one for one in arguments)
    stamped = (getattr(one, "step_share", None) for one in last)
    session.model_share = next((one for one in stamped if isinstance(one, StepShare)), session.step_share)
    return session.model_share


def gradient_weight(share: StepShare | None, reduction: Reduction) -> float:
    """Return the factor of this rank's gradient in the sum over ranks.

    For a mean it is n_local / n_global, so the sum is the mean over all targets; for a sum it is 1, so the
    sum is the gradient of one process (the gradient rule, docs/design/contracts.md). It is 0 on a rank
    without targets, whatever its loss.

    Raises:
        ConfigError: the loss is a mean and the number of targets is unknown.
    """
    if share is not None and share.num_local == 0:
        return 0.0
    if reduction == "sum":
        return 1.0
    if share is None:
        raise ConfigError(
            "the wrapped model does not know how many targets this step has, so it cannot weigh this rank's "
            "mean loss; feed it from dglx_dist.DataLoader, set session.step_share = dglx_dist.strategies."
            "base.count_targets(len(targets), session) before the forward call, or wrap with reduction='sum'"
        )
    return share.num_local / share.num_global
