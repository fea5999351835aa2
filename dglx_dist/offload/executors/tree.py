"""A folder from which worker processes import: links to what their package would hold, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dglx_dist.offload.fields import write_json
from dglx_dist.offload.libraries import LIBRARIES, library_place
from dglx_dist.offload.user_stages import code_of
from dglx_dist.offload.worker.packaged import STAGES_FILE
from dglx_dist.offload.worker_files import package_root, worker_files


def make_tree(folder: Path, stages: Mapping[str, str]) -> None:
    """Fill the empty ``folder``.

    Args:
        folder: Goes into ``sys.path`` of the workers.
        stages: The user's own, name to ``module:Class``.

    Raises:
        ConfigError: a stage, or a library, has no place to be linked from.
    """
    root = package_root()
    for file in worker_files(root):
        link = folder / file
        if not link.parent.is_dir():
            link.parent.mkdir(parents=True)
            # Compiled once for all: a worker's start would else compile all of it again.
            (link.parent / "__pycache__").symlink_to((root / file).parent / "__pycache__")
        link.symlink_to(root / file)
    for name, project in LIBRARIES.items():
        place = library_place(name)
        shared_objects = place.parent / f"{project}.libs"  # there where the library came as a wheel
        for target in (place, *([shared_objects] if shared_objects.is_dir() else [])):
            (folder / target.name).symlink_to(target)
    for place in code_of(stages):
        (folder / place.name).symlink_to(place)
    (folder / STAGES_FILE).write_bytes(write_json(dict(stages)))
