"""S3, and what speaks like it.

One request for each small operation, where fsspec's general methods take two or three; listings go by
prefix, and a missing bucket is an error in them, never an empty listing.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import fsspec.asyn

from checkpoints.backend_fsspec import ObjectBackend, past_the_end
from checkpoints.backends import Verdict, classify

_BULK: Final = 1000


class S3Backend(ObjectBackend):
    """S3 and what speaks like it: one request for each small operation, listings by prefix."""

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        config = dict(arguments.get("config_kwargs") or {})
        config.setdefault("connect_timeout", 5)
        config.setdefault("read_timeout", 30)
        config["retries"] = {"mode": "standard", "total_max_attempts": 1}
        return {**arguments, "config_kwargs": config}

    def _open(self) -> tuple[Any, str]:
        fs, root = super()._open()
        fs.retries = 1
        return fs, root

    def close(self) -> None:
        """Close the client of this process."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None and made[0] == os.getpid() and made[1]._s3 is not None:  # noqa: SLF001
            made[1].close_session(made[1].loop, made[1]._s3)  # noqa: SLF001

    def _key(self, name: str) -> dict[str, str]:
        bucket, key, _ = self._fs.split_path(self._path(name))
        return {"Bucket": bucket, "Key": key}

    def check(self) -> None:
        """List at most one object: that needs no right on the rest of the bucket."""
        where = self._key("")
        self._fs.call_s3("list_objects_v2", Bucket=where["Bucket"], Prefix=where["Key"], MaxKeys=1)

    def swap(self, name: str, data: bytes, tag: str | None) -> str | None:
        """One conditional request; the tag is the ETag."""
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            reply = self._fs.call_s3("put_object", **self._key(name), Body=data, **condition)
        except Exception as error:
            # A missing object has no tag: for AWS that is 404, for others 412.
            if classify(error) in {Verdict.EXISTS, Verdict.MISSING}:
                return None
            raise
        return str(reply["ETag"])

    def read(self, name: str, limit_bytes: int | None) -> bytes:
        """One request, where fsspec would ask for the size first."""
        return (
            self._fetch(name, None)[0] if limit_bytes is None else self._range(name, 0, limit_bytes)
        )

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """Bytes and ETag out of one reply, so that they belong together."""
        return self._fetch(name, None)

    def _range(self, name: str, start: int, length: int) -> bytes:
        try:
            return self._fetch(name, f"bytes={start}-{start + length - 1}")[0]
        except Exception as error:
            if past_the_end(error):
                return b""
            raise

    def _fetch(self, name: str, span: str | None) -> tuple[bytes, str]:
        fs = self._fs
        where = self._key(name)
        if span is not None:
            where["Range"] = span

        async def fetch() -> tuple[bytes, str]:
            reply = await fs._call_s3("get_object", **where)  # noqa: SLF001  # body and tag of one reply
            body = reply["Body"]
            try:
                return await body.read(), str(reply["ETag"])
            finally:
                body.close()

        data, tag = fsspec.asyn.sync(fs.loop, fetch)
        return bytes(data), str(tag)

    def size(self, name: str) -> int:
        """One request, where fsspec would also look for a folder of that name."""
        return int(self._fs.call_s3("head_object", **self._key(name))["ContentLength"])

    def names(self, prefix: str) -> list[str]:
        """List by prefix, page by page."""
        root = self._key("")["Key"]
        lead = f"{root}/" if root else ""
        found: list[str] = []
        for page in self._pages(lead + prefix):
            found.extend(str(item["Key"])[len(lead) :] for item in page.get("Contents", ()))
        # A "folder" that some tool has made is an object whose name ends in a slash.
        return [name for name in found if name and not name.endswith("/")]

    def _pages(self, prefix: str, **more: str) -> Iterator[Mapping[str, Any]]:
        where = {"Bucket": self._key("")["Bucket"], "Prefix": prefix, **more}
        while True:
            page = self._fs.call_s3("list_objects_v2", **where)
            yield page
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def children(self, folder: str) -> list[str]:
        """List up to the next slash."""
        lead = self._key(folder)["Key"]
        lead = f"{lead}/" if lead else ""
        found: list[str] = []
        for page in self._pages(lead, Delimiter="/"):
            found.extend(str(item["Key"])[len(lead) :] for item in page.get("Contents", ()))
            found.extend(
                str(item["Prefix"])[len(lead) :] for item in page.get("CommonPrefixes", ())
            )
        return [name.rstrip("/") for name in found if name.rstrip("/")]

    def delete(self, name: str) -> None:
        """Delete one object; S3 does not mind a missing one."""
        self._fs.call_s3("delete_object", **self._key(name))

    def delete_tree(self, folder: str) -> None:
        """Delete in bulk, with the folder's own mark, which some servers keep and show."""
        keys = [self._key(name) for name in [*self.names(f"{folder}/"), f"{folder}/"]]
        for at in range(0, len(keys), _BULK):
            batch = [{"Key": where["Key"]} for where in keys[at : at + _BULK]]
            reply = self._fs.call_s3(
                "delete_objects",
                Bucket=keys[at]["Bucket"],
                Delete={"Objects": batch, "Quiet": True},
            )
            for problem in reply.get("Errors", ()):
                raise OSError(
                    f"{problem.get('Key')}: {problem.get('Code')}: {problem.get('Message')}"
                )
