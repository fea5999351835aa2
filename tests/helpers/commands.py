"""Runs ``dglx`` in a process that finds torch and dgl imported, which saves seconds of each command."""

import atexit
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.helpers.ranks import PRELOAD

LIMIT_S = 200.0


def dglx(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command without this process's settings; return its code and what it wrote."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="dglx-") as name:
        folder = Path(name)
        process = context.Process(target=_main, args=(arguments, dict(os.environ), os.getcwd(), folder))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        written = ((folder / stream).read_text() for stream in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, process.exitcode, *written)


def _main(arguments: tuple[str, ...], environment: dict[str, str], working: str, folder: Path) -> None:
    os.environ.clear()
    kept = {name for name in environment if not name.startswith("DGLX_") or name == "DGLX_DATASET_CACHE"}
    os.environ.update({name: environment[name] for name in kept})
    os.chdir(working)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT), number)
    import dglx_dist.report.pictures
    from dglx_dist.cli import main

    importlib.reload(dglx_dist.report.pictures)  # ranks draw empty ones
    sys.argv = ["dglx", *arguments]
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
