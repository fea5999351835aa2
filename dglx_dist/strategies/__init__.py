"""Where each layer of a model runs and which bytes cross the network: one class per strategy."""

from __future__ import annotations

from dglx_dist.strategies.base import Parts, Reduction, Strategy, Traits, WrappedModel
from dglx_dist.strategies.registry import STRATEGIES

__all__ = ["STRATEGIES", "Parts", "Reduction", "Strategy", "Traits", "WrappedModel"]
