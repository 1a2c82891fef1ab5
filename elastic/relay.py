"""The short half of a warm start: what torchrun started stays behind as a stub, a forked worker does the work.

The node's warm process (`elastic.warm`) has imported everything; the stub hands it its arguments, environment,
folder and standard streams, passes signals on, and ends as the worker ends, by the same code or signal. Guarantees:
whatever is unexpected before the worker runs leads to the ordinary start in this process, with one line at most; the
worker never outlives the stub, and no worker is forked for a stub that has turned away.

Imports what costs next to nothing: a stub is there in 20 ms, where `socket` or `typing` alone would double that.
"""

import _socket  # the C half of socket
import os
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

__all__ = [
    "ACCEPTED",
    "ENDED",
    "GO",
    "REFUSED",
    "RELAYED",
    "SOCKET",
    "hand_over",
    "is_off",
    "pack",
    "peer_of",
    "unpack",
]

SOCKET = "warm.sock"
"""The warm process's socket, in the private folder of its agent."""
ACCEPTED = b"A"
REFUSED = b"R"
"""Followed by the reason."""
ENDED = b"E"
"""Followed by the worker's wait status, four bytes."""
GO = b"G"
"""The stub's last word: from here on it waits for the worker's end, however long."""
_NOT_RELAYED = (
    "SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGCONT", "SIGCHLD", "SIGPIPE"
)  # fmt: skip
RELAYED = frozenset(map(int, signal.valid_signals())).difference(
    int(getattr(signal, name)) for name in _NOT_RELAYED
)
"""All but those that cannot be, or are a process's own business; SIGSEGV and its like too, for whoever sends them."""
_ANSWER_S = 2.0
"""A warm process that does not answer by then is stopped or stuck: the ordinary start takes less."""
_LOOK_MS = 1000
_STOPPED_LOOKS = 2
"""Found stopped so many times in a row, the warm process is made to go on: what stops a whole job stops the stub too."""
_OFF = frozenset({"0", "off", "no", "false"})
_SIZE = 8
_PRIVATE = 0o077


def hand_over(environ: "Mapping[str, str]") -> None:
    """Have the node's warm process run this worker and end as it ends; returns where there is none to do it."""
    if is_off(environ) or "TORCHELASTIC_RUN_ID" not in environ:
        return
    agent = os.getppid()
    folder = _find_folder(environ, agent)
    if folder is None:
        return
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    refusal: str | None
    try:
        refusal = _ask(sock, folder)
        if refusal is None:
            refusal = _relay(sock, agent)
    except TimeoutError:
        # All workers of the node find the same; one says it.
        silent = f"warm start: found no answer within {_ANSWER_S:g} s"
        refusal = silent if environ.get("LOCAL_RANK") == "0" else ""
    except OSError:
        refusal = ""  # it has ended or is about to
    sock.close()
    if refusal:
        sys.stderr.write(f"{refusal}; this start is an ordinary one\n")


def is_off(environ: "Mapping[str, str]") -> bool:
    """Tell whether the environment switches warm starts off."""
    return environ.get("ELASTIC_WARM", "").lower() in _OFF


