"""Where this process stands in its world, read from what its launcher put into the environment.

Understood, the first that is there: RANK and WORLD_SIZE (torchrun, torch.distributed.launch, or set by hand), Open MPI, MPICH and its
kin (PMI), Slurm's srun; else a world of one. A set of variables that is partial or impossible is refused, naming the variable: a guess
would make two processes rank 0. Reads the mapping it is given and writes nothing; imports no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elastic.errors import StartError

__all__ = ["Place", "read_place"]

Launcher = Literal["torchrun", "hand", "mpirun", "srun", "none"]

# Slurm's own numbers for the batch script, an interactive shell and the like: there srun started no ranks.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One process's place, as its launcher tells it."""

    rank: int
    world_size: int
    local_rank: int
    """Among the workers of this node; 0 where the launcher does not tell."""
    local_world_size: int
    """Workers of this node; where the launcher does not tell, those that are known of."""
    node_rank: int
    nodes: int | None
    """None where the launcher does not tell."""
    launcher: Launcher
    group: str
    """An id that all ranks of this launch share: rendezvous id, MPI namespace, Slurm step, or the master's address."""
    restart_count: int
    """Of this node's agent: no generation number, nodes may differ."""
    address: tuple[str, int] | None
    """MASTER_ADDR and MASTER_PORT."""
    agent_store: bool
    """Whether the agent serves a store at the address, so that rank 0 must not."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        _within("rank", self.rank, self.world_size, "the world size")
        _within("local rank", self.local_rank, self.local_world_size, "the workers of the node")
        if self.local_world_size > self.world_size:
            found = f"{self.local_world_size} workers of this node in a world of {self.world_size}"
            raise StartError(
                f"local world size: found {found}, expected no more than the world has"
            )


class _Environ:
    """The environment, read with errors that name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def text(self, *names: str) -> str:
        """The first of the names that is set; empty where none is."""
        return next((self.environ[name] for name in names if self.environ.get(name)), "")

    def number(self, *names: str) -> int | None:
        """The first of the names that is set, as a number of 0 or more."""
        for name in names:
            text = self.environ.get(name, "").strip()
            if text:
                if not (text.isascii() and text.isdigit()):
                    raise StartError(
                        f"{name}: found {text!r}, expected a whole number of 0 or more"
                    )
                return int(text)
        return None

    def required(self, beside: str, *names: str) -> int:
        """As number, but one of the names must be set, since another variable is."""
        found = self.number(*names)
        if found is None:
            raise StartError(
                f"{names[0]}: missing although {beside} is set, expected both or neither"
            )
        return found

    def address(self) -> tuple[str, int] | None:
        """MASTER_ADDR and MASTER_PORT; None where neither is set."""
        host, port = self.text("MASTER_ADDR"), self.number("MASTER_PORT")
        if host and port is None:
            raise StartError(
                "MASTER_PORT: missing although MASTER_ADDR is set, expected both or neither"
            )
        if not host or port is None:
            return None
        if not 0 < port < 1 << 16:
            raise StartError(f"MASTER_PORT: found {port}, expected 1 to 65535")
        return host, port


