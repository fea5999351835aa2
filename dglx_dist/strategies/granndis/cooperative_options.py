"""The options of cooperative batching, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final, get_args

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import check_options
from dglx_dist.strategies.granndis.batches import Composition, check_composition
from dglx_dist.strategies.granndis.eas import EasOptions
from dglx_dist.strategies.granndis.options import BUCKET_BYTES, COMMON, EXTERNAL, read_full_graph_options
from dglx_dist.strategies.push_pull.options import read_size

Keep: TypeAlias = Literal["disk", "rebuild"]

_OWN: Mapping[str, type] = {
    "batches": int,
    "memory": str,
    "composition": str,
    "keep": str,
    "external_inner": str,
}
KNOWN: Mapping[str, type] = {**COMMON, **EXTERNAL, **_OWN, "split": str}


@final
@dataclass(frozen=True, kw_only=True)
class CooperativeOptions:
    """What the user said.

    Raises:
        ConfigError: a value cannot be honoured.
    """

    batches: int = 1
    """R: co-batches of an epoch; 1 is shared_preload. 0: as few as ``memory`` allows."""
    memory: int = 0
    """Bytes that a rank may need for training; 0: nobody said."""
    composition: Composition = "random"
    keep: Keep = "disk"
    """Whether plans and what is fetched for them are kept beside the dataset, or made and fetched again in
    each epoch. Of no meaning where all epochs have other co-batches."""
    eas: EasOptions | None = None
    split: str = "auto"
    use_pp: bool = True
    """Of use with one co-batch only; see ``full_graph``."""
    bucket_bytes: int = BUCKET_BYTES
    """Gradients of parameters that are sent together."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.batches < 0 or (self.batches == 0) != (self.memory > 0):
            raise ConfigError(
                f"options batches={self.batches} and memory={self.memory}: give the number of co-batches of "
                "an epoch, at least 1, or the memory that a rank may need ('4GB'), and not both"
            )
        check_composition(self.composition)
        if self.keep not in get_args(Keep):
            raise ConfigError(f"option keep={self.keep!r} must be {' or '.join(map(repr, get_args(Keep)))}")


def read_cooperative_options(strategy: str, options: Mapping[str, object]) -> CooperativeOptions:
    """Return the options of the session.

    Raises:
        ConfigError: one is unknown, of another type, or has a value that cannot be honoured.
    """
    memory = options.get("memory")
    if isinstance(memory, int) and not isinstance(memory, bool):
        # The command line reads memory=1000 as a number.
        options = {**options, "memory": str(memory)}
    check_options(strategy, options, KNOWN)
    read = read_full_graph_options(
        strategy, {name: value for name, value in options.items() if name not in _OWN}, KNOWN
    )
    own = {name: options[name] for name in ("batches", "composition", "keep") if name in options}
    granted = read_size(str(options["memory"])) if "memory" in options else 0
    if granted:
        own = {"batches": 0, **own}
    return CooperativeOptions(
        **own,  # type: ignore[arg-type]  # checked above
        memory=granted,
        eas=_from(read.eas, options.get("external_inner")),
        split=read.split,
        use_pp=read.use_pp,
        bucket_bytes=read.bucket_bytes,
    )


def _from(eas: EasOptions | None, inner: object) -> EasOptions | None:
    """Return ``eas`` with what the expansion starts from."""
    if inner is None:
        return eas
    if eas is None:
        raise ConfigError(
            f"option external_inner={inner!r} belongs to expansion-aware sampling; give external_hops=1 and "
            "external_fanout=15 with it"
        )
    return replace(eas, inner=inner)  # type: ignore[arg-type]  # checked by EasOptions
