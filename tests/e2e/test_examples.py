"""The examples of README and docs run as they stand there."""

import re
from pathlib import Path

import pytest

from tests.support import records
from tests.support.cluster import Cluster, torchrun_command
from tests.support.distribution import ROOT

FENCE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def write_example(page: Path, folder: Path) -> str:
    """Write a page's example that begins with a file name into that file; return the name."""
    ((name, text),) = FENCE.findall(page.read_text(encoding="utf-8"))
    (folder / name).write_text(text)
    return str(name)


@pytest.mark.parametrize("page", ["README.md", "docs/own-loop.md"], ids=["own-job", "own-loop"])
def test_an_example_trains(cluster: Cluster, page: str) -> None:
    name = write_example(ROOT / page, cluster.folder)
    if page == "README.md":
        agent = cluster.start(f"{name}:Sine", "train.epochs=5", "checkpoint.url=runs/own")
    else:
        launcher = [*torchrun_command(), "--nproc_per_node=2", "--rdzv_backend=c10d"]
        agent = cluster.spawn([*launcher, name], env={"PYTHONPATH": f"{ROOT}"})
    assert agent.wait(90) == 0, agent.tail()
    url = cluster.folder / "runs" / "own"
    summary = records.summary(url)
    assert summary["status"] == "complete"
    assert summary["epochs"] == 5
    losses = [event["loss"] for event in records.step_events(url)]
    assert losses[-1] < losses[0] / 2
