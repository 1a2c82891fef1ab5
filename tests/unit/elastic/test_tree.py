"""The canonical order of a sum, and who owns what."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.tree import Node, merges, nodes_of, owned

shards = st.integers(1, 40)


def canonical(first: int, size: int, present: int) -> str:
    """The tree by its definition, as text."""
    if first >= present:
        return ""
    if size == 1:
        return str(first)
    half = size // 2
    left, right = canonical(first, half, present), canonical(first + half, half, present)
    return f"({left}+{right})" if right else left


def root(present: int) -> str:
    return canonical(0, 64, present)


@given(world=st.integers(1, 12), shards=shards)
def test_each_shard_has_one_owner_and_the_primary_has_one(world: int, shards: int) -> None:
    ranges = [owned(rank, world, shards) for rank in range(world)]
    assert [shard for own in ranges for shard in own] == list(range(shards))
    assert len(ranges[0]) >= 1
    sizes = [len(own) for own in ranges[:shards]]
    assert max(sizes) - min(sizes) <= 1
    assert all(not own for own in ranges[shards:])


@given(world=st.integers(1, 12), shards=shards, data=st.data())
def test_every_world_adds_in_the_same_order(world: int, shards: int, data: st.DataObject) -> None:
    present = data.draw(st.integers(1, shards))
    nodes = [n for rank in range(world) for n in nodes_of(owned(rank, world, shards), present)]
    texts = [canonical(node.first, node.size, present) for node in nodes]
    for into, other in merges(nodes):
        texts[into] = f"({texts[into]}+{texts[other]})"
    assert texts[0] == root(present)


@given(start=st.integers(0, 30), length=st.integers(0, 30))
def test_nodes_are_complete_cover_the_range_and_cannot_be_joined(start: int, length: int) -> None:
    nodes = nodes_of(range(start, start + length), 99)
    assert [s for n in nodes for s in range(n.first, n.first + n.size)] == list(
        range(start, start + length)
    )
    for node in nodes:
        assert node.size & (node.size - 1) == 0
        assert node.first % node.size == 0
    for left, right in pairwise(nodes):
        assert left.size != right.size or left.first % (2 * left.size)


@pytest.mark.parametrize(
    ("present", "text"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
    ],
)
def test_order_is_pinned(present: int, text: str) -> None:
    assert root(present) == text


def test_what_no_rank_holds_is_refused() -> None:
    message = "tree: found no sum over shard 0, expected one of [Node(first=1, size=1)]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        merges([Node(1, 1)])


def test_nothing_to_add_is_nothing() -> None:
    assert merges([]) == []
    assert nodes_of(range(3, 5), 2) == []
