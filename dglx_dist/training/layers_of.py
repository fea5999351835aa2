"""Which layers a model has, for computing one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.training.models import InferenceLayer


def layers_of(
    module: nn.Module,
    layers: Sequence[InferenceLayer] | str | None,
    between: Callable[[Tensor], Tensor] | None,
) -> list[InferenceLayer]:
    """Return ``(block, h) -> h`` for each layer of a model, the input-most first.

    Args:
        module: The user's, with uncut weights.
        layers: These; or the name of the attribute that holds them; None: what ``inference_layers()`` gives.
        between: Applied to what each layer but the last gives.

    Raises:
        ConfigError: the model does not tell its layers, or there is none.
    """
    if layers is None:
        steps = _told_layers(module)
    elif isinstance(layers, str):
        steps = _named_layers(module, layers)
    else:
        steps = list(layers)
    if not steps:
        raise ConfigError(f"{type(module).__name__} has no layers to compute; give one callable a layer")
    if between is None:
        return steps
    return [*(_followed(layer, between) for layer in steps[:-1]), *steps[-1:]]


def _followed(layer: InferenceLayer, between: Callable[[Tensor], Tensor]) -> InferenceLayer:
    return lambda block, h: between(layer(block, h))


def _named_layers(module: nn.Module, name: str) -> list[InferenceLayer]:
    found = getattr(module, name, None)
    if not isinstance(found, (nn.ModuleList, nn.Sequential, list, tuple)):
        raise ConfigError(
            f"layers={name!r}, but {type(module).__name__} has no list of layers by that name; give the name "
            "of its nn.ModuleList, or one callable (block, h) -> h per layer"
        )
    return list(found)


def _told_layers(module: nn.Module) -> list[InferenceLayer]:
    ask = getattr(module, "inference_layers", None)
    if ask is None:
        raise ConfigError(
            f"{type(module).__name__} does not tell its layers; give it a method inference_layers() that "
            "returns one callable (block, h) -> h per layer (see dglx_dist.training.models), or name its "
            "list of them with layers=, or pass num_layers= to evaluate(), which computes each batch's whole "
            "neighbourhood"
        )
    return list(ask())
