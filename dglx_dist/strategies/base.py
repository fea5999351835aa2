"""Base classes for training strategies, and their registry."""

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
from dglx_dist.comm.session import Session, SessionField, start_session
from dglx_dist.comm.stopping import call_if_alive
from dglx_dist.comm.topology import read_settings
from dglx_dist.dataloading.step_loader import WRAPPED_MODELS, EpochLoader
from dglx_dist.errors import ConfigError, DglxError, shorten_list
from dglx_dist.internals.cpu_kernels import correct_kernels
from dglx_dist.internals.pytorch import leave_to_python, remove_hooks_without_owner
from dglx_dist.records import FEATURE, LABEL, EpochRecord, StepShare
from dglx_dist.registry import AUTO, Registry
from dglx_dist.strategies.candidate import Candidate, CandidateContext, Unit

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


T = TypeVar("T")
Reduction: TypeAlias = Literal["mean", "sum"]
"""Whether the user's loss is the mean over this rank's targets or their sum."""

CACHE_CHOICE: SessionField[dict[str, object] | None] = SessionField(lambda _: None)
"""Row cache policy and alpha that ``strategy="auto"`` has chosen. The cache is already filled with them."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties that a strategy declares, so that no code depends on its name."""

    unit: Unit
    """Data that one step trains on."""
    features: Literal["rows", "columns"] = "rows"
    """Way to cut node features over the servers."""
    summary: str
    """Network traffic, in one line."""
    own_loop: bool = True
    """Whether users can write their own training loop. If False, only an :class:`EpochTrainer` can train."""
    on_edges: bool = False
    """Whether the strategy also trains on edge batches."""
    excludes_edges: bool = True
    """Whether the blocks for an edge batch can leave out the batch's own edges."""
    any_layers: bool = False
    """Whether layers of other libraries train, because the strategy does not change how a layer computes."""
    on_gpus: bool = True
    """Whether the strategy trains models on GPUs."""
    complexity: int = 100
    """Number that grows with complexity. Among equally fast candidates, the planner takes the smallest."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parameter names in the user's module, grouped by where the parameters live."""

    replicated: tuple[str, ...]
    """Parameters that are equal on every rank. Their gradients are summed over the ranks."""
    local: tuple[str, ...]
    """Parameters that are cut, so that each rank holds its own piece. Their gradients are not exchanged."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Loss, data names, clipping and learning rates for an :class:`EpochTrainer`."""

    loss: Callable[[Tensor, Tensor], Tensor] | None
    """Maps (B, C) scores and (B,) labels to their mean loss. None if the user defined the task."""
    feature: str = FEATURE
    """Node data that the model takes as input, by name."""
    label: str = LABEL
    extra_terms: tuple[str, ...] = ()
    """Names of the options that add another term to the loss."""
    clip_norm: float | None = None
    """Maximum norm for all gradients together. None if they are not clipped."""
    rate_factor: Callable[[int], float] | None = None
    """Maps an epoch to a factor for the learning rates. None keeps the optimizer's rates."""


