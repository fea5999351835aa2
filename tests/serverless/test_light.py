"""What a worker imports: Python, numpy and pyzmq; so its package is small and its start is quick."""

import json
import subprocess
import sys
from pathlib import Path

from .programs import gat

ROOT = Path(__file__).parents[2]
OWN = ("json_fields", "program", "tasks", "worker", "worker_process", "aws.function")
HEAVY = (
    *("torch", "numba", "dgl", "pyarrow", "rich", "llvmlite", "scipy", "pandas"),
    *("matplotlib", "boto3", "typer"),
    # Quick to write, slow to import: each takes as long as half of NumPy.
    *("asyncio", "importlib.metadata"),
)


def worker_modules() -> list[str]:
    """The worker's own modules, all stages, and how it calls others."""
    stages = sorted((ROOT / "dglx_dist" / "serverless" / "stages").glob("*.py"))
    names = [*OWN, *(f"stages.{path.stem}" for path in stages if path.stem != "__init__")]
    return [*(f"dglx_dist.serverless.{name}" for name in names), "dglx_dist.comm.rpc"]


PROGRAM = """
import importlib, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(heavy)) and any(name == one or name.startswith(one + ".") for one in heavy):
            raise ImportError(f"a worker must not import {name}")

heavy, modules, text = json.load(sys.stdin)
# What was imported before the first line, by this Python's own start, is not the worker's doing.
for name in [name for name in sys.modules if any(name == one or name.startswith(one + ".") for one in heavy)]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
for module in modules:
    importlib.import_module(module)

import numpy as np
from dglx_dist.serverless.program import Program
from dglx_dist.serverless.tasks import Direction
from dglx_dist.serverless.tasks import Work

program = Program.from_json(text)
for step in (0, 2, 4, 8):
    work = Work(program, step, Direction.FORWARD, True)
    weights = [np.ones(shape) for shape in work.weights.values()]
    lengths = {"node": 3, "edge": 5}
    arrays = [
        np.ones((lengths[item.per.value], item.width)) if item.width else np.array([0, 2, 2, 5])
        for item in work.pulled
    ]
    work.whole(weights, arrays, 3)
known = set(sys.stdlib_module_names) | {"numpy", "zmq", "dglx_dist", "__main__"}
files = {name.partition(".")[0] for name, module in sys.modules.items() if getattr(module, "__file__", None)}
print(json.dumps(sorted(files - known)))
"""


def run(modules: list[str]) -> subprocess.CompletedProcess[str]:
    given = json.dumps([HEAVY, modules, gat().to_json().decode()])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_a_worker_needs_numpy_and_pyzmq_only() -> None:
    found = run(worker_modules())
    assert found.returncode == 0, found.stderr
    # Cython and setuptools leave modules of theirs behind: parts of pyzmq's build and of an editable install.
    others = [
        name for name in json.loads(found.stdout) if not name.startswith(("_cython", "_distutils", "__ed"))
    ]
    assert others == []


def test_the_check_sees_what_it_looks_for() -> None:
    found = run(["dglx_dist.layers.convolutions"])
    assert found.returncode != 0
    assert "a worker must not import" in found.stderr


def test_the_worker_side_is_what_is_looked_at() -> None:
    modules = worker_modules()
    assert {"dglx_dist.serverless.stages.conv", "dglx_dist.serverless.worker"} <= set(modules)
