"""A resumable-upload server that takes what it likes of each part, as Google's may.

fake-gcs-server takes all of a part or none, and takes the question how much has arrived for the end of
the upload; so what has to go well on the real service when it does neither is tried against this one.
"""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import google_crc32c


class Uploads:
    """What arrived, and how much of the next parts is taken."""

    def __init__(self) -> None:
        self.taken = bytearray()
        self.objects: dict[str, bytes] = {}
        self.most: list[int] = []
        """Of each part that comes, how many bytes are kept; all, once the list is empty."""
        self.reset: list[bool] = []
        """Whether the connection then breaks off instead of an answer."""
        self.spans: list[str] = []
        self.shift = False
        self.endpoint = ""


@contextmanager
def resumable_server() -> Iterator[Uploads]:
    """Serve one upload at a time on loopback."""
    state = Uploads()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            state.taken.clear()
            self._answer(200, {}, {"Location": f"{state.endpoint}/session"})

        def do_DELETE(self) -> None:
            state.objects.clear()
            self._answer(204, None)

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            span = self.headers["Content-Range"]
            state.spans.append(span)
            total = int(span.rpartition("/")[2])
            first = re.match(r"bytes (\d+)-", span)
            if first and int(first[1]) == len(state.taken):
                kept = body[: state.most.pop(0)] if state.most else body
                if state.shift and kept:
                    kept, state.shift = kept[1:] + kept[:1], False
                state.taken += kept
                if state.reset and state.reset.pop(0):
                    self.close_connection = True
                    self.connection.close()
                    return
            if len(state.taken) < total:
                last = {"Range": f"bytes=0-{len(state.taken) - 1}"} if state.taken else {}
                self._answer(308, None, last)
                return
            state.objects["made"] = data = bytes(state.taken)
            crc32c = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
            made = {"size": str(len(data)), "crc32c": crc32c, "generation": "7"}
            self._answer(200, made)

        def _answer(self, status: int, document: object, headers: Any = ()) -> None:
            body = b"" if document is None else json.dumps(document).encode()
            self.send_response(status)
            for name, value in dict(headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