class EpochTrainer(ABC):
    """Trains whole epochs, for strategies with overlapping steps that a user's loop cannot run."""

    @abstractmethod
    def run(self, first: int, number: int) -> tuple[list[EpochRecord], Sequence[LedgerRow]]:
        """Train ``number`` epochs, starting with epoch ``first``. Every rank must call it.

        Afterwards nothing is in flight, and every rank has the parameters and the optimizer state that the
        last epoch left.

        Returns:
            One record per epoch over all ranks, without evaluation, and the bytes that this rank counted.

        Raises:
            PeerError: a rank is dead or silent.
        """

    @abstractmethod
    def account(self) -> dict[str, object]:
        """Return what the run cost over all ranks, as JSON values. Every rank must call it.

        The key ``dollars`` has the amount, ``label`` says how to read it, and ``text`` has both.
        """

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Release all resources. Every rank must call it, and waits for the others unless ``failed``."""


_PREFETCH = (
    "let the sampler fetch it with NeighborSampler(..., prefetch_edge_feats=[{name}]), or name it in "
    "dx.local_graph(g, edge_columns=[{name}])"
)


@contextmanager
def explain_missing_edge_data(advice: str = _PREFETCH) -> Iterator[None]:
    """Turn DGL's KeyError for edge data that a block lacks into a ConfigError with a remedy.

    Args:
        advice: The remedy. ``{name}`` is replaced by the missing name.
    """
    try:
        yield
    except KeyError as error:
        # DGL's edge data view is in one traceback frame. A KeyError without such a frame is not about blocks.
        data = _find_edge_view(error)
        if data is None:
            raise
        columns = ", ".join(map(repr, data)) or "none"
        raise ConfigError(
            f"the model reads edge data {error}, but its block does not have it (known: "
            f"{columns}); {advice.format(name=error)}"
        ) from error


def _find_edge_view(error: BaseException) -> Any:
    from dgl.view import HeteroEdgeDataView

    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, HeteroEdgeDataView):
            return owner
    return None


class WrappedModel(nn.Module, ABC):
    """The user's model, wrapped by a strategy to train together with the other ranks.

    Call it like the user's module, on the thread of the training loop. Backward is collective. Forward is
    collective too under strategies that exchange activations.

    The wrapper passes attribute reads on to the user's module. Submodules, parameters and methods can be read
    only without gradients, because their gradients would stay on this rank.

    Under every strategy, ``state_dict`` has the user's names and uncut shapes. So a checkpoint that one
    strategy wrote loads under another.
    """

    module: nn.Module
    """The user's module. If it is called directly, its gradients stay on this rank."""

    def __init__(self) -> None:
        super().__init__()
        correct_kernels()
        leave_to_python()
        WRAPPED_MODELS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module.

        Raises ConfigError if the model reads edge data that its block does not have, or is on another device
        than its inputs.
        """
        # Autocast caches converted weights until its block ends. A block around the whole loop would reuse
        # the weights from the first step.
        torch.clear_autocast_cache()
        try:
            with explain_missing_edge_data():
                return super().__call__(*args, **kwargs)
        except DglxError:
            raise
        except Exception as error:
            # Reading .module may be collective, and the other ranks may not fail.
            _raise_for_devices(self.parameters(), (*args, *kwargs.values()), error)
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling, and copying where the strategy has no ``__deepcopy__``."""
        raise ConfigError(
            f"{type(self).__name__} is connected to the other ranks, so it cannot be pickled "
            "or copied here; call model.state_dict() on all ranks and save that, or "
            "copy.deepcopy(model.whole())"
        )

    def _get_module(self) -> nn.Module | None:
        # There is none while the wrapper is constructed, copied or unpickled.
        modules = self.__dict__.get("_modules", {})
        module: nn.Module | None = modules.get("module", modules.get("inner"))
        return module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_ddp_params_and_buffers_to_ignore":  # DistributedDataParallel looks for it
                raise ConfigError(
                    "DistributedDataParallel around a wrapped model would average its "
                    "gradients again; leave it out, as dx.wrap exchanges the gradients"
                ) from None
            module = self._get_module()
            if name.startswith("_") or module is None:
                raise

        value = getattr(module, name)
        has_gradient = isinstance(value, Tensor) or callable(value)
        if has_gradient and torch.is_grad_enabled():
            raise AttributeError(
                f"{name!r} belongs to the wrapped module, so its gradients would stay on this "
                f"rank; call it in forward(), or use model.module.{name} where it does not "
                "train"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name.startswith("_") or hasattr(type(self), name)
        is_set = name in vars(self) or name in self.__dict__.get("_modules", {})
        if not is_own and not is_set and hasattr(self._get_module(), name):
            raise AttributeError(f"{name!r} belongs to the wrapped module; set model.module.{name}")
        super().__setattr__(name, value)

    @property
    def parts(self) -> Parts:
        """Parameter names, split into replicated and cut parameters."""
        return Parts(replicated=tuple(name for name, _ in self.module.named_parameters()), local=())

    @property
    def overlaps_steps(self) -> bool:
        """Whether a batch begins before the previous batch's optimizer step."""
        return False

    @abstractmethod
    def exchange_seconds(self, *, reset: bool = False) -> float:
        """Return the seconds that this rank waited for exchanges since the start or the last reset."""

    def whole(self) -> nn.Module:
        """Return the user's module with its current, uncut weights. Every rank must call it.

        Use it to compute without the other ranks, for example to evaluate. Training the result does not train
        the wrapped model.
        """
        return self.module

    def join_state(self, name: str, piece: Tensor) -> Tensor:
        """Join pieces from all ranks that are cut like parameter ``name``. Every rank must call this.

        Checkpoints use it for optimizer state. If the parameter is replicated, ``piece`` itself is returned.
        """
        return piece

    def cut_state(self, name: str, uncut: Tensor) -> Tensor:
        """Return this rank's piece, undoing :meth:`join_state`. Sends nothing."""
        return uncut

    def rank_state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores for this rank beside parameters. All ranks call it."""
        return {}

    def load_rank_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what :meth:`rank_state` returned. Every rank must call this.

        ``state`` is {} if the number of ranks has changed since.
        """

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over the uncut model, like torch's function. All ranks call this.

        Returns:
            The norm before clipping, a scalar that is equal on every rank.
        """
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def trainer(
        self,
        loader: Any,
        optimizer: Optimizer,
        objective: Objective,
        show: Callable[[str], None] | None = None,
    ) -> EpochTrainer | None:
        """Return the trainer that replaces a loop over ``loader``, or None. Every rank must call this.

        Args:
            optimizer: An optimizer for this model's parameters.
            show: Called from any thread with one progress line at a time.

        Raises:
            ConfigError: the strategy cannot train this.
        """
        return None

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which forward calls accumulate gradients without exchanging them.

        As in DistributedDataParallel, the first backward that belongs to a forward call outside the context
        sends the accumulated gradients. An optimizer step before that raises ConfigError.

        Activations are still exchanged in each call. Gradients are still exchanged in each backward if
        mini-batches overlap (push_pull with ``weights="whole"``) or if first-layer replicas are summed.
        """
        return nullcontext()

    def join(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because loaders give all ranks equally many steps."""
        return nullcontext()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the user's module's state, without a name prefix.

        If ``parts.local`` is not empty, every rank must call it.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load state that an unwrapped module returned. Every rank must load the same state.

        Raises RuntimeError if names or shapes differ (torch's own error).
        """
        result = self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        self.note_buffers()
        return result

    def note_buffers(self) -> None:
        """Record that buffers have changed equally on all ranks, after the model was loaded or moved."""

    def close(self) -> None:
        """Release the connections to other ranks. The model cannot be called afterwards."""
        WRAPPED_MODELS.discard(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Called by .to(), .double() and the like.
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not annotate this
        self.note_buffers()
        return result


def _raise_for_devices(parameters: Iterable[Tensor], arguments: Iterable[Any], error: Exception) -> None:
    """Raise ConfigError if an argument is on another device than the model's parameters."""
    devices = [parameter.device for parameter in parameters]
    if not devices:
        return
    model_device = devices[0]

    values = [[*argument.values()] if isinstance(argument, Mapping) else argument for argument in arguments]
    for value in flatten_arguments(values):
        input_device = getattr(value, "device", model_device)
        if input_device != model_device:
            raise ConfigError(
                f"the model is on {model_device}, but its inputs are on {input_device}; wrap "
                f"model.to(dx.local_device()), or give the loader device={str(model_device)!r}"
            ) from error


def find_float_parameter(model: nn.Module) -> Tensor:
    """Return the first floating-point parameter, for its dtype and device. A model without one gets zeros."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter
    return torch.zeros(())


class Strategy(ABC):
    """A way to distribute training over the ranks, with its options checked for one session.

    Raises ConfigError if an option is unknown or has a value that is not supported.
    """

    traits: ClassVar[Traits]

    @staticmethod
    def read_options(options: Mapping[str, object]) -> Any:
        """Check ``options`` as far as possible without a session, before any rank is started.

        The default accepts everything. Raises ConfigError if an option is unknown or has a value that is not
        supported.
        """
        return options

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        self.session = session
        self.options = self.read_options(options)

    def is_same(self, strategy: Strategy) -> bool:
        return type(self) is type(strategy) and bool(self.options == strategy.options)

    @abstractmethod
    def open(self, g: DistGraph) -> OpenedStrategy:
        """Open the strategy on ``g``, to make loaders and models. Every rank must call it.

        Several strategies may be open on one graph. They share nothing. Raises ConfigError if the strategy
        does not train on this graph.
        """

    @classmethod
    def candidates(cls, context: CandidateContext) -> Iterator[Candidate]:
        """Yield the candidates that ``dglx plan`` and ``auto`` compare, the simplest first.

        The default yields one candidate without options. Tables and checkpoints call a candidate by the
        strategy's registered name and the options.
        """
        if context.steps or cls.traits.unit == "full_graph":
            yield Candidate(unit=cls.traits.unit)


class OpenedStrategy(ABC):
    """A strategy on one graph. It makes loaders and models, and holds the data that they share."""

    def __init__(self, strategy: Strategy, g: DistGraph) -> None:
        self.strategy = strategy
        self.g = g
        self.session = g.session
        self.options = strategy.options
        self.on_close: list[Callable[[], None]] = []
        """Functions to call on all ranks when the graph or this object is closed, the last one first."""
        self.is_closed = False
        self._share = g.session.model_share
        self._models: list[weakref.ref[WrappedModel]] = []
        g.on_close.append(self._release)

    @abstractmethod
    def make_loader(self, indices: Tensor, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Make the iterable that :meth:`loader` returns."""

    def make_edge_loader(self, eids: Any, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Make the iterable that :meth:`edge_loader` returns, for a strategy with ``traits.on_edges``."""
        raise NotImplementedError

    @abstractmethod
    def make_model(self, model: nn.Module, reduction: Reduction) -> WrappedModel:
        """Make the model that :meth:`wrap` returns."""

    @final
    def loader(self, indices: Tensor, sampler: Any, **loader_options: Any) -> Any:
        """Return an iterable of ``(input_nodes, output_nodes, blocks)``. Every rank must call it.

        Args:
            indices: (K,) int64 seeds on this rank. May be empty.
            sampler: A sampler from ``dgl.dataloading``.
        """
        return self._keep_loader(self.make_loader(indices, sampler, **loader_options))

    @final
    def edge_loader(self, eids: Any, sampler: Any, **loader_options: Any) -> Any:
        """Yield ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``. Every rank must call this.

        Args:
            eids: This rank's edge ids, or a dict that maps edge types to ids. They may be empty.
            sampler: See :meth:`loader`. For ``loader_options`` see ``dglx_dist.DistEdgeDataLoader``.

        Raises:
            ConfigError: the strategy trains on nodes only.
        """
        if not self.strategy.traits.on_edges:
            raise ConfigError(
                f"strategy {self.session.strategy!r} trains on nodes, not on batches of "
                "edges; use strategy='data_parallel'"
            )
        return self._keep_loader(self.make_edge_loader(eids, sampler, **loader_options))

    @final
    def wrap(self, model: nn.Module, reduction: Reduction = "mean") -> WrappedModel:
        """Wrap ``model`` to train with the other ranks. Every rank must call it.

        Args:
            model: The user's model. All ranks must build the same one. They start with rank 0's weights.

        Raises:
            ConfigError: the strategy cannot train this model exactly.
        """
        wrapped = self.make_model(model, reduction)
        self._models.append(weakref.ref(wrapped))
        return wrapped

    def _keep_loader(self, loader: T) -> T:
        # The reference is weak, so that loaders that the user drops are freed while the graph is open.
        if isinstance(loader, EpochLoader):
            self.on_close.append(call_if_alive(loader.close))
        return loader

    @final
    def close(self) -> None:
        """Release the loaders and models and the data that they share. Every rank must call it.

        Afterwards the models cannot be trained. A second call does nothing. ``g.close()`` releases everything
        but the models, which may continue with another graph.
        """
        for reference in self._models:
            model = reference()
            if model is not None:
                model.close()
        self._models.clear()

        if not self.is_closed:
            self.session.model_share = self._share
        self._release()

    def _release(self) -> None:
        self.is_closed = True
        while self.on_close:
            release = self.on_close.pop()
            release()
        remove_hooks_without_owner()
        if self._release in self.g.on_close:
            self.g.on_close.remove(self._release)


def check_one_type(strategy: str, g: DistGraph) -> None:
    if not g.is_homogeneous:
        raise ConfigError(
            f"{strategy} trains on graphs of one node and one edge type, but this graph has "
            f"the node types {shorten_list(g.ntypes)} and the edge types "
            f"{shorten_list(g.canonical_etypes)}; use strategy='data_parallel'"
        )


DEFAULT_STRATEGY = "data_parallel"
"""Default strategy. Its fan-outs and batch size are the defaults for mini-batches."""

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
"""Opened strategies in the session, by the label of the graph's store."""


def open_strategy(g: DistGraph) -> OpenedStrategy:
    """Return the session's strategy on ``g``, the same object at each call. All ranks call this.

    Raises ConfigError if the strategy does not train on this graph, or if :func:`get_strategy` raises it.
    """
    strategy = get_strategy(g.session)
    opened_by_label = _OPENED.get(g.session)
    opened = opened_by_label.get(g.kvstore.label)
    if opened is None or opened.is_closed or not opened.strategy.is_same(strategy):
        opened = strategy.open(g)
        opened_by_label[g.kvstore.label] = opened
    return opened


def get_strategy(session: Session) -> Strategy:
    """Return the session's strategy.

    Raises ConfigError if the session has an unknown option, or if strategy ``auto`` was requested but no
    strategy has been chosen yet.
    """
    if session.strategy == AUTO:
        raise ConfigError(
            "strategy 'auto' can only choose when it has the model and the graph. Call "
            "dx.choose_strategy(model, g, fanouts=..., batch_size=...) before the first loader and dx.wrap, "
            "or use dx.fit, which calls it. Both compare batches of nodes, so name a strategy for batches of "
            "edges."
        )
    return STRATEGIES.get(session.strategy)(session, session.options)


def resolve_strategy(strategy: str | None, *, auto: bool = False) -> str:
    """Resolve ``strategy`` to its registered name. None stands for DGLX_STRATEGY or the default.

    Args:
        auto: Whether ``auto`` is allowed, because a strategy is chosen later.

    Raises:
        UnknownNameError: there is no such strategy. The message suggests the nearest name.
        ConfigError: the name is ``auto``, which is not allowed here.
    """
    name = strategy or read_settings().strategy or DEFAULT_STRATEGY
    if name != AUTO:
        return STRATEGIES.resolve(name, also=(AUTO,) if auto else ())
    if auto:
        return AUTO
    raise ConfigError(
        "strategy 'auto' chooses in dx.fit or dx.choose_strategy, which a dgl.distributed "
        "script does not call; run `dglx plan` to find a strategy, and give its name"
    )


def begin(
    strategy: str,
    options: Mapping[str, object],
    *,
    timeout_s: float = 300.0,
    seed: int = 0,
    backend: str | None = None,
    device: torch.device | str = "auto",
    check: Callable[[Session], object] = get_strategy,
) -> Session:
    """Join the other ranks and start a session for ``strategy``. Every rank must call it.

    Args:
        options: Strategy options. They override DGLX_OPTIONS.
        backend: Process group backend, if there is no group yet.
        check: Raises ConfigError if the session's options are wrong.

    Raises:
        ConfigError: the strategy does not know an option, the ranks disagree, a rank lacks the device, or a
            session is already open.
        PeerError: ranks are missing after the time-out.
    """
    merged = {**read_settings().options, **options}
    session = start_session(
        strategy=strategy, options=merged, timeout_s=timeout_s, seed=seed, backend=backend, device=device
    )
    try:
        check(session)
    except BaseException as error:
        # The other ranks get the reason. Otherwise they would wait for this one.
        session.fail(error)
        session.close(failed=True)
        raise
    return session


def count_targets(num_local: int, session: Session) -> StepShare:
    """Count the targets on all ranks, if this rank has ``num_local``. Every rank must call it.

    In a loop without ``dglx_dist.DataLoader``, assign the resulting share to ``session.step_share``.
    """
    counts = gather_int64([num_local], session)
    return StepShare(num_local=num_local, num_global=int(counts.sum()))


def flatten_arguments(arguments: Iterable[object]) -> Iterator[Any]:
    """Yield ``arguments``. A list or tuple, such as a batch's blocks, is replaced by its items."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument


def find_share(arguments: Iterable[object], session: Session) -> StepShare | None:
    """Return the step's share from the blocks among ``arguments``, or else from the session.

    The result is also stored as ``session.model_share``.
    """
    session.model_share = session.step_share
    for argument in arguments:
        block = argument
        if isinstance(argument, list | tuple) and argument:
            # The last block has the targets.
            block = argument[-1]
        share = getattr(block, "step_share", None)
        if isinstance(share, StepShare):
            session.model_share = share
            break
    return session.model_share


def gradient_weight(share: StepShare | None, reduction: Reduction) -> float:
    """Return the factor by which this rank's gradient enters the sum over ranks.

    If the loss is a mean, the factor is n_local / n_global, so that the sum is the mean over all targets. If
    the loss is a sum, the factor is 1. On a rank without targets it is 0. See "the gradient rule" in
    docs/development/contracts.md.

    Raises ConfigError if the loss is a mean and the target count is unknown.
    """
    if share is not None and share.num_local == 0:
        return 0.0
    if reduction == "sum":
        return 1.0
    if share is not None:
        return share.num_local / share.num_global
    raise ConfigError(
        "the wrapped model does not know how many targets this step has, so it cannot weight "
        "this rank's mean loss; use the batches of dglx_dist.DataLoader, set "
        "session.step_share = dglx_dist.strategies.base.count_targets(len(targets), session) "
        "before the forward call, or wrap with reduction='sum'"
    )
