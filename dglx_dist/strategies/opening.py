"""Starting a session for a strategy that is named, and finding it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dglx_dist.cluster.session import Session, start_session
from dglx_dist.cluster.topology import read_settings
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import Strategy
from dglx_dist.strategies.registry import AUTO, STRATEGIES


def strategy_of(session: Session) -> Strategy:
    """Return the strategy that the session was opened with; it keeps no state of its own.

    Raises:
        ConfigError: the strategy does not know one of the session's options, or ``auto`` has not chosen yet.
    """
    if session.strategy == AUTO:
        raise ConfigError(
            "strategy 'auto' chooses once it has seen model and graph: call dx.choose_strategy(model, g, "
            "fanouts=..., batch_size=...) before the first loader and dx.wrap; dx.fit does it by itself"
        )
    return STRATEGIES.get(session.strategy)(session, session.options)


def resolve_strategy(strategy: str | None, *, auto: bool = False) -> str:
    """Return the one name of ``strategy``; of None: DGLX_STRATEGY, else ``data_parallel``.

    Args:
        strategy: A name or an alias.
        auto: Whether ``auto`` may be asked for, because somebody will choose.

    Raises:
        UnknownNameError: there is no such strategy; the message has the nearest name.
        ConfigError: ``auto`` where nobody will choose.
    """
    asked = strategy or read_settings().strategy or "data_parallel"
    if asked != AUTO:
        return STRATEGIES.resolve(asked)
    if not auto:
        raise ConfigError(
            "strategy 'auto' chooses in dx.fit or dx.choose_strategy, which a script of dgl.distributed does "
            "not call; ask `dglx plan` which strategy suits, and name that one"
        )
    return AUTO


def begin(
    strategy: str,
    options: Mapping[str, object],
    *,
    timeout_s: float = 300.0,
    seed: int = 0,
    backend: str | None = None,
    check: Callable[[Session], object] = strategy_of,
) -> Session:
    """Join the other ranks for ``strategy``; every rank must call it.

    Args:
        strategy: What :func:`resolve_strategy` gives.
        options: The strategy's own; where DGLX_OPTIONS has others of them, both.
        timeout_s: Seconds that a rank may be silent.
        seed: Of everything random.
        backend: Of the process group, if there is none yet.
        check: What raises ConfigError for the session's options.

    Raises:
        ConfigError: the strategy does not know an option, ranks disagree, or a session is open already.
        PeerError: ranks are missing after the time-out.
    """
    told = {**read_settings().options, **options}
    session = start_session(strategy=strategy, options=told, timeout_s=timeout_s, seed=seed, backend=backend)
    try:
        check(session)
    except BaseException as error:
        session.fail(error)
        session.close(failed=True)
        raise
    return session
