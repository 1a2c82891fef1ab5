"""Google Cloud Storage.

gcsfs finds the credentials and makes the connection; the requests are this room's own: gcsfs tries each
six times, keeps listings, waits for ever on a silent server, and asks another service about the bucket.
Small objects are one request under `ifGenerationMatch`, which is the one condition that holds everywhere.
Large ones are a resumable upload: after each part, and after each failure, the server is asked how much
of it has arrived, and the sum of all bytes is compared before the object counts.
"""

import base64
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import fsspec.asyn

from checkpoints.backend_objects import ANY, ObjectBackend
from checkpoints.uploads import Upload, pieces, total_bytes

_CONNECT_S: Final = 5.0
_SILENT_S: Final = 30.0
_WHOLE: Final = 1 << 30
_INCOMPLETE: Final = 308
_BINARY: Final = "application/octet-stream"


class GcsError(Exception):
    """A reply that says no; carries its status and reason."""

    def __init__(self, status: int, content: bytes) -> None:
        reason, message = _told(content)
        if "bucket does not exist" in message:
            reason = "NoSuchBucket"
        super().__init__(f"{status}: {message or reason}")
        self.status = status
        self.error_code = reason


def _told(content: bytes) -> tuple[str, str]:
    """Reason and message out of the body of an error, which may be anything."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
        error = json.loads(content)["error"]
        first = (error.get("errors") or [{}])[0]
        return str(first.get("reason", "")), str(error.get("message", ""))[:300]
    return "", content[:300].decode("utf-8", "replace")


class DamagedUploadError(ConnectionError):
    """What arrived is not what was sent; sending it again cures it."""


class GcsBackend(ObjectBackend):
    """The requests of the JSON API."""

    def _connect(self) -> tuple[Any, str]:
        from gcsfs.core import GCSFileSystem  # not the one of gcsfs: that probes for bucket types

        fs = GCSFileSystem(**self._arguments())
        return fs, str(fs._strip_protocol(self._url)).rstrip("/")  # noqa: SLF001  # as fsspec does

    def _disconnect(self, fs: Any) -> None:
        if fs._session is not None:  # noqa: SLF001  # there is no public way to ask
            with contextlib.suppress(Exception):
                fsspec.asyn.sync(fs.loop, fs._session.close, timeout=5)  # noqa: SLF001

    # ------------------------------------------------------------------------------------ requests
    def request(
        self,
        method: str,
        path: str,
        *,
        chunks: Sequence[memoryview] | None = None,
        headers: Mapping[str, str] | None = None,
        document: Mapping[str, object] | None = None,
        reads: int = 0,
        **parameters: Any,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One request: status, headers and body of a reply that does not say no."""
        sends = total_bytes(chunks or ())
        made = {"Content-Type": _BINARY, "Content-Length": str(sends), **(headers or {})}
        given = headers if chunks is None else made

        async def ask() -> tuple[int, Mapping[str, str], bytes]:
            import aiohttp

            fs = self._fs
            await fs._set_session()  # noqa: SLF001  # the session with its options and its proxy
            silent = float(self._options.get("requests_timeout") or _SILENT_S)  # type: ignore[arg-type]
            async with fs.session.request(
                method=method,
                url=path if path.startswith("http") else f"{fs._location}/{path}",  # noqa: SLF001
                params=fs._get_params(parameters),  # noqa: SLF001  # adds who pays for the request
                headers=fs._get_headers(given),  # noqa: SLF001  # adds the token, fresh
                json=document,
                data=None if chunks is None else _stream(chunks),
                allow_redirects=False,  # 308 is no redirect here
                timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=silent),
            ) as reply:
                content = await reply.read()
                if reply.status >= 400:
                    raise GcsError(reply.status, content)
                return reply.status, reply.headers, content

        answer: tuple[int, Mapping[str, str], bytes] = self._ask(ask, sends=sends + reads)
        return answer

    def _object(self, name: str) -> str:
        bucket, key = self._where(name)
        return f"storage/v1/b/{quote(bucket, safe='')}/o/{quote(key, safe='')}"

    def _uploads(self) -> str:
        return f"upload/storage/v1/b/{quote(self._where('')[0], safe='')}/o"

    def _place(self, name: str, chunks: Sequence[memoryview], tag: str | None) -> str:
        # 0 is the generation of what is not there.
        condition = {} if tag == ANY else {"ifGenerationMatch": tag or "0"}
        facts = json.dumps({"name": self._where(name)[1], "crc32c": _crc32c(chunks)}).encode()
        edge = secrets.token_hex(16).encode()
        json_type, data_type = b"application/json; charset=UTF-8", _BINARY.encode()
        head = b"--%b\r\nContent-Type: %b\r\n\r\n%b\r\n--%b\r\nContent-Type: %b\r\n\r\n"
        framed = [
            memoryview(head % (edge, json_type, facts, edge, data_type)),
            *chunks,
            memoryview(b"\r\n--%b--\r\n" % edge),
        ]
        _, _, content = self._writing(
            "POST",
            self._uploads(),
            chunks=framed,
            headers={"Content-Type": f"multipart/related; boundary={edge.decode()}"},
            uploadType="multipart",
            **condition,
        )
        made = json.loads(content)
        check(made, chunks)
        return str(made["generation"])

    def swap(self, name: str, data: bytes, tag: str | None) -> str | None:
        """A tag that is no generation belongs to nothing; 0 would mean that nothing is there."""
        if tag is not None and not (tag.isdigit() and int(tag)):
            return None
        return super().swap(name, data, tag)

    def _writing(self, *args: Any, **more: Any) -> tuple[int, Mapping[str, str], bytes]:
        """A request for which nothing but the bucket can be missing."""
        try:
            return self.request(*args, **more)
        except GcsError as error:
            if error.status == 404:
                error.error_code = "NoSuchBucket"
            raise

    def open_session(self, name: str) -> str:
        """The address of a new resumable upload."""
        _, headers, _ = self._writing(
            "POST",
            self._uploads(),
            document={"name": self._where(name)[1]},
            headers={"X-Upload-Content-Type": _BINARY},
            uploadType="resumable",
        )
        return str(headers["Location"])

    def _begin(self, name: str, parts: Sequence[Sequence[memoryview]]) -> Upload:
        return _Resumable(self, name, parts)

    def _fetch(self, name: str, start: int, length: int | None) -> tuple[bytes, str]:
        span = {} if length is None else {"Range": f"bytes={start}-{start + length - 1}"}
        _, headers, content = self.request(
            "GET",
            self._object(name),
            headers={"Accept-Encoding": "identity", **span},
            reads=_WHOLE if length is None else length,
            alt="media",
        )
        return content, str(headers.get("x-goog-generation", ""))

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """The bytes of one generation, which is their tag."""
        content, tag = self._fetch(name, 0, None)
        if tag:
            return content, tag
        # A server that does not tell it with the bytes: ask before and after, until they agree.
        found = self._generation(name)
        while True:
            content, _ = self._fetch(name, 0, None)
            now = self._generation(name)
            if now == found:
                return content, found
            found = now

    def _generation(self, name: str) -> str:
        return str(json.loads(self.request("GET", self._object(name))[2])["generation"])

    def size(self, name: str) -> int:
        """The object's facts."""
        return int(json.loads(self.request("GET", self._object(name), fields="size")[2])["size"])

    def _keys(self, prefix: str, *, deep: bool) -> Iterator[str]:
        bucket = self._where("")[0]
        where: dict[str, str] = {"prefix": prefix, "fields": "items/name,prefixes,nextPageToken"}
        if not deep:
            where["delimiter"] = "/"
        while True:
            _, _, content = self._writing(
                "GET", f"storage/v1/b/{quote(bucket, safe='')}/o", reads=_WHOLE, **where
            )
            page = json.loads(content)
            yield from (str(item["name"]) for item in page.get("items") or ())
            yield from map(str, page.get("prefixes") or ())
            if not page.get("nextPageToken"):
                return
            where["pageToken"] = page["nextPageToken"]

    def _remove(self, name: str) -> None:
        self.request("DELETE", self._object(name))


