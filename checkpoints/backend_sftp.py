"""A folder on another machine, by SFTP.

Rename makes both promises that a store needs: the one of the protocol fails where the name is taken,
OpenSSH's own replaces. So a name appears with all its bytes, for exactly one of many creators. What it
cannot promise: nobody asks the server's disk to sync.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from checkpoints.backend_fsspec import FsspecBackend
from checkpoints.uploads import pieces

_SILENT_S: Final = 30.0
_BLOCK_BYTES: Final = 4 << 20


class _OneAtATime:
    """A file system whose connection mixes up replies where two threads ask at once."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self.alone = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.fs, name)
        return self._alone(found) if callable(found) else found

    def _alone(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.alone:
                return call(*args, **kwargs)

        return called


class SftpBackend(FsspecBackend):
    """One SSH connection, made anew where it broke."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        super().__init__(url, options)
        self._is_paramiko = True

    def _arguments(self) -> dict[str, Any]:
        limits = {"timeout": 10.0, "banner_timeout": _SILENT_S, "auth_timeout": _SILENT_S}
        arguments = {**limits, **super()._arguments()}
        del arguments["use_listings_cache"]  # there is none; it would be taken for an option of SSH
        return arguments

    def _connect(self) -> tuple[Any, str]:
        fs, root = super()._connect()
        # The package sshfs takes over the URL where it is installed; it has another way to say all this.
        self._is_paramiko = hasattr(fs, "ftp")
        if self._is_paramiko:
            fs.ftp.get_channel().settimeout(_SILENT_S)
        return _OneAtATime(fs), root

    def _disconnect(self, fs: Any) -> None:
        if self._is_paramiko:
            fs.fs.client.close()

    def _stream(self, path: str, chunks: Sequence[memoryview]) -> None:
        fs = self._fs
        if not self._is_paramiko:
            super()._stream(path, chunks)
            return
        with fs.alone:
            file = fs.ftp.open(path, "wb")
            file.set_pipelined(True)  # else each 32 kB wait for an answer
        try:
            for piece in pieces(chunks, _BLOCK_BYTES):
                with fs.alone:
                    file.write(bytes(piece))
        finally:
            with fs.alone:
                file.close()

    def _range(self, name: str, start: int, length: int) -> bytes:
        fs = self._fs
        if not self._is_paramiko:
            return super()._range(name, start, length)
        with fs.alone, fs.ftp.open(self._path(name), "rb") as file:
            count = min(length, max(0, int(file.stat().st_size) - start))
            return b"".join(file.readv([(start, count)])) if count else b""

    def create(self, name: str, data: bytes) -> bool:
        """Write beside it, then rename by the protocol's own call, which never replaces."""
        fs = self._fs
        if not self._is_paramiko:
            return super().create(name, data)
        path = self._path(name)
        with self._sent(path, [memoryview(data)]) as temp:
            try:
                with fs.alone:
                    fs.ftp.rename(temp, path)
            except OSError:
                # The protocol has one code for all failures: is it that the name is taken?
                if not fs.exists(path):
                    raise
                self._quietly_remove(temp)
                return False
        return True
