"""What `python -m elastic launch` makes of a command line: torchrun's arguments, with what a careful person adds.

Takes words and settings, returns words, and asks this host for nothing but its own name. What the user gave, on the command
line or as PET_*, always wins. Does not import torch, so that a wrong setting is told at once.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from elastic.addresses import holds_store
from elastic.errors import ConfigError
from elastic.hook import FLAGS, RENDEZVOUS, SHARED, UNSHARE
from elastic.options import Settings

__all__ = ["LAUNCHED", "RUNNER", "Command", "Launch", "complete", "rdzv_id", "split"]

RUNNER: Final = str(Path(__file__).resolve().with_name("run.py"))
LAUNCHED: Final = "ELASTIC_LAUNCH"
"""In the environment of workers: a launcher that keeps their exit codes stands over them."""
MAX_RESTARTS: Final = 100
"""A fault of the job's own ends the run at its second time (76) however many are left."""
MONITOR_INTERVAL_S: Final = 0.03
_REFUSED: Final = frozenset({"no-python", "run-path"})
_NODES: Final = re.compile(r"(\d+)(?::(\d+))?", re.ASCII)
_LOCAL: Final = ("", "file", "local")
_SECTIONS: Final = frozenset(field.name for field in dataclasses.fields(Settings))


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command line of `launch`, taken apart."""

    words: tuple[str, ...] = ()
    """torchrun's options as they were given."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The same by name, without dashes in front; a flag's value is empty."""
    script: str = RUNNER
    arguments: tuple[str, ...] = ()
    """The runner's: JOB and key=value."""
    help: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What torchrun is to be started with."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """To be set beside what is set."""
    backend: str
    endpoint: str
    nnodes: str
    nproc: str
    max_restarts: str
    names_id: bool
    """Whether the id of the rendezvous is ours."""


def split(argv: Sequence[str]) -> Command:
    """Take a command line apart.

    Raises:
        ConfigError: It starts something else than our runner.
    """
    options: dict[str, str] = {}
    words: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and not _is_ours(rest[0]):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        name = "m" if name in {"-m", "--module"} else name.lstrip("-").replace("_", "-")
        if name in {"h", "help"}:
            return Command(help=True)
        if name in _REFUSED:
            raise ConfigError(f"launch: found {word}, which elastic/run.py cannot be started with")
        attached = not word.startswith("--") and len(word) > 2  # -r3
        is_flag = attached or f"--{name}" in FLAGS or name == "m"
        if not is_flag and not equals and rest:
            value = rest.pop(0)
            word = f"{word}={value}" if word.startswith("--") else word + value
        options[name] = value
        if name != "m":
            words.append(word)
    script, arguments = _runner(rest, as_module="m" in options)
    return Command(words=tuple(words), options=options, script=script, arguments=tuple(arguments))


def _is_ours(word: str) -> bool:
    """Tell whether a word with dashes in front is a setting of the run: `--train.epochs=3`."""
    name = word.partition("=")[0].lstrip("-")
    return "." in name or name in _SECTIONS


def _runner(rest: Sequence[str], *, as_module: bool) -> tuple[str, Sequence[str]]:
    """Find our runner, which may be left out, at the head of the words that torchrun leaves over."""
    if as_module:
        if list(rest[:1]) != ["elastic.run"]:
            found = rest[0] if rest else "nothing"
            raise ConfigError(f"launch: found -m {found}, expected -m elastic.run, or leave it out")
        return RUNNER, rest[1:]
    if rest and rest[0].endswith(".py"):
        if os.path.realpath(rest[0]) != RUNNER:
            raise ConfigError(
                f"launch: found the script {rest[0]}, expected elastic/run.py or none: a job is FILE.py:Class, and a"
                " loop of your own is started by torchrun"
            )
        return rest[0], rest[1:]
    return RUNNER, rest


def complete(command: Command, settings: Settings, environ: Mapping[str, str]) -> Launch:
    """Add to torchrun's options what is not given.

    Raises:
        ConfigError: The number of nodes is none.
    """
    given = _Given(command.options, environ)
    nnodes = given.value("nnodes", "1:1")
    _check_nodes(nnodes)
    added = _meeting(given, settings.checkpoint.url, nnodes)
    for name, value in (("max-restarts", MAX_RESTARTS), ("monitor-interval", MONITOR_INTERVAL_S)):
        if not given.has(name):
            added[name] = str(value)
    if not given.has("signals-to-handle"):
        # torch wants one. The launcher hears the others, and lets none break off what another began.
        added["signals-to-handle"] = "SIGPWR"
    words = [*command.words, *(f"--{name}={value}" for name, value in added.items())]
    nproc = given.value("nproc-per-node", "1")
    backend = added.get("rdzv-backend") or given.value("rdzv-backend")
    variables = {
        LAUNCHED: "1",
        "TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if backend in SHARED and _is_several(nnodes):
        # Without it a node that joins ends every agent, and a new agent cannot come back.
        variables[UNSHARE] = environ.get(UNSHARE, "1")
    if "OMP_NUM_THREADS" not in environ and nproc.isdigit() and int(nproc) > 1:
        variables["OMP_NUM_THREADS"] = "1"  # as torchrun does, without its seven lines
    return Launch(
        argv=(*words, command.script, *command.arguments),
        environ=variables,
        backend=backend,
        endpoint=added.get("rdzv-endpoint") or given.value("rdzv-endpoint"),
        nnodes=nnodes,
        nproc=nproc,
        names_id="rdzv-id" in added,
        max_restarts=added.get("max-restarts", given.value("max-restarts", "0")),
    )


def _meeting(given: "_Given", url: str, nnodes: str) -> dict[str, str]:
    """Say how the agents meet, as far as it is not said: nothing for torchrun's own other ways."""
    backend, endpoint = given.value("rdzv-backend"), given.value("rdzv-endpoint")
    added: dict[str, str] = {}
    if given.has("standalone") or backend == "static":
        return added
    if not backend:
        backend = added["rdzv-backend"] = _backend(url, endpoint, nnodes)
    if not endpoint and backend == "fsspec":
        added["rdzv-endpoint"] = f"{url.rstrip('/')}/rdzv"
    elif not endpoint and backend == "c10d" and not _is_several(nnodes):
        added["rdzv-endpoint"] = "localhost:0"  # a free port, where torchrun would take 29400
    if not given.has("rdzv-id"):
        added["rdzv-id"] = rdzv_id(url)
    conf = given.value("rdzv-conf")
    if backend in SHARED and _is_several(nnodes) and not given.has("rdzv-conf"):
        conf = added["rdzv-conf"] = RENDEZVOUS
    if backend == "c10d" and "is_host" not in conf:
        holds = holds_store(added.get("rdzv-endpoint", endpoint))
        if holds is not None:
            added["rdzv-conf"] = f"{conf},is_host={holds}".lstrip(",")
    return added


