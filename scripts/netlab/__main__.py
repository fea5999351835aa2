"""``python scripts/netlab``: emulated servers with slow links on this machine."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root of the repository in place of this folder, whose modules share names with those of others.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from scripts.netlab.cli import main

    main()
