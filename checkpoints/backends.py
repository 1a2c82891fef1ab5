"""What a store's back end has to do, what its errors mean, and which back end serves a URL.

One classification judges the errors of every file system and client library, over the whole chain of
causes: the same fault comes as an OSError from one library and as a class of its own from the next.
Back ends raise whatever their library raises; the store maps it.
"""

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Final, Protocol

from checkpoints.errors import PermanentStoreError
from checkpoints.redaction import redact, redact_url, secret_values
from checkpoints.uploads import Upload


class NotAFileError(OSError):
    """Raised by a back end where a folder, a FIFO or a loop of links lies in place of a file, or the reverse."""


class Appender(Protocol):
    """One file that grows; made by back ends that can append."""

    def write(self, data: bytes | memoryview) -> int:
        """Append in one write, without fsync; how many bytes were taken."""

    def sync(self) -> None:
        """Return when all that was written would survive a power cut."""

    def close(self) -> None:
        """Let the file go."""


class Backend(Protocol):
    """The operations under one URL; names are relative to it and were checked by the store."""

    @property
    def folder(self) -> Path | None:
        """The local folder that it is, if it is one."""

    can_swap: bool
    """Whether `swap` replaces, and does not only create."""

    def check(self) -> None:
        """Raise unless the URL can be reached (and, where that is cheap to see, written)."""

    def write(self, name: str, chunks: Sequence[memoryview]) -> None:
        """Replace an object: readers see the old or the new bytes, never a mixture."""

    def upload(self, name: str, chunks: Sequence[memoryview]) -> Upload | None:
        """How to send an object in parts; None where `write` does it, in one go."""

    def create(self, name: str, data: bytes) -> bool:
        """Create an object; False where there is one by that name."""

    def swap(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Replace the object that has `tag` (None: that is missing); its new tag, or None."""

    def read(self, name: str, limit_bytes: int | None) -> bytes:
        """The bytes of an object, at most `limit_bytes` of them."""

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """The bytes of an object and the tag that `swap` takes."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Fill `buffer` from `start`; how many bytes there were."""

    def size(self, name: str) -> int:
        """The object's size in bytes."""

    def names(self, prefix: str) -> list[str]:
        """All names that begin with `prefix`, in no order."""

    def children(self, folder: str) -> list[str]:
        """What lies directly in a folder, in no order; nothing where it is missing."""

    def delete(self, name: str) -> None:
        """Delete an object; one that is missing is fine."""

    def delete_tree(self, folder: str) -> None:
        """Delete a folder and all in it; one that is missing is fine."""

    def delete_temps(self, folder: str) -> None:
        """Delete what writers that were killed left in a folder: no listing shows it."""

    def appender(self, name: str) -> Appender | None:
        """A growing file, or None where the store has none."""

    def renew(self) -> None:
        """Make the client anew, with credentials and options as they are by now."""

    def reconnect(self) -> None:
        """Let go of a connection that has failed, where a client has just the one."""

    def close(self) -> None:
        """Let connections go."""


# --------------------------------------------------------------------------------- what errors mean
class Verdict(Enum):
    """What an error means for the one who asked."""

    MISSING = auto()
    EXISTS = auto()
    FULL = auto()
    TRANSIENT = auto()
    EXPIRED = auto()
    """The credentials were good, and their time is over: fresh ones cure it."""
    PERMANENT = auto()


_CODES: Final[Mapping[str, Verdict]] = {
    "PreconditionFailed": Verdict.EXISTS,
    "BlobAlreadyExists": Verdict.EXISTS,
    "ConditionNotMet": Verdict.EXISTS,
    "NoSuchKey": Verdict.MISSING,
    "NoSuchVersion": Verdict.MISSING,
    "BlobNotFound": Verdict.MISSING,
    "NoSuchBucket": Verdict.PERMANENT,
    "ContainerNotFound": Verdict.PERMANENT,
    "NoSuchUpload": Verdict.TRANSIENT,
    "ConditionalRequestConflict": Verdict.TRANSIENT,
    "OperationAborted": Verdict.TRANSIENT,
    "RequestTimeout": Verdict.TRANSIENT,
    "IncompleteBody": Verdict.TRANSIENT,
    "BadDigest": Verdict.TRANSIENT,
    "Md5Mismatch": Verdict.TRANSIENT,
    "XAmzContentSHA256Mismatch": Verdict.TRANSIENT,
    "ExpiredToken": Verdict.EXPIRED,
    "ExpiredTokenException": Verdict.EXPIRED,
    "ExpiredAuthenticationToken": Verdict.EXPIRED,
    "RequestExpired": Verdict.EXPIRED,
    "TokenRefreshRequired": Verdict.EXPIRED,
    "QuotaExceeded": Verdict.FULL,
    "XMinioStorageFull": Verdict.FULL,
    "InsufficientStorage": Verdict.FULL,
}
_CODES_BUSY: Final = re.compile(r"SlowDown|Unavailable|InternalError|Throttl|TooManyRequests|Busy")
_CODES_DENIED: Final = frozenset(
    {
        "AccessDenied",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "InvalidAccessKeyId",
        "InvalidAuthenticationInfo",
        "InvalidToken",
        "SignatureDoesNotMatch",
    }
)
_STATUSES: Final[Mapping[int, Verdict]] = {
    404: Verdict.MISSING,
    408: Verdict.TRANSIENT,
    409: Verdict.TRANSIENT,
    412: Verdict.EXISTS,
    425: Verdict.TRANSIENT,
    429: Verdict.TRANSIENT,
    507: Verdict.FULL,
}
_TRANSIENT_CLASSES: Final = frozenset(
    {
        "ClientConnectionError",
        "ChannelException",
        "ClientPayloadError",
        "ConnectionError",
        "EOFError",
        "EndpointConnectionError",
        "FSTimeoutError",
        "HTTPClientError",
        "NoValidConnectionsError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProxyError",
        "ResponseParserError",
        "SSHException",
        "ServerDisconnectedError",
        "ServiceRequestError",
        "ServiceResponseError",
        "TimeoutError",
        "gaierror",
    }
)
_REFUSED_CLASSES: Final = frozenset({"AuthenticationException", "BadHostKeyException"})
"""What paramiko makes subclasses of its class for broken connections."""
_CLASSES: Final[Mapping[str, Verdict]] = {
    "ResourceExistsError": Verdict.EXISTS,
    "ResourceModifiedError": Verdict.EXISTS,
    "FileExistsError": Verdict.EXISTS,
    "ResourceNotFoundError": Verdict.MISSING,
    "FileNotFoundError": Verdict.MISSING,
    "PermissionError": Verdict.PERMANENT,
}
_ERRNOS: Final[Mapping[int, Verdict]] = {
    errno.ENOSPC: Verdict.FULL,
    errno.EDQUOT: Verdict.FULL,
    **dict.fromkeys(
        (
            errno.EAGAIN,
            errno.EBUSY,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.EINTR,
            errno.EIO,
            errno.ENETDOWN,
            errno.ENETUNREACH,
            errno.ENOLCK,
            errno.EREMOTEIO,
            errno.ESTALE,
            errno.ETIMEDOUT,
        ),
        Verdict.TRANSIENT,
    ),
}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes; a context is left out, since it may be the caller's own trouble."""
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return
        yield link
        link = link.__cause__


def error_code(error: BaseException) -> str | None:
    """The vendor's own code for the error, e.g. NoSuchBucket; None where there is none."""
    for link in _causes(error):
        response = getattr(link, "response", None)
        inner = response.get("Error") if isinstance(response, Mapping) else None
        code = (
            inner.get("Code") if isinstance(inner, Mapping) else getattr(link, "error_code", None)
        )
        if isinstance(code, Enum):
            code = code.value
        if isinstance(code, str) and code and not code.isdigit():
            return code
    return None


def http_status(error: BaseException) -> int | None:
    """The HTTP status that the error stands for; None where there is none."""
    for link in _causes(error):
        response = getattr(link, "response", None)
        if isinstance(response, Mapping):
            meta = response.get("ResponseMetadata")
            found = meta.get("HTTPStatusCode") if isinstance(meta, Mapping) else None
        else:
            found = next(
                (
                    value
                    for key in ("status_code", "status", "code")
                    if str(value := getattr(link, key, "")).isdigit()
                ),
                None,
            )
        if found is not None and 300 <= int(found) < 600:
            return int(found)
    return None


def _class_names(error: BaseException) -> list[str]:
    return [base.__name__ for base in type(error).__mro__]


def classify(error: BaseException) -> Verdict:
    """What an error of any back end means: codes count before classes, statuses and errnos."""
    code = error_code(error)
    if code is not None:
        if code in _CODES:
            return _CODES[code]
        if _CODES_BUSY.search(code):
            return Verdict.TRANSIENT
    classes = {name for link in _causes(error) for name in _class_names(link)}
    if classes & _REFUSED_CLASSES:
        return Verdict.PERMANENT
    # A connection that broke off counts before a status: aiohttp calls a reply cut short a 400.
    if classes & _TRANSIENT_CLASSES:
        return Verdict.TRANSIENT
    status = http_status(error)
    if status is not None:
        return _STATUSES.get(status, Verdict.TRANSIENT if status >= 500 else Verdict.PERMANENT)
    verdict = Verdict.PERMANENT
    # The cause knows better than what it was wrapped in.
    for link in _causes(error):
        known = next((_CLASSES[name] for name in _class_names(link) if name in _CLASSES), None)
        if known is None and isinstance(link, OSError) and link.errno is not None:
            known = _ERRNOS.get(link.errno)
        verdict = known or verdict
    return verdict


def is_denied(error: BaseException) -> bool:
    """Whether the credentials were not accepted: other ones may be by now."""
    code = error_code(error)
    if code is not None and (code in _CODES_DENIED or _CODES.get(code) is Verdict.EXPIRED):
        return True
    return http_status(error) in {401, 403}


def hint(error: BaseException) -> str:
    """The way out that belongs to an error which no retry can cure."""
    code, status = error_code(error), http_status(error)
    if code in {"NoSuchBucket", "ContainerNotFound"}:
        return "; create the bucket, or correct the URL"
    if classify(error) is Verdict.EXPIRED:
        return (
            "; the credentials have expired: renew them where they come from (environment, file or "
            "options), they are read anew at each try"
        )
    if isinstance(error, PermissionError) or status in {401, 403} or "Credentials" in repr(error):
        return "; check the credentials and what they may do"
    if isinstance(error, ImportError):
        return "; install the file system's package, e.g. pip install 'elastic-trainer[s3]'"
    if isinstance(error, TypeError) and "required positional argument" in str(error):
        return "; give what is missing as an option of the file system (checkpoint.storage_options, --option)"
    is_folder = isinstance(error, NotADirectoryError | FileExistsError)
    return "; a folder of that name is needed there" if is_folder else ""


# ---------------------------------------------------------------------------------------- by the URL
_REMOTE: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:::|://)")
_LOCAL: Final = re.compile(r"(?:file|local):(?://|(?=/))", re.IGNORECASE)


_SLASHED: Final = re.compile(
    r"(s3a?|gs|gcs|az|abfss?|sftp|ssh|ftp|https?|hdfs|webhdfs|memory):(?!//)/*(.*)"
)
"""As a URL of which a slash is missing; a folder of such a name is hardly meant."""
_NAMED: Final = re.compile(r"(?:(s3a?|gs|gcs|az|abfss?)|(sftp|ssh))://(?=/|$)", re.IGNORECASE)
"""Without the bucket, or the host, that has to come first."""
_WRAPPED: Final = re.compile(
    r"(?:[^/]*::|(?:simplecache|filecache|blockcache|cached|dir|reference)://)"
)


def _check_url(url: str, options: Mapping[str, object]) -> None:
    """Refuse what cannot be meant.

    Raises:
        PermanentStoreError: Says what was expected.
    """
    found = f"store: found {redact_url(url)!r}, expected"
    if not url.strip() or "\0" in url or (_LOCAL.match(url) and not _LOCAL.sub("", url, count=1)):
        raise PermanentStoreError(f"{found} a folder or a URL")
    if slashed := _SLASHED.match(url):
        meant = redact_url(f"{slashed[1]}://{slashed[2]}")
        raise PermanentStoreError(f"{found} {meant!r}, or './{url}' for a folder of that name")
    if (unnamed := _NAMED.match(url)) and (unnamed[1] or "host" not in options):
        what = "bucket" if unnamed[1] else "host"
        raise PermanentStoreError(f"{found} a {what} after {unnamed[0]!r}")
    if _WRAPPED.match(url):
        raise PermanentStoreError(
            f"{found} a URL of one file system: what stands around another one keeps copies or shows other names, and a store "
            "must never show an old state"
        )


def open_backend(url: str, options: Mapping[str, object]) -> Backend:
    """The back end for a URL; a local folder never loads fsspec.

    Raises:
        PermanentStoreError: Nothing serves such a URL, or the package that does is not installed.
    """
    _check_url(url, options)
    if _LOCAL.match(url) or not _REMOTE.match(url):
        from checkpoints.backend_local import LocalBackend

        return LocalBackend(_LOCAL.sub("", url, count=1))
    from checkpoints.backend_fsspec import open_remote

    try:
        return open_remote(url, options)
    except (ImportError, ValueError, TypeError) as error:
        reason = redact(str(error), secret_values(url, options))
        raise PermanentStoreError(f"{redact_url(url)}: {reason}{hint(error)}") from None
