"""Models that are replicated on every rank: equal at the start, gradients summed, buffers averaged."""

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dglx_dist.comm.collectives import check_equal, report_failed_peers
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import Reduction, WrappedModel
from dglx_dist.strategies.gradient_sync import BufferMeans, GradientExchange


class ReplicatedModel(WrappedModel):
    """A model that is replicated on every rank. Gradients and buffer changes are summed over the ranks.

    ``options`` are the strategy's options. They must include ``bucket_bytes``.
    """

    def __init__(self, model: nn.Module, session: Session, options: Any, *, reduction: Reduction) -> None:
        super().__init__()
        check_same_model(model, session, f"bucket_bytes={options.bucket_bytes}", reduction)
        self._check(model)
        broadcast_state(model, session)
        self._session = session
        self._options = options
        self._reduction = reduction
        self._attach(model)

    def _check(self, model: nn.Module) -> None:
        """Raise ConfigError on all ranks if the model cannot be trained."""

    def _attach(self, model: nn.Module) -> None:
        """Set the user's module, and connect its gradients and buffers with the other ranks."""
        self.module = model
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._trained = {id(parameter) for _, parameter in trained}
        self._exchange = GradientExchange(trained, self._session, self._options.bucket_bytes)
        self._exchange.warns_of_gaps = self._reduction == "mean"
        self._buffer_means = BufferMeans(model, self._session, self._reduction)
        self._exchange.after = self._buffer_means.average

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an independent copy that trains with the other ranks. Every rank must copy the model."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        WrappedModel.__init__(result)
        result._session = self._session
        result._options = self._options
        result._reduction = self._reduction
        result._attach(copy.deepcopy(self.module, memo))
        result.training = self.training
        return result

    def exchange_seconds(self, *, reset: bool = False) -> float:
        return self._exchange.seconds(reset=reset)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._exchange.hold_gradients()

    def note_buffers(self) -> None:
        self._buffer_means.note()

    def close(self) -> None:
        super().close()
        self._exchange.close()


def broadcast_state(model: nn.Module, session: Session) -> None:
    """Overwrite parameters and buffers with rank 0's values, in place. Every rank must call it.

    The ledger counts one copy from rank 0 to each other rank, in phase ``weights``.
    """
    topology = session.topology
    if topology.world_size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        values = tensor.detach().contiguous()
        with report_failed_peers(session, "the first weights"):
            dist.broadcast(values, src=0)
        tensor.detach().copy_(values)

        # Only the sender counts, so that the bytes are not counted twice.
        if topology.rank == 0:
            for rank in range(1, topology.world_size):
                session.ledger.add("weights", 0, 0, rank, values.numel() * values.element_size())


def check_same_model(
    model: nn.Module, session: Session, settings: str = "", reduction: Reduction = "mean"
) -> None:
    """Raise ConfigError if the ranks' models differ or ``reduction`` is unknown. Every rank must call this.

    The check compares names, shapes, dtypes, devices, frozen parameters, ``settings`` and ``reduction``. Each
    model must be on one device.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"reduction={reduction!r} must be 'mean' or 'sum'")

    description = [f"reduction={reduction}, {settings}"]
    name_by_device: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        name_by_device[parameter.device] = name
        frozen = "" if parameter.requires_grad else " frozen"
        description.append(f"{name} {_describe_kind(parameter)}{frozen}")
    for name, buffer in model.named_buffers():
        name_by_device[buffer.device] = name
        description.append(f"{name} {_describe_kind(buffer)}")

    # Two GPUs look the same in this comparison, so it also covers how many devices there are. That comes
    # last, because a differing parameter makes a more precise message.
    num_devices = len(name_by_device)
    devices = "all of it on one device"
    if num_devices > 1:
        devices = f"parts on {num_devices} devices (wrap model.to(dx.local_device()))"
    description.append(devices)
    remedy = "build the model from the same configuration on every rank"
    check_equal(session, "the wrapped model", description, remedy)

    # All ranks have the same devices here, so the errors below are raised on every rank.
    meta_name = name_by_device.get(torch.device("meta"))
    if meta_name is not None and session.device.type != "meta":
        raise ConfigError(
            f"the model's {meta_name!r} is on the meta device, where tensors have no values; "
            "before wrapping, call model.to_empty(device=dx.local_device()), then initialise "
            "or load the model"
        )
    if num_devices > 1:
        parts = ", ".join(f"{name!r} on {device}" for device, name in name_by_device.items())
        raise ConfigError(f"the model is on several devices ({parts}); wrap model.to(dx.local_device())")


def _describe_kind(tensor: Tensor) -> str:
    # Ranks have different GPUs, but the same device type.
    location = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{location}".replace("torch.", "")
