"""Accumulation of gradients: one step on several batches, which is that on their union."""

from collections.abc import Iterable

from torch import Tensor, nn

from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.training.exact_mean import NUM_TERMS


class Accumulation:
    """Weighs the mean losses of ``number`` batches by the terms that all ranks have in each."""

    def __init__(self, number: int, session: Session) -> None:
        self.number, self._session, self._sum = number, session, 0.0

    def end_of(self, step: int, steps_of_epoch: int) -> int:
        """Return the steps of the epoch after which the gradients of ``step`` are complete."""
        return min(-(-step // self.number) * self.number, steps_of_epoch)

    def begin(self) -> None:
        """Forget the terms of the batch before."""
        NUM_TERMS.of(self._session).clear()

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss of a batch times its number of terms."""
        if self.number == 1:
            return loss
        share, counts = self._session.model_share, set(NUM_TERMS.of(self._session))
        if len(counts) > 1 or share is None:
            raise ConfigError(
                f"accumulate={self.number} needs a loss that is one mean over a known number of terms, but "
                f"this one has {sorted(counts) or 'none'}; leave it out"
            )
        terms = next(iter(counts), float(share.num_global))
        self._sum += terms
        return loss * terms

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the terms of all batches."""
        for parameter in parameters if self._sum else ():
            if parameter.grad is not None:
                parameter.grad /= self._sum
        self._sum = 0.0
