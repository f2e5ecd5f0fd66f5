"""When a run on Jobs goes on after a loss, and when it ends. Pure.

Machines are taken away and fail; programs crash. The two look alike from outside, so progress decides: a trainer that
got further since it was last started is started again from its checkpoint, one that did not is a crash that would
repeat. A replica that served is replaced when it is lost, one that never did is a crash, too. One that cannot be
replaced is no reason to stop while another one serves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# A run that lost its machine this often in a row is on a flavor that is being taken away; each time costs the steps
# since the last checkpoint.
MAX_RESTARTS = 5
# A replica that dies this often while the trainer does not take one step is not unlucky.
MAX_REPLACEMENTS = 3


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


@dataclass
class Replacements:
    """How often each replica was replaced since the trainer last got further."""

    _counts: dict[str, int] = field(default_factory=dict)
    _at_step: int = 0

    def again(self, replica: str, served: bool, step: int) -> bool:
        """Whether a replica that was lost at this step of the trainer is started anew; counts it if so."""
        if step > self._at_step:
            self._counts, self._at_step = {}, step
        if not served or self._counts.get(replica, 0) >= MAX_REPLACEMENTS:
            return False
        self._counts[replica] = self._counts.get(replica, 0) + 1
        return True


def goes_on_without(serving: int, step: int) -> bool:
    """Whether a run at this step goes on with so many replicas left, when one cannot be replaced.

    Not before the first step: TRL begins only when every replica is well.
    """
    return step > 0 and serving > 0


def is_way_broken(answering: int, alive: int) -> bool:
    """Whether it is the way to the replicas that is broken, when one is silent and so many of them answer.

    None of several: the trainer has a way of its own, and its proxy looks after them.
    """
    return answering == 0 and alive > 1
