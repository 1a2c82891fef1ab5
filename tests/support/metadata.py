"""The clouds' metadata services on loopback: they refuse what the real ones refuse, and say what a test wants."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

TOKEN = "secret-token"  # noqa: S105 - of a fake
INTERRUPTION = '{"action": "terminate", "time": "2027-01-01T08:22:00Z"}'


class Metadata:
    """One service; `answers` maps a path to what it says, and may be changed while it runs."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.token = TOKEN
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
                is_right = self.path == "/latest/api/token" and ttl.isdigit()
                self._answer(200 if is_right else 400, fake.token)

            def do_GET(self) -> None:
                fake.asked.append(self.path)
                if self.path.startswith("/latest/"):
                    allowed = self.headers.get("X-aws-ec2-metadata-token") == fake.token
                    refusal = 401
                else:
                    allowed = self.headers.get("Metadata-Flavor") == "Google"
                    refusal = 403
                found = fake.answers.get(self.path)
                status = refusal if not allowed else 404 if found is None else 200
                self._answer(status, found or "")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def aws(said: str | None = None) -> Iterator[Metadata]:
    """EC2's, of a spot instance that is to be interrupted or not."""
    with Metadata({} if said is None else {AWS_PATH: said}) as fake:
        yield fake


@contextlib.contextmanager
def gcp(*, preempted: str = "FALSE", maintenance: str = "NONE") -> Iterator[Metadata]:
    """Compute Engine's."""
    with Metadata({GCP_PREEMPTED: preempted, GCP_MAINTENANCE: maintenance}) as fake:
        yield fake


AWS_PATH = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
GCP_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
