"""``python scripts/bench``: the experiments, and programs that measure one part each."""

import sys
from pathlib import Path


def main() -> None:
    """Run the program whose name comes first, else the experiments that the arguments name."""
    from scripts.bench import suites

    if sys.argv[1:] and sys.argv[1] in suites.PROGRAMS:
        code = suites.program(sys.argv[1])(sys.argv[2:])
        if code:
            sys.exit(code)
        return
    from scripts.bench import cli

    cli.main()


if __name__ == "__main__":
    # The root of the repository in place of this folder, whose modules share names with those of others.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
