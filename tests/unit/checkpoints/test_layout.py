from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.canonical import dump, parse
from checkpoints.errors import DamagedError, NewerFormatError, RecordError
from checkpoints.layout import (
    JSON,
    MANIFEST_LIMIT_BYTES,
    AgentId,
    CheckpointName,
    Claim,
    FileEntry,
    Manifest,
    PartSum,
    RunRecord,
    Started,
    audit_prefix,
    check_name,
    claim_name,
    generation_of,
    is_void,
    journal_prefix,
    meeting_name,
    new_token,
    started_name,
    utc_now,
    void_manifest,
)
from tests.support.states import signed

NAME = CheckpointName(7, 1200)
SUM = "0123456789abcdef" * 2


def manifest(**changes: object) -> Manifest:
    parts = (PartSum(offset=0, size=60, xxh3_128=SUM), PartSum(offset=60, size=40, xxh3_128=SUM))
    files = (
        FileEntry(name="model.safetensors", size_bytes=100, parts=parts),
        FileEntry(
            name="frozen.safetensors", size_bytes=60, parts=parts[:1], owner=CheckpointName(3, 5)
        ),
        FileEntry(name="empty", size_bytes=0, parts=()),
    )
    made = Manifest(
        name=NAME, parent=CheckpointName(6, 1000), run_id="run", files=files, info={"epoch": 3}
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # each test gives the field's own type


# ------------------------------------------------------------------------------------------- names
def test_names_are_those_of_the_design() -> None:
    assert str(NAME) == "000007-000000001200"
    assert NAME.folder == "checkpoints/000007-000000001200"
    assert NAME.manifest == "checkpoints/000007-000000001200/manifest.json"
    assert NAME.file("state.json") == "checkpoints/000007-000000001200/state.json"
    assert claim_name(7) == "generations/000007.json"
    assert started_name(7) == "generations/000007.started.json"
    assert journal_prefix(7) == "journal/000007"
    assert audit_prefix(7) == "audit/000007"
    assert meeting_name("k") == "meeting/k.json"


def test_the_generation_of_a_claim_is_read_from_its_name_alone() -> None:
    assert generation_of("generations/000007.json") == 7
    assert generation_of("generations/1000000.json") == 1_000_000
    for other in (
        "generations/000007.started.json",
        "generations/7.json",
        "x/000007.json",
        "generations/\uff10\uff100007.json",
    ):
        assert generation_of(other) is None


def test_c29_names_are_compared_as_numbers() -> None:
    assert CheckpointName(10, 1) > CheckpointName(9, 10**9)
    assert CheckpointName(1, 1000) > CheckpointName(1, 999)
    assert CheckpointName(2, 998) > CheckpointName(1, 1000)
    # Beyond the padding text would put a million before 999999.
    assert CheckpointName(1_000_000, 1) > CheckpointName(999_999, 1)
    assert str(CheckpointName(1_000_000, 1)) < str(CheckpointName(999_999, 1))


@given(st.integers(1, 10**9), st.integers(0, 10**15))
def test_every_name_is_read_back(generation: int, step: int) -> None:
    name = CheckpointName(generation, step)
    assert CheckpointName.parse(str(name)) == name
    assert CheckpointName.find(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["", "7-1200", "000007-00000001200", "0000007-000000001200", "000000-000000000001", "latest",
     "000007-000000001200/", "../000007-000000001200", "000007_000000001200", "000007-0000000012001200",
     "-00007-000000001200", "000007-000000001200\n", "00000\u0667-000000001200", "9" * 5000],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    assert CheckpointName.find(text) is None
    with pytest.raises(RecordError, match="expected generation-step") as caught:
        CheckpointName.parse(text)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(("generation", "step"), [(0, 1), (-1, 1), (1, -1), (10**9 + 1, 0)])
def test_impossible_numbers_are_refused(generation: int, step: int) -> None:
    with pytest.raises(RecordError, match=f"found generation {generation} and step {step}"):
        CheckpointName(generation, step)


@given(st.text(max_size=30))
def test_a_checked_name_stays_under_the_url(text: str) -> None:
    try:
        check_name(text)
    except RecordError:
        return
    assert text
    assert not {".", "..", ""} & set(text.split("/"))


def test_tokens_differ_and_times_are_utc() -> None:
    assert new_token() != new_token()
    assert utc_now().endswith("+00:00")


# ---------------------------------------------------------------------------------------- manifest
def test_a_manifest_is_read_back() -> None:
    made = manifest()
    assert Manifest.from_json(made.to_json(), NAME.manifest) == made
    assert made.size_bytes == 160
    first = manifest(parent=None, files=())
    assert Manifest.from_json(first.to_json(), "anywhere") == first


def test_info_that_is_not_json_is_refused_when_it_is_written() -> None:
    for info in ({"loss": float("nan")}, {"x": object()}):
        with pytest.raises(RecordError, match=r"manifest\.json: info is not JSON"):
            manifest(info=info).to_json()


@given(st.data())
def test_any_changed_byte_of_a_manifest_is_found(data: st.DataObject) -> None:
    good = bytearray(manifest().to_json())
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedError, match=r"^checkpoints/000007-000000001200/manifest\.json: "):
        Manifest.from_json(bytes(good), NAME.manifest)


@given(st.binary(max_size=300))
def test_any_bytes_in_a_manifests_place_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedError, match=r"^m: "):
        Manifest.from_json(data, "m")


