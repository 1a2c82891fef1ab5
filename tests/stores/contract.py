"""What every store has to do; each back end's tests subclass it and give a `url` and `options`."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from checkpoints.errors import DamagedError, ObjectMissingError, PermanentStoreError, RecordError
from checkpoints.layout import new_token
from checkpoints.store import Store

Opener = Callable[[], Store]


class StoreContract:
    """The contract, as tests."""

    large_bytes = 3 << 20
    race_rounds = 10

    @pytest.fixture
    def open_one(self) -> Opener:
        """Opens a store at this test's URL; what a subclass has to give."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, open_one: Opener) -> Iterator[Store]:
        store = open_one()
        yield store
        store.close()

    @pytest.fixture
    def other(self, open_one: Opener) -> Iterator[Store]:
        """The same URL, as another process would open it."""
        store = open_one()
        yield store
        store.close()

    # -------------------------------------------------------------------------- reading and writing
    def test_check_accepts_an_url_that_holds_nothing_yet(self, store: Store) -> None:
        store.check()
        assert store.list() == []
        assert store.children("") == []

    def test_what_was_put_is_read_back(self, store: Store, other: Store) -> None:
        store.put("a/b/c.bin", b"bytes")
        assert other.get("a/b/c.bin") == b"bytes"
        assert other.size("a/b/c.bin") == 5
        assert other.exists("a/b/c.bin")

    def test_put_joins_many_buffers_of_any_kind(self, store: Store) -> None:
        floats = memoryview(bytearray(16)).cast("d")
        store.put("many", [b"ab", bytearray(b"cd"), memoryview(b""), floats, b"e" * 1000])
        assert store.get("many") == b"abcd" + bytes(16) + b"e" * 1000

    def test_put_replaces_the_whole_object(self, store: Store) -> None:
        store.put("x", b"a long first version")
        store.put("x", b"short")
        assert store.get("x") == b"short"

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert store.size("empty") == 0
        assert store.exists("empty")
        assert store.get_range("empty", 0, 10) == b""
        assert store.get("empty", limit_bytes=10) == b""

    def test_a_large_object_returns_bit_for_bit(self, store: Store) -> None:
        block = bytes(range(256)) * 1024
        count = self.large_bytes // len(block)
        store.put("large", [block] * count)
        assert store.size("large") == count * len(block)
        buffer = bytearray(len(block))
        for at in (0, count // 2, count - 1):
            store.readinto("large", at * len(block), memoryview(buffer))
            assert buffer == block

    def test_ranges_end_where_the_object_ends(self, store: Store) -> None:
        store.put("r", b"0123456789")
        assert store.get_range("r", 0, 4) == b"0123"
        assert store.get_range("r", 7, 100) == b"789"
        assert store.get_range("r", 10, 5) == b""
        assert store.get_range("r", 1000, 5) == b""
        assert store.get_range("r", 3, 0) == b""

    def test_readinto_beyond_the_end_says_that_the_file_is_truncated(self, store: Store) -> None:
        store.put("r", b"0123456789")
        with pytest.raises(DamagedError, match=r"r: found 3 bytes at 7, expected 8: .*truncated$"):
            store.readinto("r", 7, memoryview(bytearray(8)))

    def test_get_with_a_limit_refuses_what_is_larger(self, store: Store) -> None:
        store.put("r", b"0123456789")
        assert store.get("r", limit_bytes=10) == b"0123456789"
        with pytest.raises(RecordError, match="more than 9 bytes"):
            store.get("r", limit_bytes=9)

    def test_a_missing_object_is_told_by_name(self, store: Store) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.get("no/such"),
            lambda: store.size("no/such"),
            lambda: store.get_range("no/such", 0, 1),
            lambda: store.readinto("no/such", 0, memoryview(bytearray(1))),
            lambda: store.get("no/such", limit_bytes=5),
        ]
        for call in calls:
            with pytest.raises(ObjectMissingError, match="no/such: there is no such object"):
                call()
        assert store.get_tagged("no/such") is None
        assert not store.exists("no/such")

    def test_a_folder_is_no_object(self, store: Store) -> None:
        store.put("folder/x", b"1")
        assert not store.exists("folder")

    @pytest.mark.parametrize("name", ["", "/x", "../x", "a/../../x", "a//b", "a/./b", "a\nb", "a/"])
    def test_a_name_that_leaves_the_url_is_refused(self, store: Store, name: str) -> None:
        with pytest.raises(RecordError, match="object name"):
            store.put(name, b"1")

    # -------------------------------------------------------------------------------------- listing
    def test_list_goes_by_prefix_at_any_depth(self, store: Store) -> None:
        for name in ("journal/000007.jsonl", "journal/000007-000001.jsonl", "journal/000008.jsonl"):
            store.put(name, b"1")
        store.put("journal/deep/er/x", b"1")
        store.put("run.json", b"1")
        assert store.list("journal/000007") == [
            "journal/000007-000001.jsonl",
            "journal/000007.jsonl",
        ]
        assert store.list("journal/") == [
            "journal/000007-000001.jsonl",
            "journal/000007.jsonl",
            "journal/000008.jsonl",
            "journal/deep/er/x",
        ]
        assert len(store.list()) == 5
        assert store.list("nothing/here") == []

    def test_children_are_the_next_components(self, store: Store) -> None:
        for name in (
            "checkpoints/a/1",
            "checkpoints/a/2",
            "checkpoints/b/1",
            "checkpoints/c",
            "run.json",
        ):
            store.put(name, b"1")
        assert store.children("checkpoints") == ["a", "b", "c"]
        assert store.children("checkpoints/") == ["a", "b", "c"]
        assert store.children("") == ["checkpoints", "run.json"]
        assert store.children("nothing") == []
        # A folder of which another's name is the beginning is another folder.
        assert store.children("check") == []

    def test_c32_a_listing_never_shows_an_old_state(self, store: Store, other: Store) -> None:
        store.put("checkpoints/1/manifest.json", b"1")
        assert store.children("checkpoints") == ["1"]
        assert store.exists("checkpoints/1/manifest.json")
        assert store.list("checkpoints/") == ["checkpoints/1/manifest.json"]
        other.put("checkpoints/2/manifest.json", b"2")
        other.put("checkpoints/3/manifest.json", b"3")
        other.delete_tree("checkpoints/1")
        assert store.children("checkpoints") == ["2", "3"]
        assert not store.exists("checkpoints/1/manifest.json")
        assert store.list("checkpoints/") == [
            "checkpoints/2/manifest.json",
            "checkpoints/3/manifest.json",
        ]
        other.put("checkpoints/3/manifest.json", b"another size")
        assert store.size("checkpoints/3/manifest.json") == len(b"another size")

    # ------------------------------------------------------------------------------------- deleting
    def test_deleting_what_is_missing_is_fine(self, store: Store) -> None:
        store.delete("never/was")
        store.delete_tree("never/was")
        store.put("x", b"1")
        store.delete("x")
        store.delete("x")
        assert not store.exists("x")

    def test_delete_tree_takes_the_folder_and_nothing_beside_it(self, store: Store) -> None:
        for name in ("c/1/a", "c/1/b/c", "c/10/a", "c/1.json"):
            store.put(name, b"1")
        store.delete_tree("c/1")
        assert store.list() == ["c/1.json", "c/10/a"]

    def test_delete_tree_of_the_url_itself_is_refused(self, store: Store) -> None:
        store.put("x", b"1")
        with pytest.raises(RecordError):
            store.delete_tree("")
        assert store.exists("x")

    # --------------------------------------------------------------------------- exclusive creation
    def test_the_second_creator_is_told_so(self, store: Store, other: Store) -> None:
        assert store.put_new("generations/000001.json", b"token one")
        assert not other.put_new("generations/000001.json", b"token two")
        assert other.get("generations/000001.json") == b"token one"

    def test_creating_the_same_bytes_again_counts_as_ours(self, store: Store) -> None:
        # That is what a retry after a lost reply looks like.
        assert store.put_new("x", b"token")
        assert store.put_new("x", b"token")

    def test_nothing_empty_is_created_exclusively(self, store: Store) -> None:
        # It could not hold a token, and s3fs overwrites with nothing in spite of the condition.
        with pytest.raises(PermanentStoreError, match="found 0 bytes"):
            store.put_new("x", b"")

    def test_racing_creators_have_exactly_one_winner(self, store: Store, other: Store) -> None:
        for number in range(self.race_rounds):
            name = f"race/{number}"
            tokens = [new_token().encode() for _ in range(8)]
            won = _race(name, tokens, [store, other])
            assert len(won) == 1
            assert store.get(name) == won[0]


