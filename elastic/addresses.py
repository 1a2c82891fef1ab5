"""Under which addresses this host may be reached, the likeliest first. Needs Linux. Does not import torch."""

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

__all__ = ["holds_store", "host_mark", "is_own", "own_addresses", "split_endpoint"]

_SIOCGIFADDR: Final = 0x8915


def own_addresses(*, one_node: bool, given: str | None) -> tuple[str, ...]:
    """List the addresses under which this host may be reached, the likeliest first."""
    found: list[str] = []
    wanted = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    names = [name for _, name in socket.if_nameindex()]
    for name in [*wanted, *names]:
        found += _interface_addresses(name)
    loop = [address for address in found if address.startswith("127.") or address == "::1"]
    others = [address for address in found if address not in loop]
    named = [given] if given else []
    ordered = ["127.0.0.1", *others, *named] if one_node else [*others, *named, *loop, "127.0.0.1"]
    return tuple(dict.fromkeys(ordered))


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Take HOST, HOST:PORT or [ADDRESS]:PORT apart."""
    host, colon, digits = endpoint.rpartition(":")
    if colon and digits.isdigit() and (":" not in host or host.endswith("]")):
        return host.strip("[]"), int(digits)
    return endpoint.strip("[]"), None


def holds_store(endpoint: str) -> bool | None:
    """Tell whether a c10d store at HOST:PORT is this host's to serve; None where torch finds that out by itself.

    torch looks this host's own name up for it, and ends where nobody knows that name.
    """
    host, own = split_endpoint(endpoint)[0], socket.gethostname()
    if host in {"", "localhost", "::1", own} or host.startswith("127."):
        return None
    with contextlib.suppress(OSError, UnicodeError):
        socket.getaddrinfo(own, None)
        return None
    with contextlib.suppress(OSError, UnicodeError):
        return any(is_own(str(one[4][0])) for one in socket.getaddrinfo(host, None))
    return False


def host_mark() -> str:
    """Name this boot of this host and its network: equal for processes that share a loopback, and only for them."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot[:13]}-{Path('/proc/self/ns/net').stat().st_ino}"


def is_own(address: str) -> bool:
    """Tell whether an interface has this address, be it its second one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def _interface_addresses(name: str) -> list[str]:
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, device = line.split()
            if device == name and scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
