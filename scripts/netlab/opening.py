"""Making labs, and finding again those that are up."""

from __future__ import annotations

from dglx_dist.errors import ConfigError, LabError
from scripts.netlab import state
from scripts.netlab.base import Lab, LabSpec
from scripts.netlab.cleaning import clean_stale
from scripts.netlab.host import what_is_missing
from scripts.netlab.loopback import LoopbackLab
from scripts.netlab.namespaces import NamespaceLab, make


def open_lab(spec: LabSpec, *, name: str | None = None, force_loopback: bool = False) -> Lab:
    """Make a lab that ends with this process at the latest; ``with`` takes it down before.

    What is left of labs whose owner was killed is removed first.

    Args:
        spec: What is asked for.
        name: Found by it in ``python scripts/netlab status``; None: a random one.
        force_loopback: Emulate nothing.

    Returns:
        Servers in namespaces; on a machine that cannot make them, or with ``force_loopback``, plain loopback,
        whose ``missing`` says what it lacks.

    Raises:
        ConfigError: the name is taken, or there are not as many cores as asked for.
        LabError: the machine refused something that it can do otherwise; nothing stays.
    """
    missing = None if force_loopback else what_is_missing()
    if force_loopback or missing:
        return LoopbackLab(spec, missing=missing)
    clean_stale()
    return make(spec, name if name is not None else state.random_name(), held="process")


def up(spec: LabSpec, name: str) -> NamespaceLab:
    """Make a lab that stays up when this process ends, until ``cleaning.down(name)``.

    Raises:
        ConfigError: the name is taken, or there are not as many cores as asked for.
        LabError: this machine cannot make labs; the message says what is missing.
    """
    state.check_name(name)
    missing = what_is_missing()
    if missing:
        raise LabError(f"no lab can stay up here: {missing}")
    clean_stale()
    return make(spec, name, held="detached")


def attach(name: str) -> NamespaceLab:
    """Return a lab that another process made; closing it leaves it up.

    Raises:
        ConfigError: there is none of this name, or it is down.
        LabError: its notes are damaged.
    """
    noted = state.read(name)
    if not noted.complete or not all(process.alive() for process in noted.processes):
        raise ConfigError(
            f"the lab {name!r} is not up any more, or not yet; "
            f"remove it with `python scripts/netlab down {name}`"
        )
    return NamespaceLab(noted)
