"""What an emulated replica holds until it is restarted: its engine, what is under way, whether generation is frozen."""

from __future__ import annotations

import asyncio

from rlkit.serving.emulated_engine import Adapter, EmulatedEngine, Sampled
from rlkit.serving.emulated_timing import EmulatedTiming


class ReplicaState:
    """One life of a replica. Without a `timing` completions take no cache, and a cleared one preempts all of them."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine = engine
        self.timing: EmulatedTiming | None = None
        self.in_flight = 0
        self.arrived = asyncio.Event()  # set by every completion that arrives
        self.resumed = asyncio.Event()
        self.resumed.set()
        self._preemptions = 0  # of the timing's, those that are on the page

    @property
    def is_paused(self) -> bool:
        """Whether generation is frozen."""
        return not self.resumed.is_set()

    def pause(self, clear_cache: bool) -> None:
        """Freeze generation, with the KV cache kept or not."""
        self.resumed.clear()
        if clear_cache:
            self._clear_cache()
        if self.timing is not None:
            self.timing.pause(clear_cache=clear_cache)

    def resume(self) -> None:
        """Let generation go on."""
        self.resumed.set()
        if self.timing is not None:
            self.timing.resume()

    def reset(self, running_too: bool) -> bool:
        """Clear the KV cache; False where something is in flight that is to be left alone."""
        if self.in_flight and not running_too:
            return False
        self._clear_cache()
        if self.timing is not None and not self.is_paused:
            self.timing.pause(clear_cache=True)
            self.timing.resume()
        return True

    async def take_time(self, adapter: Adapter, prompts: list[list[int]], sampled: list[Sampled]) -> None:
        """As long as these completions take, each prompt's as many as any other's; none without a timing."""
        if self.timing is None:
            return
        each = len(sampled) // len(prompts)
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(sampled):
                group.create_task(self.timing.generate(adapter, prompts[number // each], len(one.token_ids)))

    def metrics_page(self) -> bytes:
        """/metrics as it is now."""
        engine = self.engine
        running, waiting = (0, self.in_flight) if self.is_paused else (self.in_flight, 0)
        if self.timing is not None:
            replica = self.timing.bring_up_to_date()
            running, waiting = replica.running, len(replica.waiting)
            engine.waiting_for_capacity.set(waiting)
            engine.usage.set(replica.usage)
            engine.preemptions.inc(replica.preemptions - self._preemptions)
            self._preemptions = replica.preemptions
        engine.running.set(running)
        engine.waiting.set(waiting)
        return engine.metrics_page()

    def _clear_cache(self) -> None:
        self.engine.clear_cache()
        if self.timing is None:
            self.engine.preemptions.inc(self.in_flight)  # else it counts them itself
