#!/usr/bin/env bash
# Sets up, then runs the tests; arguments go to pytest.
#
#   scripts/test.sh                       the tests that every change must pass
#   scripts/test.sh --all                 also those marked wide: more placements, seeds, models, real graphs
#   scripts/test.sh tests/data/storage -x      one folder, stopping at the first failure
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# Many tests leave a core idle, and a few start ranks of their own, one thread each: two workers fill two cores.
export OMP_NUM_THREADS=1
# Hundreds of processes import the package and share its bytecode.
unset PYTHONDONTWRITEBYTECODE
cores=$(nproc --all)
workers=$((cores < 2 ? 1 : cores < 4 ? 2 : cores / 2))
exec .venv/bin/python -m pytest --numprocesses "$workers" --dist loadfile --no-loadscope-reorder "$@"
