"""Put docs/performance.md together from docs/results: experiments' results, and notes about everything else.

python scripts/bench/performance.py
python scripts/bench/performance.py --check     # only say whether it is up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dglx_dist.bench.performance import render
from dglx_dist.bench.results import write_text

DOCS = Path(__file__).parents[2] / "docs"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=DOCS / "results", help="folder of <ID>.json")
    parser.add_argument("--notes", type=Path, default=DOCS / "results" / "notes", help="folder of *.md")
    parser.add_argument("--to", type=Path, default=DOCS / "performance.md")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when the page is out of date")
    options = parser.parse_args()
    page = render(options.results, options.notes)
    if not options.check:
        print(write_text(options.to, page))
        return 0
    return 0 if options.to.is_file() and options.to.read_text(encoding="utf-8") == page else 1


if __name__ == "__main__":
    sys.exit(main())
