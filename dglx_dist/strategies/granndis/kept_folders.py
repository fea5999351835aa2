"""Folders that are kept if the disk allows, and done without if not."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

from dglx_dist.errors import StorageError
from dglx_dist.storage.folders import partial_folder, publish, replace_folder

_LOG = logging.getLogger(__name__)
# What numpy raises in the middle of an array, when the disk is full, has no number.
_NO_ROOM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, None)


def keep_folder(target: Path, fill: Callable[[Path], None], what: str) -> bool:
    """Have ``fill`` write into a folder, and name it ``target``, in the place of what is there.

    Args:
        target: It appears whole or not at all.
        fill: Is given an empty folder.
        what: For messages: "the plan".

    Returns:
        Whether that could be done; it is logged when not.

    Raises:
        StorageError: the system fails in another way than by refusing to write.
    """
    try:
        with partial_folder(target) as partial:
            fill(partial)
            if not publish(partial, target):
                replace_folder(partial, target)
    except OSError as problem:
        if problem.errno in _NO_ROOM:
            _LOG.warning("%s cannot be written (%s): %s is not kept on disk", target, problem, what)
            return False
        raise StorageError(f"{target} cannot be written ({problem}); see to the disk") from problem
    return True
