"""When a run on Jobs goes on after a loss, and when it ends. Pure.

Machines are taken away and fail; programs crash. The two look alike from outside, so progress decides: a trainer that
got further since it was last started is started again from its checkpoint, one that did not is a crash that would
repeat. A lost replica is no reason to stop while another one serves.
"""

from __future__ import annotations

from dataclasses import dataclass

# A run that lost its machine this often in a row is on a flavor that is being taken away; each time costs the steps
# since the last checkpoint.
MAX_RESTARTS = 5


@dataclass
class Restarts:
    """How often the trainer was started again, and how far it was then."""

    count: int = 0
    last_start_step: int = 0

    def again(self, last_step: int) -> bool:
        """Whether a trainer that ended early at this step is started again; counts it if so."""
        if last_step <= self.last_start_step or self.count >= MAX_RESTARTS:
            return False
        self.count += 1
        self.last_start_step = last_step
        return True


def goes_on_without(lost: str, serving: int, training: bool) -> bool:
    """Whether a run goes on when the Job `lost` has ended, with `serving` replicas left."""
    return training and lost != "trainer" and serving > 0
