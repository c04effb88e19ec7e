"""Whether ranks can meet: ports, connections of this machine to itself, and names that every connection looks up.

torch's store has the name of its peer looked up at both ends of every connection. A peer on this machine is
``::ffff:127.0.0.1``, which /etc/hosts does not name, so a name server is asked; glibc waits 5 s for an answer that got
lost, twice.
"""

import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from lightning_moeclip.diagnosis.current_launch import Launch
from lightning_moeclip.diagnosis.findings import Finding, within

__all__ = ["lookup_finding", "loopback_finding", "port_finding"]

_CONNECT_S = 3.0
_SAMPLES, _SAMPLES_S = 5, 8.0
_SLOW_S = 0.1  # a name server of the same site answers in a hundredth of that
_PEER = "::ffff:127.0.0.1"
_REMEDY = (
    'Add the line "::ffff:127.0.0.1 localhost" to /etc/hosts, which answers without a name server; or, without rights '
    'to it, write RES_OPTIONS="timeout:1 attempts:1" before the launch, which waits 1 s at most.'
)

Lookup = Callable[[str], object]


def look_up(address: str) -> object:
    """The name of an IPv6 address, as torch's store asks for it."""
    return socket.getnameinfo((address, 0, 0, 0), 0)


def lookup_finding(look: Lookup = look_up, *, samples: int = _SAMPLES, deadline_s: float = _SAMPLES_S) -> Finding:
    """Seconds that the lookup of a peer on this machine takes.

    Args:
        look: looks up the name of an address.
        samples: how often; a name server that loses answers loses some of them.
        deadline_s: for all of them together.
    """
    times: list[float] = []
    lock = Lock()

    def measure() -> None:
        for _ in range(samples):
            begin = time.monotonic()
            with suppress(OSError):  # no answer is one too, and what counts is how long it took
                look(_PEER)
            with lock:
                times.append(time.monotonic() - begin)

    try:
        within(deadline_s, measure)
        lost = ""
    except TimeoutError:
        lost = f", and then no answer within {deadline_s:g} s"
    with lock:
        taken = list(times)
    slowest = max(taken, default=0.0)
    told = f"{len(taken)} lookups of {_PEER} took {1000 * slowest:.1f} ms at most{lost}"
    if lost or slowest > _SLOW_S:
        return Finding("name lookup", "warning", f"{told}; every connection to a store waits for two", _REMEDY)
    return Finding("name lookup", "ok", told)


def loopback_finding() -> Finding:
    """Whether a connection of this machine to itself works, as ranks on one machine make it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            begin = time.monotonic()
            with socket.create_connection(server.getsockname(), timeout=_CONNECT_S):
                server.settimeout(_CONNECT_S)
                connection, _ = server.accept()
                connection.close()
    except OSError as error:
        advice = "Ranks of one machine meet there: look at the firewall, and bring the loopback interface up."
        return Finding("loopback", "error", f"no connection to 127.0.0.1: {error}", advice)
    return Finding("loopback", "ok", f"127.0.0.1 answers in {1000 * (time.monotonic() - begin):.1f} ms")


def port_finding(launch: Launch | None) -> Finding:
    """Whether the store's address can be used: free before a launch on this machine, reachable in one.

    Args:
        launch: that this process is a rank of.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if port is None:
        told = "MASTER_PORT is not set: a launch takes a free port"
        return Finding("store's port", "ok", told)
    if not (port.isdigit() and 0 < int(port) < 2**16):
        advice = "Write a number such as MASTER_PORT=29500, or unset it."
        return Finding("store's port", "error", f"MASTER_PORT={port!r} is no port", advice)
    address = address or "127.0.0.1"
    if launch is not None:
        return _reachable(address, int(port), is_own=launch.rank == 0 and launch.by != "torchrun")
    return _free(address, int(port))


def _reachable(address: str, port: int, *, is_own: bool) -> Finding:
    """In a launch: torchrun's store listens there already; elsewhere rank 0 will, and others come to it."""
    where = f"{address}:{port}"
    if is_own:
        return _free(address, port)
    try:
        within(2 * _CONNECT_S, lambda: socket.create_connection((address, port), timeout=_CONNECT_S).close())
    except ConnectionRefusedError:
        # the machine answers; nobody listens until rank 0 makes the store
        return Finding("store's port", "ok", f"{address} is reachable, and nobody listens on {port} yet")
    except OSError as error:  # also a name that nobody knows, and TimeoutError
        advice = "Set MASTER_ADDR to an address of the first machine that all others reach, and open the port there."
        return Finding("store's port", "error", f"no connection to {where}: {error}", advice)
    return Finding("store's port", "ok", f"{where} answers")


def _free(address: str, port: int) -> Finding:
    """Before a launch, or on the rank that will serve the store."""
    where = f"{address}:{port}"
    try:
        found = within(2 * _CONNECT_S, lambda: socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
    except OSError as error:
        advice = "Set MASTER_ADDR to an address or a name that this machine knows, such as 127.0.0.1."
        return Finding("store's port", "error", f"MASTER_ADDR={address!r} is not known: {error}", advice)
    family, kind, _, _, place = found[0]
    try:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
            probe.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            told = f"{address} is an address of another machine, which is to be reachable when ranks start"
            return Finding("store's port", "note", told)
        advice = "Set MASTER_PORT to a free port, or unset it; a run that has not ended may hold this one."
        return Finding("store's port", "error", f"{where} cannot be listened on: {error.strerror}", advice)
    return Finding("store's port", "ok", f"{where} is free")
