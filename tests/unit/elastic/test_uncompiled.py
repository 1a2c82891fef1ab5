"""The compiler that is not imported until somebody compiles: each case in a process of its own."""

import subprocess
import sys
from textwrap import dedent

import pytest

from tests.support.distribution import ROOT

START = """
import sys
import torch
from elastic.uncompiled import postpone_compiler
postpone_compiler()

def is_real():
    module = sys.modules["torch._dynamo"]
    assert torch._dynamo is module
    return "sympy" in sys.modules and module.__spec__ is not None

def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()

net = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(net.parameters())
step(net, optimizer)
assert not is_real()
"""


def run(program: str) -> None:
    """Run the start and a program."""
    whole = dedent(START) + dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_training_with_ddp_does_not_import_it() -> None:
    run("""
        import inspect
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        assert not ddp._use_python_reducer
        step(ddp, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        inspect.getmodule(inspect.currentframe())
        dist.destroy_process_group()
        assert not is_real()
    """)


@pytest.mark.parametrize(
    "how",
    [
        "from torch._dynamo import config",
        "import torch._dynamo as d; d.reset()",
        "torch._dynamo.disable(lambda: 1)()",
    ],
)
def test_whoever_asks_for_more_gets_the_real_one(how: str) -> None:
    run(f"{how}\nassert is_real()\nstep(net, optimizer)")


@pytest.mark.parametrize("part", ["config", "profiler"])
def test_a_part_that_is_asked_for_first_is_loaded_once(part: str) -> None:
    # One that the package loads by itself, and one that it does not.
    run(f"""
        import torch._dynamo.{part} as part
        assert is_real()
        assert part is torch._dynamo.{part} is sys.modules["torch._dynamo.{part}"]
        assert part.__spec__.loader.name == part.__spec__.name
        assert torch._dynamo.eval_frame.config is torch._dynamo.config
        assert not [one for one in sys.meta_path if type(one).__module__ == "elastic.uncompiled"]
    """)


def test_compiled_code_is_compiled_and_torchs_own_functions_stay_outside() -> None:
    run("""
        frames = []

        def backend(graph, inputs):
            frames.append(graph)
            return graph.forward

        @torch.compile(backend=backend)
        def whole(x):
            optimizer.zero_grad()
            return net(x * 2).sum()

        whole(torch.ones(1, 2)).backward()
        assert is_real()
        assert frames
        zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
        assert getattr(zero_grad, "__dynamo_disable") is not zero_grad
        step(net, optimizer)
    """)


def test_one_that_is_there_stays() -> None:
    run("""
        import torch._dynamo
        torch._dynamo.reset()
        before = sys.modules["torch._dynamo"]
        assert is_real()
        postpone_compiler()
        assert sys.modules["torch._dynamo"] is before
    """)
