"""Kernels that start at once: one process imports what a point of a simulated sweep needs, and forks for each kernel.

A new interpreter spends 2 s of CPU on imports before the first cell of a notebook; a fork of one that has them spends
0.1 s and has a namespace as clean. The process is started with `python -m rlkit.sweep_nursery`. Each line on its
standard input asks for a kernel (JSON: argv, env, cwd) and is answered with its process id; it ends at the end of its
input, and its kernels end with it, because ipykernel watches its parent.

Only simulated points are run so. trackio is not imported before the fork: it reads TRACKIO_DIR then.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What the notebook of a point and its kernel import, and what trackio does.
WARM = (
    *("ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.zmqshell"),
    # The first figure that is shown imports nbformat, whose JSON schema compiles 39 grammars: a second of CPU. Not
    # plotly's renderers themselves: they decide when they are imported whether they are in a notebook.
    *("plotly.graph_objects", "nbformat"),
    *("rlkit.display", "rlkit.figures", "rlkit.preflight", "rlkit.engines.sim", "rlkit.sweep_point"),
    *("huggingface_hub", "gradio_client", "fsspec", "starlette", "uvicorn", "PIL.Image", "multiprocessing"),
)

# What starts threads when it is imported, told not to: a fork has only the one that forks. Arrow loads its jemalloc,
# which has a thread, whatever pool it then takes.
SINGLE_THREADED = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}

# Plotly looks for a notebook when it is imported, and here there is none yet: a figure would be shown as its repr.
NOTEBOOK_FIGURES = {"PLOTLY_RENDERER": "plotly_mimetype"}

# `python -m ipykernel_launcher` and the options that follow it.
_LAUNCHER = "ipykernel_launcher"


class Nursery:
    """The process that forks kernels; it is started with the first one. `start` may be called from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self, argv: Sequence[str], environment: dict[str, str], cwd: str) -> int:
        """A kernel's process id. Raises OSError when the process that forks is gone."""
        options = list(argv)[list(argv).index(_LAUNCHER) + 1 :]
        with self._guard:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"argv": options, "env": environment, "cwd": cwd}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer:
            raise OSError("the process that starts kernels is gone")
        return int(answer)

    def close(self) -> None:
        """End the process, and with it the kernels that are left."""
        with self._guard:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self._process.communicate()
            self._process = None  # somebody killed it; the next kernel needs another
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(os.environ) | SINGLE_THREADED | NOTEBOOK_FIGURES | {"PYTHONPATH": _import_path()},
                start_new_session=True,  # Ctrl-C is for the sweep, which stops its kernels itself
            )
        return self._process


def can_fork(argv: Sequence[str]) -> bool:
    """Whether a kernel's command is one that a fork can stand in for: Python's own kernel in this interpreter."""
    # Jupyter puts this interpreter in the place of a bare name (KernelManager.format_kernel_cmd).
    ours = argv[0] in {"python", "python3", os.path.basename(sys.executable), sys.executable}
    return hasattr(os, "fork") and _LAUNCHER in argv and ours


def _import_path() -> str:
    """PYTHONPATH with this package's own place, wherever it was imported from."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))


def main() -> None:
    """Import, then fork a kernel for each line."""
    del sys.path[0]  # where this process was started is no kernel's business
    for module in WARM:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # kernels that ended leave nothing to be waited for
    answers = os.dup(1)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _become_kernel(json.loads(line))
        os.write(answers, f"{pid}\n".encode())


def _become_kernel(wanted: dict[str, Any]) -> None:
    parent = os.getppid()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    np.random.seed()  # or every kernel would draw the same numbers; Python's own generator does this by itself
    from ipykernel import kernelapp

    code = 1
    try:
        # ipykernel looked for JPY_PARENT_PID when it was imported: without this it would outlive its parent.
        kernelapp.launch_new_instance(argv=[*wanted["argv"], f"--IPKernelApp.parent_handle={parent}"])
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
