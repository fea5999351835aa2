"""Which local address a rank listens on: the one the other ranks reach it by, never all of them."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from dglx_dist.cluster.topology import Rendezvous
from dglx_dist.errors import ConfigError

_SIOCGIFADDR = 0x8915


def listening_address(rendezvous: Rendezvous) -> str:
    """Return the numeric local address of the interface that ``GLOO_SOCKET_IFNAME`` or the rendezvous picks.

    Raises:
        ConfigError: there is no such interface, or only a loopback address where ranks are on several
            machines.
    """
    if rendezvous.interface:
        return interface_address(rendezvous.interface)
    address = _address_towards(rendezvous.host, rendezvous.port)
    if rendezvous.num_nodes > 1 and ipaddress.ip_address(address).is_loopback:
        # The rendezvous runs on this machine and its name means loopback here; others use a real address.
        address = _own_outer_address()
    return address


def interface_address(name: str, said_by: str = "GLOO_SOCKET_IFNAME") -> str:
    """Return the IPv4 address of the interface ``name``, or else its IPv6 address.

    Args:
        name: Of the interface.
        said_by: Where the user wrote it, for messages.

    Raises:
        ConfigError: it does not exist or has no address.
    """
    known = [interface for _, interface in socket.if_nameindex()]
    if name not in known:
        raise ConfigError(f"{said_by}={name!r} is no network interface here (there are: {', '.join(known)})")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return _ipv6_address(name, said_by)
    return socket.inet_ntoa(answer[20:24])


def link_speed(address: str, cards: Path = Path("/sys/class/net")) -> float | None:
    """Return how many bytes per second the network card with ``address`` carries.

    None where the kernel does not know, as for loopback and many virtual cards.

    Args:
        address: Numeric, of this machine.
        cards: Where the kernel tells of its cards.
    """
    for _, name in socket.if_nameindex():
        try:
            if interface_address(name) == address:
                megabits = int((cards / name / "speed").read_text())
                return megabits * 1e6 / 8 if megabits > 0 else None
        except (ConfigError, OSError, ValueError):
            continue  # A card without address, or one that does not tell its speed.
    return None


def endpoint_of(address: str, port: int | str) -> str:
    """ZeroMQ's spelling of a TCP address."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _address_towards(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # chooses the route; a datagram socket sends nothing yet
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={host!r} cannot be reached from here: {error}; use a name or address that every "
            "machine resolves, or set GLOO_SOCKET_IFNAME"
        ) from error


def _own_outer_address() -> str:
    name = socket.gethostname()
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        found = set()
    outer = sorted(
        address for address in found if not ipaddress.ip_address(address.split("%")[0]).is_loopback
    )
    if not outer:
        raise ConfigError(
            f"several machines take part, but this one ({name}) knows itself only by a loopback address; set "
            "GLOO_SOCKET_IFNAME to the network interface that the others reach"
        )
    return outer[0]


def _ipv6_address(name: str, said_by: str) -> str:
    with open("/proc/net/if_inet6", encoding="ascii") as table:
        rows = [line.split() for line in table]
    for digits, *_, interface in rows:
        if interface == name:
            return str(ipaddress.IPv6Address(int(digits, 16)))
    raise ConfigError(f"{said_by}={name!r} has no address; choose an interface that is up")
