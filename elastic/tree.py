"""The canonical order of a sum over logical shards: a binary tree that knows nothing of ranks.

Pure. The sum of the shards [first, first + 2k) is the sum of [first, first + k) plus that of
[first + k, first + 2k); what has no shards is left out, never added as zero. A rank owns a contiguous
range of shards and adds up the complete subtrees inside it; whoever finishes the tree adds the rest.
So each addition has the same two operands in every world, and the sum the same bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Node", "merges", "nodes_of", "owned"]


class Node(NamedTuple):
    """The sum over the shards [first, first + size); size is a power of two, and divides first."""

    first: int
    size: int


def owned(rank: int, world_size: int, shards: int) -> range:
    """The shards that a rank executes: contiguous, ascending with the rank, none twice.

    Ranks beyond the number of shards own none, so that the primary always owns one.
    """
    workers = min(world_size, shards)
    if rank >= workers:
        return range(0)
    return range(rank * shards // workers, (rank + 1) * shards // workers)


def nodes_of(shards: range, present: int) -> list[Node]:
    """The largest complete subtrees of a rank's shards; of a step only the first `present` exist."""
    nodes: list[Node] = []
    first, stop = shards.start, min(shards.stop, present)
    while first < stop:
        size = 1
        while first % (2 * size) == 0 and first + 2 * size <= stop:
            size *= 2
        nodes.append(Node(first, size))
        first += size
    return nodes


def siblings(left: Node, right: Node) -> bool:
    """Whether two nodes are the halves of one."""
    return (
        left.size == right.size
        and left.first % (2 * left.size) == 0
        and right.first == left.first + left.size
    )


def merges(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """How to finish the tree over nodes that cover [0, present): (i, j) adds number j to number i.

    Afterwards number 0 is the sum.

    Raises:
        ValueError: The nodes are not what ranks' shards make.
    """
    present = sum(node.size for node in nodes)
    places = {node: place for place, node in enumerate(nodes)}
    steps: list[tuple[int, int]] = []

    def build(node: Node) -> int | None:
        if node.first >= present:
            return None
        if node in places:
            return places[node]
        if node.size == 1:
            raise ValueError(f"tree: found no sum over shard {node.first}, expected one of {nodes}")
        half = node.size // 2
        left = build(Node(node.first, half))
        right = build(Node(node.first + half, half))
        if left is not None and right is not None:
            steps.append((left, right))
        return left

    top = 1
    while top < present:
        top *= 2
    if present:
        build(Node(0, top))
    return steps
