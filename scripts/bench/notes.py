"""The hand-written part of the pages, docs/results/notes.md: what each experiment is, and other sections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dglx_dist.errors import StorageError

DOCS = Path(__file__).parents[2] / "docs"
NOTES = DOCS / "results" / "notes.md"
_TOLD = ("Title", "Suites", "Paper", "Claim", "Setting", "Predicted")
"""Fields that every experiment must have."""
_FIELDS = "|".join((*_TOLD, "Strategies", "Needs", "Here", "Lesson", "Overview"))
_FIELD = re.compile(rf"(?ms)^({_FIELDS}): (.*?)(?=\n(?:{_FIELDS}): |\n\n|\Z)")


@dataclass(frozen=True, kw_only=True)
class Notes:
    """The sections of the file."""

    intro: str = ""
    """Before all sections: how to read the page, settings that experiments share."""
    experiments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Experiment's id -> its fields: those of ``records.Experiment``, ``Here`` (how it is measured here) and,
    of one that was measured, ``Lesson``."""
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Title -> ``Overview`` ("aim | measured | verdict", may be absent) and ``Text``."""


def read_notes(path: Path = NOTES) -> Notes:
    """Return the sections: one with fields other than ``Overview:`` is an experiment's."""
    if not path.is_file():
        raise StorageError(f"there are no notes at {path}; they are a part of the page")
    experiments, parts = {}, {}
    intro, *sections = re.split(r"(?m)^## ", path.read_text(encoding="utf-8"))
    for section in sections:
        title, _, body = section.partition("\n")
        fields = {name: " ".join(text.split()) for name, text in _FIELD.findall(body)}
        if set(fields) <= {"Overview"}:
            text = re.sub(r"(?ms)^Overview: .*?(\n\n|\Z)", "", body).strip("\n")
            parts[title] = {"Overview": fields.get("Overview", ""), "Text": text}
            continue
        missing = [name for name in (*_TOLD, "Here") if name not in fields]
        if missing:
            raise StorageError(f"{path}: section {title} needs '{missing[0]}: ...'")
        experiments[title] = fields
    return Notes(intro=intro, experiments=experiments, parts=parts)
