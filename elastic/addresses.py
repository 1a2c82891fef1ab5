"""Under which addresses this host may be reached, the likeliest first. Needs Linux. Does not import torch."""

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

__all__ = ["host_mark", "own_addresses"]

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


def host_mark() -> str:
    """Name this boot of this host and its network: equal for processes that share a loopback, and only for them."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot[:13]}-{Path('/proc/self/ns/net').stat().st_ino}"


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
