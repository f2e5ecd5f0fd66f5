"""The servers of a simulated run: engines on the event loop, and the proxy's own router in front of them.

Every server counts as one replica. Inside a server with several engines (vLLM's data parallelism) a request goes to the
least loaded one, which is what the router does with a prompt of no blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from rlkit.admission.law import ReplicaState
from rlkit.admission.spread import SpeedMeter
from rlkit.serving.prefix_index import prefix_chain
from rlkit.serving.router import Routed, Router
from rlkit.simulation.events import EventLoop
from rlkit.simulation.lengths import Lengths
from rlkit.simulation.replica import FluidReplica, Sequence
from rlkit.simulation.rollout import Rollout
from rlkit.simulation.setup import Setup


class Fleet:
    """Engines by number, and how rollouts get to them. `on_ended` is told of the rollouts that ended together."""

    def __init__(self, loop: EventLoop, setup: Setup, on_ended: Callable[[list[Rollout]], None]) -> None:
        self.engines = [FluidReplica(engine.rates, engine.capacity) for engine in setup.engines]
        self._loop = loop
        self._setup = setup
        self._on_ended = on_ended
        # Told of each decision: when, what was decided, and what every server has in flight then.
        self.on_routed: Callable[[float, Routed, list[int]], None] | None = None
        self._members: list[list[int]] = [[] for _ in range(setup.servers)]
        for number, engine in enumerate(setup.engines):
            self._members[engine.server].append(number)
        self.router = _router(setup.servers, setup.routing.spill_threshold, setup)
        self._inner = [_router(len(members), 0, setup) for members in self._members]
        self._turns = [0] * len(self.engines)
        self._pausing = 0
        self._seen = [(0, 0, 0)] * setup.servers  # preemptions, tokens and running requests at the last reading
        self._read_before = False
        self._speeds = SpeedMeter()
        self._chain_of: tuple[int, int] | None = None
        self._chain = b""
        self._places: dict[Rollout, tuple[Routed, Routed, int]] = {}
        self.speed = 1.0
        self._computing = False
        self._on_speed: Callable[[], None] | None = None
        if setup.pauses is not None:
            loop.at(setup.pauses.every_s, self._pause_for_a_while)

    def dispatch(self, rollout: Rollout) -> None:
        """Send an admitted rollout to an engine."""
        version = rollout.version if self._setup.routing.adapters else 0
        routed = self.router.route_chain(_adapter(version), self._prompt_chain(version, rollout))
        assert routed is not None  # no server is ever taken out
        if self.on_routed is not None:
            self.on_routed(self._loop.now, routed, self.router.in_flight)
        members = self._members[routed.replica]
        inner = self._inner[routed.replica].route_chain("", b"")
        assert inner is not None
        number = members[inner.replica]
        self._places[rollout] = (routed, inner, number)
        prompt = (rollout.group.prompt_number, version)
        sequence = Sequence(prompt, rollout.group.prompt.tokens, rollout.completion_tokens, rollout)
        self.engines[number].submit(self._loop.now, sequence)
        self._reschedule(number)

    def forget_version(self, version: int) -> None:
        """The trainer unloads this policy version."""
        if self._setup.routing.adapters and version >= 0:
            self.router.forget_adapter(_adapter(version))

    def pause(self, clear_cache: bool) -> None:
        """Stop generation everywhere. Pauses nest: everybody who paused has to resume."""
        self._pausing += 1
        for number, engine in enumerate(self.engines):
            engine.pause(self._loop.now, clear_cache)
            self._reschedule(number)

    def resume(self) -> None:
        """Take one pause back."""
        self._pausing -= 1
        if self._pausing:
            return
        for number, engine in enumerate(self.engines):
            engine.resume(self._loop.now)
            self._reschedule(number)

    def trainer_computes(self, computing: bool) -> None:
        """The trainer begins or ends to want the cores that it may share with the engines."""
        self._computing = computing
        self._share_cores()

    def when_speed_changes(self, told: Callable[[], None]) -> None:
        """Call `told` whenever `speed`, of everybody on shared cores, becomes another one."""
        self._on_speed = told

    def states(self) -> dict[str, ReplicaState | None]:
        """What the servers' /metrics pages would say now; preemptions since the last reading."""
        states: dict[str, ReplicaState | None] = {}
        for server, members in enumerate(self._members):
            engines = [self.engines[number] for number in members]
            for engine in engines:
                engine.advance(self._loop.now)
            before = self._seen[server]
            running = sum(engine.running for engine in engines)
            preempted = sum(engine.preemptions for engine in engines)
            generated = round(sum(engine.generated_tokens for engine in engines))
            waiting = sum(len(engine.waiting) for engine in engines)
            new = generated - before[1] if self._read_before else None
            states[str(server)] = ReplicaState(
                usage=max(engine.usage for engine in engines),
                running=running,
                waiting=waiting,
                waiting_for_capacity=waiting,
                preemptions=preempted - before[0] if self._read_before else None,
                capacity_tokens=sum(int(engine.capacity.kv_tokens) for engine in engines),
                engines=len(engines),
                tokens_each=self._speeds.note(str(server), new, before[2], running),
            )
            self._seen[server] = (preempted, generated, running)
        self._read_before = True
        return states

    def _reschedule(self, number: int) -> None:
        self._schedule(number)
        if self._setup.cores.cores:
            self._share_cores()

    def _share_cores(self) -> None:
        busy = sum(engine.running > 0 and not engine.paused for engine in self.engines)
        speed = self._setup.cores.speed(busy, self._computing)
        if speed == self.speed:
            return
        self.speed = speed
        for number, engine in enumerate(self.engines):
            engine.set_speed(self._loop.now, speed)
            self._schedule(number)
        if self._on_speed is not None:
            self._on_speed()

    def _schedule(self, number: int) -> None:
        self._turns[number] += 1
        at = self.engines[number].next_at
        if at < float("inf"):
            self._loop.at(at, self._fire, number, self._turns[number])

    def _fire(self, number: int, turn: int) -> None:
        if turn != self._turns[number]:
            return  # something else happened to this engine in between
        ended = self.engines[number].fire(self._loop.now)
        self._reschedule(number)
        if ended:
            rollouts = [sequence.tag for sequence in ended if isinstance(sequence.tag, Rollout)]
            for rollout in rollouts:
                routed, inner, _ = self._places.pop(rollout)
                self.router.release(routed)
                self._inner[routed.replica].release(inner)
            self._on_ended(rollouts)

    def _prompt_chain(self, version: int, rollout: Rollout) -> bytes:
        number = rollout.group.prompt_number
        if self._chain_of != (version, number):
            lengths, size = self._setup.lengths, self._setup.routing.block_size
            self._chain_of = (version, number)
            self._chain = prefix_chain(_adapter(version), _blocks(lengths, rollout, size))
        return self._chain

    def _pause_for_a_while(self) -> None:
        pauses = self._setup.pauses
        assert pauses is not None
        self.pause(clear_cache=False)
        self._loop.after(pauses.seconds, self.resume)
        self._loop.after(pauses.every_s, self._pause_for_a_while)


def _router(replicas: int, spill_threshold: int, setup: Setup) -> Router:
    router = Router(replicas, spill_threshold, setup.routing.policy)
    for replica in range(replicas):
        router.set_routable(replica, True)
    return router


def _blocks(lengths: Lengths, rollout: Rollout, size: int) -> list[bytes]:
    """The whole blocks of a prompt: those of the chat template, then its own."""
    common = min(lengths.template_tokens, rollout.group.prompt.tokens) // size
    number = rollout.group.prompt_number
    return [
        b"%d" % block if block < common else b"%d:%d" % (number, block)
        for block in range(rollout.group.prompt.tokens // size)
    ]


def _adapter(version: int) -> str:
    return f"trl-policy-v{version}"
