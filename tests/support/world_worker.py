"""A worker that uses every collective of the world, then (where told) loses a peer: for the tests of the world."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from elastic.errors import CollectiveError
from elastic.meeting import meet
from elastic.ranks import read_place
from elastic.world import World, start_world

KINDS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip


def main() -> int:
    """Do what the first argument names: "use", "lose" or "slow"."""
    place = read_place(os.environ)
    meeting = meet(
        place, {"host": f"h{place.rank % 2}"}, channel=None, init_method=None, timeout_s=60
    )
    world = start_world(
        place,
        meeting,
        backend="auto",
        init_method=None,
        timeout_s=60,
        control_timeout_s=60 if sys.argv[1] != "slow" else 3,
    )
    if sys.argv[1] == "use":
        use(world)
        world.close()
        meeting.close()
        return 0
    return lose(world)


def use(world: World) -> None:
    """Check each collective against what it must give."""
    rank, size = world.rank, world.world_size
    expect(world.hosts, tuple(f"h{rank % 2}" for rank in range(size)))
    expect(world.gather({"r": rank}), [{"r": one} for one in range(size)])
    long = "y" * (10_000 * rank)
    expect([len(one) for one in world.gather(long)], [10_000 * one for one in range(size)])
    for src in range(size):
        expect(world.broadcast([rank, None, "é"], src), [src, None, "é"])
        expect(world.broadcast("z" * (9000 + rank), src), "z" * (9000 + src))
    expect(world.all_sum([1.0, rank, 1e-17]), [size, sum(range(size)), size * 1e-17])
    tensors = [torch.full((3, 5), rank).to(kind) for kind in KINDS]
    tensors += [
        torch.full((4, 6), float(rank)).t(),
        torch.tensor(float(rank)),
        torch.empty(0),
        torch.full((9_000_000,), rank),
    ]
    world.broadcast_tensors(tensors, src=1)
    for tensor in tensors:
        expect(bool((tensor == torch.ones_like(tensor)).all()), True)
    parameter = torch.nn.Parameter(torch.full((2,), float("nan") if rank else -0.0))
    world.broadcast_tensors([parameter])
    expect(parameter.tolist() == [0.0, 0.0] and bool(torch.signbit(parameter).all()), True)
    pending = [world.flags_async(1 << (rank + shift)) for shift in range(5)]
    world.barrier()  # others may be on their way
    expect(
        [one.wait() for one in pending],
        [sum(1 << (one + shift) for one in range(size)) for shift in range(5)],
    )
    world.flags_async(0)  # left behind: close takes it in


def lose(world: World) -> int:
    """Rank 1 dies (or is silent); each of the others sees a CollectiveError, soon, and leaves without an abort."""
    world.barrier()
    if world.rank == 1:
        if sys.argv[1] == "slow":
            time.sleep(20)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            world.flags_async(0).wait()
            world.gather(world.rank)
    except CollectiveError as error:
        took = timedelta(seconds=round(time.monotonic() - began))
        sys.stderr.write(
            f"lost after {took.seconds} s: {error} <- {type(error.__cause__).__name__}\n"
        )
    world.close(orderly=False)
    return 1


def expect(found: object, wanted: object) -> None:
    """Stop with both values where they differ."""
    if found != wanted:
        raise AssertionError(f"found {found!r:.300}, expected {wanted!r:.300}")


if __name__ == "__main__":
    sys.exit(main())
