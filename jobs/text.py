"""Text files at any fsspec URL as windows of bytes, read once per node into a cache file.

Promises: files are taken in an order that depends on their names alone, up to a bound on bytes; the
held-out part is the same everywhere; the cache file is whole or not there; items are read from it
through the page cache, so that all ranks and loader workers of a node share one copy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from jobs.errors import JobError
from jobs.tensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

FORMAT = 1
BATCH_BYTES = 16 << 20
MAGIC = "*?["
# What tells two versions of a file apart, as far as its file system knows it.
VERSION_KEYS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "md5Hash", "generation")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file of a corpus: its name below the corpus, where it lies, and which version it is."""

    name: str
    path: str
    size_bytes: int
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text files, and how much of them is used for what."""

    url: str | None = None
    """A file, a folder or a pattern; None: the source of Python's own standard library."""

    exclude: Sequence[str] = ()
    """Names of folders that are left out."""

    max_bytes: int = 4_000_000
    """How much text is read at most."""

    heldout: float = 0.05
    """The part of it that is kept for evaluation."""

    cache: str | None = None
    """The folder of the cache file; None: elastic-trainer/ in the user's cache folder."""

    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Options of the URL's file system."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            JobError: A number is out of its range.
        """
        if self.max_bytes < 64:
            raise JobError(f"args.max_bytes: found {self.max_bytes}, expected at least 64")
        if not 0 <= self.heldout < 1:
            raise JobError(f"args.heldout: found {self.heldout}, expected at least 0 and below 1")

    def prepare(self) -> Path:
        """Make the cache file, if it is not there yet, and give its path.

        Raises:
            JobError: No file matches, none can be read, or the cache folder cannot be written.
        """
        files = self.find()
        path = self._cache_folder() / f"text-{self._key(files)}.safetensors"
        if path.is_file():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path, files)
        except OSError as error:
            raise JobError(
                f"args.cache: {path.parent}: cannot be written ({error.strerror or error}); "
                "name another folder"
            ) from error
        return path

    def find(self) -> list[TextFile]:
        """List the files, each name's hash deciding its place, so that any prefix is a fair sample.

        Raises:
            JobError: No file matches, or the place cannot be listed.
        """
        found = self._find_library() if self.url is None else self._find_url(self.url)
        left_out = set(self.exclude)
        kept = [file for file in found if left_out.isdisjoint(file.name.split("/")[:-1])]
        if not kept:
            raise JobError(f"args.url: {self.url}: found no file with text, expected at least one")
        return sorted(kept, key=lambda file: (_digest(file.name), file.name))

    def _find_library(self) -> Iterator[TextFile]:
        """List the standard library's source; what is left out is not even looked at.

        Python installs packages below its own library: they can be ten times as many files.
        """
        root = Path(sysconfig.get_path("stdlib"))
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in self.exclude]
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                if size := path.stat().st_size:
                    name = path.relative_to(root).as_posix()
                    version = str(path.stat().st_mtime_ns)
                    yield TextFile(name=name, path=str(path), size_bytes=size, version=version)

    def _find_url(self, url: str) -> list[TextFile]:
        """List a file, a folder or a pattern of any file system."""
        try:
            system, place = self._file_system()
            is_pattern = any(character in place for character in MAGIC)
            found = (system.glob if is_pattern else system.find)(place, detail=True)
        except (OSError, ValueError, ImportError) as error:
            raise JobError(f"args.url: {url}: cannot be listed ({error})") from error
        root = _root(place)
        return [
            TextFile(
                name=path.removeprefix(root).lstrip("/") or path.rpartition("/")[2],
                path=path,
                size_bytes=int(info["size"]),
                version=json.dumps([str(info.get(key)) for key in VERSION_KEYS]),
            )
            for path, info in found.items()
            if info["type"] == "file" and info["size"]
        ]

    def _file_system(self) -> tuple[Any, str]:
        """The URL's file system, and the place in it; a listing is never taken from a cache."""
        import fsspec  # here: the shipped digits need none of it

        system, place = fsspec.core.url_to_fs(
            self.url or "file:///", use_listings_cache=False, **self.storage_options
        )
        return system, place

    def _key(self, files: Sequence[TextFile]) -> str:
        """A name for what will be in the cache file."""
        listed = [[file.name, file.size_bytes, file.version] for file in files]
        return _digest(json.dumps([FORMAT, self.max_bytes, self.heldout, self.url, listed]))[:24]

    def _cache_folder(self) -> Path:
        """The folder of the cache files, the same for all processes of a user on a node."""
        if self.cache:
            return Path(self.cache).expanduser()
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(home).expanduser() / "elastic-trainer"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            logger.warning("%s cannot be made; the text is cached in the temporary folder", folder)
            return Path(tempfile.gettempdir()) / f"elastic-trainer-text-{os.getuid()}"
        return folder

    def _write(self, path: Path, files: Sequence[TextFile]) -> None:
        """Read the files and write bytes, and where each document begins, in one go."""
        text = bytearray()
        starts = [0]
        for part in self._read(files):
            text += part[: self.max_bytes - len(text)]
            starts.append(len(text))
            if len(text) >= self.max_bytes:
                break
        if len(text) < 2:
            raise JobError(f"args.url: {self.url}: found {len(text)} bytes of text, expected 2")
        # The held-out part comes first: with hashed order it is as fair a sample as any.
        border = int(len(text) * self.heldout)
        tensors = {
            "text": torch.frombuffer(text, dtype=torch.uint8),
            "heldout_starts": torch.tensor([at for at in starts if at < border] + [border]),
            "train_starts": torch.tensor([border] + [at for at in starts if at > border]),
        }
        if border == 0:
            tensors["heldout_starts"] = torch.zeros(1, dtype=torch.int64)
        write_tensors(path, tensors, {"sha256": hashlib.sha256(text).hexdigest()})
        logger.info("%d bytes of %d files are in %s", len(text), len(starts) - 1, path)

    def _read(self, files: Sequence[TextFile]) -> Iterator[bytes]:
        """Read the files in order, a batch at a time: object stores serve many at once."""
        system, _ = self._file_system()
        budget = self.max_bytes
        rest = list(files)
        while rest and budget > 0:
            batch: list[TextFile] = []
            while rest and sum(file.size_bytes for file in batch) < min(BATCH_BYTES, budget):
                batch.append(rest.pop(0))
            ends = [min(file.size_bytes, self.max_bytes) for file in batch]
            parts = system.cat_ranges([file.path for file in batch], [0] * len(batch), ends)
            for file, part in zip(batch, parts, strict=True):
                if isinstance(part, Exception):
                    raise JobError(f"args.url: {file.path}: cannot be read ({part})") from part
                budget -= len(part)
                yield bytes(part)


