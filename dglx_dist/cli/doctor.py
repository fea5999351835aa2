"""``dglx doctor``."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import typer

import dglx_dist
from dglx_dist.cli.common import command, write
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.internals import dgl_wheel
from dglx_dist.memory import format_bytes, machine_memory
from dglx_dist.options import option
from dglx_dist.progress import PlainConsole, say

_PACKAGES = "torch dgl numpy scipy pandas pyarrow numba pyzmq pymetis kaminpar psutil safetensors rich typer"
_BROKEN = (ImportError, OSError, RuntimeError, AttributeError)
"""Errors that packages raise if they do not load."""
_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY = 1 << 30
_MIN_FILES = 1024
_ANY_ADDRESS = "192.0.2.1"
"""Address reserved for documentation. It selects the default route. Nothing is sent to it."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Options of ``dglx doctor``."""

    as_json: bool = option(False, "Write JSON and nothing else.", flag="--json")
    install_dgl: bool = option(False, "Install DGL if it has no wheel for this Python. Asks first.")
    yes: bool = option(False, "Answer the question of --install-dgl with yes.")


@dataclass(frozen=True)
class Diagnosis:
    """Facts about this machine by section, what prevents training, and advice."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


@command(DoctorConfig)
def doctor(config: DoctorConfig) -> None:
    """Show versions, processors, memory, network, GPUs, DGL and caches of this machine, with advice.

    The exit code is 2 if something prevents training. --install-dgl installs DGL on Python 3.13.
    """
    if config.install_dgl:
        _install_dgl(ask=not config.yes)
    diagnosis = Diagnosis()
    for check in (_check_versions, _check_machine, _check_network, _check_torch, _check_dgl):
        check(diagnosis)

    if config.as_json:
        findings = {"problems": diagnosis.problems, "advice": diagnosis.advice}
        write(json.dumps({**diagnosis.facts, **findings}))
    else:
        _show(diagnosis)

    if diagnosis.problems:
        raise typer.Exit(2)


def _install_dgl(*, ask: bool) -> None:
    """Install DGL's wheel for another Python. Raise ConfigError if DGL has a wheel for this one."""
    installed = dgl_wheel.find_version()
    if installed is not None:
        say(f"DGL {installed} is installed already")
        return

    python = platform.python_version()
    if dgl_wheel.has_official_wheel():
        raise ConfigError(f"DGL has a wheel for Python {python}. Install it with `pip install dgl`.")

    say(f"DGL has no wheel for Python {python}. The wheel of DGL {dgl_wheel.VERSION} for Python 3.12 works.")
    question = f"Download it with pip, check its hash, and install it into {sys.prefix}?"
    if ask and not typer.confirm(question, err=True):
        raise typer.Exit(1)
    dgl_wheel.install_wheel()
    say(f"installed DGL {dgl_wheel.VERSION}; `pip uninstall dgl` removes it")


def _show(diagnosis: Diagnosis) -> None:
    console = PlainConsole(soft_wrap=True)
    for section, facts in diagnosis.facts.items():
        console.print(section, style="bold")
        width = max(map(len, facts))
        for name, value in facts.items():
            console.print(f"  {name:{width}}  {_format(name, value)}")

    for problem in diagnosis.problems:
        console.print(f"problem: {problem}", style="red")
    for advice in diagnosis.advice:
        console.print(f"advice: {advice}", style="yellow")
    if not diagnosis.problems:
        console.print("ready to train", style="green")


