#!/usr/bin/env bash
# Makes .venv with the pinned CPU dependencies and installs dglx_dist into it, editable.
# Runs in a second, and without network, when nothing has changed since the last time.
#
#   scripts/setup.sh              PYTHON=/path/to/python3.11 scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "setup.sh: $1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 found. The pinned versions need exactly that (the dgl 1.1.3 wheels end there, numpy's and
pyarrow's begin there). Install it (Debian 12, Ubuntu: apt-get install python3.11 python3.11-venv) or point
PYTHON at it. With another Python or a GPU, install your own torch and dgl, then: pip install -e ."
}

check_machine() {
    "$1" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$1 cannot make virtual environments; install them (Debian, Ubuntu: apt-get install python3.11-venv)"
    if ! ldconfig -p 2>/dev/null | grep 'libgomp\.so\.1' >/dev/null && [ "$(uname -s)" = Linux ]; then
        echo "setup.sh: libgomp.so.1 is not in the library path; if importing dgl fails below, install it" \
            "(Debian, Ubuntu: apt-get install libgomp1; Fedora: dnf install libgomp)" >&2
    fi
}

hint_at_lab() {
    local tool
    for tool in ip tc unshare nsenter taskset; do
        if ! command -v "$tool" >/dev/null && [ "$(uname -s)" = Linux ]; then
            echo "setup.sh: no $tool here; only emulated servers (python scripts/netlab) need it; install iproute2 and util-linux" \
                "(Debian, Ubuntu: apt-get install iproute2 util-linux)" >&2
            return
        fi
    done
}

install_torch() {
    local pin
    pin=$(grep '^torch==' constraints.txt)
    # A CPU build from where pip already looks; else from PyTorch's own index; else whatever pip finds.
    .venv/bin/python -m pip install -qq --constraint constraints.txt "${pin}+cpu" 2>/dev/null ||
        .venv/bin/python -m pip install -qq --constraint constraints.txt "$pin" \
            --extra-index-url https://download.pytorch.org/whl/cpu
}

main() {
    local python stamp now
    stamp=.venv/dglx_dist.stamp
    now=$(cat setup.py constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)
    if [ -x .venv/bin/dglx ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now  $PWD" ]; then
        return
    fi
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python)
        check_machine "$python"
        echo "making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    echo "installing the pinned dependencies; a few minutes the first time"
    install_torch || die "torch could not be installed; the message above says why (a proxy? an offline machine?)"
    .venv/bin/python -m pip install -qq --constraint constraints.txt "setuptools>=68" wheel -e ".[dev]" ||
        die "the dependencies could not be installed; the message above says which one and why"
    .venv/bin/python -c 'import dgl, dglx_dist' ||
        die "dgl does not load; when the message above names libgomp.so.1: apt-get install libgomp1 (or dnf install libgomp)"
    hint_at_lab
    echo "$now  $PWD" >"$stamp"
    echo "ready: .venv/bin/dglx --help"
}

main
