import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.redaction import (
    HIDDEN,
    is_secret_name,
    redact,
    redact_options,
    redact_url,
    secret_values,
)

SECRET = "Xk92Lmq0Secret"  # noqa: S105  # of nothing


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://user:pa55@host/run", "sftp://host/run"),
        ("sftp://user@host:22/run", "sftp://host:22/run"),
        ("s3://bucket/run-42@best", "s3://bucket/run-42@best"),
        ("https://h/x?sig=abc&sv=2020", "https://h/x?sig=***&sv=2020"),
        (
            "https://h/x?X-Amz-Credential=a&X-Amz-Signature=b&n=1",
            "https://h/x?X-Amz-Credential=***&X-Amz-Signature=***&n=1",
        ),
        ("simplecache::ftp://u:p@h/x", "simplecache::ftp://h/x"),
        ("runs/digits", "runs/digits"),
        ("file:///a/b", "file:///a/b"),
    ],
)
def test_c53_a_url_is_shown_without_its_credentials(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert redact(url) == shown


@pytest.mark.parametrize(
    "name",
    ["key", "secret", "token", "password", "sas_token", "account_key", "credential", "AWSAccessKeyId",
     "aws_secret_access_key", "connection_string", "apiKey", "X-Amz-Security-Token", "passphrase",
     "client_secret", "sas", "private_key_file", "auth"],
)  # fmt: skip
def test_c53_secret_options_are_known_by_name(name: str) -> None:
    assert is_secret_name(name)
    assert redact_options({name: SECRET}) == {name: HIDDEN}
    assert redact_options({"deep": [{"er": {name: {"x": SECRET}}}]}) == {
        "deep": [{"er": {name: {"x": HIDDEN}}}]
    }


@pytest.mark.parametrize(
    "name",
    [
        "endpoint_url",
        "region_name",
        "anon",
        "max_tokens",
        "tokenizer",
        "epochs",
        "seed",
        "host",
        "width",
    ],
)
def test_other_options_are_shown(name: str) -> None:
    assert redact_options({name: 5}) == {name: 5}


def test_options_keep_names_and_what_is_no_secret() -> None:
    options = {
        "key": None,
        "token": True,
        "client_kwargs": {"verify": False},
        "endpoint_url": "http://u:p@h",
        "raw": b"x",
        "password": 12345,
    }
    assert redact_options(options) == {
        "key": None, "token": True, "client_kwargs": {"verify": False}, "endpoint_url": "http://h", "raw": HIDDEN, "password": HIDDEN,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        f"could not log in with password={SECRET} at host",
        f"AWS_SECRET_ACCESS_KEY: '{SECRET}'",
        f"{{'account_key': '{SECRET}', 'x': 1}}",
        f"GET https://h/x?token={SECRET}&a=1 failed",
        f"connect to ftp://me:{SECRET}@host/path refused",
    ],
)
def test_c53_messages_of_other_libraries_are_cleaned(text: str) -> None:
    assert SECRET not in redact(text)


@given(st.text(min_size=4, max_size=20), st.text(max_size=50), st.text(max_size=50))
def test_c53_a_known_secret_is_found_wherever_it_stands(
    secret: str, before: str, after: str
) -> None:
    if secret in HIDDEN:
        return
    assert secret not in redact(f"{before}\x00{secret}\x00{after}", [secret]).replace(
        before, ""
    ).replace(after, "")


def test_secret_values_are_collected_from_url_and_options() -> None:
    url = "sftp://user:pa55word@host/x?sig=signature1&v=1"
    options = {
        "key": "key-value",
        "client_kwargs": [{"aws_session_token": "session"}],
        "port": 22,
        "password": 123456,
        "secret": True,
    }
    assert secret_values(url, options) == {
        "pa55word",
        "signature1",
        "key-value",
        "session",
        "123456",
    }
    assert secret_values("sftp://only-user@host", {}) == {"only-user"}


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd: Permission denied",
        "/data/token: found a folder, expected a file",
        "tokenizer.json: not JSON",
        "~/models/tokenizers.bin=missing",
        "NoCredentialsError: Unable to locate credentials",
        "InvalidSignatureException: clock skew",
    ],
)
def test_what_is_said_of_a_file_is_not_hidden_because_of_its_name(text: str) -> None:
    assert redact(text) == text
