"""Notices: what tells a node that it is to leave, besides signals: the cloud's metadata service, and a mark on the node.

One worker of each node asks in a thread of its own, so that no step waits for an answer; what it finds becomes a mark in the
node's private folder, which all workers of the node see at their next step. `python -m elastic launch` leaves the same mark
for a signal. Guarantees: a service that does not answer is told once and asked again, and never harms the training; nothing
is asked unless `notices` names it. Does not import torch.
"""

import contextlib
import http.client
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

__all__ = ["KINDS", "MARK", "Notices", "leave_mark", "read_mark"]

logger = logging.getLogger(__name__)

MARK: Final = "notice"
"""In the folder of the node: why it is to leave."""
KINDS: Final = ("aws", "aws-rebalance", "gcp", "slurm")
_EVERY_S: Final = 5.0
"""As AWS advises; it warns two minutes before, Google 30 seconds."""
_ANSWER_S: Final = 2.0
_TOKEN_S: Final = 21600
_RENEW_S: Final = 3600.0
_MOST_BYTES: Final = 1 << 16
_AWS: Final = ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
_GCP: Final = ("GCE_METADATA_HOST", "metadata.google.internal")
"""The variables by which the clouds' own libraries are told another address, and the usual one."""


def leave_mark(folder: Path, why: str) -> None:
    """Tell all workers of a node that it is to leave; the first reason stays."""
    path = folder / MARK
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        fresh.write_text(why, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
    except OSError as error:
        logger.warning("notice: %s; it could not be passed on (%s)", why, error)


def read_mark(folder: Path) -> str | None:
    """Return why the node is to leave; None where nobody said so."""
    try:
        return (folder / MARK).read_text(encoding="utf-8")
    except OSError:
        return None


class Notices:
    """Asks for one node until it is told to leave or closed."""

    def __init__(
        self,
        kinds: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        """Ask what `kinds` names, as `environ` says where; `start` begins."""
        ask: dict[str, Callable[[], str | None]] = {
            "aws": Aws(environ).interruption,
            "aws-rebalance": Aws(environ).rebalance,
            "gcp": Gcp(environ).look,
        }
        self._sources = {kind: ask[kind] for kind in kinds if kind in ask}
        self._folder, self._every_s = folder, every_s
        self._closed = threading.Event()
        self._told: set[str] = set()

    def start(self) -> None:
        """Begin to ask, where there is anybody to ask."""
        if self._sources:
            threading.Thread(target=self._run, name="notices", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            why = self.look()
            if why is not None:
                leave_mark(self._folder, why)
                return
            self._closed.wait(self._every_s)

    def look(self) -> str | None:
        """Ask each source once; returns why the node is to leave, None where it may stay."""
        for kind, ask in self._sources.items():
            try:
                why = ask()
            except (OSError, ValueError, http.client.HTTPException) as error:
                if kind not in self._told:
                    self._told.add(kind)
                    logger.warning(
                        "notices: %s: no answer (%s); asked again every %g s",
                        kind,
                        error,
                        self._every_s,
                    )
                continue
            if why is not None:
                return why
        return None


class Aws:
    """EC2's instance metadata, version 2: with a token that is asked for first."""

    def __init__(
        self, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._base = environ.get(_AWS[0]) or _AWS[1]
        self._clock = clock
        self._token = ""
        self._asked = 0.0

    def interruption(self) -> str | None:
        """Whether this spot instance is to be stopped or terminated."""
        found = self._get("spot/instance-action")
        if found is None:
            return None
        return f"AWS: spot instance: {_said(found, 'action')} at {_said(found, 'time')}"

    def rebalance(self) -> str | None:
        """Whether AWS recommends to leave this spot instance."""
        found = self._get("events/recommendations/rebalance")
        if found is None:
            return None
        return f"AWS: it is recommended to leave, since {_said(found, 'noticeTime')}"

    def _get(self, name: str) -> str | None:
        now = self._clock()
        if not self._token or now - self._asked > _RENEW_S:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            status, self._token = _ask(self._base, "PUT", "/latest/api/token", header)
            if status != 200:
                self._token = ""
                raise ValueError(f"{self._base}: status {status} to the request of a token")
            self._asked = now
        header = {"X-aws-ec2-metadata-token": self._token}
        status, text = _ask(self._base, "GET", f"/latest/meta-data/{name}", header)
        if status == 404:
            return None
        if status != 200:
            self._token = ""  # 401: it is over
            raise ValueError(f"{self._base}: status {status}")
        return text


class Gcp:
    """Compute Engine's metadata server."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        host = environ.get(_GCP[0]) or _GCP[1]
        self._base = host if "://" in host else f"http://{host}"

    def look(self) -> str | None:
        """Whether this machine is preempted, or is to be ended by maintenance; a live migration is none."""
        if self._get("preempted").upper() == "TRUE":
            return "Google Cloud: this instance is preempted"
        event = self._get("maintenance-event")
        if event.upper().startswith("TERMINATE"):
            return f"Google Cloud: maintenance: {event}"
        return None

    def _get(self, name: str) -> str:
        path = f"/computeMetadata/v1/instance/{name}"
        status, text = _ask(self._base, "GET", path, {"Metadata-Flavor": "Google"})
        if status != 200:
            raise ValueError(f"{self._base}: status {status} to {name}")
        return text.strip()


def _said(text: str, name: str) -> str:
    """One field of an answer; an answer of another form is a notice all the same."""
    try:
        found = json.loads(text)
    except ValueError:
        return "?"
    return str(found.get(name, "?")) if isinstance(found, dict) else "?"


def _ask(base: str, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """One request, straight to the machine's own service: no proxy stands before it."""
    url = urlsplit(base)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=_ANSWER_S)
    try:
        connection.request(method, url.path.rstrip("/") + path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES).decode(errors="replace")
    finally:
        connection.close()
