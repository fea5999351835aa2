"""Run an unchanged DistDGL script: ``torchrun ... -m dglx_dist.run --strategy S -- script.py ARGS``."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from dglx_dist.comm.session import get_open_session
from dglx_dist.comm.topology import read_settings, set_settings
from dglx_dist.errors import ConfigError
from dglx_dist.options import parse_literals
from dglx_dist.strategies.base import resolve_strategy


def main(arguments: Sequence[str]) -> None:
    """Run a script with this package in place of ``dgl.distributed``.

    ``arguments`` are ``[--strategy S] [--option NAME=VALUE]... [--] script.py ARGS``. Raises ConfigError if
    the script does not exist, or the strategy or an option is invalid.
    """
    parser = argparse.ArgumentParser(prog="python -m dglx_dist.run", description=__doc__)
    parser.add_argument("--strategy", help="Name of a strategy. Default: DGLX_STRATEGY or data_parallel.")
    parser.add_argument(
        "--option", action="append", default=[], help="Option of the strategy as NAME=VALUE. Repeatable."
    )
    parser.add_argument(*("--local-rank", "--local_rank"), help="Ignored. The environment has LOCAL_RANK.")
    parser.add_argument("script", help="Python file to run.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Arguments of the script.")
    parsed = parser.parse_args(arguments)
    script = Path(parsed.script)
    if not script.is_file():
        raise ConfigError(f"there is no script {parsed.script!r}. Pass the path of a Python file.")

    options = {**read_settings().options, **parse_literals(parsed.option, "--option")}
    set_settings(resolve_strategy(parsed.strategy), options)
    # DGL reads the environment when it is imported, so it is imported here.
    from dglx_dist.compat import install

    install()
    # `python script.py` also puts the script's folder first and sets argv[0] to its name.
    sys.argv = [parsed.script, *parsed.arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(parsed.script, run_name="__main__")
    except BaseException as error:
        is_success = isinstance(error, SystemExit) and error.code in (None, 0)
        session = get_open_session()
        if session is not None and not is_success:
            # Tell the other ranks about the failure, because they would wait for this one.
            session.fail(error)
            session.close(failed=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