def read_place(environ: Mapping[str, str]) -> Place:
    """Find this process's place.

    Raises:
        StartError: the variables are partial or impossible.
    """
    env = _Environ(environ)
    if env.text("RANK", "WORLD_SIZE"):
        return _from_torch(env)
    if env.text("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return _from_open_mpi(env)
    step = env.number("SLURM_STEP_ID")
    is_step = step is not None and step < _FIRST_RESERVED_STEP and bool(env.text("SLURM_PROCID"))
    # An mpiexec inside a Slurm step numbers its processes itself; srun with PMI says the same number twice.
    by_srun = is_step and env.text("PMI_RANK") in {"", env.text("SLURM_PROCID")}
    if env.text("PMI_RANK", "PMI_SIZE") and not by_srun:
        return _from_pmi(env)
    if by_srun:
        return _from_slurm(env)
    return Place(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        nodes=1,
        launcher="none",
        group="alone",
        restart_count=0,
        address=None,
        agent_store=False,
    )


def _from_torch(env: _Environ) -> Place:
    """Torchrun's variables, or the same set by hand; one process a node where LOCAL_RANK is not told."""
    rank = env.required("WORLD_SIZE", "RANK")
    world_size = env.required("RANK", "WORLD_SIZE")
    elastic = bool(env.text("TORCHELASTIC_RUN_ID"))
    address = env.address()
    local_rank = env.number("LOCAL_RANK") or 0
    # Without LOCAL_WORLD_SIZE no more is known than the ranks below this one. Never too many: who
    # takes all workers for local would wait for the others at an address that they cannot reach.
    local_size = env.number("LOCAL_WORLD_SIZE") or local_rank + 1
    given_group = env.text("TORCHELASTIC_RUN_ID")
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=_or(env.number("GROUP_RANK", "NODE_RANK"), 0 if elastic else rank // local_size),
        nodes=_nodes(env.number("GROUP_WORLD_SIZE", "NNODES"), local_size, world_size),
        launcher="torchrun" if elastic else "hand",
        group=given_group or _address_group(address),
        restart_count=_or(env.number("TORCHELASTIC_RESTART_COUNT"), 0),
        address=address,
        agent_store=env.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_open_mpi(env: _Environ) -> Place:
    local_size = env.required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _by_launcher(
        env,
        rank=env.required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        world_size=env.required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        local=(env.required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), local_size),
        # OMPI_COMM_WORLD_NODE_RANK is not a node's number but a process's on its node.
        node=(None, None),
        launcher="mpirun",
        group=env.text("PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid"),
    )


def _from_pmi(env: _Environ) -> Place:
    local_rank = _or(env.number("MPI_LOCALRANKID"), 0)
    return _by_launcher(
        env,
        rank=env.required("PMI_SIZE", "PMI_RANK"),
        world_size=env.required("PMI_RANK", "PMI_SIZE"),
        local=(local_rank, env.number("MPI_LOCALNRANKS") or local_rank + 1),
        node=(None, None),
        launcher="mpirun",
        group=env.text("PMI_JOBID", "HYDRA_JOBID"),
    )


def _from_slurm(env: _Environ) -> Place:
    node_rank = _or(env.number("SLURM_NODEID"), 0)
    local_rank = env.required("SLURM_PROCID", "SLURM_LOCALID")
    tasks = _tasks_per_node(env.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    known = node_rank < len(tasks)
    parts = (
        env.text("SLURM_JOB_ID", "SLURM_JOBID"),
        env.text("SLURM_STEP_ID"),
        env.text("SLURM_RESTART_COUNT"),
    )
    return _by_launcher(
        env,
        rank=env.required("SLURM_STEP_ID", "SLURM_PROCID"),
        world_size=env.required(
            "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"
        ),
        local=(local_rank, tasks[node_rank] if known else local_rank + 1),
        node=(node_rank, env.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES")),
        launcher="srun",
        # A job that is queued again keeps its number.
        group="slurm-" + ".".join(part for part in parts if part),
    )


def _by_launcher(
    env: _Environ,
    *,
    rank: int,
    world_size: int,
    local: tuple[int, int],
    node: tuple[int | None, int | None],
    launcher: Launcher,
    group: str,
) -> Place:
    """A place told by a launcher that starts ranks once and keeps no store."""
    address = env.address()
    local_rank, local_size = local
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=_or(node[0], rank // local_size),
        nodes=_nodes(node[1], local_size, world_size),
        launcher=launcher,
        group=group or _address_group(address),
        restart_count=0,
        address=address,
        agent_store=False,
    )


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` is 2, 2, 2, 1."""
    tasks: list[int] = []
    for word in filter(None, text.split(",")):
        match = _TASKS.fullmatch(word)
        if match is None:
            raise StartError(
                f"SLURM_TASKS_PER_NODE: found {text!r}, expected numbers such as 2(x3),1"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _nodes(told: int | None, local_world_size: int, world_size: int) -> int | None:
    return 1 if local_world_size == world_size else told


def _address_group(address: tuple[str, int] | None) -> str:
    return f"{address[0]}:{address[1]}" if address else "world"


def _or(found: int | None, default: int) -> int:
    return default if found is None else found


def _within(name: str, found: int, size: int, of: str) -> None:
    if not 0 <= found < size:
        raise StartError(f"{name}: found {found}, expected less than {of}, {size}")