class Windows(Dataset[Tensor]):
    """Windows of `block` bytes and the next one, within one document each; the last are shorter."""

    def __init__(self, path: Path, part: str, block: int) -> None:
        self.path = path
        self.part = part
        self.block = block
        tensors, notes = read_tensors(path)
        self._text = tensors["text"]
        borders = tensors[f"{part}_starts"]
        self._starts, self._lengths = cut(borders[:-1], borders[1:], block)
        self.sha256 = notes["sha256"]

    def __reduce__(self) -> tuple[type[Windows], tuple[Path, str, int]]:
        """A spawned loader worker maps the file again, in place of getting a copy of its bytes."""
        return type(self), (self.path, self.part, self.block)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self._starts[index])
        # A copy: a view would take all the text along when a loader worker hands it over.
        return self._text[start : start + int(self._lengths[index]) + 1].clone()


def cut(starts: Tensor, stops: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Cut documents into windows: where each begins, and how many bytes it predicts (1 to block).

    Every byte but the first of its document is predicted exactly once.
    """
    predicted = (stops - starts - 1).clamp(min=0)
    counts = (predicted + block - 1) // block
    document = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.cumsum(counts, 0) - counts
    offset = (torch.arange(len(document)) - first[document]) * block
    return starts[document] + offset, (predicted[document] - offset).clamp(max=block)


def _root(place: str) -> str:
    """The folder above the first name that is a pattern; a place without patterns is its own."""
    folders = place.split("/")
    for count, name in enumerate(folders):
        if any(character in name for character in MAGIC):
            return "/".join(folders[:count])
    return place


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