# ------------------------------------------------------------------------------------------- asking
def _find_folder(environ: "Mapping[str, str]", agent: int) -> str | None:
    """Find the private folder of this agent (`elastic.agent.node_folder`) if a warm process listens in it."""
    try:
        boot = _read("/proc/sys/kernel/random/boot_id")[:8]
        start = _stat(agent)[19]
    except (OSError, IndexError):
        return None
    given = [environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    for base in (*given, "/tmp", "/var/tmp", "/usr/tmp"):  # noqa: S108 - where tempfile looks
        root = f"{base}/elastic-trainer-{os.getuid()}"
        folder = f"{root}/{boot}-{agent}-{start}"
        if base and os.path.exists(f"{folder}/{SOCKET}"):  # noqa: PTH110 - no pathlib here
            return folder if _is_private(root) and _is_private(folder) else None
    return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _stat(pid: int) -> "list[str]":
    """What the kernel says of a process after its name."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _is_private(folder: str) -> bool:
    found = os.lstat(folder)
    return found.st_uid == os.getuid() and not found.st_mode & _PRIVATE


def _ask(sock: "_socket.socket", folder: str) -> str | None:
    """Ask for a worker; returns why there will be none (empty: no reason worth telling), None where it runs."""
    sock.settimeout(_ANSWER_S)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Through the descriptor: a socket's address holds only 107 bytes.
        sock.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")
    finally:
        os.close(descriptor)
    if peer_of(sock)[1] != os.getuid():
        return f"{folder}/{SOCKET} is served by user {peer_of(sock)[1]}, expected {os.getuid()}"
    message = pack(sys.argv, os.getcwd(), os.environb)  # noqa: PTH109 - no pathlib here
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
    sent = sock.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    if sent < len(message):  # nothing to send would fail where the answer has come already
        sock.sendall(memoryview(message)[sent:])
    answer = sock.recv(1024)
    if answer[:1] != ACCEPTED:
        return _reason(answer)
    sock.settimeout(None)
    sock.sendall(GO)
    return None


def _reason(answer: bytes) -> str:
    reason = answer[1:].decode(errors="replace")
    return f"warm start: {reason}" if reason else ""


def pack(argv: "Sequence[str]", folder: str, environ: "Mapping[bytes, bytes]") -> bytes:
    """Put a process's arguments, folder and environment into bytes, their number in front."""
    fields = [str(len(argv)).encode(), *map(os.fsencode, argv), os.fsencode(folder)]
    fields += [name + b"=" + value for name, value in environ.items()]
    data = b"\0".join(fields)
    return len(data).to_bytes(_SIZE, "little") + data


def unpack(data: bytes) -> tuple[list[str], str, dict[str, str]] | None:
    """Read what `pack` gave: arguments, folder, environment; None while bytes are missing.

    Raises:
        ValueError: Raised when it is something else.
    """
    size = int.from_bytes(data[:_SIZE], "little")
    if len(data) < _SIZE or len(data) < _SIZE + size:
        return None
    count, *fields = os.fsdecode(data[_SIZE : _SIZE + size]).split("\0")
    words = int(count)
    if not 0 < words < len(fields):
        raise ValueError(f"warm start: found {words} arguments in {len(fields)} fields")
    environ = dict(field.split("=", 1) for field in fields[words + 1 :])
    return fields[:words], fields[words], environ


def peer_of(sock: "_socket.socket") -> tuple[int, int]:
    """Return pid and user of the process at the other end, as the kernel knows them."""
    found = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    return int.from_bytes(found[:4], sys.byteorder), int.from_bytes(found[4:8], sys.byteorder)


# ------------------------------------------------------------------------------------------- being the stub
def _relay(sock: "_socket.socket", agent: int) -> str:
    """Pass signals on until the worker has ended, and end alike; returns why where it could not be set up."""
    came: list[int] = []

    def handler(number: int, _frame: object) -> None:
        came.append(number)

    # The number goes out where the kernel hands the signal over. A Python handler alone could come too late: one that
    # arrives just before a blocking call is not handled until that returns. Through a pipe, since the socket's other end may
    # be gone by then.
    sock.setblocking(False)
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    before = {}
    for number in RELAYED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    told = _hear(sock, woken)
    signal.set_wakeup_fd(-1)
    os.close(woken)
    os.close(wakes)
    if told[:1] == ENDED:
        _end_as(int.from_bytes(told[1:], "little"))
    if not told:
        # The kernel has ended the worker together with the warm process.
        # Where the agent is gone too, that is why, and there is no next start.
        if os.environ.get("LOCAL_RANK") == "0" and os.getppid() == agent:
            line = "the warm process is gone and its workers with it; the next start is an ordinary one"
            sys.stderr.write(line + "\n")
        os._exit(1)
    for number, former in before.items():
        signal.signal(number, former)
    for number in came:
        os.kill(os.getpid(), number)
    return _reason(told)


def _hear(sock: "_socket.socket", woken: int) -> bytes:
    """Wait for the warm process's last word, and pass on what comes meanwhile; empty where it is gone without."""
    told = b""
    warm, stopped = peer_of(sock)[0], 0
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    poll.register(woken, select.POLLIN)
    while not (told[:1] == ENDED and len(told) == 5):
        try:
            ready = poll.poll(_LOOK_MS)
            if not ready:
                stopped = stopped + 1 if _is_stopped(warm) else 0
                if stopped == _STOPPED_LOOKS:
                    _continue(warm)
                continue
            if any(number == woken for number, _ in ready):
                _pass_on(sock, os.read(woken, 64))
                continue
            more = sock.recv(1024)
        except BlockingIOError:
            continue
        except OSError:
            more = b""
        if not more:
            break
        told += more
    return told


def _pass_on(sock: "_socket.socket", numbers: bytes) -> None:
    try:
        sock.send(numbers)
    except OSError:
        return  # the worker has ended; how, is still to be read


def _is_stopped(pid: int) -> bool:
    try:
        return _stat(pid)[0] == "T"
    except (OSError, IndexError):
        return False


def _continue(warm: int) -> None:
    """Nobody else sees the ends of its workers, nor passes signals on to them."""
    if os.environ.get("LOCAL_RANK") == "0":
        line = f"the warm process ({warm}) was stopped (SIGSTOP) while its workers ran: it is continued"
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    try:
        os.kill(warm, signal.SIGCONT)
    except OSError:
        return  # gone, or no longer ours


def _end_as(status: int) -> "NoReturn":
    """End with the worker's exit code, or by the signal that ended it."""
    if os.WIFSIGNALED(status):
        import resource

        # The worker has left its core, if any; ours would take its place.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
