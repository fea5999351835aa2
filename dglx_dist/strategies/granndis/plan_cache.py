"""Plans of co-batches that are kept beside the dataset, for later epochs and later runs.

``<dataset>/cache/cobatches-<checksum>/<key>/<step>-<rank>/``, where the key stands for everything that the
plans depend on; ``rows-<rank>/`` beside them has the columns of their rows. A folder appears whole or not at
all.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from dglx_dist.errors import StorageError
from dglx_dist.storage.folders import remove_abandoned
from dglx_dist.storage.layout import CACHE
from dglx_dist.storage.reader import StoredDataset
from dglx_dist.strategies.granndis.kept_folders import keep_folder
from dglx_dist.strategies.granndis.plan import RankPlan
from dglx_dist.strategies.granndis.plan_files import VERSION, read_plan, write_plan

_LOG = logging.getLogger(__name__)


@final
class PlanCache:
    """The plans of one rank. Not collective; one thread at a time.

    What a rank that was killed left half written is removed, of any plans of the dataset.

    Args:
        dataset: Beside which they are kept.
        facts: Everything that they depend on besides the dataset, JSON values, equal on all ranks.
        rank: Whose plans.
    """

    def __init__(self, dataset: StoredDataset, facts: Mapping[str, Any], rank: int) -> None:
        text = json.dumps({**facts, "version": VERSION}, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.folder = dataset.folder / CACHE / f"cobatches-{dataset.manifest.checksum}" / key
        self._rank, self._has_room = rank, True
        remove_abandoned(self.folder.parent)

    @property
    def rows_folder(self) -> Path:
        """Where this rank keeps the columns of its plans' rows; see :class:`RowFiles`."""
        return self.folder / f"rows-{self._rank}"

    def holds(self, step: int) -> bool:
        """Whether the plan of ``step`` is here and sound; a damaged one is logged."""
        target = self._of(step)
        if not target.exists():
            return False
        try:
            read_plan(target)
        except StorageError as problem:
            _LOG.warning("%s", problem)
            return False
        return True

    def read(self, step: int) -> RankPlan:
        """Return the plan of ``step``, mapped.

        Raises:
            StorageError: it is not there, or damaged.
        """
        return read_plan(self._of(step))

    def write(self, step: int, plan: RankPlan) -> bool:
        """Keep the plan of ``step``; return whether that could be done.

        When it could not, that is logged, once, and not tried again. What is there is replaced, sound or not:
        it may be of an earlier run whose plans the other ranks have lost, and the ranks' plans fit together
        only when they were made together.

        Raises:
            StorageError: the system fails in another way than by refusing to write.
        """
        self._has_room = self._has_room and keep_folder(
            self._of(step), lambda partial: write_plan(partial, plan), "the plan"
        )
        return self._has_room

    def _of(self, step: int) -> Path:
        return self.folder / f"{step}-{self._rank}"