class _Resumable:
    """One resumable upload; its parts go in order, each from where the server says it stands."""

    parallel = 1

    def __init__(
        self, backend: GcsBackend, name: str, parts: Sequence[Sequence[memoryview]]
    ) -> None:
        self.count = len(parts)
        self._backend = backend
        self._name = name
        self._chunks = [chunk for part in parts for chunk in part]
        self._size = total_bytes(self._chunks)
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + total_bytes(part))
        self._at: int | None = 0
        """How much the server has; None: it has to be asked."""
        self._address = ""
        self._made: Mapping[str, Any] | None = None

    def begin(self) -> None:
        """Open a session; one that is forgotten is dropped by the server within a week."""
        self._address = self._backend.open_session(self._name)

    def send(self, number: int) -> None:
        """Send up to the end of a part, however often the server takes only some of it."""
        end = self._starts[number + 1]
        while self._made is None:
            at = self._ask() if self._at is None else self._at
            if at >= end and end < self._size:
                return
            if self._made is None:
                self._at = None
                span = f"bytes {at}-{end - 1}/{self._size}"
                self._put(list(_cut(self._chunks, at, end)), span)

    def _ask(self) -> int:
        """How much has arrived."""
        self._put([], f"bytes */{self._size}")
        return self._at or 0

    def _put(self, chunks: list[memoryview], span: str) -> None:
        try:
            status, headers, content = self._backend.request(
                "PUT", self._address, chunks=chunks, headers={"Content-Range": span}
            )
        except GcsError as error:
            if error.status not in {404, 410}:
                raise
            self._at = 0
            self.begin()
            raise DamagedUploadError("the server has forgotten the upload") from error
        if status == _INCOMPLETE:
            last = headers.get("Range", "").rpartition("-")[2]
            self._at = int(last) + 1 if last else 0
        else:
            self._made, self._at = json.loads(content), self._size

    def finish(self) -> None:
        """Compare the sums; what is damaged is deleted, if nobody has replaced it by now."""
        if self._made is None:
            self.send(self.count - 1)
        made = self._made or {}
        try:
            check(made, self._chunks)
        except DamagedUploadError:
            with contextlib.suppress(GcsError):
                path = self._backend._object(self._name)  # noqa: SLF001  # of the same room
                self._backend.request("DELETE", path, ifGenerationMatch=made["generation"])
            self._at, self._made = 0, None
            self.begin()
            raise

    def abort(self) -> None:
        """Cancel the session."""
        if self._address and self._made is None:
            with contextlib.suppress(GcsError):  # 499 is its way to say yes
                self._backend.request("DELETE", self._address)


def check(made: Mapping[str, Any], chunks: Sequence[memoryview]) -> None:
    """Raise unless the server has got these bytes."""
    found, size = int(made.get("size", -1)), total_bytes(chunks)
    if found != size:
        raise DamagedUploadError(f"found {found} bytes after sending {size}")
    told = made.get("crc32c")
    if told and told != _crc32c(chunks):
        raise DamagedUploadError(f"found crc32c {told} of {size} bytes, expected another")


def _crc32c(chunks: Sequence[memoryview]) -> str:
    import google_crc32c

    value = 0
    for piece in pieces(chunks, 8 << 20):
        value = google_crc32c.extend(value, bytes(piece))
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def _cut(chunks: Sequence[memoryview], start: int, end: int) -> Iterator[memoryview]:
    """The views of the bytes from `start` to `end`."""
    at = 0
    for chunk in chunks:
        piece = chunk[max(0, start - at) : max(0, end - at)]
        at += chunk.nbytes
        if piece.nbytes:
            yield piece


async def _stream(chunks: Sequence[memoryview]) -> AsyncIterator[bytes]:
    """The bytes in small copies, so that an upload of any size needs no more than one of them."""
    for piece in pieces(chunks, 256 << 10):
        yield bytes(piece)