def test_a_truncated_or_reformatted_manifest_is_refused() -> None:
    good = manifest().to_json()
    for bad in (good[:-1], good + b" ", good.replace(b'"void"', b'"voi"') + b"\n", b" " + good):
        with pytest.raises(DamagedError):
            Manifest.from_json(bad, "m")


def test_the_manifest_of_another_step_is_refused() -> None:
    other = CheckpointName(7, 1100)
    with pytest.raises(
        DamagedError, match=f"found the manifest of {NAME}, expected that of {other}"
    ):
        Manifest.from_json(manifest().to_json(), other.manifest)


HOSTILE: list[tuple[str, JSON, str]] = [
    ("format", 0, "format: found 0, expected 1"),
    ("format", None, "format: found None"),
    ("name", "../../etc", "name: found '../../etc'"),
    ("name", 7, "name: found 7"),
    ("parent", "yesterday", "parent: found 'yesterday'"),
    ("run_id", "", "run_id: found ''"),
    ("run_id", "x" * 1000, "run_id"),
    ("files", {}, "files: found"),
    ("files", ["a"], "files.0.: found 'a', expected an object"),
    ("info", [], "info: found"),
    ("token", None, "token: found None"),
    ("created_at", 5, "created_at: found 5"),
]


@pytest.mark.parametrize(("key", "value", "reason"), HOSTILE)
def test_a_hostile_manifest_with_a_right_checksum_is_refused(
    key: str, value: JSON, reason: str
) -> None:
    values = parse(manifest().to_json(), "m")
    values[key] = value
    with pytest.raises(DamagedError, match=reason):
        Manifest.from_json(signed(values), "m")


def test_a_manifest_of_a_newer_version_is_no_damage() -> None:
    values = parse(manifest().to_json(), "m")
    values["format"] = 2
    with pytest.raises(NewerFormatError, match="m: found format 2, expected 1: a newer version"):
        Manifest.from_json(signed(values), "m")


