"""Reads what the kernel grants a control group."""

from pathlib import Path


def quota_of(folder: Path) -> float:
    """Return the cores' worth of time that the group in ``folder`` gets at most."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota) / int(period)
