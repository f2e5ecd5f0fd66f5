"""The one exception a user is meant to read."""


class RlkitError(Exception):
    """A mistake or a failure told in one line: what is wrong, where, and the way out.

    The command line prints it without a traceback and exits with `exit_code`.
    """

    exit_code = 1


class BadInput(RlkitError):
    """Something the user wrote does not fit: a file, a field, a value. Nothing was started."""

    exit_code = 2


class NotLogged(BadInput):
    """What was asked for is not in trackio, or not yet: no such project, no such run, or a run without a step."""


class RunFailed(RlkitError):
    """A run that had started ended before its last step; the message carries the last log lines."""

    exit_code = 3
