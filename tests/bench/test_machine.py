import json
import os
import socket
from importlib.metadata import version
from pathlib import Path

from scripts.bench import driver


def test_what_is_told_of_this_machine() -> None:
    told = driver.describe_machine()
    assert told["cores_usable"] == len(os.sched_getaffinity(0))
    versions = told["versions"]
    assert isinstance(versions, dict)
    assert versions["torch"] == version("torch")
    assert versions["dglx-dist"] == version("dglx-dist")
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert told["memory_bytes"] == int(memory.split()[1]) * 1024


def test_neither_the_host_nor_the_user_is_named() -> None:
    told = json.dumps(driver.describe_machine())
    assert str(Path.home()) + "/" not in told
    assert str(Path.cwd()) not in told
    name = socket.gethostname()
    # A name like "linux" may be part of a word of the kernel's version.
    assert name not in told or len(name) < 6


def test_the_processor_is_the_first_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\nmodel name\t: Fast One\n\nmodel name\t: Other\n")
    assert driver._cpu_model(tmp_path / "cpuinfo") == "Fast One"
    (tmp_path / "cpuinfo").write_text("Features: fp\n")
    assert driver._cpu_model(tmp_path / "cpuinfo") == os.uname().machine
