"""Plans of co-batches that are kept beside the dataset, for later epochs and later runs.

``<dataset>/cache/cobatches-<checksum>/<key>/<step>-<rank>/``, where the key stands for everything that the
plans depend on. A folder appears whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from dglx_dist.errors import StorageError
from dglx_dist.storage.folders import partial_folder, publish, replace_folder
from dglx_dist.storage.layout import CACHE
from dglx_dist.storage.reader import StoredDataset
from dglx_dist.strategies.granndis.plan import RankPlan
from dglx_dist.strategies.granndis.plan_files import VERSION, read_plan, write_plan

_LOG = logging.getLogger(__name__)
_NO_ROOM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@final
class PlanCache:
    """The plans of one rank. Not collective; one thread at a time.

    Args:
        dataset: Beside which they are kept.
        facts: Everything that they depend on besides the dataset, JSON values, equal on all ranks.
        rank: Whose plans.
    """

    def __init__(self, dataset: StoredDataset, facts: Mapping[str, Any], rank: int) -> None:
        text = json.dumps({**facts, "version": VERSION}, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.folder = dataset.folder / CACHE / f"cobatches-{dataset.manifest.checksum}" / key
        self._rank = rank

    def holds(self, step: int) -> bool:
        """Whether the plan of ``step`` is here and sound; a damaged one is logged."""
        target = self._of(step)
        if not target.exists():
            return False
        try:
            read_plan(target)
        except StorageError as problem:
            _LOG.warning("%s; it is made anew", problem)
            return False
        return True

    def read(self, step: int) -> RankPlan:
        """Return the plan of ``step``, mapped.

        Raises:
            StorageError: it is not there, or damaged.
        """
        return read_plan(self._of(step))

    def write(self, step: int, plan: RankPlan) -> bool:
        """Keep the plan of ``step``; return whether that could be done. Logged when not.

        What is there is replaced, sound or not: it may be of an earlier run whose plans the other ranks have
        lost, and the ranks' plans fit together only when they were made together.

        Raises:
            StorageError: the system fails in another way than by refusing to write.
        """
        target = self._of(step)
        try:
            with partial_folder(target) as partial:
                write_plan(partial, plan)
                if not publish(partial, target):
                    replace_folder(partial, target)
        except OSError as problem:
            if problem.errno in _NO_ROOM:
                _LOG.warning("%s cannot be written (%s): the plan is kept in memory", target, problem)
                return False
            raise StorageError(f"{target} cannot be written ({problem}); see to the disk") from problem
        return True

    def _of(self, step: int) -> Path:
        return self.folder / f"{step}-{self._rank}"
