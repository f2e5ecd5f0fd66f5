from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

PATIENCE_S = 60.0


# A long sleep would not do: a signal that arrives just before it begins does not end it.
REST = """
import threading
def rest():
    while True:
        threading.Event().wait(0.05)
"""


def run_orphaned(child: str) -> str:
    """Run a child whose parent is killed once the child has said so; what it printed from then until its end."""
    code = f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {REST + textwrap.dedent(child)!r}])
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "watching\n"
        parent.kill()
        # The child holds the other end of the pipe: this returns when it has ended, too.
        printed, _ = parent.communicate(timeout=PATIENCE_S)
        return printed


def test_a_child_may_finish_what_it_does() -> None:
    printed = run_orphaned("""
        import signal, sys
        from rlkit.engines.parent_watch import exit_with_parent
        def finish(number, frame):
            print("finished", number, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, finish)
        exit_with_parent()
        print("watching", flush=True)
        rest()
    """)
    assert printed == f"finished {int(signal.SIGTERM)}\n"


def test_a_child_that_ignores_the_signal_ends_after_the_grace() -> None:
    printed = run_orphaned("""
        import signal, threading
        from rlkit.engines import parent_watch
        ignored = threading.Event()
        # The grace lasts until the signal was ignored: how soon that is is the machine's business.
        parent_watch.time.sleep = lambda grace_s: ignored.wait() if grace_s == 0.2 else None
        signal.signal(signal.SIGTERM, lambda *_: (print("ignored", flush=True), ignored.set()))
        parent_watch.exit_with_parent(grace_s=0.2)
        print("watching", flush=True)
        rest()
    """)
    assert printed == "ignored\n"


def test_it_works_without_pidfds_too() -> None:
    printed = run_orphaned("""
        import os, signal, sys
        from rlkit.engines import parent_watch
        del os.pidfd_open
        signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit(0)))
        parent_watch.exit_with_parent()
        print("watching", flush=True)
        rest()
    """)
    assert printed == "told\n"


def test_the_end_of_the_thread_that_started_it_is_not_the_end_of_the_parent() -> None:
    code = """
        import subprocess, sys, threading, time
        child_code = "from rlkit.engines.parent_watch import exit_with_parent; exit_with_parent(); " \\
            "print('watching', flush=True); input(); print('alive', flush=True)"
        children = []
        start = lambda: children.append(subprocess.Popen([sys.executable, "-c", child_code], stdin=subprocess.PIPE))
        thread = threading.Thread(target=start)
        thread.start(); thread.join()
        sys.stdin.readline()
        children[0].communicate(b"go on\\n")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        out, _ = process.communicate("\n", timeout=PATIENCE_S)
    assert out == "alive\n"
