"""The runner: trains a job with DDP on machines that go away, and finishes it.

Everything is imported when it is first asked for, so that an error in the config does not pay for torch.
"""

from importlib import import_module

TYPE_CHECKING = (
    False  # `typing` alone would double the time in which a stub (elastic.relay) is there
)
if TYPE_CHECKING:
    from elastic.core import Run as Run
    from elastic.errors import AttentionError as AttentionError
    from elastic.errors import CollectiveError as CollectiveError
    from elastic.errors import ConfigError as ConfigError
    from elastic.errors import ElasticError as ElasticError
    from elastic.errors import ExitCode as ExitCode
    from elastic.errors import MeetingError as MeetingError
    from elastic.errors import OverruledError as OverruledError
    from elastic.errors import PreemptedError as PreemptedError
    from elastic.errors import StartError as StartError
    from elastic.own import start as start
    from elastic.sampler import ElasticSampler as ElasticSampler
    from elastic.seeding import Addressed as Addressed
    from elastic.seeding import Seeded as Seeded
    from elastic.seeding import seed_sample as seed_sample
    from elastic.state import TrainState as TrainState
    from jobs.job import Job as Job
    from jobs.job import Mean as Mean
    from jobs.sampling import Mixture as Mixture
    from jobs.sampling import Weighted as Weighted

_ROOMS = {
    "Addressed": "elastic.seeding",
    "AttentionError": "elastic.errors",
    "CollectiveError": "elastic.errors",
    "ConfigError": "elastic.errors",
    "ElasticError": "elastic.errors",
    "ElasticSampler": "elastic.sampler",
    "ExitCode": "elastic.errors",
    "Job": "jobs.job",
    "Mean": "jobs.job",
    "MeetingError": "elastic.errors",
    "Mixture": "jobs.sampling",
    "OverruledError": "elastic.errors",
    "PreemptedError": "elastic.errors",
    "Run": "elastic.core",
    "Seeded": "elastic.seeding",
    "StartError": "elastic.errors",
    "TrainState": "elastic.state",
    "Weighted": "jobs.sampling",
    "seed_sample": "elastic.seeding",
    "start": "elastic.own",
}

__all__ = list(_ROOMS)  # names and rooms stand in one place


def __getattr__(name: str) -> object:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(room), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
