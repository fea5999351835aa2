"""The user's model under strategy ``lambda``: it evaluates as always, and is trained by whole epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from dglx_dist.errors import ConfigError
from dglx_dist.offload.executors.registry import EXECUTORS
from dglx_dist.offload.user_stages import check_imports, stages_of
from dglx_dist.strategies.base import EpochTrainer, Objective, Parts, WrappedModel
from dglx_dist.strategies.bounded.chain import chain_of
from dglx_dist.strategies.bounded.loader import OWN_LOOP, IntervalLoader, check_types
from dglx_dist.strategies.bounded.settings import LambdaSettings
from dglx_dist.strategies.bounded.trainer import LambdaTrainer
from dglx_dist.strategies.bounded.weights import draw_weights
from dglx_dist.strategies.data_parallel import broadcast_state, check_same_model

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
class LambdaModel(WrappedModel):
    """A model that graph servers, workers and parameter servers train; its module is the user's, unchanged.

    Args:
        model: The user's model; all ranks build the same one, rank 0's weights win.
        g: The distributed graph.
        settings: Of the strategy.

    Raises:
        ConfigError: on all ranks: the model is not made of layers that workers know, the message has the
            place and the way out; or the graph has several types, or the ranks differ.
    """

    def __init__(self, model: nn.Module, g: DistGraph, settings: LambdaSettings) -> None:
        super().__init__()
        check_types(g)
        check_same_model(model, g.session, str(settings.options))
        broadcast_state(model, g.session)
        self.module = model
        columns = {name: tuple(g.edata[name].shape[1:]) for name in g.edata}
        self._chain, self._settings = chain_of(model, columns), settings
        if not EXECUTORS.get(settings.options.executor).in_process:
            check_imports(stages_of(self._chain.steps), settings.options.executor)
        if settings.options.initialise:
            draw_weights(model, self._chain, settings.options.initialise, g.session.seed)

    @property
    def parts(self) -> Parts:
        """All parameters are replicated: between runs every rank has those of the parameter servers."""
        return Parts(replicated=tuple(name for name, _ in self.module.named_parameters()), local=())

    def exchange_seconds(self, *, reset: bool = False) -> float:
        """Return 0: epochs overlap, so nobody stands waiting for exchanges alone."""
        return 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module, for evaluation.

        Raises:
            ConfigError: gradients are recorded, as for a training step.
        """
        if self.training and torch.is_grad_enabled():
            raise ConfigError(OWN_LOOP)
        return self.module(*args, **kwargs)

    def trainer(
        self,
        loader: Any,
        optimizer: Optimizer,
        objective: Objective,
        show: Callable[[str], None] | None = None,
    ) -> EpochTrainer:
        """Return what trains; see :meth:`WrappedModel.trainer`.

        Raises:
            ConfigError: the loader is another strategy's, the loss is not cross entropy, something takes part
                in a step that cannot here, the optimizer is none of SGD, Adam and AdamW, or node data is
                missing.
        """
        if not isinstance(loader, IntervalLoader):
            raise ConfigError(
                f"the loader is a {type(loader).__name__}; make it with dx.DataLoader(g, nodes, sampler) "
                "after dx.init(strategy='lambda'), or leave it to dx.fit"
            )
        if objective.beside:
            raise ConfigError(
                f"{' and '.join(objective.beside)} would take part in a step, which strategy 'lambda' "
                "computes from the features alone; leave it out, or use strategy='data_parallel'"
            )
        _check_loss(objective.loss)
        return LambdaTrainer(self.module, optimizer, self._chain, loader, objective, self._settings, show)


def _check_loss(loss: object) -> None:
    plain = nn.CrossEntropyLoss()
    same = isinstance(loss, nn.CrossEntropyLoss) and (
        loss.weight is None
        and (loss.ignore_index, loss.reduction, loss.label_smoothing)
        == (plain.ignore_index, plain.reduction, plain.label_smoothing)
    )
    if loss is not functional.cross_entropy and not same:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ConfigError(
            f"the loss is {name}, and workers know torch.nn.functional.cross_entropy only, without options; "
            "use it, or strategy='data_parallel'"
        )
