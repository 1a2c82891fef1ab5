"""Weights that others saved: read from a file or checkpoint at a URL, their names matched to a model's.

Promises: nothing that is read can run code (safetensors; of torch.save files plain tensors alone;
checkpoints through their manifest, every byte verified); what is no such thing is one line that
names the file. Wrappers' parts of names are left out only where a match needs it.
"""

import io
import json
import pickle
import re
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

import torch
from torch import Tensor

from checkpoints.errors import DamagedError, NoCheckpointError
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from checkpoints.tensorfile import TensorSpec, decode_header, header_bytes, new_tensor
from elastic.errors import StartError

__all__ = ["match_names", "read_weights"]

_WRAPPED: Final = ("module", "_orig_mod")
_MOST_SEGMENTS: Final = 8
"""How many wrapper-like parts of one foreign name are tried to be left out."""
_SELECTED: Final = re.compile(r"(?P<url>.+)@(?P<selector>best|latest|ema|\d+)(?P<ema>:ema)?")
_PICKLED: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_INDEX: Final = ".index.json"
_SAFE: Final = ".safetensors"
_IN_FOLDER: Final = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_NESTED: Final = ("state_dict", "model_state_dict", "model", "module", "weights", "params")
_RUN_BYTES: Final = 8 << 20
"""Small tensors that lie together are read at once up to this size."""
_EXPECTED: Final = (
    "a .safetensors file, an index of such files, a torch.save file (.pt, .pth, .bin) of plain"
    " tensors, a folder with one of these, or a run's URL, as it is or with @best, @latest or @STEP"
    " (with :ema behind it the average of the weights)"
)


def read_weights(
    url: str, storage_options: Mapping[str, object] | None = None
) -> dict[str, Tensor]:
    """Read a model's weights, under the names that the file has, into host memory.

    Args:
        url: A .safetensors file, a Hugging Face index or folder, a torch.save file, or a run
            (its newest checkpoint, or `URL@best`, `URL@latest`, `URL@1200`). Of a checkpoint the weights
            themselves, unless their average is asked for: `URL@best:ema`, `URL@ema` (the newest).
        storage_options: For the filesystem.

    Raises:
        StartError: There are no weights at the URL, or the file is not what its name says.
        CheckpointError: The store cannot be read, or a checkpoint is damaged.
    """
    selected = _SELECTED.fullmatch(url)
    if selected is not None:
        selector = selected["selector"]
        key = "ema" if selected["ema"] or selector == "ema" else "model"
        selector = "latest" if selector == "ema" else selector
        return _read_run(open_store(selected["url"], storage_options), selector, key)
    folder, slash, last = url.rstrip("/").rpartition("/")
    if last.endswith((_SAFE, _INDEX, *_PICKLED)):
        parent = f"{folder}/" if folder.endswith(":/") or not folder else folder
        return _read_file(open_store(parent if slash else ".", storage_options), last)
    return _read_folder(open_store(url, storage_options), url, storage_options)


def _read_folder(
    store: Store, url: str, storage_options: Mapping[str, object] | None
) -> dict[str, Tensor]:
    head, _, last = url.rstrip("/").rpartition("/checkpoints/")
    try:
        checkpoint = CheckpointName.parse(last) if head else None
    except ValueError:
        checkpoint = None
    if checkpoint is not None:
        run = open_store(head, storage_options)
        return _read_checkpoint(CheckpointManager(run), checkpoint)
    for name in _IN_FOLDER:
        if store.exists(name):
            return _read_file(store, name)
    return _read_run(store, "latest")


def _read_run(store: Store, selector: str, key: str = "model") -> dict[str, Tensor]:
    manager = CheckpointManager(store)
    try:
        checkpoint = manager.resolve(selector)
    except NoCheckpointError as error:
        raise StartError(
            f"{store.display_url}: found no weights there ({error}), expected {_EXPECTED}"
        ) from error
    return _read_checkpoint(manager, checkpoint, key)