def _race(name: str, tokens: list[bytes], stores: list[Store]) -> list[bytes]:
    """Let each token try to take the name at the same moment; those that were told they did."""
    gate = threading.Barrier(len(tokens))
    won: list[bytes] = []

    def create(token: bytes, at: Store) -> None:
        gate.wait()
        if at.put_new(name, token):
            won.append(token)

    _run([partial(create, token, stores[n % len(stores)]) for n, token in enumerate(tokens)])
    return won


def _run(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class CompareAndSetContract(StoreContract):
    """The rest of it, for stores that can compare and set."""

    def test_put_if_wins_only_with_the_newest_tag(self, store: Store, other: Store) -> None:
        first = store.put_if("leader", b"one", None)
        assert first is not None
        assert other.put_if("leader", b"two", None) is None
        second = other.put_if("leader", b"three", first)
        assert second is not None
        assert store.put_if("leader", b"four", first) is None
        assert store.get_tagged("leader") == (b"three", second)

    def test_put_if_on_what_is_missing_loses(self, store: Store) -> None:
        assert store.put_if("leader", b"one", "0" * 32) is None
        assert not store.exists("leader")

    def test_racing_setters_never_lose_an_update(self, store: Store, other: Store) -> None:
        assert store.put_if("count", b"0 start", None)
        gate = threading.Barrier(4)

        def add(at: Store) -> None:
            gate.wait()
            done = 0
            while done < 5:
                found = at.get_tagged("count")
                assert found is not None
                value = int(found[0].split()[0])
                if at.put_if("count", f"{value + 1} {new_token()}".encode(), found[1]):
                    done += 1

        _run([partial(add, (store, other)[n % 2]) for n in range(4)])
        assert store.get("count").startswith(b"20 ")
