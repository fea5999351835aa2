"""What of a model push-pull splits, in numbers: for its bytes, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dglx_dist.layers.adapters import stages_of


@dataclass(frozen=True, kw_only=True)
class FirstLayer:
    """The convolution that takes the features, and the rest."""

    sum_width: int
    """H: columns of what is summed over the parts for each destination; of all heads together."""
    logit_width: int
    """K: columns of what is summed and handed back for each source and destination; 0: nothing is."""
    itemsize: int
    """s: bytes of an element."""
    cut_bytes: int
    """Of the parameters that are cut, uncut and together."""
    replicated_bytes: int
    """Of all others, as their gradients are sent: those of the owner side with a flag of one element each."""


def first_layer(model: nn.Module, convolution: nn.Module, heads: int) -> FirstLayer:
    """Return the numbers of ``model``, which is split at ``convolution``.

    Args:
        model: All of it.
        convolution: The layer of it that takes the features.
        heads: Of its attention.

    Raises:
        ConfigError: the layer cannot be split; the message has the reason.
    """
    stages = stages_of(convolution)
    cut = [stages.get_parameter(name) for name in stages.cut]
    name, dimension = next(iter(stages.cut.items()))
    weight = stages.get_parameter(name)
    split = {id(parameter) for parameter in cut}
    others = [parameter for parameter in model.parameters() if id(parameter) not in split]
    # What parts use before the sum has a gradient on every rank, and needs no flag that tells so.
    unflagged = {id(stages.get_parameter(name)) for name in stages.shared}
    attends = any("attn" in shared for shared in stages.shared)
    return FirstLayer(
        sum_width=weight.numel() // weight.shape[dimension],
        logit_width=heads if attends else 0,
        itemsize=weight.element_size(),
        cut_bytes=sum(parameter.numel() * parameter.element_size() for parameter in cut),
        replicated_bytes=sum(
            (other.numel() + (id(other) not in unflagged)) * other.element_size() for other in others
        ),
    )
