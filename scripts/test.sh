#!/usr/bin/env bash
# Sets up, then runs the tests; arguments go to pytest.
#
#   scripts/test.sh                       everything
#   scripts/test.sh tests/storage -x      one folder, stopping at the first failure
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# nproc heeds OMP_NUM_THREADS, so it comes first.
workers=$(($(nproc) < 4 ? $(nproc) : 4))
# Tests start ranks of their own: one thread each, or they fight over the cores.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest --numprocesses "$workers" --dist loadfile "$@"
