"""Compact figures of all experiments, docs/results/ID.json, and the pages made from them.

python scripts/bench performance                # from docs/results/raw and docs/results/notes.md
python scripts/bench performance --add DIR      # first take over the results and pictures of a bench
python scripts/bench performance --check        # fail where figures or pages are out of date
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.figures import figures_of
from scripts.bench.notes import DOCS, read_notes
from scripts.bench.pages import render
from scripts.bench.results import read, result_path
from scripts.bench.suites import find
from scripts.out_files import make_folder, write_text


def main(arguments: Sequence[str] | None = None) -> int | str:
    """Write figures and pages; return 0, or what is out of date."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench performance",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=DOCS / "results", help="folder of raw/ and notes.md")
    parser.add_argument("--to", type=Path, default=DOCS / "results", help="folder of the pages")
    parser.add_argument("--add", type=Path, help="folder that the bench wrote (its --out)")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    if options.add:
        add(options.add, options.results)
    figures = {
        outcome.experiment: figures_of(find(outcome.experiment), outcome)
        for outcome in read(options.results / "raw")
    }
    texts = {
        result_path(options.results, name): dump_figures(one_figures) for name, one_figures in figures.items()
    }
    pages = render(figures, read_notes(options.results / "notes.md"), options.results)
    texts |= {options.to / name: text for name, text in pages.items()}
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
    if not options.check:
        make_folder(options.to)
    for path in () if options.check else stale:
        write_text(path, texts[path])
    return f"out of date: {', '.join(map(str, stale))}" if options.check and stale else 0


def dump_figures(figures: Mapping[str, Any]) -> str:
    """Return ``figures`` as JSON text with one line for each variant, ratio or other entry."""
    dump, lines = partial(json.dumps, ensure_ascii=False), []
    for name, value in figures.items():
        entries = ",\n  ".join(map(dump, value)) if isinstance(value, list) else ""
        lines.append(f" {dump(name)}: " + (f"[\n  {entries}\n ]" if entries else dump(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def add(out: Path, folder: Path) -> None:
    """Take over what is in ``out``: results gzipped into ``folder/raw``, pictures as PNG of 256 colours."""
    from PIL import Image

    make_folder(folder / "raw")
    for outcome in read(out):
        data = result_path(out, outcome.experiment).read_bytes()
        packed = folder / "raw" / f"{outcome.experiment}.json.gz"
        packed.write_bytes(gzip.compress(data, mtime=0))
        for picture in out.glob(f"{outcome.experiment}-*.png"):
            with Image.open(picture) as image:
                few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                few.save(folder / picture.name, optimize=True)
