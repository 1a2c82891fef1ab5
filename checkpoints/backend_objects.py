"""What object stores have in common: whole objects, conditions instead of locks, listings by prefix.

Each operation is one request, where fsspec's general methods take two or three, and each goes past its
caches. A write is whole or nothing by itself; there are no folders to make. A missing bucket is an error
in all of them, never an empty listing.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final

from checkpoints.backend_fsspec import FsspecBackend, past_the_end
from checkpoints.backends import Verdict, classify
from checkpoints.uploads import PART_BYTES, Upload, divide, total_bytes

ANY: Final = "*"
"""No condition: replace whatever there is."""


class ObjectBackend(FsspecBackend):
    """The operations, by way of the few requests that a subclass gives."""

    can_swap = True

    part_bytes = PART_BYTES
    most_parts = 10_000

    # ----------------------------------------------------------------------- what a subclass gives
    @abstractmethod
    def _place(self, name: str, chunks: Sequence[memoryview], tag: str | None) -> str:
        """Write in one request if the object has this tag (None: if it is missing); its new tag."""

    @abstractmethod
    def _begin(self, name: str, parts: Sequence[Sequence[memoryview]]) -> Upload:
        """How to send a large object."""

    @abstractmethod
    def _fetch(self, name: str, start: int, length: int | None) -> tuple[bytes, str]:
        """The bytes from `start` and the tag, out of one reply."""

    @abstractmethod
    def _keys(self, prefix: str, *, deep: bool) -> Iterator[str]:
        """All keys that begin with `prefix`; unless deep, up to the next slash after it."""

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Delete one object; a missing one may be an error."""

    # --------------------------------------------------------------------------------- one by one
    def _where(self, name: str) -> tuple[str, str]:
        """Bucket and key."""
        bucket, _, key = self._path(name).lstrip("/").partition("/")
        return bucket, key

    def reconnect(self) -> None:
        """Each request finds a connection of its own."""

    def check(self) -> None:
        """List at most a page: that needs no right on the rest of the bucket."""
        next(self._keys(self._lead(""), deep=False), None)

    def write(self, name: str, chunks: Sequence[memoryview]) -> None:
        """Send in one request."""
        self._place(name, chunks, ANY)

    def upload(self, name: str, chunks: Sequence[memoryview]) -> Upload | None:
        """Send what is larger than one part in parts."""
        size = total_bytes(chunks)
        if size <= self.part_bytes:
            return None
        longest = max(self.part_bytes, -(-size // self.most_parts))
        return self._begin(name, divide(chunks, -(-longest // self.part_bytes) * self.part_bytes))

    def create(self, name: str, data: bytes) -> bool:
        """Send under the condition that there is no such object."""
        return self.swap(name, data, None) is not None

    def swap(self, name: str, data: bytes, tag: str | None) -> str | None:
        """One conditional request."""
        try:
            return self._place(name, [memoryview(data)], tag)
        except Exception as error:
            # A missing object has no tag: that is 404 for some, 412 for others.
            lost = {Verdict.EXISTS, Verdict.MISSING} if tag is not None else {Verdict.EXISTS}
            if classify(error) in lost:
                return None
            raise

    def read(self, name: str, limit_bytes: int | None) -> bytes:
        """All of it, or a range."""
        if limit_bytes is None:
            return self._fetch(name, 0, None)[0]
        return self._range(name, 0, limit_bytes)

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """Bytes and tag belong together."""
        return self._fetch(name, 0, None)

    def _range(self, name: str, start: int, length: int) -> bytes:
        try:
            return self._fetch(name, start, length)[0]
        except Exception as error:
            if past_the_end(error):
                return b""
            raise

    def _lead(self, folder: str) -> str:
        key = self._where(folder)[1]
        return f"{key}/" if key else ""

    def names(self, prefix: str) -> list[str]:
        """List by prefix, page by page."""
        lead = self._lead("")
        found = [key[len(lead) :] for key in self._keys(lead + prefix, deep=True)]
        # A "folder" that some tool has made is an object whose name ends in a slash.
        return [name for name in found if name and not name.endswith("/")]

    def children(self, folder: str) -> list[str]:
        """List up to the next slash."""
        lead = self._lead(folder)
        found = [key[len(lead) :].rstrip("/") for key in self._keys(lead, deep=False)]
        return [name for name in found if name]

    def delete(self, name: str) -> None:
        """Delete one object; one that is missing is fine."""
        try:
            self._remove(name)
        except Exception as error:
            if classify(error) is not Verdict.MISSING:
                raise

    def delete_tree(self, folder: str) -> None:
        """Delete the objects, with the folder's own mark, which some servers keep and show."""
        for name in self.names(f"{folder}/"):
            self.delete(name)
        self.delete(f"{folder}/")

    def delete_temps(self, folder: str) -> None:
        """Objects need none."""
