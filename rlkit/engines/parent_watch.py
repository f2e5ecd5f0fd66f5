"""Ends a process when the one that started it is gone.

On Linux a thread waits on a pidfd of the parent, so nothing polls and the end is noticed at once; elsewhere it looks at
the parent's process id every half second. PR_SET_PDEATHSIG is not used: it fires when the *thread* that started the
child ends, and a notebook or an executor starts children from threads that do not live as long as they do.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

POLL_EVERY_S = 0.5

# After the polite SIGTERM a process writes what it has; one that hangs instead must not stay behind.
GRACE_S = 10.0


def exit_with_parent(grace_s: float = GRACE_S) -> None:
    """From now on: SIGTERM to this process when its parent ends, and its hard exit `grace_s` seconds later."""
    parent = os.getppid()
    threading.Thread(target=_end_after, args=(parent, grace_s), name="parent-watch", daemon=True).start()


def _end_after(parent: int, grace_s: float) -> None:
    _wait_for_end(parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(128 + signal.SIGTERM)


def _wait_for_end(parent: int) -> None:
    try:
        watched = os.pidfd_open(parent)
    except (AttributeError, OSError):  # not Linux, an old kernel, or the parent is gone already
        while os.getppid() == parent:
            time.sleep(POLL_EVERY_S)
        return
    try:
        # The id may have been taken by another process between the two calls; then the parent is gone.
        if os.getppid() == parent:
            select.select([watched], [], [])
    finally:
        os.close(watched)
