"""Uploads a mapped file of shared memory, and tells how much memory of its own that took.

python -m tests.support.upload_worker URL OPTIONS_JSON MEGABYTES CHUNKS
"""

import hashlib
import itertools
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path


def own_bytes() -> int:
    """The anonymous memory of this process."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if "RssAnon" in line)


class Peak:
    """The most memory that was seen, in a thread of its own."""

    def __init__(self) -> None:
        self.bytes = own_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.bytes = max(self.bytes, own_bytes())

    def end(self) -> int:
        """Stop and tell."""
        self._ended.set()
        self._thread.join()
        return self.bytes


def main() -> None:
    """Upload; one line of JSON."""
    url, options, size, count = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:5])
    size <<= 20
    from checkpoints.store import open_store

    store = open_store(url, options)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        block = os.urandom(1 << 20)
        for number in range(size >> 20):
            file.write(number.to_bytes(4, "big") + block[4:])
        file.flush()
        with mmap.mmap(file.fileno(), size) as mapped:
            whole = memoryview(mapped)
            sha = hashlib.sha256(whole).hexdigest()
            edges = [size * number // count for number in range(count + 1)]
            chunks = [whole[a:b] for a, b in itertools.pairwise(edges)]
            # What the libraries need once, whatever is sent, is not an upload's.
            store.put("warm", chunks[0][: 1 << 20])
            before = own_bytes()
            peak = Peak()
            began = time.monotonic()
            store.put("large", chunks)
            took = time.monotonic() - began
            print(json.dumps({"added": peak.end() - before, "seconds": took, "sha256": sha}))
            for view in (*chunks, whole):
                view.release()
    store.close()


if __name__ == "__main__":
    main()
