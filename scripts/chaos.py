"""Kills and preempts training runs at random moments, and compares their weights with undisturbed runs.

    python scripts/chaos.py --kills 100 --preemptions 20 --seed 0 --minutes 60

Two ranks train a small graph under each strategy, started by ``dglx train`` or by plain ``torchrun
--max-restarts``. At random epochs, or while the ranks start, one process gets SIGKILL: a rank, the launcher,
or a worker of ``lambda``; or the launcher gets SIGTERM (a preemption). What ends is started again by the same
command, and the last checkpoint must have the bits of a run that nobody disturbed. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

GRAPH = "synthetic:nodes=600,degree=8,classes=4,features=16,signal=0.5,seed=1"
STRATEGIES = ("data_parallel", "push_pull", "full_graph", "shared_preload", "cooperative", "lambda")
BY_BATCH = STRATEGIES[:2]
RANK, LAUNCHER, WORKER, PREEMPTION = "rank", "launcher", "worker", "preemption"
PER_RUN = 4
"""Disturbances of one run."""
LIMIT_S = 300.0
"""For a run to go further, or to end; then it counts as hung."""
OUTLIVE_S = 30.0
"""For ranks to end after their launcher."""


class Stuck(Exception):
    """A run neither goes on nor ends, or processes outlive it."""


@dataclass
class Run:
    """A training run in a folder, under one launcher."""

    data: Path
    out: Path
    strategy: str
    epochs: int
    launcher: str = "dglx"
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        """Start the command, the same one each time."""
        train = ["train", str(self.data), "--strategy", self.strategy, "--out", str(self.out)]
        train += ["--epochs", str(self.epochs), "--hidden", "8", "--dropout", "0.5", "--timeout", "60"]
        by_batch = self.strategy in BY_BATCH
        train += ["--fanout", "3,3", "--batch-size", "8"] if by_batch else []
        train += ["--checkpoint-every", "3steps" if by_batch else "1"]
        python = [sys.executable, "-m"]
        command = [*python, "dglx_dist.cli", *train, "--ranks", "2", "--servers", "2"]
        if self.launcher == "torchrun":
            command = [*python, "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["--max-restarts", "99", "-m", "dglx_dist.cli", *train]
        variables = {**os.environ, "DGLX_RANKS_PER_SERVER": "1", "OMP_NUM_THREADS": "1"}
        self.out.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        with open(self.out / "output.txt", "ab") as output:
            self.process = subprocess.Popen(
                command, env=variables, stdout=output, stderr=output, start_new_session=True
            )

    def epoch(self) -> int:
        """Return the last epoch that is done, -1 before the first."""
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.out / "metrics.jsonl").read_text().splitlines()[-1])["epoch"])
        return -1

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the live processes by kind."""
        by_kind: dict[str, list[psutil.Process]] = {RANK: [], LAUNCHER: [], WORKER: []}
        with suppress(psutil.Error):
            assert self.process is not None
            head = psutil.Process(self.process.pid)
            for process in [head, *head.children(recursive=True)]:
                with suppress(psutil.Error):
                    words = process.cmdline()
                    # Forks of the launcher have its first environment, and a name.
                    is_rank = "RANK" in process.environ() or process.name().startswith("dglx-rank-")
                    kind = RANK if is_rank else WORKER if "-I" in words else LAUNCHER
                    by_kind[kind].append(process)
        return by_kind

    def is_over(self) -> bool:
        """Return whether the run is complete; start it again where it ended before."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None and code != 0:
            self.start()
        return code == 0

    def kill(self) -> None:
        for of_kind in self.processes().values():
            for process in of_kind:
                with suppress(psutil.Error):
                    process.kill()

    def weights(self) -> dict[str, bytes]:
        """Return the bytes of every tensor of the last checkpoint: weights and the optimizer's moments."""
        last = max((self.out / "checkpoints").glob(f"epoch-{self.epochs:06d}-step-*[0-9]"))
        entries = json.loads((last / "state.json").read_text())["tensors"]
        return {name: _read(last / e["file"], e["first_byte"], e["num_bytes"]) for name, e in entries.items()}


