"""What may stand between the features and the first layer, on a part's columns: norm, dropout, embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.columns import Columns
from dglx_dist.strategies.push_pull.input_dropout import ColumnDropout
from dglx_dist.strategies.push_pull.input_embedding import ColumnEmbedding
from dglx_dist.strategies.push_pull.input_norm import ColumnLayerNorm
from dglx_dist.strategies.push_pull.origins import InputModule

Moments: TypeAlias = Callable[[Sequence[str]], tuple[Tensor, Tensor]]
"""Names of features to (mean, variance) of each node's row of them side by side: (V,) float64; collective."""

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    """What goes into the first layer, and which of it this part has."""

    features: tuple[str, ...]
    """Names, in the order in which the model puts them side by side."""
    runs: tuple[Columns, ...]
    """This part's columns of what the first layer takes."""
    num_nodes: int
    """V, rows of a trained embedding of all nodes."""
    seed: int
    """Of the run."""

    @property
    def width(self) -> int:
        """Columns that the first layer takes."""
        return self.runs[0].width


def find_input_modules(
    model: nn.Module, first_name: str, layout: InputLayout, moments: Moments
) -> dict[str, InputModule]:
    """Return what to put in place of the modules that may work on the input; every rank must call it.

    Dropout is replaced wherever it stands, for one ``nn.Dropout`` usually serves all layers; on anything but
    the input it is as before. A norm over the layer's width, and an embedding of all nodes of that width, are
    cut; a norm is taken for one of the input if it is registered before the first layer, or if no other
    parameter of the model is that wide.

    Args:
        model: The user's, uncut.
        first_name: Of the first layer, as in ``named_modules``.
        layout: What goes into that layer.
        moments: Of the features, asked only if there is a norm.

    Returns:
        Names of ``named_modules``, also all names of a module that has several, to what replaces them.

    Raises:
        ConfigError: something before the first layer cannot work on columns; the message has the reason.
    """
    _refuse_batch_norms(model, first_name, layout.width)
    embeddings = [
        (name, embedding)
        for name, embedding in embeddings_of_all_nodes(model, layout.num_nodes)
        if embedding.embedding_dim == layout.width
    ]
    norms = list(_norms(model, first_name, layout.width))
    if embeddings and norms:
        raise ConfigError(
            f"{norms[0][0]!r} normalizes the rows of the trained embedding {embeddings[0][0]!r}: their mean "
            "and variance change with every step and need all columns; leave the norm out, or use "
            "strategy='data_parallel'"
        )
    made: dict[nn.Module, InputModule] = {}
    for _, embedding in embeddings:
        made[embedding] = ColumnEmbedding(embedding, layout.runs)
    if norms:
        mean, variance = moments(layout.features)
        made |= {norm: ColumnLayerNorm(norm, layout.runs, mean, variance) for _, norm in norms}
    for place, (_, dropout) in enumerate(_of_kind(model, nn.Dropout)):
        made[dropout] = ColumnDropout(dropout, layout.seed, place)
    # The first layer's own dropout is a matter of its stages.
    firsts = all_names(model, first_name)
    return {
        name: made[module]
        for name, module in model.named_modules(remove_duplicate=False)
        if module in made and not any(_is_inside(name, place) for place in firsts)
    }


def all_names(model: nn.Module, name: str) -> list[str]:
    """Return every name under which ``model`` has the module that it has under ``name``."""
    module = model.get_submodule(name)
    return [other for other, one in model.named_modules(remove_duplicate=False) if one is module]


def _of_kind(model: nn.Module, kind: type[_Module]) -> Iterator[tuple[str, _Module]]:
    """Yield modules of exactly this class: a subclass does something else."""
    for name, module in model.named_modules():
        if type(module) is kind:
            yield name, module


def embeddings_of_all_nodes(model: nn.Module, num_nodes: int) -> Iterator[tuple[str, nn.Embedding]]:
    """Yield the embeddings that have a row for every node, by name."""
    for name, embedding in _of_kind(model, nn.Embedding):
        if embedding.num_embeddings == num_nodes:
            yield name, embedding


def _norms(model: nn.Module, first_name: str, width: int) -> Iterator[tuple[str, nn.LayerNorm]]:
    for name, norm in _of_kind(model, nn.LayerNorm):
        if tuple(norm.normalized_shape) == (width,) and _is_before(model, name, first_name, width):
            yield name, norm


def _refuse_batch_norms(model: nn.Module, first_name: str, width: int) -> None:
    for name, norm in _of_kind(model, nn.BatchNorm1d):
        if norm.num_features == width and _is_before(model, name, first_name, width):
            raise ConfigError(
                f"{name!r} is a BatchNorm1d of the {width} input columns: its mean and variance are over the "
                "sources of each owner's batch, so one batch's rows would depend on who owns it, and its "
                "running averages on the order of the batches. Use torch.nn.LayerNorm, or normalize the "
                "features once before training, or use strategy='data_parallel'"
            )


def _is_before(model: nn.Module, name: str, first_name: str, width: int) -> bool:
    """Whether a norm over ``width`` columns is one of the input, as far as registration tells."""
    if _is_inside(name, first_name):
        return False
    names = [other for other, _ in model.named_modules()]
    if first_name in names and names.index(name) < names.index(first_name):
        return True
    norms = (nn.LayerNorm, nn.BatchNorm1d)
    return not any(
        width in parameter.shape
        for other, module in model.named_modules()
        if other != first_name and not _is_inside(other, first_name) and not isinstance(module, norms)
        for parameter in module.parameters(recurse=False)
    )


def _is_inside(name: str, first_name: str) -> bool:
    return first_name == "" or name.startswith(f"{first_name}.")
