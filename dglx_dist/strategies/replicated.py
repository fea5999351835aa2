"""Models that are replicated on every rank: equal at the start, gradients summed, buffers averaged."""

import copy
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dglx_dist.comm.collectives import (
    check_equal,
    gather_int64,
    gather_json,
    gather_rows,
    report_failed_peers,
)
from dglx_dist.comm.exchange import view_bytes
from dglx_dist.comm.session import Session, warn_user
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import Reduction, WrappedModel
from dglx_dist.strategies.gradient_sync import BufferMeans, GradientExchange


class ReplicatedModel(WrappedModel):
    """A model that is replicated on every rank; its gradients, and the changes of its buffers, are summed.

    ``options`` are those of its strategy, ``bucket_bytes`` among them.
    """

    def __init__(self, model: nn.Module, session: Session, options: Any, *, reduction: Reduction) -> None:
        super().__init__()
        check_same_model(model, session, f"bucket_bytes={options.bucket_bytes}", reduction)
        self._check(model)
        broadcast_state(model, session)
        self._session, self._options, self._reduction = session, options, reduction
        self._attach(model)

    def _check(self, model: nn.Module) -> None:
        """Raise ConfigError, on all ranks alike, for a model that cannot be trained."""

    def _attach(self, model: nn.Module) -> None:
        self.module, session = model, self._session
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._trained = {id(parameter) for _, parameter in trained}
        self._exchange = GradientExchange(trained, session, self._options.bucket_bytes)
        self._exchange.warns_of_gaps = self._reduction == "mean"
        self._buffer_means = BufferMeans(model, session, self._reduction)
        self._exchange.after = self._buffer_means.average

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that trains with the other ranks by itself; every rank must make it."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        WrappedModel.__init__(copied)
        copied._session, copied._options, copied._reduction = self._session, self._options, self._reduction
        copied._attach(copy.deepcopy(self.module, memo))
        copied.training = self.training
        return copied

    def exchange_seconds(self, *, reset: bool = False) -> float:
        return self._exchange.seconds(reset=reset)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._exchange.hold()

    def note_buffers(self) -> None:
        self._buffer_means.note()

    def close(self) -> None:
        super().close()
        self._exchange.close()


def broadcast_state(model: nn.Module, session: Session) -> None:
    """Overwrite parameters and buffers with those of rank 0, in place; every rank must call it.

    Counted as one copy from rank 0 to each other rank, phase ``weights``.
    """
    topology = session.topology
    if topology.world_size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        values = tensor.detach().contiguous()
        with report_failed_peers(session, "the first weights"):
            dist.broadcast(values, src=0)
        tensor.detach().copy_(values)
        for rank in range(1, topology.world_size) if topology.rank == 0 else ():
            session.ledger.add("weights", 0, 0, rank, values.numel() * values.element_size())


def check_same_model(
    model: nn.Module, session: Session, settings: str = "", reduction: Reduction = "mean"
) -> None:
    """Raise ConfigError if the models of the ranks differ, or ``reduction`` is unknown; collective.

    Compares names, shapes, dtypes, devices, frozen parameters, ``settings`` and ``reduction``. All of a model
    must be on one device.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"reduction={reduction!r} must be 'mean' or 'sum'")
    places = {one.device: name for name, one in (*model.named_parameters(), *model.named_buffers())}
    described = [
        f"reduction={reduction}, {settings}",
        *(f"{name} {_kind(p)}{'' if p.requires_grad else ' frozen'}" for name, p in model.named_parameters()),
        *(f"{name} {_kind(buffer)}" for name, buffer in model.named_buffers()),
        # Their kinds may be equal. Last: a parameter's is more exact.
        "all of it on one device"
        if len(places) < 2
        else f"parts on {len(places)} devices (wrap model.to(dx.local_device()))",
    ]
    remedy = "build the model from the same configuration on every rank"
    check_equal(session, "the wrapped model", described, remedy)
    # As many on all ranks by now, and of the same kinds, so that all raise.
    if session.device.type != "meta" and torch.device("meta") in places:
        raise ConfigError(
            f"the model's {places[torch.device('meta')]!r} is on meta, where tensors have no values; before "
            "it is wrapped, call model.to_empty(device=dx.local_device()), then initialise or load it"
        )
    if len(places) > 1:
        parts = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        raise ConfigError(f"the model is on several devices ({parts}); wrap model.to(dx.local_device())")


def _kind(tensor: Tensor) -> str:
    # Ranks have different GPUs, but the same kind of device.
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{place}".replace("torch.", "")


_CAUSES = (
    "in the loop, model.module(...), torch.autograd.grad, or a step that depends on a rank's own loss (a "
    "scheduler: give it dx.reduce_mean); a second model that is not wrapped; DistributedDataParallel; "
    "reset_parameters(), or other weights on one rank, after dx.wrap"
)


def check_replicas(weights: Mapping[str, Tensor], session: Session) -> None:
    """Raise ConfigError on all ranks unless their uncut ``weights`` are equal to the bit; collective."""
    if session.topology.world_size == 1:
        return
    digests = {name: zlib.crc32(view_bytes(t.detach().cpu().contiguous())) for name, t in weights.items()}
    ranks = gather_int64([zlib.crc32(repr(digests).encode())], session)[:, 0]
    if not (ranks != ranks[0]).any():
        return
    of_ranks = gather_json(digests, session)
    differ = [rank for rank, digest in enumerate(of_ranks) if digest != of_ranks[0]]
    name = next(n for n in {**digests, **of_ranks[differ[0]]} if len({one.get(n) for one in of_ranks}) > 1)
    message = f"{name!r} differs on ranks {', '.join(map(str, differ))} from that on rank 0"
    if len(set(session.hosts)) > 1 and all(one.keys() == digests.keys() for one in of_ranks):
        # Processors of different machines may round differently.
        norms = gather_rows(weights[name].detach().double().norm().cpu(), session)
        if float(norms.max() - norms.min()) <= 1e-6 * float(norms.max()):
            warn_user(f"{message}, by no more than rounding")
            return
    raise ConfigError(f"{message}, so the ranks train apart. Likely causes: {_CAUSES}")
