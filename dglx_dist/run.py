"""Run an unchanged DistDGL script: ``torchrun ... -m dglx_dist.run --strategy S -- script.py ARGS``."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from dglx_dist.comm.session import get_open_session
from dglx_dist.comm.topology import read_settings, tell_settings
from dglx_dist.errors import ConfigError
from dglx_dist.options import parse_literals
from dglx_dist.strategies.base import resolve_strategy


def main(arguments: Sequence[str]) -> None:
    """Run a script with this package in place of ``dgl.distributed``.

    ``arguments`` are ``[--strategy S] [--option NAME=VALUE]... [--] script.py ARGS``; else ConfigError.
    """
    parser = argparse.ArgumentParser(prog="python -m dglx_dist.run", description=__doc__)
    parser.add_argument("--strategy", help="name of a strategy; default: DGLX_STRATEGY, else data_parallel")
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE of the strategy, beside DGLX_OPTIONS"
    )
    parser.add_argument(
        *("--local-rank", "--local_rank"), help="from torch.distributed.launch; not used, LOCAL_RANK has it"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parsed = parser.parse_args(arguments)
    script = Path(parsed.script)
    if not script.is_file():
        raise ConfigError(f"there is no script {parsed.script!r}; give the path of a Python file")
    options = {**read_settings().options, **parse_literals(parsed.option, "--option")}
    tell_settings(resolve_strategy(parsed.strategy), options)
    # Imported here: DGL reads the environment when it is imported.
    from dglx_dist.compat import install

    install()
    # As under `python script.py`: its folder first, its name as argv[0].
    sys.argv = [parsed.script, *parsed.arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(parsed.script, run_name="__main__")
    except BaseException as error:
        session = get_open_session()
        if session is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            # The other ranks would wait for this one.
            session.fail(error)
            session.close(failed=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
