"""The rollout worker's loop, taught through TRL's own hook (`AsyncRolloutWorker._loop_cls`).

It runs in a child that is spawned, so this module must be importable there; what it must know travels among the
arguments that TRL's worker forwards to its loop.

A rollout passes the admission gate once, as a whole, however many turns it has: the adapter's name is chosen at each
request, so one that waits here starts with the newest policy, where one that waits in the server (or in a proxy) waits
with an old one. TRL stamps a group with the version at which its first rollout was created; a capped group is stamped
anew with the oldest version at which one of its rollouts was admitted, or fresh samples would be dropped as stale.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop

from rlkit.admission.asked import AskedLimit
from rlkit.admission.gauges import RECENT_ROLLOUTS, percentiles
from rlkit.admission.law import make_law
from rlkit.admission.poll import MetricsPoll
from rlkit.training.admission_gate import Admission, AsyncGate, control

# After a stop TRL's loop waits for what is in flight, its parent joins for 15 s and then kills. Nobody reads those
# rollouts any more; this leaves time to end the requests and the process in order.
STOP_GRACE_S = 5.0


class RolloutLoop(_AsyncRolloutLoop):  # type: ignore[misc]  # trl ships no types
    """TRL's loop with an admission gate, which ends when it is told to.

    It adds to TRL's metrics, per rollout: `rollout/gate_wait_s` (at the gate) and `rollout/duration_with_gate_s`, which
    includes it; TRL's own `rollout/duration_s` counts from admission, when the first request is sent. `..._p95_s` are
    the 95th percentiles of the last rollouts, `rollout/completed_total` counts them.
    """

    def __init__(self, *, admission: Admission, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._admission = admission
        self._law = make_law(admission.policy, ceiling=self.max_inflight_tasks, max_model_len=admission.max_model_len)
        self._gate = AsyncGate(self._law.cap)
        self._oldest_version: dict[int, int] = {}  # by group, of those still in flight or unscored
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_ROLLOUTS)  # (from admission, with the gate), s

    def run(self) -> None:
        """Run until stopped, then leave unread samples behind.

        A process that has put into a multiprocessing queue waits at its exit until a reader took everything. Nobody
        reads after the last step, so without this the child is terminated 15 s later instead of ending.
        """
        try:
            super().run()
        finally:
            self.rollout_buffer.cancel_join_thread()
            self._metrics_queue.cancel_join_thread()

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        pages, trace = MetricsPoll(self.vllm_server_url), self._admission.trace
        # Without a cap TRL's own stamps are in force, which know nothing of a rollout that waited at the gate.
        asked = None if self._admission.policy == "none" else AskedLimit(self._admission.asked)
        controller = asyncio.create_task(control(self._law, self._gate, pages, self._publish, trace, stop_event, asked))
        loops = asyncio.create_task(super()._run_loops(stop_event=stop_event))
        stopped = asyncio.create_task(stop_event.wait())
        try:
            await asyncio.wait({loops, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not loops.done():
                self._gate.open()
                await asyncio.wait({loops}, timeout=STOP_GRACE_S)
            if loops.done():
                await loops  # raises what it ended with
        finally:
            for task in (loops, stopped, controller):
                task.cancel()
            await asyncio.gather(loops, stopped, controller, return_exceptions=True)

    async def _generate_one(self, prompt: Any, *, group_id: int = 0, **arguments: Any) -> Any:
        arrived = time.monotonic()
        async with self._gate.admission():
            admitted = time.monotonic()
            if self._admission.policy != "none":
                version = self.model_version
                self._oldest_version[group_id] = min(self._oldest_version.get(group_id, version), version)
            outcome = await super()._generate_one(prompt, group_id=group_id, **arguments)
        self._note(admitted - arrived, time.monotonic() - arrived)
        return outcome

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        group.model_version = self._oldest_version.pop(group.group_id, group.model_version)
        samples: list[RolloutSample] = await super()._score_group(group)
        return samples

    def _note(self, waited_s: float, whole_s: float) -> None:
        self._recent.append((whole_s - waited_s, whole_s))
        self._counters["rollout/completed_total"] += 1
        for name, seconds in (("gate_wait_s", waited_s), ("duration_with_gate_s", whole_s)):
            rate = self._rates[f"rollout/{name}"]
            rate[0] += seconds
            rate[1] += 1

    def _publish(self, gauges: Mapping[str, float]) -> None:
        self._push_metrics({**gauges, **percentiles(self._recent)})


def teach(trainer: Any, admission: Admission) -> None:
    """Make `trainer`'s rollout worker (not started yet) run this loop; TRL has already chosen all its arguments."""
    trainer.rollout_worker._loop_cls = RolloutLoop
    trainer.rollout_worker._loop_kwargs["admission"] = admission