def _check_nodes(nnodes: str) -> None:
    found = _NODES.fullmatch(nnodes)
    if not found or not 0 < int(found[1]) <= int(found[2] or found[1]):
        raise ConfigError(f"launch: --nnodes: found {nnodes}, expected a number or MIN:MAX")


def _is_several(nnodes: str) -> bool:
    return nnodes.rpartition(":")[2] != "1"


def _backend(url: str, endpoint: str, nnodes: str) -> str:
    """Choose how the agents meet: through the store where there is one and nodes may come and go."""
    if "://" in endpoint:
        return "fsspec"
    least, _, most = nnodes.partition(":")
    is_range = most not in {"", least}
    return "fsspec" if not endpoint and is_range and is_remote(url) else "c10d"


def is_remote(url: str) -> bool:
    """Tell whether a run's URL is no folder."""
    return "://" in url and urlsplit(url).scheme not in _LOCAL


def rdzv_id(url: str) -> str:
    """Make the rendezvous id of a run: the same for each spelling of its URL, another one for each run."""
    if is_remote(url):
        parts = urlsplit(url)
        # Who asks, and how, does not make another run.
        host = parts.netloc.rpartition("@")[2]
        path = "/".join(part for part in parts.path.split("/") if part)
        normal = f"{parts.scheme.lower()}://{host}/{path}"
    else:
        scheme = urlsplit(url).scheme if "://" in url else ""
        normal = os.path.realpath(url[len(scheme) + 3 :] if scheme in _LOCAL[1:] else url)
    return f"run-{hashlib.sha256(normal.encode()).hexdigest()[:12]}"


class _Given:
    """What the user said, on the command line or in torchrun's variables."""

    def __init__(self, options: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._options, self._environ = options, environ

    def value(self, name: str, default: str = "") -> str:
        return self._options.get(name) or next(self._variable(name), default)

    def has(self, name: str) -> bool:
        if f"--{name}" in FLAGS:
            return name in self._options or self.value(name) == "1"
        return name in self._options or any(True for _ in self._variable(name))

    def _variable(self, name: str) -> Iterator[str]:
        found = self._environ.get(f"PET_{name.replace('-', '_').upper()}")
        if found is not None:
            yield found
