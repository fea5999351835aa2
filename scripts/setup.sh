#!/usr/bin/env bash
# Makes .venv with the CPU dependencies pinned for its Python, and installs dglx_dist into it, editable.
# Runs in a second, and without network, when nothing has changed since the last time.
#
#   scripts/setup.sh              takes Python 3.11, else 3.12, 3.10 or 3.13
#   PYTHON=/path/to/python3.12 scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "setup.sh: $1" >&2
    exit 1
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

find_python() {
    local candidate version found="" usable="" candidates=(python3.11 python3.12 python3.10 python3.13 python3 python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        version=$(version_of "$candidate") || continue
        found+=" $version"
        [ -f "constraints/$version.txt" ] || continue
        usable=${usable:-$candidate}
        if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            usable=$candidate
            break
        fi
    done
    if [ -n "$usable" ]; then
        echo "$usable"
        return
    fi
    die "no Python 3.10, 3.11, 3.12 or 3.13 found${PYTHON:+ at PYTHON=$PYTHON}${found:+, only$found}. DGL runs on these. Install one
(Debian, Ubuntu: apt-get install python3 python3-venv) or point PYTHON at it."
}

check_machine() {
    "$1" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$1 cannot make virtual environments; install them (Debian, Ubuntu: apt-get install python$2-venv)"
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
    local pip=(.venv/bin/python -m pip install -qq --constraint "$constraints") pin
    pin=$(grep '^torch==' "$constraints")
    # A CPU build from where pip already looks; else from PyTorch's own index, asked for nothing else; else any build.
    "${pip[@]}" "$pin+cpu" 2>/dev/null && return
    "${pip[@]}" --no-deps --retries 1 --index-url https://download.pytorch.org/whl/cpu "$pin+cpu" 2>/dev/null && return
    echo "no CPU build of $pin can be reached; PyPI's comes with several gigabytes of CUDA"
    "${pip[@]}" "$pin"
}

main() {
    local python version constraints stamp now
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python)
        version=$(version_of "$python")
        check_machine "$python" "$version"
        echo "making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    version=$(version_of .venv/bin/python) || die ".venv has no working Python; remove the folder and try again"
    [ -z "${PYTHON:-}" ] || [ "$version" = "$(version_of "$PYTHON")" ] ||
        die ".venv has Python $version, not that of PYTHON=$PYTHON; remove the folder .venv first"
    constraints=constraints/$version.txt
    [ -f "$constraints" ] || die ".venv has Python $version, which is not supported; remove the folder and try again"
    stamp=.venv/dglx_dist.stamp
    now=$(cat pyproject.toml "$constraints" scripts/setup.sh | sha256sum | cut -d' ' -f1)
    if [ -x .venv/bin/dglx ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now  $PWD" ]; then
        return
    fi
    echo "installing the pinned dependencies; a few minutes the first time"
    install_torch || die "torch could not be installed; the message above says why (a proxy? an offline machine?)"
    .venv/bin/python -m pip install -qq --constraint "$constraints" "setuptools>=77" wheel -e ".[dev]" ||
        die "the dependencies could not be installed; the message above says which one and why"
    # DGL has no wheel for Python 3.13. This one does nothing where DGL is installed.
    [ "$version" != 3.13 ] || .venv/bin/dglx doctor --install-dgl --yes >/dev/null ||
        die "DGL could not be installed; the message above says why"
    .venv/bin/python -c 'import dglx_dist, dgl' ||
        die "dgl does not load; when the message above names libgomp.so.1: apt-get install libgomp1 (or dnf install libgomp)"
    .venv/bin/python -c 'from dglx_dist.dataloading.sampler import load_kernels; load_kernels(print)' ||
        echo "setup.sh: the kernels could not be compiled here; the first run will try again" >&2
    hint_at_lab
    echo "$now  $PWD" >"$stamp"
    echo "ready: .venv/bin/dglx --help"
}

main