HOSTILE_FILES: list[tuple[dict[str, JSON], str]] = [
    ({"name": "../x"}, "plain file name"),
    ({"name": "/etc/passwd"}, "plain file name"),
    ({"name": "a/b"}, "plain file name"),
    ({"name": ".."}, "plain file name"),
    ({"name": ".hidden"}, "plain file name"),
    ({"name": "a\x00b"}, "plain file name"),
    ({"name": "manifest.json"}, "plain file name"),
    ({"name": "x" * 300}, "at most 200"),
    ({"size_bytes": -1}, "whole number"),
    ({"size_bytes": 2**60}, "whole number"),
    ({"size_bytes": 1.5}, "whole number"),
    ({"size_bytes": True}, "whole number"),
    ({"size_bytes": 10**15}, "parts: found 8 bytes"),
    ({"parts": []}, "parts: found 0 bytes, expected the 8"),
    ({"parts": [[0, 4, SUM]]}, "parts: found 4 bytes, expected the 8"),
    ({"parts": [[0, 9, SUM]]}, "expected the next"),
    ({"parts": [[4, 4, SUM], [0, 4, SUM]]}, "expected the next"),
    ({"parts": [[0, 8, SUM], [0, 8, SUM]]}, "expected the next"),
    ({"parts": [[0, 0, SUM], [0, 8, SUM]]}, "expected the next"),
    ({"parts": [[False, 8, SUM]]}, "expected the next"),
    ({"parts": [[0, 8, "xyz"]]}, "expected the next"),
    ({"parts": [[0, 8]]}, "expected the next"),
    ({"parts": [[0, 8, SUM, 1]]}, "expected the next"),
    ({"parts": ["0, 8"]}, "expected the next"),
    ({"parts": [[0, -8, SUM]]}, "expected the next"),
    ({"owner": "../1"}, "owner: found"),
    ({"owner": 3}, "owner: found"),
]


@pytest.mark.parametrize(("changes", "reason"), HOSTILE_FILES)
def test_a_hostile_file_entry_is_refused(changes: dict[str, JSON], reason: str) -> None:
    values = parse(manifest().to_json(), "m")
    entry: dict[str, JSON] = {"name": "a", "size_bytes": 8, "parts": [[0, 8, SUM]], "owner": None}
    values["files"] = [{**entry, **changes}]
    with pytest.raises(DamagedError, match=reason) as caught:
        Manifest.from_json(signed(values), "m")
    assert len(str(caught.value)) < 400


def test_a_file_that_stands_there_twice_is_refused() -> None:
    entry = FileEntry(name="a", size_bytes=0, parts=())
    with pytest.raises(DamagedError, match="'a' stands there twice"):
        Manifest.from_json(manifest(files=(entry, entry)).to_json(), "m")


def test_a_huge_manifest_is_refused_before_it_is_read() -> None:
    with pytest.raises(DamagedError, match="expected at most"):
        Manifest.from_json(b" " * ((64 << 20) + 1), "m")


json_values: st.SearchStrategy[JSON] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=8)
    | st.just("../.."),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.sampled_from(
        [
            "format",
            "name",
            "parent",
            "run_id",
            "files",
            "info",
            "token",
            "created_at",
            "void",
            "new",
        ]
    ),
    json_values,
)
def test_any_value_in_any_place_is_read_or_refused(key: str, value: JSON) -> None:
    values = parse(manifest().to_json(), "m")
    values[key] = value
    refusal = ""
    files: tuple[FileEntry, ...] = ()
    try:
        files = Manifest.from_json(signed(values), "m").files
    except DamagedError as error:
        refusal = str(error)
    assert not refusal or refusal.startswith("m: ")
    for entry in files:
        assert "/" not in entry.name
        assert sum(part.size for part in entry.parts) == entry.size_bytes


def test_a_void_manifest_is_known_and_is_no_checkpoint() -> None:
    assert is_void(void_manifest())
    assert is_void(b'{"void": true}')
    assert void_manifest() != void_manifest()
    for other in (manifest().to_json(), b"", b"{", b'{"void": 1}', b'{"void": false}', b"x" * 9999):
        assert not is_void(other)
    with pytest.raises(DamagedError, match="void manifest"):
        Manifest.from_json(void_manifest("token"), "m")


# ----------------------------------------------------------------------------------------- records
AGENT = AgentId(host="h", boot_id="b", pid=10, start=77)


