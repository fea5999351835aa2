"""What one step is in the loop of every system: the same loss, the same counts."""

from __future__ import annotations

from torch import Tensor, nn

from scripts.bench.peers.meter import Clock


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss."""
    return nn.functional.cross_entropy(scores, labels)


def backward(loss: Tensor) -> None:
    """Compute gradients."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare


def note_batch(clock: Clock, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
    """Count what one batch adds to the epoch's loss and accuracy."""
    clock.count("loss_sum", float(loss.detach()) * len(labels))
    clock.count("correct", float((scores.detach().argmax(1) == labels).sum()))
    clock.count("targets", len(labels))
