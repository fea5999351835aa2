"""Folder for local copies of datasets, from the environment."""

import os
from pathlib import Path


def find_dataset_cache() -> Path:
    """Return ``DGLX_DATASET_CACHE``, or a folder in the user's cache. The folder may not exist yet."""
    root = os.environ.get("DGLX_DATASET_CACHE")
    if not root:
        root = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/dglx_dist/datasets"
    return Path(root).expanduser().absolute()
