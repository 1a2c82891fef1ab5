"""The record under many writers at once, on a folder and on a store that compares and sets by itself."""

import asyncio
import dataclasses
import secrets
import socket
import threading
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError, PermanentStoreError
from elastic.ballot import Ballot
from elastic.election import Leader, Record
from tests.support.object_stores import s3_options

LEADER = Leader(id="l", addresses=("10.0.0.1",), port=1, place="there", name="h1 (pid 1)")
RECORD = Record(launch="one", token="secret", epoch=1, leader=LEADER)  # noqa: S106 - a test's


@pytest.fixture(params=["folder", "memory"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        str(tmp_path / "rdzv") if request.param == "folder" else f"memory://{secrets.token_hex(8)}"
    )


def test_nothing_then_the_first_then_the_next(endpoint: str) -> None:
    async def main() -> None:
        ballot = Ballot(endpoint, "id")
        assert await ballot.read(5) is None
        tag = await ballot.write(RECORD, None, 5)
        assert tag is not None
        assert await ballot.write(RECORD, None, 5) is None  # somebody was there before
        found = await ballot.read(5)
        assert found == (RECORD, tag)
        newer = await ballot.write(RECORD.beaten(), tag, 5)
        assert newer is not None
        assert await ballot.write(RECORD.beaten(), tag, 5) is None
        assert await ballot.read(5) == (RECORD.beaten(), newer)

    asyncio.run(main())


@pytest.mark.parametrize("rival", range(4))
def test_of_many_that_take_an_epoch_one_wins(rival: int, endpoint: str) -> None:
    """Each adds one to the epoch it has read, over and over: every win has an epoch of its own."""
    wins: list[int] = []

    async def first() -> None:
        await Ballot(endpoint, "id").write(RECORD, None, 5)

    def take() -> None:
        async def main() -> None:
            ballot = Ballot(endpoint, "id")
            while len(wins) < 60:
                found = await ballot.read(5)
                assert found is not None
                record, tag = found
                wanted = dataclasses.replace(record, epoch=record.epoch + 1)
                if await ballot.write(wanted, tag, 5) is not None:
                    wins.append(wanted.epoch)

        asyncio.run(main())

    asyncio.run(first())
    threads = [threading.Thread(target=take) for _ in range(4 + rival)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(wins) == list(range(2, len(wins) + 2))


def test_folder_keeps_few_versions_and_a_torn_newest_is_passed_by(tmp_path: Path) -> None:
    async def main() -> None:
        ballot = Ballot(str(tmp_path), "id")
        tag: str | None = None
        record = RECORD
        for _ in range(50):
            tag = await ballot.write(record, tag, 5)
            record = record.beaten()
        folder = tmp_path / "id.leader"
        assert len(list(folder.iterdir())) <= 33
        (folder / f"{51:012d}").write_text(
            "{"
        )  # its writer was killed, on a file system without links
        found = await ballot.read(5)
        assert found is not None
        assert found[0].beat == 49
        assert await ballot.write(record, found[1], 5) == "52"

    asyncio.run(main())


def test_writer_that_slept_while_others_went_on_has_lost(tmp_path: Path) -> None:
    async def main() -> None:
        ballot = Ballot(str(tmp_path), "id")
        old = await ballot.write(RECORD, None, 5)
        tag = old
        for _ in range(40):
            tag = await ballot.write(RECORD, tag, 5)
        assert await ballot.write(RECORD.taken(LEADER), old, 5) is None
        found = await ballot.read(5)
        assert found is not None
        assert found[0].epoch == 1

    asyncio.run(main())


def test_ids_do_not_mix_even_where_their_names_look_alike(tmp_path: Path) -> None:
    async def main() -> None:
        for number, name in enumerate(["a b", "a-b", "a/b", ""]):
            assert await Ballot(str(tmp_path), name).read(5) is None, name
            await Ballot(str(tmp_path), name).write(
                dataclasses.replace(RECORD, epoch=number), None, 5
            )

    asyncio.run(main())


def test_what_is_no_record_is_an_error_that_names_the_place() -> None:
    from checkpoints.store import open_store

    place = f"memory://{secrets.token_hex(8)}"
    open_store(place).put("id.json", b'{"format": 9}')
    with pytest.raises(
        CheckpointError, match="found format 9, expected 1; give another --rdzv_endpoint"
    ):
        asyncio.run(Ballot(place, "id").read(5))


@pytest.mark.timeout(60)
def test_request_that_hangs_is_left_behind() -> None:
    pytest.importorskip("s3fs")

    async def ask(port: int) -> None:
        ballot = Ballot("s3://bucket/run", "id", s3_options(f"http://127.0.0.1:{port}"))
        with pytest.raises(CheckpointError, match=r"no answer within 0.3 s"):
            await ballot.read(0.3)
        for _ in range(7):
            with pytest.raises(CheckpointError):
                await ballot.read(0.01)
        with pytest.raises(CheckpointError, match="8 requests have not been answered"):
            await ballot.read(5)

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        asyncio.run(ask(silent.getsockname()[1]))


def test_url_that_nothing_serves_is_refused() -> None:
    with pytest.raises(PermanentStoreError):
        Ballot("nosuch://bucket/run", "id")