def claim(**changes: object) -> Claim:
    made = Claim(generation=7, run_id="r", launch="l", agents=(AGENT,), world_size=4, nodes=2, hosts=("h", "i"),
                 versions={"torch": "2"}, config={"a": [1]}, cause="start", faults=({"rank": 1},))  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]  # each test gives the field's own type


def test_a_claim_is_read_back() -> None:
    made = claim()
    assert Claim.from_json(made.to_json(), claim_name(7)) == made
    assert str(AGENT) == "h:10"


def test_a_claim_with_what_json_cannot_say_is_written_all_the_same() -> None:
    read = Claim.from_json(claim(faults=({"loss": float("nan")},)).to_json(), claim_name(7))
    assert read.faults == ({"loss": "nan"},)


def test_a_claim_under_another_generations_name_is_refused() -> None:
    with pytest.raises(RecordError, match="generation: found 7, expected that of its name"):
        Claim.from_json(claim().to_json(), claim_name(8))


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", 9), ("generation", 0), ("agents", [1]), ("agents", [{"host": "h"}]), ("world_size", 0),
     ("nodes", "2"), ("hosts", [1]), ("versions", 1), ("config", None), ("cause", 5), ("faults", {}),
     ("launch", ""), ("token", 1), ("created_at", None), ("run_id", 4)],
)  # fmt: skip
def test_a_claim_that_cannot_be_read_names_the_key(key: str, value: JSON) -> None:
    values = parse(claim().to_json(), "c")
    values[key] = value
    with pytest.raises(RecordError, match=rf"^generations/000007\.json: {key}"):
        Claim.from_json(dump(values), claim_name(7))


def test_keys_of_a_later_version_are_left_alone() -> None:
    made = claim()
    values = {**parse(made.to_json(), "c"), "rollback_to": "000003-000000000005"}
    assert Claim.from_json(dump(values), claim_name(7)) == made


def test_a_started_record_is_read_back() -> None:
    made = Started(
        generation=7, parent=str(NAME), source="memory", start_step=1200, position=(3, 64)
    )
    read = Started.from_json(made.to_json(), started_name(7))
    assert read == made
    assert read.parent_name == NAME
    fresh = Started(generation=1, parent=None, source="fresh", start_step=0, position=(0, 0))
    assert Started.from_json(fresh.to_json(), started_name(1)) == fresh
    assert fresh.parent_name is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", 2), ("generation", "7"), ("parent", "x"), ("source", "elsewhere"), ("start_step", -1),
     ("position", [1]), ("position", [1, -1]), ("position", ["1", 2]), ("position", None)],
)  # fmt: skip
def test_a_started_record_that_cannot_be_read_names_the_key(key: str, value: JSON) -> None:
    made = Started(generation=7, parent=None, source="fresh", start_step=0, position=(0, 0))
    values = parse(made.to_json(), "s")
    values[key] = value
    with pytest.raises(RecordError, match=f"^s: {key}"):
        Started.from_json(dump(values), "s")


def test_a_run_record_is_read_back() -> None:
    made = RunRecord(run_id="r", identity={"seed": 0, "job": "digits"})
    assert RunRecord.from_json(made.to_json(), "run.json") == made
    with pytest.raises(RecordError, match=r"^run\.json: identity"):
        RunRecord.from_json(dump({**parse(made.to_json(), "r"), "identity": 5}), "run.json")


def test_a_damaged_manifest_of_millions_of_values_is_refused_without_being_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parsed(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    data = b"{" + b",".join(b'"%d":[]' % number for number in range(300_000)) + b"}"
    assert len(data) < MANIFEST_LIMIT_BYTES
    monkeypatch.setattr("checkpoints.manifests.parse", parsed)
    with pytest.raises(DamagedError, match="checksum of the manifest itself"):
        Manifest.from_json(data, "m")
    with pytest.raises(DamagedError, match=f"expected at most {MANIFEST_LIMIT_BYTES}"):
        Manifest.from_json(data * 2, "m")
