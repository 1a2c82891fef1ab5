"""Nodes of this machine as network namespaces on a bridge, with links that can be cut without a reset.

Promises: names are unique to each bridge, so that several may be there at once; all that was made is removed by
`close`, also where making it failed half way. Needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and the program `ip`.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final, Self

from elastic.errors import StartError

__all__ = ["Bridge", "why_impossible"]

_NETWORK: Final = "10.77.0"


def why_impossible() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    if shutil.which("ip") is None:
        return "there is no program `ip` (package iproute2)"
    name = f"ed{secrets.token_hex(3)}-probe"
    made = _ip("netns", "add", name)
    if made.returncode != 0:
        return f"network namespaces cannot be made ({made.stderr.strip() or 'not permitted'})"
    _ip("netns", "del", name)
    return None


class Bridge:
    """So many nodes on a bridge, each in a namespace of its own."""

    def __init__(self, count: int) -> None:
        """Make them.

        Raises:
            StartError: `ip` refused; what had been made is gone again.
        """
        self._token = secrets.token_hex(3)
        self._made: list[str] = []
        try:
            self._namespace("sw")
            self._in("sw", "link", "add", "br0", "type", "bridge")
            self._in("sw", "link", "set", "br0", "up")
            for node in range(count):
                self._node(node)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was made; the processes inside have to be gone."""
        while self._made:
            _ip("netns", "del", self._made.pop())

    @staticmethod
    def address(node: int) -> str:
        """A node's address."""
        return f"{_NETWORK}.{node + 1}"

    def command(self, node: int, words: Sequence[str]) -> list[str]:
        """A command on a node, under a host name of its own; the process stays the same up to the command."""
        renamed = ["unshare", "-u", "sh", "-c", f'hostname node{node}; exec "$@"', "sh"]
        return [_program(), "netns", "exec", self._name(node), *renamed, *words]

    def cut(self, node: int) -> None:
        """Cut a node's link: what is sent is lost, and nobody is told."""
        self._in("sw", "link", "set", f"v{node}", "down")

    def heal(self, node: int) -> None:
        """Mend it."""
        self._in("sw", "link", "set", f"v{node}", "up")

    def _name(self, node: int | str) -> str:
        return f"ed{self._token}-{node}"

    def _namespace(self, node: int | str) -> None:
        _checked("netns", "add", self._name(node))
        self._made.append(self._name(node))
        self._in(node, "link", "set", "lo", "up")

    def _node(self, node: int) -> None:
        self._namespace(node)
        link, peer = f"v{node}", self._name(node)
        self._in("sw", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", peer)
        self._in("sw", "link", "set", link, "master", "br0", "up")
        self._in(node, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        self._in(node, "link", "set", "eth0", "up")

    def _in(self, node: int | str, *words: str) -> None:
        _checked("-n", self._name(node), *words)


def _program() -> str:
    return shutil.which("ip") or "ip"


def _ip(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # noqa: S603 - no shell, and no word comes from outside
        [_program(), *words], check=False, capture_output=True, text=True, env=dict(os.environ)
    )


def _checked(*words: str) -> None:
    done = _ip(*words)
    if done.returncode != 0:
        raise StartError(f"ip {' '.join(words)}: {done.stderr.strip()}")
