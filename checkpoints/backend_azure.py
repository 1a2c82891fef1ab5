"""Azure blobs.

adlfs finds the credentials and makes the client; the requests are this room's own, because adlfs keeps
listings, retries by itself and asks more often. Large objects are blocks, sent beside each other and
committed under one list: until then nothing of them is seen, and what is never committed goes away by
itself within a week.
"""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Final

import fsspec.asyn

from checkpoints.backend_objects import ANY, ObjectBackend
from checkpoints.uploads import PARALLEL, Body, Upload, total_bytes

_WHOLE: Final = 1 << 30


class AzureBackend(ObjectBackend):
    """The requests of the blob service."""

    most_parts = 50_000

    def _disconnect(self, fs: Any) -> None:
        with contextlib.suppress(Exception):  # a client that is half made, or closed already
            fsspec.asyn.sync(fs.loop, fs.service_client.close, timeout=5)

    def _blob(self, name: str) -> Any:
        container, key = self._where(name)
        return self._fs.service_client.get_blob_client(container=container, blob=key)

    def blob(self, method: str, name: str, *args: Any, sends: int = 0, **more: Any) -> Any:
        """One request on one blob."""
        call = getattr(self._blob(name), method)
        return self._ask(call, *args, sends=sends, **more, **self._limits())

    def _limits(self) -> dict[str, Any]:
        """For each request: one try, since the store counts them, and a bound on silence."""
        given = {
            key: self._options[key]
            for key in ("timeout", "connection_timeout", "read_timeout")
            if self._options.get(key) is not None
        }
        return {"connection_timeout": 5, "read_timeout": 30, **given, "retry_total": 0}

    def _place(self, name: str, chunks: Sequence[memoryview], tag: str | None) -> str:
        condition: dict[str, Any] = {"overwrite": tag is not None}
        if tag not in {None, ANY}:
            from azure.core import MatchConditions

            condition |= {"etag": tag, "match_condition": MatchConditions.IfNotModified}
        size = total_bytes(chunks)
        data = b"".join(chunks)  # one part at most: the client's check of the content needs bytes
        reply = self.blob(
            "upload_blob", name, data, sends=size, length=size, validate_content=True, **condition
        )
        return str(reply["etag"])

    def _begin(self, name: str, parts: Sequence[Sequence[memoryview]]) -> Upload:
        return _Blocks(self, name, parts)

    def _fetch(self, name: str, start: int, length: int | None) -> tuple[bytes, str]:
        blob, limits = self._blob(name), self._limits()
        span = {} if length is None else {"offset": start, "length": length}

        async def fetch() -> tuple[bytes, str]:
            reply = await blob.download_blob(max_concurrency=1, **span, **limits)
            return await reply.readall(), str(reply.properties.etag)

        data, tag = self._ask(fetch, sends=_WHOLE if length is None else length)
        return bytes(data), str(tag)

    def size(self, name: str) -> int:
        """The blob's own length."""
        return int(self.blob("get_blob_properties", name).size)

    def _keys(self, prefix: str, *, deep: bool) -> Iterator[str]:
        container = self._fs.service_client.get_container_client(self._where("")[0])
        limits = self._limits()

        async def listed() -> list[str]:
            ask = container.list_blobs if deep else container.walk_blobs
            return [str(item.name) async for item in ask(name_starts_with=prefix, **limits)]

        yield from self._ask(listed, sends=_WHOLE)

    def _remove(self, name: str) -> None:
        self.blob("delete_blob", name)


class _Blocks:
    """Blocks under ids that no other writer has."""

    parallel = PARALLEL

    def __init__(
        self, backend: AzureBackend, name: str, parts: Sequence[Sequence[memoryview]]
    ) -> None:
        self.count = len(parts)
        self._backend = backend
        self._name = name
        self._parts = parts
        self._token = secrets.token_hex(8)

    def _id(self, number: int) -> str:
        return f"{self._token}-{number:06d}"

    def begin(self) -> None:
        """There is nothing to open."""

    def send(self, number: int) -> None:
        """Send one block, with a hash that the server compares."""
        body = Body(self._parts[number])
        size = len(body)
        self._backend.blob(
            "stage_block",
            self._name,
            self._id(number),
            body,
            sends=size,
            length=size,
            validate_content=True,
        )

    def finish(self) -> None:
        """Commit the list; committing the same blocks again changes nothing."""
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(block_id=self._id(number)) for number in range(self.count)]
        self._backend.blob("commit_block_list", self._name, blocks)

    def abort(self) -> None:
        """Blocks cannot be taken back: they are never seen, and the service drops them."""
