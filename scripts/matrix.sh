#!/usr/bin/env bash
# Runs the demo and a part of the tests on the oldest, the middle and the newest supported versions, each in a clone
# of the last commit with an environment of its own. By hand, before a release; prints the table of docs/reference/compat.md.
#
#   scripts/matrix.sh                       all of them
#   scripts/matrix.sh 3.10 3.13             some of them
#   MATRIX=/tmp/matrix scripts/matrix.sh    where the clones are kept (default: build/matrix)
#
# python3.10 to python3.13 must be on the path (pyenv: PYENV_VERSION=3.10.13:3.11.7:3.12.1:3.13.0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

where=${MATRIX:-$PWD/build/matrix}
tests=(tests/test_dgl_import.py tests/test_message_passing.py tests/strategies/test_*.py tests/compat tests/data/storage
    tests/graph/test_sampling.py tests/dataloading/test_loader.py tests/training/test_checkpoint.py)
packages="torch dgl numpy numba pyarrow"
[ $# -gt 0 ] || set -- 3.10 3.11 3.12 3.13

run_one() {
    local folder=$where/$1 log=$where/$1.log versions demo=failed tested seconds
    [ -d "$folder/.git" ] || git init -q "$folder"
    git -C "$folder" fetch -q "$PWD" HEAD
    cd "$folder"
    git checkout -q --detach FETCH_HEAD
    PYTHON=python$1 scripts/demo.sh >"$log" 2>&1 && demo=passed
    versions=$(.venv/bin/python -c 'import sys
from importlib.metadata import version
print(sys.version.split()[0], *map(version, sys.argv[1:]), sep=" | ")' $packages)
    seconds=$SECONDS
    scripts/test.sh "${tests[@]}" >>"$log" 2>&1 || true
    tested=$(tail -1 "$log" | tr -d '=')
    echo "| $versions | $demo | $tested | $((SECONDS - seconds)) |"
    [ "$demo" = passed ] && [[ $tested == *passed* && $tested != *failed* && $tested != *error* ]]
}

status=0
echo "| Python | ${packages// / | } | demo | tests | seconds |"
for version; do
    # In the background and waited for, so that any command that fails ends it.
    run_one "$version" &
    wait $! || status=1
done
exit $status
