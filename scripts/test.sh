#!/usr/bin/env bash
# Sets up, then runs the tests; arguments go to pytest.
#
#   scripts/test.sh                       everything
#   scripts/test.sh tests/storage -x      one folder, stopping at the first failure
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# Tests start ranks of their own, one thread each, which fill the cores of a small machine: a second worker was
# seen to gain nothing on 2 cores.
export OMP_NUM_THREADS=1
workers=$(($(nproc --all) < 4 ? 1 : $(nproc --all) / 2))
exec .venv/bin/python -m pytest --numprocesses "$workers" --dist loadfile "$@"
