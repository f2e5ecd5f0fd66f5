"""The kernels of a sweep: started for papermill, one for each point, and all stopped at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil
from jupyter_client import AsyncKernelManager

# After an interrupt the engine in a kernel ends its jobs; vLLM takes a few seconds to release its sockets.
GRACE_S = 20.0
LOOK_EVERY_S = 0.05


class Kernels:
    """The processes of the kernels that run now. `manager` and `stop` may be called from any thread."""

    def __init__(self) -> None:
        self.stopping = False
        self._processes: set[psutil.Process] = set()
        self._guard = threading.Lock()

    def manager(self, environment: Mapping[str, str]) -> type[AsyncKernelManager]:
        """A class of kernel managers whose kernels get `environment` on top of ours, and are known here."""
        kernels = self

        class PointKernel(AsyncKernelManager):
            async def start_kernel(self, **options: Any) -> None:
                if kernels.stopping:
                    raise KeyboardInterrupt
                await super().start_kernel(**options | {"env": dict(os.environ) | dict(environment)})
                kernels.add(self.provisioner.pid)

        return PointKernel

    def add(self, pid: int) -> None:
        """A kernel that was started; stopped at once when all are being stopped."""
        with self._guard:
            self._processes = {process for process in self._processes if process.is_running()}
            try:
                self._processes.add(psutil.Process(pid))
            except psutil.NoSuchProcess:
                return
        if self.stopping:
            self._signal(signal.SIGKILL)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Interrupt every kernel; end what is left of them after `grace_s` seconds."""
        self.stopping = True
        self._signal(signal.SIGINT)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(process.is_running() for process in self._processes):
            time.sleep(LOOK_EVERY_S)
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Nothing of a sweep that is over is left running."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._guard:
            for process in self._processes:
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
