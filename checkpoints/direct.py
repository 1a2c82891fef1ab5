"""Large buffers to local disks past the page cache: the disk reads them straight from where they lie.

Steadier and cheaper than buffered writes, and it needs no memory beside the buffer. Where a file system
or an address does not allow it, the caller is told and writes the usual way.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Final

ALIGNMENT: Final = 4096
CHUNK_BYTES: Final = 8 << 20
SMALLEST: Final = 1 << 20
"""Below this the page cache is as fast, and a small file needs no flags."""
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def write_direct(fd: int, data: memoryview) -> int:
    """Write the whole blocks of `data` to the start of an open file; how many bytes that were.

    0 where the file system or the address of the data does not allow it. The file is in its usual mode
    again afterwards, its position at the end of what was written.
    """
    whole = data.nbytes - data.nbytes % ALIGNMENT
    if whole < SMALLEST or not hasattr(os, "O_DIRECT"):
        return 0
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno in _REFUSALS:
            return 0
        raise
    done = 0
    try:
        while done < whole:
            chunk = data[done : min(done + CHUNK_BYTES, whole)]
            done += os.pwrite(fd, chunk, done)
            if (
                done % ALIGNMENT
            ):  # a short write in the middle of a block: the rest goes the usual way
                break
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    os.lseek(fd, done, os.SEEK_SET)
    return done
