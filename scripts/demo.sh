#!/usr/bin/env bash
# Sets up, generates and partitions a graph, trains GraphSAGE on 2 ranks, evaluates, prints a table and
# writes runs/<name>/.
#
#   scripts/demo.sh                                    the built-in graph
#   scripts/demo.sh --data path/to/graph.npz           a graph of your own (anything `dglx partition` reads)
#   scripts/demo.sh --strategy data_parallel --servers 2 --epochs 5
#
#   --data DATA      what to train on                     --strategy S   how (default data_parallel)
#   --ranks N        processes (default 2)                --servers S    virtual servers (default 1)
#   --parts P        parts of the graph (default: ranks)  --method M     partitioner (default: the package's)
#   --name NAME      of data/NAME and runs/NAME           anything else goes to `dglx train`
set -euo pipefail
started_in=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

data="synthetic:nodes=20000,degree=25,seed=0" strategy=data_parallel ranks=2 servers=1 parts="" method="" name=""
more=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' scripts/demo.sh; exit ;;
        --data | --strategy | --ranks | --servers | --parts | --method | --name)
            [ $# -ge 2 ] || { echo "demo.sh: $1 needs a value; see scripts/demo.sh --help" >&2 && exit 2; }
            printf -v "${1#--}" '%s' "$2" && shift 2 ;;
        *) more+=("$1") && shift ;;
    esac
done

# Paths are relative to the folder of the caller.
if [ -e "$started_in/$data" ]; then
    data=$started_in/$data
fi
scripts/setup.sh
dglx=.venv/bin/dglx
parts=${parts:-$ranks}
if [ -z "$name" ]; then
    # Readable, and different for every graph and partitioning: a changed file is partitioned again.
    changed=$(stat -c '%s %Y' "$data" 2>/dev/null || true)
    name=$(basename "${data%%:*}" .npz)-$parts-$(printf '%s' "$data $parts $method$changed" | sha256sum | cut -c1-6)
fi

if [ ! -f "data/$name/manifest.json" ]; then
    "$dglx" partition "$data" --parts "$parts" ${method:+--method "$method"} --out "data/$name"
fi
"$dglx" inspect "data/$name"
"$dglx" train "data/$name" --strategy "$strategy" --ranks "$ranks" --servers "$servers" \
    --out "runs/$name-$strategy" ${more[@]+"${more[@]}"}
