"""``g.ndata``, ``g.nodes[ntype].data`` and the same for edges: the tensors of one type by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar, final

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.dtypes import torch_dtype
from dglx_dist.graph.policy import PartitionPolicy

K = TypeVar("K")
T = TypeVar("T")


@final
class DataView(MutableMapping[str, DistTensor]):
    """The named tensors that go with the nodes or edges of one type."""

    def __init__(self, policy: PartitionPolicy) -> None:
        self._policy = policy
        self._own: dict[str, DistTensor] = {}

    def __getitem__(self, name: str) -> DistTensor:
        """Return the tensor called ``name``; never collective.

        Raises:
            KeyError: there is none; the message lists those that exist.
        """
        if name in self._own:
            return self._own[name]
        key = self._policy.key(name)
        if not self._policy.store.has(key):
            known = ", ".join(map(repr, self)) or "none"
            raise KeyError(f"{self._policy.policy_str} has no tensor {name!r} (known: {known})")
        info = self._policy.store.column(key).info
        shape = (self._policy.get_size(), *info.row_shape)
        return DistTensor(shape, torch_dtype(info.dtype), name, part_policy=self._policy)

    def __setitem__(self, name: str, value: DistTensor) -> None:
        """Make a tensor that exists known by ``name`` here; call it on every rank that will look it up.

        Raises:
            ConfigError: ``value`` is no DistTensor, or has another number of rows.
        """
        if not isinstance(value, DistTensor):
            raise ConfigError(
                f"{name!r} would be a {type(value).__name__} of this rank alone; make a DistTensor with "
                "part_policy= and write the rows: t[ids] = rows"
            )
        if len(value) != self._policy.get_size():
            raise ConfigError(
                f"{self._policy.policy_str} has {self._policy.get_size()} rows, the tensor for {name!r} has "
                f"{len(value)}"
            )
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        """Forget ``name`` if it was set here, else free the tensor, which is collective."""
        if name in self._own:
            del self._own[name]
        else:
            self[name].delete()

    def __iter__(self) -> Iterator[str]:
        prefix = self._policy.key("")
        stored = [name[len(prefix) :] for name in self._policy.store.names() if name.startswith(prefix)]
        return iter(dict.fromkeys([*stored, *self._own]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@final
@dataclass(frozen=True)
class TypeView:
    """What ``g.nodes[ntype]`` and ``g.edges[etype]`` are: ``.data`` holds the tensors."""

    data: DataView


@final
class TypedViews(Generic[K]):
    """``g.nodes`` and ``g.edges``.

    Args:
        view_of: Type to its tensors.
        called: What to write for the ids that calling it gives in a DGLGraph.
    """

    def __init__(self, view_of: Callable[[K], DataView], called: str) -> None:
        self._view_of, self._called = view_of, called

    def __getitem__(self, key: K) -> TypeView:
        """Return the view of one type.

        Raises:
            ConfigError: there is no such type.
        """
        return TypeView(self._view_of(key))

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse what a DGLGraph answers with all its ids.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"a distributed graph does not list its ids: write {self._called}, or dx.node_split(mask) or "
            "dx.edge_split(mask) for this rank's share. What changes a graph goes before dx.distribute"
        )


def only_of(types: Sequence[T], names: Sequence[str], what: str, remedy: str) -> T:
    """Return the one type that there is.

    Raises:
        ConfigError: there are several; the message has their ``names`` and the ``remedy``.
    """
    if len(types) == 1:
        return types[0]
    raise ConfigError(f"the graph has the {what} types {', '.join(names)}; use {remedy}")
