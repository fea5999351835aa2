"""A user's own stages, as the package of a worker lists them: nothing else of the user's is imported."""

from __future__ import annotations

from pathlib import Path

import dglx_dist
from dglx_dist.offload.fields import Fields, read_json
from dglx_dist.offload.stages.registry import register_stage

STAGES_FILE = "dglx_stages.json"
"""Beside the package ``dglx_dist``: name of a stage to its ``module:Class``."""
_MAX_BYTES, _MAX_PATH = 64 * 1024, 1024


def register_packaged_stages() -> None:
    """Make the stages of the list known in this process; none where there is no list.

    Raises:
        ConfigError: the list is no such mapping, or there is no such stage.
    """
    file = Path(dglx_dist.__file__).parent.parent / STAGES_FILE
    if not file.is_file():
        return
    found = read_json(file.read_bytes(), _MAX_BYTES, STAGES_FILE)
    fields = Fields(found, STAGES_FILE)
    for name in found if isinstance(found, dict) else ():
        register_stage(name, fields.text(name, _MAX_PATH))
