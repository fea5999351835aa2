"""A model whose weights are cut over ranks, for scripts that go on with ``.module``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from dglx_dist.strategies.base import Parts, WrappedModel


@final
class ScriptModel(WrappedModel):
    """Trains as ``inner`` does; ``.module`` is a copy of the user's module with uncut weights.

    DistDGL scripts compute with ``model.module`` what they evaluate. With a strategy that cuts weights, that
    must be another module than the one that trains. Asking for it is collective.

    Args:
        inner: What the strategy made of the script's model.
    """

    def __init__(self, inner: WrappedModel) -> None:
        super().__init__()
        self.inner = inner

    @property
    def module(self) -> nn.Module:  # type: ignore[override]  # an attribute where nothing is cut
        """The user's module with uncut weights as they are now; every rank must ask."""
        return self.inner.whole()

    @property
    def parts(self) -> Parts:
        """See :class:`WrappedModel`."""
        return self.inner.parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`WrappedModel`."""
        return self.inner(*args, **kwargs)

    def exchange_seconds(self, *, reset: bool = False) -> float:
        """See :class:`WrappedModel`."""
        return self.inner.exchange_seconds(reset=reset)

    def whole(self) -> nn.Module:
        """See :class:`WrappedModel`."""
        return self.inner.whole()

    def join_state(self, name: str, mine: Tensor) -> Tensor:
        """See :class:`WrappedModel`."""
        return self.inner.join_state(name, mine)

    def cut_state(self, name: str, uncut: Tensor) -> Tensor:
        """See :class:`WrappedModel`."""
        return self.inner.cut_state(name, uncut)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See :class:`WrappedModel`."""
        return self.inner.clip_grad_norm_(max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`WrappedModel`."""
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See :class:`WrappedModel`."""
        return self.inner.load_state_dict(state_dict, strict=strict, assign=assign)
