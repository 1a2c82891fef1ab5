"""Agents of the rendezvous without torchrun and without torch: for the tests of many nodes and of their faults.

    member_worker.py ENDPOINT ID LOG MIN:MAX [key=value …]

Joins each world and writes a line on it to LOG; ends the launch when LOG.stop is there, leaves at SIGTERM. Keys are those
of --rdzv_conf.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from elastic.addresses import own_addresses
from elastic.ballot import Ballot
from elastic.link import ClosedError
from elastic.member import Member
from elastic.terms import read_terms
from elastic.wire import listen


def main() -> int:
    """Be an agent until told to end."""
    endpoint, rdzv_id, log, nodes, *conf = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    low, high = map(int, nodes.split(":"))
    terms = read_terms(low, high, dict(word.split("=", 1) for word in conf))
    served: list[socket.socket] = []

    async def make_store() -> int:
        served.append(listen())
        return int(served[-1].getsockname()[1])

    name = f"{socket.gethostname()} (pid {os.getpid()})"
    member = Member(
        Ballot(endpoint, rdzv_id),
        terms,
        own_addresses(one_node=False, given=None),
        name,
        make_store,
    )

    def leave(_number: int, _frame: object) -> None:
        member.leave()

    signal.signal(signal.SIGTERM, leave)
    member.begin()

    def tell(event: str, **fields: object) -> None:
        asked = {"reads": member.ballot.reads, "writes": member.ballot.writes}
        line = json.dumps(
            {"event": event, "time": time.monotonic(), "pid": os.getpid(), **asked, **fields}
        )
        with Path(log).open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    stop = Path(f"{log}.stop")
    tell("up")
    while True:
        member.ask()
        try:
            start = member.link.wait_for_start(terms.join_s)
        except ClosedError as error:
            tell("closed", text=str(error))
            return 3
        except TimeoutError as error:
            tell("late", text=str(error))
            member.leave()
            member.link.wait_until_left(terms.close_s)
            return 4
        socket.create_connection((start.address, start.port), timeout=5).close()
        tell(
            "world",
            world=start.world,
            rank=start.rank,
            size=start.size,
            leads=member.is_leading,
            launch=member.launch,
        )
        while not member.link.waiting:
            if stop.exists():
                tell("stop", world=start.world)
                member.finish()
                member.close()
                return 0 if member.link.wait_until_left(terms.close_s) else 5
            if member.link.has_left:
                tell("left")
                return 1
            time.sleep(0.01)


if __name__ == "__main__":
    code = main()
    # Give what the others are told time to arrive, as torchrun's own end does.
    asyncio.run(asyncio.sleep(0.2))
    os._exit(code)
