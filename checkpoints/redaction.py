"""Credentials taken out of URLs, options and messages, before anything is shown or written.

A secret is known by the name that it stands under (`secret_access_key`, `?sig=…`), by its place (the
user part of a URL), or because the caller names its value. Too much is hidden rather than too little:
`keyring: 3` becomes `***`, too. Pure: no I/O.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

HIDDEN: Final = "***"
_SECRET_PARTS: Final = (
    "secret",
    "passw",
    "passphrase",
    "pwd",
    "credential",
    "connection_string",
    "connectionstring",
    "signature",
    "private",
    "bearer",
)
_SECRET_WORDS: Final = frozenset(
    {"key", "keys", "token", "sas", "sig", "auth", "authorization", "pass"}
)
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_USER: Final = re.compile(r"(?<=://)[^\s/?#'\"]*@")
_PAIR: Final = re.compile(r"([?&;])([^=&;#\s'\"]+)=([^&;#\s'\"]*)")
_ASSIGNED: Final = re.compile(
    r"(?i)\b([\w.-]*(?:secret|password|passwd|token(?!iz)|account_?key|access_?key|credential|signature)"
    r"[\w.-]*['\"]?\s*[=:]\s*)(['\"]?)([^\s'\",;&}]{3,})"
)
_SHORTEST: Final = 4


def is_secret_name(name: str) -> bool:
    """Whether the value of an option or query field of this name is a credential."""
    low = name.lower()
    if any(part in low for part in _SECRET_PARTS) or low.endswith(("key", "token")):
        return True
    return any(word.lower() in _SECRET_WORDS for word in _WORD.findall(name))


def redact_url(url: str) -> str:
    """The URL without its user part, and with the secrets of its query hidden."""
    return _PAIR.sub(_hide_pair, _USER.sub("", url))


def _hide_pair(match: re.Match[str]) -> str:
    lead, name, value = match.groups()
    return f"{lead}{name}={HIDDEN if value and is_secret_name(name) else value}"


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """A message (or a URL) without credentials; `secrets` are values known to the caller."""
    # Longest first: a secret may hold another one.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return _ASSIGNED.sub(_hide_assigned, redact_url(text))


def _hide_assigned(match: re.Match[str]) -> str:
    name, quote, _ = match.groups()
    before = match.string[: match.start()]
    # The path of a file and what is said of it: "/etc/passwd: permission denied".
    is_path = before.endswith("/") and name.rstrip().endswith(":")
    # What an exception says of itself: "NoCredentialsError: Unable to locate credentials".
    is_error = name.rstrip(": ").endswith(("Error", "Exception")) and not quote
    return match.group() if is_path or is_error else f"{name}{quote}{HIDDEN}"


def redact_options(options: Mapping[str, object]) -> dict[str, object]:
    """A copy in which the values of secret names are hidden, at any depth; the names stay."""
    return {
        name: _redact_value(value, hide=is_secret_name(str(name)))
        for name, value in options.items()
    }


def _redact_value(value: object, *, hide: bool) -> object:
    if isinstance(value, Mapping):
        return {
            name: _redact_value(inner, hide=hide or is_secret_name(str(name)))
            for name, inner in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_redact_value(inner, hide=hide) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    if hide or isinstance(value, bytes | bytearray):
        return HIDDEN
    return redact_url(value) if isinstance(value, str) else value


def secret_values(url: str, options: Mapping[str, object]) -> frozenset[str]:
    """The credentials that `url` and `options` hold, to be kept out of other libraries' messages."""
    found: set[str] = set()
    for match in _USER.finditer(url):
        user = match.group()[:-1]
        # The user alone is no secret where a password stands beside it.
        found.add(user.partition(":")[2] or user)
    found.update(value for _, name, value in _PAIR.findall(url) if is_secret_name(name))
    _collect(options, False, found)
    return frozenset(value for value in found if len(value) >= _SHORTEST)


def _collect(value: object, hide: bool, found: set[str]) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _collect(inner, hide or is_secret_name(str(name)), found)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        for inner in value:
            _collect(inner, hide, found)
    elif hide and isinstance(value, str | int | float) and not isinstance(value, bool):
        found.add(str(value))
