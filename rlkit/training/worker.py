"""The rollout worker's loop, taught through TRL's own hook (`AsyncRolloutWorker._loop_cls`).

It runs in a child that is spawned, so this module must be importable there.
"""

from __future__ import annotations

from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop


class RolloutLoop(_AsyncRolloutLoop):  # type: ignore[misc]  # trl ships no types
    """TRL's loop, which ends when it is told to."""

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


def teach(trainer: Any) -> None:
    """Make `trainer`'s rollout worker (not started yet) run this loop; TRL has already chosen all its arguments."""
    trainer.rollout_worker._loop_cls = RolloutLoop
