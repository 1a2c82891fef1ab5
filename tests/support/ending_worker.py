"""A torchrun worker for the tests of the agent: writes that it started, then ends its agent, or stays, or fails."""

import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from elastic.agent import current_agent, die_with_agent, end_agent, node_folder
from elastic.ranks import read_place


def main() -> None:
    """Do what the first argument names; leave traces in the folder of the second."""
    act, folder = sys.argv[1], Path(sys.argv[2])
    place = read_place(os.environ)
    die_with_agent(place)
    agent = current_agent(place, os.environ)
    (folder / f"start.{place.rank}.{os.getpid()}").write_text(str(agent.pid))
    node_folder(agent)
    # All at once, and only when all are there.
    while len(list(folder.glob("start.*"))) < place.world_size:
        time.sleep(0.005)
    if act == "all" or (act == "one" and place.rank == 0):
        end_agent(agent, 76)
    if act == "thread":
        threading.Thread(target=end_agent, args=(agent, 2)).start()
    if act == "stagger":
        time.sleep(0.3 * place.rank)
        end_agent(agent, 2)
    time.sleep(60)


if __name__ == "__main__":
    main()