def _read_checkpoint(
    manager: CheckpointManager, name: CheckpointName, key: str = "model"
) -> dict[str, Tensor]:
    try:
        found = manager.restore(name, keys=[key])[key]
    except NoCheckpointError as error:
        hint = "; train.ema makes an average, the weights themselves are there without :ema"
        raise StartError(f"{error}{hint if key == 'ema' else ''}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"{name}: found {type(found).__name__} as its {key}, expected tensors")
    return found


def _read_file(store: Store, name: str) -> dict[str, Tensor]:
    where = f"{store.display_url.rstrip('/')}/{name}"
    if not store.exists(name):
        raise StartError(f"{where}: found no such file, expected {_EXPECTED}")
    try:
        if name.endswith(_INDEX):
            return _read_index(store, name, where)
        if name.endswith(_SAFE):
            return _read_safetensors(store, name, where)
    except DamagedError as error:
        raise StartError(
            f"{error} (weights are read from safetensors, never by unpickling)"
        ) from error
    return _read_torch(store.get(name), where)


# ------------------------------------------------------------------------------------------- formats
def _read_index(store: Store, name: str, where: str) -> dict[str, Tensor]:
    """Several files, with a table that says which tensor lies in which."""
    try:
        table = json.loads(store.get(name))["weight_map"]
        files = {str(key): str(value) for key, value in table.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise StartError(
            f"{where}: found no table 'weight_map' in it, expected tensor names and their files"
        ) from error
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if "/" in file or "\\" in file or not file.endswith((_SAFE, *_PICKLED)):
            raise StartError(f"{where}: found file {file!r}, expected one in the same folder")
        content = _read_file(store, file)
        for key in (key for key, value in files.items() if value == file):
            if key not in content:
                raise StartError(
                    f"{where}: found no tensor {key!r} in {file}, which should hold it"
                )
            tensors[key] = content[key]
    return tensors


def _read_safetensors(store: Store, name: str, where: str) -> dict[str, Tensor]:
    size = store.size(name)
    start = header_bytes(store.get_range(name, 0, min(8, size)), size, where=where)
    header = decode_header(store.get_range(name, 0, start), size, where=where)
    tensors: dict[str, Tensor] = {}
    for run in _runs(header.tensors):
        made = [(spec, *new_tensor(spec)) for spec in run]
        tensors |= {spec.name: tensor for spec, tensor, _ in made}
        length = sum(spec.size_bytes for spec in run)
        if len(run) == 1 and length:
            store.readinto(name, run[0].offset, made[0][2])
        elif length:
            data = memoryview(store.get_range(name, run[0].offset, length))
            for spec, _, view in made:
                begin = spec.offset - run[0].offset
                view[:] = data[begin : begin + spec.size_bytes]
    if not tensors:
        raise DamagedError(f"{where}: found no tensors in it, expected a model's")
    return tensors


def _runs(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Neighbours in a file that are worth one request; a large tensor is one by itself."""
    run: list[TensorSpec] = []
    for spec in specs:
        if run and sum(s.size_bytes for s in run) + spec.size_bytes > _RUN_BYTES:
            yield run
            run = []
        run.append(spec)
    if run:
        yield run


def _read_torch(data: bytes, where: str) -> dict[str, Tensor]:
    """A torch.save file, by the loader that makes plain tensors and containers alone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: it is read, or told below
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # What a broken or hostile pickle makes the loader stumble over is not told by its type.
    except (
        pickle.UnpicklingError,
        struct.error,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise StartError(
            f"{where}: found something else than plain tensors ({cause}), expected a torch.save"
            " file of a state_dict; it was not executed"
        ) from error
    tensors = _tensors_in(content)
    for key in _NESTED if isinstance(content, Mapping) else ():
        tensors = tensors or _tensors_in(content.get(key))
    if not tensors:
        keys = (
            sorted(map(str, content))[:8]
            if isinstance(content, Mapping)
            else type(content).__name__
        )
        raise StartError(
            f"{where}: found no tensors by name in it (found {keys}), expected a state_dict, or one"
            f" under {', '.join(_NESTED)}"
        )
    return tensors


def _tensors_in(content: object) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    return {
        k: v.detach() for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)
    }


# --------------------------------------------------------------------------------------------- names
def match_names(found: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Name in a foreign file -> name in the model, leaving out what wrappers put in.

    `module.` and `_orig_mod.` are left out only where that is needed for a match: first in front of
    all names alike, by whichever number of parts most names match; then, for what is left, anywhere
    in a name, as few as possible. A name that matches nothing comes back as it is.
    """
    names, targets = list(found), set(wanted)
    stripped = dict(zip(names, names, strict=True))
    best, matches = stripped, _matches(stripped, targets)
    while names and all(name.split(".", 1)[0] in _WRAPPED for name in stripped.values()):
        if not all("." in name for name in stripped.values()):
            break
        stripped = {name: short.split(".", 1)[1] for name, short in stripped.items()}
        if _matches(stripped, targets) > matches:
            best, matches = stripped, _matches(stripped, targets)
    result = {name: short for name, short in best.items() if short in targets}
    taken = set(result.values())
    for name, short in best.items():
        if name not in result:
            match = next((c for c in _shortened(short) if c in targets and c not in taken), None)
            result[name] = name if match is None else match
            taken.add(result[name])
    return {name: result[name] for name in names}


def _matches(mapping: Mapping[str, str], targets: set[str]) -> int:
    return sum(short in targets for short in mapping.values())


def _shortened(name: str) -> Iterable[str]:
    """The name with ever more of its wrapper-like parts left out."""
    parts = name.split(".")
    spots = [i for i, part in enumerate(parts[:-1]) if part in _WRAPPED][:_MOST_SEGMENTS]
    for count in range(1, len(spots) + 1):
        for out in combinations(spots, count):
            yield ".".join(part for i, part in enumerate(parts) if i not in out)