def _read(path: Path, first: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(first)
        return file.read(num_bytes)


@dataclass
class Row:
    """Outcome of one kind of disturbance under one strategy."""

    done: int = 0
    survived: int = 0
    bitwise: int = 0
    seconds: list[float] = field(default_factory=list)


def wait_until(what: Callable[[], bool], run: Run, doing: str, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > end:
            raise Stuck(f"{doing} took more than {limit_s:.0f} s; see {run.out}/output.txt")
        time.sleep(0.01)


def strike(run: Run, kind: str, draw: random.Random) -> float | None:
    """Kill one process of a kind, or preempt; return the seconds until the run is further than before.

    None: there was no such process, as the run is complete.
    """
    by_kind = run.processes()
    while not by_kind[kind if kind != PREEMPTION else LAUNCHER]:
        if run.is_over():
            return None
        time.sleep(0.01)
        by_kind = run.processes()
    before, begin = run.epoch(), time.monotonic()
    assert run.process is not None
    if kind == PREEMPTION:
        run.process.terminate()
    else:
        with suppress(psutil.NoSuchProcess):
            draw.choice(by_kind[kind]).kill()
    if kind in (LAUNCHER, PREEMPTION):
        launcher = run.process
        wait_until(lambda: launcher.poll() is not None, run, "the end of the launcher")
        left = [process for of_kind in by_kind.values() for process in of_kind]
        _, left = psutil.wait_procs(left, timeout=OUTLIVE_S)
        if left:
            for process in left:
                process.kill()
            raise Stuck(f"{len(left)} processes outlived their launcher by {OUTLIVE_S:.0f} s")
        # Ranks may have gone on before they ended.
        before = run.epoch()
    wait_until(lambda: run.is_over() or run.epoch() > before, run, f"going on after the end of a {kind}")
    return time.monotonic() - begin


def disturb(run: Run, kinds: Sequence[str], draw: random.Random) -> Iterator[tuple[str, float]]:
    """Start ``run``, disturb it by each of ``kinds``, yield each with its seconds, and wait for the end."""
    run.start()
    stride = max(run.epochs // (len(kinds) + 1), 1)
    for kind in kinds:
        # Also while ranks start, before they have done another epoch.
        target = run.epoch() + draw.randint(0, stride)
        if target > run.epoch():
            wait_until(lambda target=target: run.is_over() or run.epoch() >= target, run, f"epoch {target}")  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.1))
        else:
            time.sleep(draw.uniform(0, 6))
        seconds = strike(run, kind, draw)
        if seconds is not None:
            yield kind, seconds
    wait_until(run.is_over, run, "the last epoch")


def plan(
    strategies: Sequence[str], kills: int, preemptions: int, draw: random.Random
) -> list[tuple[str, list[str]]]:
    """Return (strategy, kinds of disturbances) of each run, the strategies in turn."""
    kinds: dict[str, list[str]] = {strategy: [] for strategy in strategies}
    for number in range(kills + preemptions):
        strategy = strategies[number % len(strategies)]
        worker = [WORKER] * 2 if strategy == "lambda" else []
        kinds[strategy].append(draw.choice([RANK, RANK, LAUNCHER, *worker]))
    places = [
        (strategy, i)
        for i in range(kills + preemptions)
        for strategy in strategies
        if i < len(kinds[strategy])
    ]
    for strategy, place in draw.sample(places, preemptions):
        kinds[strategy][place] = PREEMPTION
    longest = max(map(len, kinds.values()))
    return [
        (strategy, kinds[strategy][first : first + PER_RUN])
        for first in range(0, longest, PER_RUN)
        for strategy in strategies
        if kinds[strategy][first : first + PER_RUN]
    ]


def campaign(options: argparse.Namespace, folder: Path) -> dict[tuple[str, str], Row]:
    data, draw, rows = folder / "data", random.Random(options.seed), dict[tuple[str, str], Row]()
    cut = [sys.executable, "-m", "dglx_dist.cli", "partition", GRAPH, "--parts", "2", "--out", str(data)]
    subprocess.run(cut, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end, expected = time.monotonic() + 60 * options.minutes, dict[str, dict[str, bytes]]()
    for number, (strategy, kinds) in enumerate(
        plan(options.only or STRATEGIES, options.kills, options.preemptions, draw)
    ):
        if time.monotonic() > end:
            print("the time is over", file=sys.stderr)
            break
        if strategy not in expected:
            undisturbed = Run(data, folder / strategy, strategy, options.epochs)
            for _ in disturb(undisturbed, (), draw):
                pass
            expected[strategy] = undisturbed.weights()
        run = Run(data, folder / f"{strategy}-{number}", strategy, options.epochs)
        run.launcher = draw.choice(["dglx", "torchrun"])
        struck: list[Row] = []
        message = ""
        try:
            for kind, seconds in disturb(run, kinds, draw):
                struck.append(rows.setdefault((strategy, kind), Row()))
                struck[-1].done += 1
                struck[-1].seconds.append(seconds)
        except Stuck as error:
            message = str(error)
        except KeyboardInterrupt:
            break
        finally:
            run.kill()
        equal = not message and run.weights() == expected[strategy]
        for row in struck:
            row.survived += not message
            row.bitwise += equal
        if message:
            # The one that was under way.
            rows.setdefault((strategy, kinds[min(len(struck), len(kinds) - 1)]), Row()).done += 1
        verdict = message or ("bitwise" if equal else f"other weights, see {run.out}")
        print(
            f"{run.out.name} ({run.launcher}): {', '.join(kinds)}: {len(struck)} done, {verdict}",
            file=sys.stderr,
        )
        if equal:
            shutil.rmtree(run.out)
    return rows


def table(rows: dict[tuple[str, str], Row]) -> str:
    lines = ["| strategy | struck | times | survived | bitwise | seconds to the next epoch: median, most |"]
    lines.append("|---|---|---|---|---|---|")
    for (strategy, kind), row in sorted(rows.items()):
        seconds = f"{statistics.median(row.seconds):.1f}, {max(row.seconds):.1f}" if row.seconds else ""
        lines.append(f"| {strategy} | {kind} | {row.done} | {row.survived} | {row.bitwise} | {seconds} |")
    totals = [sum(getattr(row, name) for row in rows.values()) for name in ("done", "survived", "bitwise")]
    return "\n".join([*lines, f"| all | | {' | '.join(map(str, totals))} | |"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign and print its table; 1 unless every run ended with the bits of its undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--preemptions", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=STRATEGIES, help="a strategy; may be repeated")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no run after that time")
    parser.add_argument("--folder", type=Path, help="keep runs here that did not end as they should")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dglx-chaos-") as scratch:
        rows = campaign(options, (options.folder or Path(scratch)).absolute())
    print(table(rows))
    return 0 if all(row.done == row.bitwise for row in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
