"""The stages by name: a worker runs these and nothing else."""

from __future__ import annotations

import importlib
import re

from dglx_dist.errors import ConfigError
from dglx_dist.offload.stages.base import Config, EdgeStage, Stage, VertexStage
from dglx_dist.registry import Registry

STAGES: Registry[Stage] = Registry(
    "stage",
    Stage,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "attention_edges": "dglx_dist.offload.stages.attention_edges:AttentionEdges",
        "attention_finish": "dglx_dist.offload.stages.attention_finish:AttentionFinish",
        "attention_project": "dglx_dist.offload.stages.attention_project:AttentionProject",
        "dense": "dglx_dist.offload.stages.dense:Dense",
        "rows": "dglx_dist.offload.stages.rows:Rows",
        "sage": "dglx_dist.offload.stages.sage:Sage",
    },
    group="dglx_dist.stages",
)

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def register_stage(name: str, stage: type[Stage] | str) -> None:
    """Make ``stage`` known as ``name`` in this process; again with the same class does nothing.

    A program can name only what is registered: what a message says is never imported. So a worker is
    told of a user's stages when its package is made or its process is started.

    Args:
        name: What programs call it.
        stage: A class, or ``"module:Class"``, which is imported now.

    Raises:
        ConfigError: the name is taken by another class, there is no such class, or it is no stage.
    """
    found = _imported(stage) if isinstance(stage, str) else stage
    if name in STAGES.names() and STAGES.get(name) is found:
        return
    STAGES.register(name)(found)  # type: ignore[arg-type]  # the registry refuses what is no Stage


def vertex_stage(name: str, config: Config) -> VertexStage:
    """Make the vertex stage ``name``.

    Raises:
        UnknownNameError: it is not registered.
        ConfigError: it is no vertex stage, or refuses ``config``.
    """
    stage = STAGES.get(name)(config)
    if not isinstance(stage, VertexStage):
        raise ConfigError(f"stage {name!r} works on edges; name a vertex stage such as 'dense' in this step")
    return stage


def edge_stage(name: str, config: Config) -> EdgeStage:
    """Make the edge stage ``name``.

    Raises:
        UnknownNameError: it is not registered.
        ConfigError: it is no edge stage, or refuses ``config``.
    """
    stage = STAGES.get(name)(config)
    if not isinstance(stage, EdgeStage):
        raise ConfigError(f"stage {name!r} works on vertices; name an edge stage such as 'attention_edges'")
    return stage


def _imported(path: str) -> object:
    if _PATH.fullmatch(path) is None:
        raise ConfigError(f"{path!r} names no class; write 'module:Class'")
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the stage {path!r} cannot be imported: {error}; put its module where Python finds it"
        ) from None
