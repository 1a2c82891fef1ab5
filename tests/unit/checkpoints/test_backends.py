import errno
import socket

import pytest

from checkpoints.backends import Verdict, classify, error_code, hint, http_status, open_backend
from checkpoints.errors import PermanentStoreError


class ClientError(Exception):
    """As botocore makes them."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """As gcsfs makes them."""

    def __init__(self, code: int | str) -> None:
        super().__init__(f"{code}")
        self.code = code


class HttpResponseError(Exception):
    """As Azure's library makes them."""

    def __init__(self, status: int, code: str | None = None) -> None:
        super().__init__(f"{status}")
        self.status_code = status
        self.error_code = code


class EndpointConnectionError(Exception):
    """As botocore makes them: no OSError."""


class ClientPayloadError(Exception):
    """As aiohttp makes them."""


class ContentLengthError(Exception):
    """As aiohttp makes them: with a status that no server sent."""

    status = 400


def caused(error: Exception, *causes: Exception) -> Exception:
    link: BaseException = error
    for cause in causes:
        link.__cause__ = cause
        link = cause
    return error


ERRORS: list[tuple[Exception, Verdict]] = [
    # S3, as s3fs translates it: the errno alone would mislead.
    (caused(OSError(errno.EINVAL, "x"), ClientError("PreconditionFailed", 412)), Verdict.EXISTS),
    (
        caused(OSError(errno.EIO, "x"), ClientError("ConditionalRequestConflict", 409)),
        Verdict.TRANSIENT,
    ),
    (caused(OSError(errno.EBUSY, "x"), ClientError("SlowDown", 503)), Verdict.TRANSIENT),
    (caused(OSError(errno.EIO, "x"), ClientError("TooManyRequests", 429)), Verdict.TRANSIENT),
    (caused(OSError(errno.EREMOTEIO, "x"), ClientError("InternalError", 200)), Verdict.TRANSIENT),
    (caused(OSError(errno.EREMOTEIO, "x"), ClientError("500", 500)), Verdict.TRANSIENT),
    (caused(OSError(errno.EIO, "x"), ClientError("429", 429)), Verdict.TRANSIENT),
    (caused(FileNotFoundError("x"), ClientError("NoSuchBucket", 404)), Verdict.PERMANENT),
    (caused(FileNotFoundError("x"), ClientError("NoSuchKey", 404)), Verdict.MISSING),
    (caused(FileNotFoundError("x"), ClientError("404", 404)), Verdict.MISSING),
    (caused(PermissionError("x"), ClientError("SignatureDoesNotMatch", 403)), Verdict.PERMANENT),
    (caused(PermissionError("x"), ClientError("ExpiredToken", 400)), Verdict.EXPIRED),
    (caused(OSError(errno.EINVAL, "x"), ClientError("InvalidArgument", 400)), Verdict.PERMANENT),
    (EndpointConnectionError("x"), Verdict.TRANSIENT),
    (caused(ClientPayloadError("x"), ContentLengthError("400")), Verdict.TRANSIENT),
    # Google and Azure.
    (HttpError(503), Verdict.TRANSIENT),
    (HttpError("429"), Verdict.TRANSIENT),
    (HttpError(401), Verdict.PERMANENT),
    (OSError("Forbidden: no"), Verdict.PERMANENT),
    (HttpResponseError(503), Verdict.TRANSIENT),
    (HttpResponseError(404, "BlobNotFound"), Verdict.MISSING),
    (HttpResponseError(404, "ContainerNotFound"), Verdict.PERMANENT),
    (HttpResponseError(409, "BlobAlreadyExists"), Verdict.EXISTS),
    (HttpResponseError(412, "ConditionNotMet"), Verdict.EXISTS),
    (caused(RuntimeError("Failed to upload block"), HttpResponseError(503)), Verdict.TRANSIENT),
    (caused(RuntimeError("Failed to upload block"), HttpResponseError(403)), Verdict.PERMANENT),
    # The machine itself and its network.
    (OSError(errno.ENOSPC, "x"), Verdict.FULL),
    (OSError(errno.EDQUOT, "x"), Verdict.FULL),
    (HttpResponseError(507), Verdict.FULL),
    (OSError(errno.ESTALE, "x"), Verdict.TRANSIENT),
    (OSError(errno.EIO, "x"), Verdict.TRANSIENT),
    (ConnectionResetError("x"), Verdict.TRANSIENT),
    (TimeoutError("x"), Verdict.TRANSIENT),
    (socket.gaierror("x"), Verdict.TRANSIENT),
    (FileNotFoundError("x"), Verdict.MISSING),
    (FileExistsError("x"), Verdict.EXISTS),
    (PermissionError("x"), Verdict.PERMANENT),
    (NotADirectoryError(errno.ENOTDIR, "x"), Verdict.PERMANENT),
    (OSError(errno.EROFS, "x"), Verdict.PERMANENT),
    (ImportError("x"), Verdict.PERMANENT),
    (TypeError("a bug"), Verdict.PERMANENT),
]


