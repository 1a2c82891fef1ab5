"""The one error of jobs: a job that cannot be loaded, or answers with what the runner cannot use.

Promises: every message is one line that says what was found, what was expected and the way out.
"""


class JobError(ValueError):
    """Raised when a job is missing, incomplete, wrongly built, or returns what cannot be meant."""
