"""S3, and what speaks like it.

Large objects are multipart uploads of this room's own: the parts are views of the caller's memory, and
each carries a checksum that the server compares.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from checkpoints.backend_objects import ANY, ObjectBackend
from checkpoints.backends import Verdict, classify, error_code
from checkpoints.uploads import PARALLEL, Body, Upload, total_bytes

_BULK: Final = 1000
_WHOLE: Final = 1 << 30
"""How large an object is taken to be that is read whole, when its time is bounded."""
_MARK: Final = "upload"


class S3Backend(ObjectBackend):
    """The requests of S3."""

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        config = dict(arguments.get("config_kwargs") or {})
        config.setdefault("connect_timeout", 5)
        config.setdefault("read_timeout", 30)
        config["retries"] = {"mode": "standard", "total_max_attempts": 1}
        return {**arguments, "config_kwargs": config}

    def _connect(self) -> tuple[Any, str]:
        fs, root = super()._connect()
        fs.retries = 1
        return fs, root

    def _disconnect(self, fs: Any) -> None:
        if fs._s3 is not None:  # noqa: SLF001  # there is no public way to ask
            fs.close_session(fs.loop, fs._s3)  # noqa: SLF001

    def call(self, method: str, name: str, *, sends: int = 0, **more: Any) -> Any:
        """One request on one object."""
        bucket, key = self._where(name)
        return self._bucket(method, sends=sends, Bucket=bucket, Key=key, **more)

    def _bucket(self, method: str, *, sends: int = 0, **more: Any) -> Any:
        return self._ask(self._fs._call_s3, method, sends=sends, **more)  # noqa: SLF001  # bounded here

    def _place(self, name: str, chunks: Sequence[memoryview], tag: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if tag is None else {} if tag == ANY else {"IfMatch": tag}
        sends = total_bytes(chunks)
        reply = self.call("put_object", name, sends=sends, Body=Body(chunks), **condition)
        return _tag(reply)

    def _begin(self, name: str, parts: Sequence[Sequence[memoryview]]) -> Upload:
        return _Multipart(self, name, parts)

    def _fetch(self, name: str, start: int, length: int | None) -> tuple[bytes, str]:
        fs = self._fs
        bucket, key = self._where(name)
        span = {} if length is None else {"Range": f"bytes={start}-{start + length - 1}"}

        async def fetch() -> tuple[bytes, str]:
            reply = await fs._call_s3("get_object", Bucket=bucket, Key=key, **span)  # noqa: SLF001
            body = reply["Body"]
            try:
                return await body.read(), _tag(reply)
            finally:
                body.close()

        data, tag = self._ask(fetch, sends=_WHOLE if length is None else length)
        return bytes(data), str(tag)

    def size(self, name: str) -> int:
        """One request, where fsspec would also look for a folder of that name."""
        return int(self.call("head_object", name)["ContentLength"])

    def _keys(self, prefix: str, *, deep: bool) -> Iterator[str]:
        where: dict[str, Any] = {"Bucket": self._where("")[0], "Prefix": prefix}
        if not deep:
            where["Delimiter"] = "/"
        while True:
            page = self._bucket("list_objects_v2", **where)
            if not page.keys() & {
                "IsTruncated",
                "KeyCount",
                "Name",
            }:  # another server's page is no empty store
                raise _senseless("list of objects")
            yield from (str(item["Key"]) for item in page.get("Contents", ()))
            yield from (str(item["Prefix"]) for item in page.get("CommonPrefixes", ()))
            if not page.get("IsTruncated"):
                return
            if "NextContinuationToken" not in page:
                raise _senseless("NextContinuationToken")
            where["ContinuationToken"] = page["NextContinuationToken"]

    def _remove(self, name: str) -> None:
        self.call("delete_object", name)

    def delete_tree(self, folder: str) -> None:
        """Delete in bulk, with the folder's own mark, which some servers keep and show."""
        places = [self._where(name) for name in [*self.names(f"{folder}/"), f"{folder}/"]]
        for at in range(0, len(places), _BULK):
            batch = [{"Key": key} for _, key in places[at : at + _BULK]]
            wanted = {"Objects": batch, "Quiet": True}
            reply = self._bucket("delete_objects", Bucket=places[at][0], Delete=wanted)
            for problem in reply.get("Errors", ()):
                raise OSError(
                    f"{problem.get('Key')}: {problem.get('Code')}: {problem.get('Message')}"
                )

    def delete_temps(self, folder: str) -> None:
        """Give up unfinished uploads to the folder, each by its id: listings never show them."""
        bucket, prefix = self._where("")[0], self._lead(folder)
        where: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        while True:
            page = self._bucket("list_multipart_uploads", **where)
            for found in page.get("Uploads", ()):
                if str(found["Key"]).startswith(prefix):
                    self._give_up(bucket, str(found["Key"]), str(found["UploadId"]))
            if not page.get("IsTruncated"):
                return
            where["KeyMarker"] = page["NextKeyMarker"]
            where["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def _give_up(self, bucket: str, key: str, upload_id: str) -> None:
        try:
            self._bucket("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)
        except Exception as error:
            # Its writer has finished it or given it up in the meantime.
            if error_code(error) != "NoSuchUpload" and classify(error) is not Verdict.MISSING:
                raise


def _tag(reply: Mapping[str, Any]) -> str:
    if "ETag" not in reply:
        raise _senseless("ETag")
    return str(reply["ETag"])


def _senseless(wanted: str) -> ConnectionError:
    """The error for what no S3 server says: something on the way answered, and may not the next time."""
    return ConnectionError(f"found a reply without {wanted}, expected one of S3")


class _Multipart:
    """A multipart upload: known by its id, and the object that it makes by a mark of its own."""

    parallel = PARALLEL

    def __init__(
        self, backend: S3Backend, name: str, parts: Sequence[Sequence[memoryview]]
    ) -> None:
        self.count = len(parts)
        self._backend = backend
        self._name = name
        self._parts = parts
        self._mark = secrets.token_hex(16)
        self._id: str | None = None
        self._sent: dict[int, Mapping[str, object]] = {}

    def begin(self) -> None:
        """Ask for an id; a lost reply leaves an empty upload, which the bucket's own rules clear."""
        metadata = {_MARK: self._mark}
        reply = self._backend.call("create_multipart_upload", self._name, Metadata=metadata)
        self._id = reply["UploadId"]

    def send(self, number: int) -> None:
        """Send one part, with its checksum."""
        chunks = self._parts[number]
        reply = self._backend.call(
            "upload_part",
            self._name,
            sends=total_bytes(chunks),
            UploadId=self._id,
            PartNumber=number + 1,
            Body=Body(chunks),
        )
        sums = {key: reply[key] for key in reply if key == "ETag" or key.startswith("Checksum")}
        sums.pop("ChecksumType", None)
        self._sent[number] = {"PartNumber": number + 1, **sums}

    def finish(self) -> None:
        """Put the parts together; after a lost reply the upload is gone and the object carries its mark."""
        parts = [self._sent[number] for number in range(self.count)]
        try:
            self._backend.call(
                "complete_multipart_upload",
                self._name,
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
            )
        except Exception as error:
            gone = error_code(error) == "NoSuchUpload" or classify(error) is Verdict.MISSING
            if not (gone and self._is_there()):
                raise

    def _is_there(self) -> bool:
        found = self._backend.call("head_object", self._name)
        return bool(found.get("Metadata", {}).get(_MARK) == self._mark)

    def abort(self) -> None:
        """Give up this upload alone: others of the same name may be another writer's."""
        if self._id is not None:
            self._backend.call("abort_multipart_upload", self._name, UploadId=self._id)
