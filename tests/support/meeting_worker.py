"""A worker that does nothing but meet and all-reduce: for the tests of the meeting and the world.

    meeting_worker.py FOLDER [key=value …]

Writes a line to FOLDER/log for each generation it is part of and at each tenth step; ends when FOLDER/stop is there.
Keys: late_rank, late_s (a rank that starts late), url (a run URL), init_method, timeout_s, limit_s.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from elastic.agent import current_agent, die_with_agent
from elastic.errors import ElasticError
from elastic.ranks import Place, read_place


def main() -> int:
    """Meet, step, say so; return an exit code as the runner does."""
    folder = Path(sys.argv[1])
    keys = dict(word.split("=", 1) for word in sys.argv[2:])
    place = read_place(os.environ)
    die_with_agent(place)
    write(folder, event="up", rank=place.rank, pid=os.getpid(), restart=place.restart_count)
    if int(keys.get("late_rank", -1)) == place.rank:
        time.sleep(float(keys["late_s"]))
    try:
        train(folder, place, keys)
    except ElasticError as error:
        write(folder, event="error", rank=place.rank, type=type(error).__name__, text=str(error))
        sys.stderr.write(f"rank {place.rank}: {error}\n")
        return int(error.code)
    return 0


def train(folder: Path, place: Place, keys: dict[str, str]) -> None:
    """Meet, then sum ones until told to stop."""
    import torch
    import torch.distributed as dist

    from checkpoints.store import open_store
    from elastic.meeting import meet
    from elastic.world import start_world

    began = time.monotonic()
    hello = {"host": "here", "pid": os.getpid(), "agent": current_agent(place, os.environ).pid}
    url, method = keys.get("url"), keys.get("init_method")
    channel = open_store(url) if url else None
    timeout_s = float(keys.get("timeout_s", 60))
    meeting = meet(place, hello, channel=channel, init_method=method, timeout_s=timeout_s)
    met_s = time.monotonic() - began
    world = start_world(place, meeting, backend="gloo", init_method=method, timeout_s=60)
    pids = [other["pid"] for other in world.gather(hello)]
    if pids != [other["pid"] for other in meeting.hellos]:
        raise AssertionError(f"the world {pids} is not the one that met {meeting.hellos}")
    write(
        folder, event="world", rank=place.rank, size=place.world_size, session=meeting.session, pids=pids,
        pid=os.getpid(), restart=place.restart_count, met_s=met_s,
    )  # fmt: skip
    ones = torch.ones(1000)
    end = time.monotonic() + float(keys.get("limit_s", 600))
    step = 0
    while True:
        step += 1
        total = ones.clone()
        flags = world.flags_async(
            int(place.rank == 0 and ((folder / "stop").exists() or time.monotonic() > end))
        )
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise ElasticError(f"all-reduce failed at step {step}: {str(error)[:100]}") from error
        if not bool((total == place.world_size).all()):
            raise AssertionError(f"step {step}: found {total[0]}, expected {place.world_size}")
        if step % 10 == 0:
            write(folder, event="step", rank=place.rank, step=step, session=meeting.session)
        if flags.wait():
            break
        time.sleep(0.005)
    world.close()
    meeting.close()
    write(folder, event="done", rank=place.rank, step=step, session=meeting.session)


def write(folder: Path, **fields: object) -> None:
    """Add a line to the log, in one write."""
    line = json.dumps({"time": time.time(), **fields}) + "\n"
    with (folder / "log").open("ab", buffering=0) as file:
        file.write(line.encode())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code else sys.exit(0)
