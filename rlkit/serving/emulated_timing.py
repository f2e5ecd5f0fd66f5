"""How long an emulated replica takes, and what its KV cache does meanwhile: the simulator's engine in real time.

`rlkit.simulation.replica` owns the rules (decoding, admission, preemption, pause); here its clock is the event loop's,
and a request waits for its sequence's end. A stream is sent whole at that end: its first token comes no earlier.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence as Sequence_

from rlkit.serving.emulated_engine import Adapter
from rlkit.simulation.constants import Physics
from rlkit.simulation.hardware import MODELS, Machine, gpu
from rlkit.simulation.replica import Capacity, FluidReplica, Rates, Sequence

# The model that both published experiments trained, which the simulator's constants were fitted to.
PUBLISHED_MODEL = "Qwen/Qwen2.5-Math-1.5B"


def rates_of(flavor: str, *, adapters: bool = True) -> Rates:
    """The published model's rates on a GPU (`h200`, ...). Raises BadInput for one without a data sheet."""
    device = gpu(flavor, "gpu")
    return Machine(MODELS[PUBLISHED_MODEL], device, device).rates(Physics(), adapters)


class EmulatedTiming:
    """One engine's clock and KV cache; `speed` emulated seconds pass in a real one. Needs a running event loop."""

    def __init__(self, rates: Rates, capacity: Capacity, speed: float = 1.0) -> None:
        self.replica = FluidReplica(rates, capacity)
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, adapter: Adapter, prompt: Sequence_[int], completion_tokens: int) -> None:
        """Return once a sequence of so many tokens has been generated. Cancelled, its blocks are free again."""
        name = zlib.crc32(repr((adapter.name, adapter.path)).encode()), zlib.crc32(repr(list(prompt)).encode())
        ended: asyncio.Future[None] = self._loop.create_future()
        sequence = Sequence(name, len(prompt), completion_tokens, ended)
        self.replica.submit(self._catch_up(), sequence)
        self._arm()
        try:
            await ended
        except asyncio.CancelledError:
            now = self._catch_up()
            if sequence.generated < completion_tokens:
                self.replica.abort(now, sequence)
            self._arm()
            raise

    def pause(self, *, clear_cache: bool) -> None:
        """Stop generating; with `clear_cache` everybody is preempted."""
        self.replica.pause(self._catch_up(), clear_cache)
        self._arm()

    def resume(self) -> None:
        """Go on."""
        self.replica.resume(self._catch_up())
        self._arm()

    def bring_up_to_date(self) -> FluidReplica:
        """The engine as of now."""
        self.replica.advance(self._catch_up())
        return self.replica

    def close(self) -> None:
        """Generate no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _catch_up(self) -> float:
        """Do what is due, each thing at its own time; returns the emulated time."""
        now = (self._loop.time() - self._began) * self._speed
        while self.replica.next_at <= now:
            for sequence in self.replica.fire(self.replica.next_at):
                ended = sequence.tag
                assert isinstance(ended, asyncio.Future)
                if not ended.done():
                    ended.set_result(None)
        return now

    def _arm(self) -> None:
        self.close()
        self._timer = None
        if self.replica.next_at < math.inf:
            self._timer = self._loop.call_at(self._began + self.replica.next_at / self._speed, self._fire)

    def _fire(self) -> None:
        self._catch_up()
        self._arm()