def _format(name: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _check_versions(diagnosis: Diagnosis) -> None:
    versions: dict[str, str | None] = {}
    versions["python"] = platform.python_version()
    versions["dglx_dist"] = dglx_dist.__version__
    for name in _PACKAGES.split():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    diagnosis.facts["versions"] = versions


def _check_machine(diagnosis: Diagnosis) -> None:
    total, free = machine_memory()
    file_limit, highest_file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total,
        "free_memory_bytes": free,
        "open_files": file_limit,
        "open_files_hard_limit": highest_file_limit,
    }
    diagnosis.facts["machine"] = facts

    # Containers often have 64 MB of shared memory, too little for embedding rows.
    if _SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(_SHARED_MEMORY)
        facts |= {"shared_memory_bytes": usage.total, "free_shared_memory_bytes": usage.free}
        if usage.free < _MIN_SHARED_MEMORY:
            diagnosis.advice.append(
                f"{_SHARED_MEMORY}, which ranks use for embeddings, has "
                f"{format_bytes(usage.free)} free. Raise it (in a container: --shm-size), or "
                "set DGLX_SCRATCH to a folder on a disk."
            )

    # A process can raise its own limit up to the hard limit.
    is_unlimited = highest_file_limit == resource.RLIM_INFINITY
    if not is_unlimited and highest_file_limit < _MIN_FILES:
        diagnosis.advice.append(
            f"A process may open {highest_file_limit} files. Raise `ulimit -Hn` to {_MIN_FILES}."
        )


def _check_network(diagnosis: Diagnosis) -> None:
    try:
        from dglx_dist.comm import rendezvous
        from dglx_dist.comm.topology import copy_environment
    except _BROKEN:
        # These modules import torch, and the check for torch reports that.
        return

    facts: dict[str, Any] = dict.fromkeys(("interface", "address", "mbit_per_s"))
    diagnosis.facts["network"] = facts
    interface = copy_environment().get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    try:
        if interface:
            address = rendezvous.find_interface_address(interface)
        else:
            address = rendezvous.find_address_towards(_ANY_ADDRESS, 9, "another machine", "")
    except DglxError as error:
        reason = str(error).rstrip(".")
        diagnosis.advice.append(f"{reason}. To train on several machines, set GLOO_SOCKET_IFNAME.")
        return

    facts["interface"] = interface or _find_interface(address)
    facts["address"] = address
    bytes_per_s = rendezvous.read_link_speed(address)
    if bytes_per_s is not None:
        facts["mbit_per_s"] = round(bytes_per_s * 8 / 1e6)


def _find_interface(address: str) -> str | None:
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return interface
    return None


def _check_torch(diagnosis: Diagnosis) -> None:
    try:
        import torch

        from dglx_dist.comm.devices import count_gpus, explain_missing_gpu
    except _BROKEN as error:
        diagnosis.problems.append(f"torch cannot be imported: {error}. Install it again.")
        return

    has_mkl = "BLAS_INFO=mkl" in torch.__config__.show()
    gpus = [torch.cuda.get_device_name(index) for index in range(count_gpus())]
    diagnosis.facts["torch"] = {
        "blas": "MKL" if has_mkl else "not MKL",
        "threads": torch.get_num_threads(),
        "gloo": torch.distributed.is_gloo_available(),
        "gpus": gpus or explain_missing_gpu(),
        "nccl": torch.distributed.is_nccl_available(),
    }


def _check_dgl(diagnosis: Diagnosis) -> None:
    try:
        import dgl

        from dglx_dist.dataloading import kernels, sampler

        # An import alone would not load DGL's C library.
        dgl.graph(([0, 1], [1, 2])).in_degrees()
    except _BROKEN as error:
        diagnosis.problems.append(f"DGL cannot be used: {error}. {_suggest_repair(error)}")
        return

    is_compiled = sampler.is_compiled()
    kernel_folder = kernels.sample_batch.stats.cache_path
    dgl_folder = str(Path(dgl.__file__).parent)
    diagnosis.facts["dgl"] = {"folder": dgl_folder, "calls": dgl_wheel.describe_calls()}
    diagnosis.facts["cache"] = {"folder": kernel_folder, "compiled": is_compiled}
    if not is_compiled:
        diagnosis.advice.append("The first run compiles the kernels of mini-batches, which takes about 15 s.")


def _suggest_repair(error: Exception) -> str:
    """Advise what to do if importing or calling DGL fails."""
    if "libgomp" in str(error):
        return "Run `apt-get install libgomp1` or `dnf install libgomp`."
    if dgl_wheel.find_version() is not None:
        return "Install it again in a fresh environment."
    if dgl_wheel.has_official_wheel():
        return "Run `pip install dgl`."
    return "Run `dglx doctor --install-dgl`."
