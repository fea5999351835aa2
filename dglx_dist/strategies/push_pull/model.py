"""A model whose first layer is split by input columns and whose rest is replicated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.adapters import stages_of
from dglx_dist.layers.columns import deal_out_concatenated
from dglx_dist.layers.parts import part_of
from dglx_dist.layers.staged import Staged
from dglx_dist.strategies.base import Parts, Reduction, WrappedModel
from dglx_dist.strategies.data_parallel import broadcast_state, check_same_model
from dglx_dist.strategies.gradients import GradientExchange, mark_output
from dglx_dist.strategies.push_pull.first_layer import FirstLayer
from dglx_dist.strategies.push_pull.group import make_group
from dglx_dist.strategies.push_pull.state import Cut, CutState, without_weights
from dglx_dist.strategies.share import find_share, gradient_weight


@final
class PushPullModel(WrappedModel):
    """The user's model with its first convolution split; takes the user's module over.

    Forward and backward are collective: every rank must run both in every step, also without targets.

    Args:
        model: The user's model; all ranks build the same one, rank 0's weights win.
        width: Columns of the features.
        session: The run.
        reduction: What the user's loss is over its own targets.
        bucket_bytes: Gradients that are sent together.

    Raises:
        ConfigError: no layer of the model takes that many columns and can be split; or as for
            data parallel models.
    """

    def __init__(
        self, model: nn.Module, width: int, session: Session, *, reduction: Reduction, bucket_bytes: int
    ) -> None:
        super().__init__()
        check_same_model(model, session, f"reduction={reduction}, bucket_bytes={bucket_bytes}")
        broadcast_state(model, session)
        self._session, self._reduction = session, reduction
        name, whole = find_first_layer(model, width)
        group = make_group(session, session.topology.world_size)
        runs = deal_out_concatenated([width], group.size)
        original = without_weights(model.get_submodule(name), whole.cut)
        self._runner = FirstLayer(session)
        part = part_of(whole, runs[group.part])
        part.run_parts = self._runner
        self.module = part if name == "" else _with(model, name, part)
        prefix = f"{name}." if name else ""
        self._cut = {
            prefix + inner: Cut(shape=tuple(whole.get_parameter(inner).shape), dimension=dimension, runs=runs)
            for inner, dimension in whole.cut.items()
        }
        self._state = CutState(session, group, self._cut, {name: original})
        shared = {prefix + other for other in whole.shared}
        trained = [
            (n, p) for n, p in self.module.named_parameters() if p.requires_grad and n not in self._cut
        ]
        after, before = (
            [pair for pair in trained if (pair[0] in shared) is early] for early in (False, True)
        )
        self._exchange = GradientExchange(after, session, bucket_bytes)
        # Gradients of what comes before the sum have their owners' weights already.
        self._early = GradientExchange(before, session, bucket_bytes) if before else None

    @property
    def parts(self) -> Parts:
        """The split weights are local, everything else is replicated."""
        names = [name for name, _ in self.module.named_parameters()]
        return Parts(
            replicated=tuple(name for name in names if name not in self._cut),
            local=tuple(name for name in names if name in self._cut),
        )

    def exchange_seconds(self, *, reset: bool = False) -> float:
        """Seconds that backward stood waiting for gradients since the start or the last reset."""
        early = self._early.seconds(reset=reset) if self._early is not None else 0.0
        return early + self._exchange.seconds(reset=reset)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module on blocks of the strategy's loader."""
        share = find_share((*args, *kwargs.values()), self._session)
        weight = gradient_weight(share, self._reduction) if torch.is_grad_enabled() else 1.0
        self._runner.weight = weight
        output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return output
        early = [] if self._early is None else [(self._early, 1.0)]
        return mark_output(output, (self._exchange, weight), *early)

    def whole(self) -> nn.Module:
        """Return a copy of the user's module as it was before it was split; every rank must call it."""
        return self._state.whole(self.module)

    def join_state(self, name: str, mine: Tensor) -> Tensor:
        """See :meth:`WrappedModel.join_state`."""
        return self._state.join(name, mine)

    def cut_state(self, name: str, uncut: Tensor) -> Tensor:
        """See :meth:`WrappedModel.cut_state`."""
        return self._state.cut(name, uncut)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See :meth:`WrappedModel.clip_grad_norm_`."""
        return self._state.clip_grad_norm_(self.module.named_parameters(), max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state with uncut names and shapes; every rank must call it."""
        state = self.module.state_dict(*args, **kwargs)
        self._state.join_all(state, kwargs.get("prefix", ""))
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See :meth:`WrappedModel.load_state_dict`."""
        return self.module.load_state_dict(self._state.cut_all(state_dict), strict=strict, assign=assign)


def find_first_layer(model: nn.Module, width: int) -> tuple[str, Staged]:
    """Return the name and the stages of the convolution that takes the features, the first of that width.

    Raises:
        ConfigError: there is none, or it cannot be split; the message has the reason.
    """
    reasons = []
    for name, module in model.named_modules():
        if not isinstance(module, Staged) and not type(module).__module__.startswith("dgl."):
            continue
        try:
            found = stages_of(module)
        except ConfigError as error:
            reasons.append(f"{name or 'the model'}: {error}")
            continue
        if found.width == width:
            return name, found
    raise ConfigError(
        f"push_pull found no layer that takes the {width} columns of the features and can be split"
        + "".join(f"; {reason}" for reason in reasons)
    )


def _with(model: nn.Module, name: str, part: Staged) -> nn.Module:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, part)
    return model
