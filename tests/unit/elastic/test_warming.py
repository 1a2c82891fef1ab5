import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from checkpoints.layout import AgentId
from elastic import warming
from elastic.ranks import read_place
from elastic.warming import LINK, STEPPED, Plan, first_step, interpreter_flags, is_own_to_start

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
AGENT = AgentId(host="h", boot_id="b", pid=1, start=2)


def is_own(environ: Mapping[str, str], *, wanted: bool = True) -> bool:
    return is_own_to_start(read_place(environ), environ, wanted=wanted)


def test_the_first_worker_of_a_node_sees_to_it_where_restarts_are_left() -> None:
    assert is_own(TORCHRUN)
    assert is_own({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert not is_own({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert not is_own({**TORCHRUN, "LOCAL_RANK": "1", "RANK": "1"})
    assert not is_own({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0"})


def test_switched_off_or_without_torchrun_nobody_does() -> None:
    assert not is_own(TORCHRUN, wanted=False)
    assert not is_own({**TORCHRUN, "ELASTIC_WARM": "0"})
    by_hand = {name: text for name, text in TORCHRUN.items() if "TORCHELASTIC" not in name}
    assert not is_own({**by_hand, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert not is_own({})


def test_a_forked_worker_of_any_rank_has_something_to_tell() -> None:
    assert is_own({**TORCHRUN, "LOCAL_RANK": "1", "RANK": "1", LINK: "7"})


@pytest.mark.parametrize(
    ("command", "environ", "expected"),
    [
        ("python /bin/torchrun --nnodes=1:4 run.py", {}, True),
        ("python -u -m torch.distributed.run --nnodes 2:8 run.py", {}, True),
        ("python /bin/torchrun --nnodes=2 run.py", {}, False),
        ("python /bin/torchrun --nnodes=2:2 run.py", {}, False),
        ("python /bin/torchrun run.py nnodes=1:4", {}, False),
        ("python /bin/torchrun run.py", {"PET_NNODES": "1:4"}, True),
        ("python -m elastic launch --nnodes=1:4 job.yaml", {}, True),
        ("", {}, False),
    ],
)
def test_without_restarts_it_is_of_use_only_where_nodes_may_come_and_go(
    command: str, environ: dict[str, str], expected: bool
) -> None:
    none_left = {"TORCHELASTIC_MAX_RESTARTS": "0", **environ}
    assert warming._may_restart(none_left, command.split()) is expected


@pytest.mark.parametrize(
    ("command", "argv", "expected"),
    [
        (["py", "-u", "run.py", "a", "b"], ["run.py", "a", "b"], ["-u"]),
        (["py", "-u", "-m", "elastic.run", "a"], ["/x/elastic/run.py", "a"], ["-u"]),
        (["py", "-X", "dev", "-u", "run.py"], ["run.py"], ["-X", "dev", "-u"]),
        (["py", "-c", "code", "a"], ["-c", "a"], None),
        (["py"], [""], None),
    ],
)
def test_the_interpreters_own_options(
    command: list[str], argv: list[str], expected: list[str] | None
) -> None:
    assert interpreter_flags(command, argv) == expected


def test_a_forked_worker_tells_that_it_works(tmp_path: Path) -> None:
    heard, link = os.pipe()
    first_step({LINK: str(link)}, AGENT, tmp_path)
    assert os.read(heard, 10) == STEPPED
    assert os.read(heard, 10) == b""  # closed: a loader worker that starts later does not hold it
    os.close(heard)
    assert list(tmp_path.iterdir()) == []


def test_a_node_whose_imports_cannot_be_shared_is_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / warming.UNFIT).write_text("a module starts threads")
    with caplog.at_level("INFO"):
        first_step({}, AGENT, tmp_path)
    assert "no warm start: a module starts threads" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [warming.UNFIT]


def test_a_plan_survives_being_written(tmp_path: Path) -> None:
    plan = warming._plan(AGENT, tmp_path)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.environ.items() >= {"PATH": os.environ["PATH"]}.items()
    assert "os" in plan.modules
    assert "__main__" not in plan.modules
    assert os.__file__ in plan.files
    assert plan.path == sys.path
