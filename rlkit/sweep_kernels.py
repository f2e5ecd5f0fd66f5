"""The kernels of a sweep: started for papermill, one for each point, and all stopped at once.

A simulated point's kernel is forked (`rlkit.sweep_nursery`), any other is started as papermill would. They are spoken
to through sockets in a folder: five TCP ports that are free when a kernel is asked for need not be when it binds them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from rlkit.errors import RunFailed
from rlkit.sweep_nursery import Nursery, can_fork

# After an interrupt the engine in a kernel ends its jobs; vLLM takes a few seconds to release its sockets.
GRACE_S = 20.0
LOOK_EVERY_S = 0.05

# A socket's path has room for 104 bytes on macOS, the last of them a zero; in its folder it is called `/0123abcd-5`.
ROOM_FOR_FOLDER = 92

# nbclient's words, in papermill's log, for a kernel that ended before it was ready: one that was being stopped has to.
_NEVER_READY = "Error occurred while starting new kernel client"


def _not_of_a_stop(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NEVER_READY)


class Kernels:
    """The processes of the kernels that run now. `manager` and `stop` may be called from any thread."""

    def __init__(self) -> None:
        self.stopping = False
        self.nursery = Nursery()
        self._sockets = Path(tempfile.mkdtemp(prefix="rlkit-"))
        self._processes: set[psutil.Process] = set()
        self._guard = threading.Lock()

    def manager(self, environment: Mapping[str, str], forked: bool) -> type[AsyncKernelManager]:
        """A class of kernel managers whose kernels get `environment` on top of ours, and are known here."""
        kernels = self

        class PointKernel(AsyncKernelManager):
            async def start_kernel(self, **options: Any) -> None:
                if kernels.stopping:
                    raise RunFailed("the sweep was stopped")
                if len(os.fsencode(kernels._sockets)) <= ROOM_FOR_FOLDER:
                    self.transport, self.ip = "ipc", str(kernels._sockets / uuid.uuid4().hex[:8])
                if forked and self.kernel_spec is not None and can_fork(self.kernel_spec.argv):
                    self.kernel_id = str(uuid.uuid4())
                    self.provisioner = _Forked(kernels.nursery, self)
                await super().start_kernel(**options | {"env": dict(os.environ) | dict(environment)})
                if isinstance(self.provisioner, LocalProvisioner) and self.provisioner.pid is not None:
                    kernels.add(self.provisioner.pid)

        return PointKernel

    def add(self, pid: int) -> None:
        """A kernel that was started; stopped at once when all are being stopped."""
        with self._guard:
            self._processes = {process for process in self._processes if process.is_running()}
            try:
                started = psutil.Process(pid)
            except psutil.NoSuchProcess:
                return
            self._processes.add(started)
        if self.stopping:  # this one alone: the others are given the time to end their jobs
            with contextlib.suppress(psutil.NoSuchProcess):
                started.kill()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Interrupt every kernel; end what is left of them after `grace_s` seconds."""
        self.stopping = True
        logging.getLogger("papermill").addFilter(_not_of_a_stop)
        self._signal(signal.SIGINT)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(process.is_running() for process in self._processes):
            time.sleep(LOOK_EVERY_S)
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Nothing of a sweep that is over is left running."""
        self._signal(signal.SIGKILL)
        logging.getLogger("papermill").removeFilter(_not_of_a_stop)
        self.nursery.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        with self._guard:
            for process in self._processes:
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue


class _Forked(LocalProvisioner):
    """Jupyter's provisioner of local kernels, with a fork in the place of a new interpreter."""

    def __init__(self, nursery: Nursery, manager: AsyncKernelManager) -> None:
        super().__init__(kernel_id=manager.kernel_id, kernel_spec=manager.kernel_spec, parent=manager)
        self._nursery = nursery

    async def launch_kernel(self, cmd: list[str], **options: Any) -> KernelConnectionInfo:
        """Ask for a kernel with the command that would have started it."""
        pid = self._nursery.start(cmd, options["env"], options["cwd"])
        self.process = _Process(pid)  # type: ignore[assignment]  # all that is asked of a Popen
        self.pid, self.pgid = pid, pid
        return self.connection_info


class _Process:
    """What the provisioner asks of a `Popen`, for a process that is not our child."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    def poll(self) -> int | None:
        alive = self._process is not None and self._process.is_running()
        return None if alive else 0

    def wait(self) -> int:
        if self._process is not None:
            self._process.wait()
        return 0

    def send_signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
