"""Whether this host and others will find each other: names, addresses, and where the agents meet.

What torchrun tells the others of a node is the name that the node has for itself, unless `--local_addr` gives an address;
where they cannot resolve it they wait for it in vain. Promises: only asks, sends nothing to whoever answers, and each
question is over after some seconds. Does not import torch.
"""

import contextlib
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from elastic.addresses import is_own, own_addresses, split_endpoint
from elastic.bounded import run_bounded

__all__ = ["Finding", "Kind", "look_at_endpoint", "look_at_name", "look_at_peers", "peers_of"]

Kind = Literal["ok", "warn", "wrong"]

_ASK_S: Final = 5.0
_CONNECT_S: Final = 3.0
_PORT: Final = 29400
"""torchrun's own, where the endpoint names none."""
_OR_FSSPEC: Final = "or meet by --rdzv_backend=fsspec, which tells addresses"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was looked at, and what came of it."""

    kind: Kind
    what: str
    told: str
    """With the way out, where something is not as it should be."""


def look_at_name(local_addr: str | None) -> Finding:
    """Whether others can reach this host by the name that torchrun tells them."""
    if local_addr:
        told = f"torchrun tells the others {local_addr} (--local_addr)"
        return Finding(kind="ok", what="host name", told=told)
    name = socket.getfqdn()
    ours = _outer_addresses()
    way = f"start this node with --local_addr={ours[0] if ours else 'ADDRESS'}, {_OR_FSSPEC}"
    found = _resolve(name)
    here = f"{name!r} does not resolve on this host ({socket.gethostname()})"
    if not found:
        return Finding(
            kind="warn",
            what="host name",
            told=f"{here}, and maybe nowhere, but is what torchrun tells the other nodes: {way}",
        )
    known = [address for address in found if address in ours]
    if not known:
        return Finding(
            kind="warn",
            what="host name",
            told=f"{name!r} means {', '.join(found)} here, found {', '.join(ours) or 'no address'} on this host's "
            f"interfaces: others that resolve it so do not get here; {way}",
        )
    return Finding(kind="ok", what="host name", told=f"{name!r} is {known[0]}")


def look_at_peers(names: Sequence[str]) -> list[Finding]:
    """Whether each other node's name resolves on this host."""
    findings = []
    for name in names:
        found = _resolve(name)
        if found:
            told = f"{name!r} is {found[0]}"
            findings.append(Finding(kind="ok", what="peer", told=told))
            continue
        told = (
            f"{name!r} does not resolve on this host ({socket.gethostname()}): start {name} with "
            f"--local_addr=ITS-ADDRESS, {_OR_FSSPEC}"
        )
        findings.append(Finding(kind="warn", what="peer", told=told))
    return findings


def peers_of(environ: Mapping[str, str]) -> list[str]:
    """The nodes that Slurm has given this job, but for this one; none elsewhere."""
    listed = environ.get("SLURM_JOB_NODELIST", "")
    scontrol = shutil.which("scontrol")
    if not listed or scontrol is None:
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(  # noqa: S603 - Slurm's own program
            [scontrol, "show", "hostnames", listed],
            check=True, capture_output=True, text=True, timeout=_ASK_S,
        )  # fmt: skip
        own = {socket.gethostname(), environ.get("SLURMD_NODENAME", "")}
        return [name for name in done.stdout.split() if name not in own]
    return []


def look_at_endpoint(endpoint: str) -> Finding:
    """Whether a store of torchrun's can be served, or reached, at HOST:PORT."""
    host, given = split_endpoint(endpoint)
    host, port = host or "localhost", _PORT if given is None else given
    what = "rendezvous"
    found = _resolve(host)
    if not found:
        told = f"{endpoint}: {host!r} does not resolve on this host ({socket.gethostname()}); give the address of the node"
        return Finding(kind="wrong", what=what, told=told)
    if port == 0:
        return Finding(kind="ok", what=what, told=f"{endpoint}: a free port of this node")
    here = any(is_own(address) for address in found)
    trouble = _try(found[0], port, binds=here)
    kind, told = _told_own(trouble, port) if here else _told_other(trouble)
    return Finding(kind=kind, what=what, told=f"{endpoint}: {told}")


def _told_own(trouble: int, port: int) -> tuple[Kind, str]:
    """What it means that this host can listen at a port, or cannot."""
    if trouble == errno.EADDRINUSE:
        told = f"port {port} of this host is taken; where that is no agent of this launch, give another port"
        return "warn", told
    if trouble:
        return "wrong", f"this host cannot listen there ({os.strerror(trouble)}); give another port"
    return "ok", "this host serves it, the port is free"


def _told_other(trouble: int) -> tuple[Kind, str]:
    """What it means that another host answers, or does not."""
    if trouble == errno.ECONNREFUSED:
        return "ok", "that host is there, and no agent listens yet"
    if trouble:
        why = os.strerror(trouble)
        told = f"it cannot be reached ({why}): is that the host, and does a firewall let this port through?"
        return "warn", told
    return "ok", "somebody listens there"


def _try(address: str, port: int, *, binds: bool) -> int:
    """The number of what goes wrong when listening at an address, or connecting to it; 0 where nothing does."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_S)
        try:
            if binds:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address, port))
                sock.listen(1)
            else:
                sock.connect((address, port))
        except TimeoutError:
            return errno.ETIMEDOUT
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def _outer_addresses() -> list[str]:
    """This host's addresses that others may reach."""
    found = own_addresses(one_node=False, given=None)
    return [address for address in found if not address.startswith("127.") and address != "::1"]


def _resolve(name: str) -> list[str]:
    """The addresses of a name, IPv4 first; none where nobody knows it or nobody answers in time."""
    try:
        found = run_bounded(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), _ASK_S)
    except (OSError, UnicodeError, TimeoutError):
        return []
    addresses = dict.fromkeys(str(one[4][0]) for one in found)
    return sorted(addresses, key=lambda address: ":" in address)
