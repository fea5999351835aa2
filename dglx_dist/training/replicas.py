"""The check that all ranks have the same weights, after which they train and evaluate one model."""

import zlib
from collections.abc import Mapping

from torch import Tensor

from dglx_dist.comm.collectives import gather_int64, gather_json, gather_rows
from dglx_dist.comm.exchange import bytes_of
from dglx_dist.comm.session import Session, warn_user
from dglx_dist.errors import ConfigError

_CAUSES = (
    "in the loop, model.module(...), torch.autograd.grad, or a step that depends on a rank's own loss (a "
    "scheduler: give it dx.reduce_mean); a second model that is not wrapped; DistributedDataParallel; "
    "reset_parameters(), or other weights on one rank, after dx.wrap"
)


def check_replicas(weights: Mapping[str, Tensor], session: Session) -> None:
    """Raise ConfigError on all ranks unless their uncut ``weights`` are equal to the bit; collective."""
    if session.topology.world_size == 1:
        return
    digests = {name: zlib.crc32(bytes_of(t.detach().cpu().contiguous())) for name, t in weights.items()}
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