@pytest.mark.parametrize(
    ("error", "verdict"),
    ERRORS,
    ids=[f"{n}-{e!r}-{e.__cause__!r}" for n, (e, _) in enumerate(ERRORS)],
)
def test_an_error_is_judged_by_its_whole_chain_of_causes(
    error: Exception, verdict: Verdict
) -> None:
    assert classify(error) is verdict


def test_the_callers_own_trouble_is_no_cause() -> None:
    error = PermissionError("the store's own")
    error.__context__ = ConnectionResetError("what the caller was handling when it called")
    assert classify(error) is Verdict.PERMANENT


def test_a_loop_of_causes_ends() -> None:
    error = ValueError("x")
    error.__cause__ = error
    assert classify(error) is Verdict.PERMANENT


def test_codes_and_statuses_are_found_down_the_chain() -> None:
    error = caused(OSError("x"), ClientError("NoSuchBucket", 404))
    assert error_code(error) == "NoSuchBucket"
    assert http_status(error) == 404
    assert error_code(OSError("x")) is None
    assert http_status(OSError("x")) is None


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (caused(FileNotFoundError("x"), ClientError("NoSuchBucket", 404)), "create the bucket"),
        (PermissionError("x"), "check the credentials"),
        (ImportError("x"), "pip install"),
        (NotADirectoryError("x"), "a folder of that name"),
        (ValueError("x"), ""),
    ],
    ids=["bucket", "credentials", "package", "folder", "none"],
)
def test_a_permanent_error_names_the_way_out(error: Exception, way_out: str) -> None:
    assert way_out in hint(error)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "expected a folder or a URL"),
        ("  ", "expected a folder or a URL"),
        ("a\0b", "expected a folder or a URL"),
        ("zork://x/y", "zork://x/y: Protocol not known: zork"),
        ("simplecache::s3://x/y", "expected a URL of one file system"),
        ("dir://x", "expected a URL of one file system"),
        ("reference://x", "expected a URL of one file system"),
        ("file://", "expected a folder or a URL"),
        ("s3://", "store: found 's3://', expected a bucket after 's3://'"),
        ("gs:///run", "store: found 'gs:///run', expected a bucket after 'gs://'"),
        ("az://", "expected a bucket after 'az://'"),
        ("sftp:///run", "expected a host after 'sftp://'"),
        (
            "s3:/bucket/run",
            "expected 's3://bucket/run', or './s3:/bucket/run' for a folder of that name",
        ),
        ("gs:bucket", "expected 'gs://bucket'"),
    ],
)
def test_a_url_that_nothing_serves_is_refused(url: str, reason: str) -> None:
    with pytest.raises(PermanentStoreError, match=reason):
        open_backend(url, {})


def test_c53_a_url_with_a_password_is_refused_without_it() -> None:
    with pytest.raises(PermanentStoreError) as caught:
        open_backend("zork://user:pa55word@host/x?token=tok3n-value", {"password": "An0ther"})
    text = str(caught.value)
    assert text.startswith("zork://host/x?token=***")
    assert "pa55word" not in text
    assert "tok3n" not in text
