"""What is to be done to AWS: said before it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from dglx_dist.offload.aws.clients import explained


@final
@dataclass(frozen=True)
class Step:
    """One change."""

    text: str
    """What it does, such as "create the function dglx-worker"."""
    act: Callable[[], None]


def carry_out(steps: Sequence[Step], say: Callable[[str], None]) -> None:
    """Do ``steps`` in order, saying each before it is done.

    Raises:
        ConfigError, PeerError: AWS refuses one, or cannot be reached; those after it are not done. The next
            try begins with what is missing.
    """
    for step in steps:
        say(step.text)
        with explained(f"could not {step.text}"):
            step.act()
