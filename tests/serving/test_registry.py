from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlkit.serving.adapter_answers import Answer
from rlkit.serving.adapter_commands import Abort, Command, Finished, Forget, OperationReport, Send, SetRoutable
from rlkit.serving.registry import DRAIN_S, SHORTEST_RETRY, AdapterRegistry

RETRY_S = 0.5
DEADLINE_S = 10.0


@dataclass
class Server:
    """A vLLM server as far as adapters go: what it holds, and whose blocks its prefix cache has, by adapter name.

    `disk` is what was pushed to the receiver beside it; None: there is none, paths are shared.
    """

    loaded: dict[str, str] = field(default_factory=dict)  # name -> the trainer's path, which stands for the weights
    cached: dict[str, set[str]] = field(default_factory=dict)
    paused: bool = False
    resets: int = 0
    disk: set[str] | None = None

    def local(self, path: str) -> str:
        return path if self.disk is None else f"/pushed{path}"

    def do(self, send: Send) -> Answer:
        match send.action:
            case "list":
                cards = [{"id": "base", "root": "base", "parent": None}]
                cards += [
                    {"id": name, "root": self.local(path), "parent": "base"} for name, path in self.loaded.items()
                ]
                return Answer(200, json.dumps({"data": cards}))
            case "push":
                assert self.disk is not None
                self.disk.add(self.local(send.path))
                return Answer(200, json.dumps({"path": self.local(send.path)}))
            case "discard":
                assert self.disk is not None
                assert not {self.local(path) for path in self.loaded.values()} & {send.path}
                self.disk.discard(send.path)
                return Answer(200, "")
            case "load":
                if send.name in self.loaded:
                    return error(400, f"The lora adapter '{send.name}' has already been loaded.")
                if self.disk is not None and send.path not in self.disk:
                    return missing(send.name)
                self.loaded[send.name] = send.path.removeprefix("/pushed")
                return Answer(200, "Success")
            case "unload":
                if self.loaded.pop(send.name, None) is None:
                    return error(404, f"The lora adapter '{send.name}' cannot be found.")
                return Answer(200, "Success")
            case "reset":
                self.cached.clear()
                self.resets += 1
                return Answer(200, '{"success":true}')
            case "pause" | "resume":
                self.paused = send.action == "pause"
                return Answer(200, "{}")

    def use(self, name: str, weights: str | None = None) -> None:
        """Generate with an adapter (`weights`: of a load before): its blocks are in the cache then."""
        self.cached.setdefault(name, set()).add(weights or self.loaded[name])


def error(status: int, message: str) -> Answer:
    return Answer(status, json.dumps({"error": {"message": message, "code": status}}))


def missing(name: str) -> Answer:
    return error(404, f"Loading lora {name} failed: No adapter found for <path>")


class Bench:
    """A registry, its servers, and a clock; requests are carried out when asked to."""

    def __init__(self, replicas: int = 2, max_loras: int = 6, **options: Any) -> None:
        self.registry = AdapterRegistry(
            replicas, retry_s=RETRY_S, deadline_s=DEADLINE_S, max_loras=max_loras, **options
        )
        self.pushes = bool(options.get("pushes"))
        self.servers = [self.server() for _ in range(replicas)]
        self.routable = [False] * replicas
        self.pending: list[Send] = []
        self.sent: list[Send] = []
        self.arrived: dict[int, Answer] = {}  # by ticket: answers of servers, on their way back
        self.forgotten: list[str] = []
        self.aborted: list[str] = []
        self.reports: dict[int, OperationReport] = {}
        self.now = 0.0

    def server(self) -> Server:
        return Server(disk=set() if self.pushes else None)

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    self.pending.append(command)
                    self.sent.append(command)
                case SetRoutable(replica, routable):
                    self.routable[replica] = routable
                case Forget(name):
                    self.forgotten.append(name)
                case Abort(name):
                    self.aborted.append(name)
                case Finished(number, report):
                    assert number not in self.reports
                    self.reports[number] = report

    def arrive(self, send: Send) -> Answer:
        """The server carries a request out, once; its answer may take its time."""
        if send.ticket not in self.arrived:
            self.arrived[send.ticket] = self.servers[send.replica].do(send)
        return self.arrived[send.ticket]

    def end(self, name: str) -> None:
        """A request that asked for this adapter is over."""
        self.take(self.registry.ended(name, self.now))

    def answer(self, send: Send, answer: Answer) -> None:
        self.pending.remove(send)
        self.take(self.registry.answered(send.ticket, answer, self.now))

    def work(self) -> None:
        """Carry out everything that is on its way, until nothing more comes."""
        for _ in range(1000):
            if not self.pending:
                return
            send = self.pending[0]
            self.answer(send, self.arrive(send))
        raise AssertionError(f"requests without end: {self.pending}")

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.registry.tick(self.now))

    def start(self) -> None:
        for replica in range(len(self.servers)):
            self.take(self.registry.replica_back(replica, self.now))
        self.work()
        assert all(self.routable)
        self.sent.clear()

    def load(self, name: str, path: str) -> int:
        number, commands = self.registry.load(name, path, self.now)
        self.take(commands)
        return number

    def unload(self, name: str) -> int:
        number, commands = self.registry.unload(name, self.now)
        self.take(commands)
        return number

    def actions(self, replica: int) -> list[str]:
        return [f"{send.action} {send.name}".strip() for send in self.sent if send.replica == replica]


def started(replicas: int = 2, **options: Any) -> Bench:
    bench = Bench(replicas, **options)
    bench.start()
    return bench


def test_a_load_is_over_when_every_replica_holds_it() -> None:
    bench = started()
    number = bench.load("trl-policy-v1", "/1")
    first, second = bench.pending
    assert {first.replica, second.replica} == {0, 1}
    assert (first.action, first.name, first.path, first.timeout_s) == ("load", "trl-policy-v1", "/1", DEADLINE_S)
    bench.now += 0.25
    bench.answer(first, bench.servers[first.replica].do(first))
    assert number not in bench.reports
    assert bench.registry.live == {}
    bench.work()
    assert bench.registry.live == {"trl-policy-v1": "/1"}
    report = bench.reports[number]
    assert (report.ok, report.accepted_by, report.seconds, report.reason) == (True, 2, 0.25, None)
    assert [replica.attempts for replica in report.replicas] == [1, 1]


def test_only_the_lagging_replica_is_asked_again() -> None:
    bench = started()
    number = bench.load("trl-policy-v1", "/1")
    for _ in range(2):
        for send in list(bench.pending):
            bench.answer(send, missing(send.name) if send.replica == 1 else bench.servers[0].do(send))
        assert bench.pending == []
        bench.wait(RETRY_S - 0.01)
        assert bench.pending == []
        bench.wait(0.01)
        assert [send.replica for send in bench.pending] == [1]
    bench.work()
    report = bench.reports[number]
    assert report.ok
    assert [replica.attempts for replica in report.replicas] == [1, 3]
    assert report.replicas[1].reason == "Loading lora trl-policy-v1 failed: No adapter found for <path>"
    assert bench.actions(0) == ["load trl-policy-v1"]


def test_the_clock_is_asked_for_when_something_waits() -> None:
    bench = started()
    assert bench.registry.next_wake is None
    bench.load("trl-policy-v1", "/1")
    assert bench.registry.next_wake == DEADLINE_S
    bench.answer(bench.pending[0], missing("trl-policy-v1"))
    assert bench.registry.next_wake == RETRY_S
    bench.work()
    bench.wait(RETRY_S)
    bench.work()
    assert bench.registry.next_wake is None


def test_after_the_deadline_the_load_is_taken_back() -> None:
    bench = started()
    number = bench.load("trl-policy-v1", "/1")
    while number not in bench.reports:
        for send in list(bench.pending):
            lags = send.replica == 1 and send.action == "load"
            bench.answer(send, missing(send.name) if lags else bench.servers[send.replica].do(send))
        bench.wait(RETRY_S)
    assert bench.now >= DEADLINE_S
    report = bench.reports[number]
    assert not report.ok
    assert report.accepted_by == 0
    assert report.reason == f"replica 1 did not accept it within {DEADLINE_S:g} s"
    assert [server.loaded for server in bench.servers] == [{}, {}]
    assert bench.actions(0) == ["load trl-policy-v1", "unload trl-policy-v1"]
    assert all(bench.routable)
    assert bench.registry.live == {}


def test_a_final_refusal_ends_the_load_at_once() -> None:
    bench = started()
    number = bench.load("trl-policy-v1", "/1")
    refusal = error(500, "Call to add_lora method failed: LoRA rank 16 is greater than max_lora_rank 8.")
    first, second = bench.pending
    bench.answer(first, refusal)
    assert number not in bench.reports  # the other replica may still accept it
    bench.answer(second, bench.servers[second.replica].do(second))
    bench.work()
    report = bench.reports[number]
    assert not report.ok
    assert "replica 0" in (report.reason or "")
    assert "max_lora_rank 8" in (report.reason or "")
    assert bench.now == 0
    assert bench.servers[1].loaded == {}


def test_a_load_without_an_answer_is_made_sure_of() -> None:
    """It may have arrived: the name is unloaded before the load is sent again. Nobody can have used it yet."""
    bench = started()
    number = bench.load("trl-policy-v1", "/1")
    lost = bench.pending[0]
    bench.servers[0].do(lost)
    bench.answer(lost, Answer(None, "connection reset"))
    bench.work()
    bench.wait(RETRY_S)
    bench.work()
    assert bench.reports[number].ok
    assert bench.actions(0) == ["load trl-policy-v1", "unload trl-policy-v1", "load trl-policy-v1"]
    assert bench.actions(1) == ["load trl-policy-v1"]


def test_unload_goes_everywhere_and_an_unknown_name_is_told() -> None:
    bench = started()
    bench.load("trl-policy-v1", "/1")
    bench.work()
    number = bench.unload("trl-policy-v1")
    assert bench.registry.live == {}
    assert bench.forgotten == ["trl-policy-v1"]
    bench.work()
    assert bench.reports[number].ok
    assert [server.loaded for server in bench.servers] == [{}, {}]
    unknown = bench.unload("trl-policy-v1")
    assert bench.reports[unknown].reason == "The lora adapter 'trl-policy-v1' cannot be found."


def test_more_adapters_than_slots_are_refused_before_anything_is_sent() -> None:
    bench = started(max_loras=2)
    for version in (1, 2):
        bench.load(f"trl-policy-v{version}", f"/{version}")
        bench.work()
    bench.sent.clear()
    number = bench.load("trl-policy-v3", "/3")
    assert not bench.reports[number].ok
    assert "max_loras is 2" in (bench.reports[number].reason or "")
    assert bench.sent == []
    bench.unload("trl-policy-v1")
    bench.work()
    retry = bench.load("trl-policy-v3", "/3")
    bench.work()
    assert bench.reports[retry].ok


def test_a_run_that_starts_over_gets_its_own_weights() -> None:
    """The same name again: off, prefix cache reset, on; the old run's other versions go with it."""
    bench = started()
    for version in (1, 2, 3):
        bench.load(f"trl-policy-v{version}", f"/old/{version}")
        bench.work()
    bench.load("other", "/other")
    bench.work()
    for server in bench.servers:
        server.use("trl-policy-v1")
    bench.sent.clear()
    number = bench.load("trl-policy-v1", "/new/1")
    bench.work()
    assert bench.reports[number].ok
    for replica, server in enumerate(bench.servers):
        assert server.loaded == {"trl-policy-v1": "/new/1", "other": "/other"}
        assert server.cached == {}
        actions = bench.actions(replica)
        assert actions[-2:] == ["reset", "load trl-policy-v1"]
        assert sorted(actions[:-2]) == [f"unload trl-policy-v{version}" for version in (1, 2, 3)]
    assert set(bench.forgotten) == {f"trl-policy-v{version}" for version in (1, 2, 3)}


def test_a_name_that_was_unloaded_before_needs_a_reset_too() -> None:
    bench = started()
    bench.load("trl-policy-v1", "/old")
    bench.work()
    bench.unload("trl-policy-v1")
    bench.work()
    bench.sent.clear()
    bench.load("trl-policy-v1", "/new")
    bench.work()
    assert bench.actions(0) == bench.actions(1) == ["reset", "load trl-policy-v1"]
    bench.load("trl-policy-v2", "/2")
    bench.work()
    assert bench.actions(0)[2:] == ["load trl-policy-v2"]  # a new name needs none


def test_a_server_that_cannot_reset_gets_no_name_twice() -> None:
    bench = started()
    bench.load("trl-policy-v1", "/old")
    bench.work()
    bench.unload("trl-policy-v1")
    bench.work()
    number = bench.load("trl-policy-v1", "/new")
    for send in list(bench.pending):
        assert send.action == "reset"
        bench.answer(send, Answer(404, '{"detail":"Not Found"}'))
    bench.work()
    assert not bench.reports[number].ok
    assert "VLLM_SERVER_DEV_MODE=1" in (bench.reports[number].reason or "")
    assert [server.loaded for server in bench.servers] == [{}, {}]


def test_leftovers_of_an_earlier_run_are_swept_when_a_replica_is_met() -> None:
    bench = Bench()
    bench.servers[1].loaded = {"trl-policy-v7": "/old/7", "somebody-elses": "/x"}
    for replica in (0, 1):
        bench.take(bench.registry.replica_back(replica, 0.0))
    bench.work()
    assert bench.actions(0) == ["list", "reset", "resume"]
    assert bench.actions(1) == ["list", "unload trl-policy-v7", "reset", "resume"]
    assert bench.servers[1].loaded == {"somebody-elses": "/x"}
    assert all(bench.routable)


def test_a_restarted_replica_gets_the_live_adapters_before_it_is_routable() -> None:
    bench = started()
    for version in (1, 2):
        bench.load(f"trl-policy-v{version}", f"/{version}")
        bench.work()
    bench.take(bench.registry.set_paused(True, [0, 1], bench.now))
    bench.servers[1] = Server()
    bench.take(bench.registry.replica_left(1, bench.now))
    assert bench.routable == [True, False]
    bench.sent.clear()
    bench.take(bench.registry.replica_back(1, bench.now))
    while bench.pending:
        assert not bench.routable[1]
        bench.answer(bench.pending[0], bench.servers[1].do(bench.pending[0]))
    assert bench.routable == [True, True]
    assert bench.servers[1].loaded == {"trl-policy-v1": "/1", "trl-policy-v2": "/2"}
    assert bench.servers[1].paused


def test_a_replica_that_was_only_unreachable_keeps_what_is_right_and_loses_what_is_not() -> None:
    bench = started()
    for version in (1, 2):
        bench.load(f"trl-policy-v{version}", f"/{version}")
        bench.work()
    bench.take(bench.registry.replica_left(1, bench.now))
    bench.unload("trl-policy-v1")
    bench.load("trl-policy-v3", "/3")
    bench.work()
    assert bench.registry.live == {"trl-policy-v2": "/2", "trl-policy-v3": "/3"}
    bench.sent.clear()
    bench.take(bench.registry.replica_back(1, bench.now))
    bench.work()
    assert bench.actions(1) == ["list", "unload trl-policy-v1", "load trl-policy-v3", "resume"]
    assert bench.servers[1].loaded == bench.registry.live


def test_a_replica_that_leaves_during_a_load_is_not_waited_for() -> None:
    bench = started()
    number = bench.load("trl-policy-v1", "/1")
    to_first = next(send for send in bench.pending if send.replica == 0)
    bench.answer(to_first, bench.servers[0].do(to_first))
    bench.take(bench.registry.replica_left(1, bench.now))
    report = bench.reports[number]
    assert report.ok
    assert report.accepted_by == 1
    late = bench.pending[0]
    bench.answer(late, Answer(200, "Success"))  # an answer to a request that was given up
    assert not bench.routable[1]


def test_without_any_replica_a_load_waits_for_one() -> None:
    bench = Bench()
    number = bench.load("trl-policy-v1", "/1")
    bench.wait(1.0)
    assert number not in bench.reports
    bench.take(bench.registry.replica_back(0, bench.now))
    bench.work()
    assert bench.reports[number].ok
    late = bench.load("trl-policy-v2", "/2")
    bench.take(bench.registry.replica_left(0, bench.now))
    bench.wait(DEADLINE_S)
    assert bench.reports[late].reason == f"no replica was in service within {DEADLINE_S:g} s"


def test_a_replica_that_cannot_unload_leaves() -> None:
    bench = started()
    bench.load("trl-policy-v1", "/1")
    bench.work()
    number = bench.unload("trl-policy-v1")
    while number not in bench.reports:
        for send in list(bench.pending):
            bench.answer(send, Answer(500, "boom") if send.replica == 1 else bench.servers[0].do(send))
        bench.wait(RETRY_S)
    assert bench.routable == [True, False]
    assert bench.registry.trouble(1) == "unload: boom"


def test_operations_take_their_turn() -> None:
    bench = started()
    first = bench.load("trl-policy-v1", "/1")
    second = bench.load("trl-policy-v2", "/2")
    third = bench.unload("trl-policy-v1")
    assert {send.name for send in bench.pending} == {"trl-policy-v1"}
    bench.work()
    assert list(bench.reports) == [first, second, third]
    assert bench.registry.live == {"trl-policy-v2": "/2"}


def test_a_load_that_fails_ends_only_when_what_it_replaced_is_off_too() -> None:
    """A lower version drops the higher one; at the deadline the unload of that one is still on its way."""
    bench = started(replicas=1)
    bench.load("trl-policy-v2", "/2")
    number = bench.load("trl-policy-v1", "/1")
    bench.answer(bench.pending[0], bench.servers[0].do(bench.pending[0]))
    assert bench.actions(0) == ["load trl-policy-v2", "unload trl-policy-v2"]
    bench.wait(DEADLINE_S)
    assert number not in bench.reports
    bench.work()
    assert bench.reports[number].reason == f"replica 0 did not accept it within {DEADLINE_S:g} s"
    assert bench.servers[0].loaded == bench.registry.live == {}


def test_an_unload_is_tried_again_after_a_while_and_has_no_deadline() -> None:
    """A wake-up in the past would make the shell spin until the retry."""
    bench = started(replicas=1)
    bench.load("trl-policy-v2", "/2")
    bench.work()
    number = bench.unload("trl-policy-v2")
    assert bench.registry.next_wake is None
    bench.wait(DEADLINE_S)
    bench.answer(bench.pending[0], Answer(None, "connection reset"))
    assert bench.registry.next_wake == DEADLINE_S + RETRY_S
    bench.wait(RETRY_S)
    bench.work()
    assert bench.reports[number].ok
    assert bench.servers[0].loaded == {}


def test_a_name_is_open_to_requests_on_all_replicas_or_on_none() -> None:
    bench = started()
    registry = bench.registry
    assert registry.is_open("base-model")
    assert not registry.is_open("trl-policy-v1")
    bench.load("trl-policy-v1", "/1")
    first = bench.pending[0]
    bench.answer(first, bench.arrive(first))
    assert not registry.admit("trl-policy-v1")  # one replica has it, the other not yet
    bench.work()
    assert registry.admit("trl-policy-v1")
    bench.end("trl-policy-v1")
    bench.load("eval", "/eval")
    bench.work()
    assert registry.is_open("eval")
    bench.unload("eval")
    first = bench.pending[0]
    bench.answer(first, bench.arrive(first))
    assert not registry.is_open("eval")  # one replica has dropped it, the other not yet
    bench.work()
    assert registry.is_open("eval")  # nobody's business here any more: vLLM says that it does not exist


def test_an_unload_waits_for_the_requests_of_that_version() -> None:
    bench = started()
    bench.load("trl-policy-v1", "/1")
    bench.work()
    bench.sent.clear()
    for _ in range(2):
        assert bench.registry.admit("trl-policy-v1")
    number = bench.unload("trl-policy-v1")
    assert not bench.registry.is_open("trl-policy-v1")
    bench.end("trl-policy-v1")
    assert bench.sent == []
    bench.end("trl-policy-v1")
    bench.work()
    assert bench.reports[number].ok
    assert (bench.aborted, bench.actions(0)) == ([], ["unload trl-policy-v1"])


def test_an_unload_does_not_wait_for_ever_nor_while_generation_is_paused() -> None:
    bench = started()
    for version in (1, 2):
        bench.load(f"trl-policy-v{version}", f"/{version}")
        bench.work()
        assert bench.registry.admit(f"trl-policy-v{version}")
    bench.sent.clear()
    number = bench.unload("trl-policy-v1")
    assert bench.registry.next_wake == DRAIN_S
    bench.wait(DRAIN_S)
    bench.work()
    assert bench.reports[number].ok
    number = bench.unload("trl-policy-v2")
    bench.take(bench.registry.set_paused(True, [0, 1], bench.now))
    bench.work()
    assert bench.reports[number].ok
    assert bench.aborted == []  # vLLM goes on with them, under the weights they began with


def test_weights_are_replaced_only_when_no_request_uses_the_old_ones() -> None:
    bench = started()
    bench.load("trl-policy-v1", "/old")
    bench.work()
    bench.sent.clear()
    assert bench.registry.admit("trl-policy-v1")
    number = bench.load("trl-policy-v1", "/new")
    bench.work()
    assert bench.sent == []
    assert not bench.registry.is_open("trl-policy-v1")
    bench.wait(DRAIN_S)
    assert bench.aborted == ["trl-policy-v1"]
    bench.wait(1.0)
    assert (bench.aborted, bench.sent) == (["trl-policy-v1"], [])  # told once, and waited for
    bench.end("trl-policy-v1")
    bench.work()
    assert bench.reports[number].ok
    assert bench.actions(0) == ["unload trl-policy-v1", "reset", "load trl-policy-v1"]


def test_a_request_that_outlived_its_unload_is_ended_before_its_name_comes_back() -> None:
    """A reset in between does not help: it goes on filling the cache under its name."""
    bench = started()
    for version in (1, 2):
        bench.load(f"trl-policy-v{version}", f"/old/{version}")
        bench.work()
    assert bench.registry.admit("trl-policy-v2")
    bench.load("trl-policy-v1", "/new/1")  # the run starts over, and v2 goes with it
    bench.work()
    for server in bench.servers:
        assert server.loaded == {"trl-policy-v1": "/new/1"}
        server.use("trl-policy-v2", "/old/2")
    bench.sent.clear()
    number = bench.load("trl-policy-v2", "/new/2")
    bench.wait(DRAIN_S)
    assert bench.aborted == ["trl-policy-v2"]
    bench.end("trl-policy-v2")
    bench.work()
    assert bench.reports[number].ok
    assert bench.actions(0) == ["reset", "load trl-policy-v2"]


def test_requests_that_do_not_end_fail_the_load_that_would_replace_their_weights() -> None:
    bench = started()
    bench.load("eval", "/old")
    bench.work()
    assert bench.registry.admit("eval")
    number = bench.load("eval", "/new")
    bench.wait(DRAIN_S)
    bench.wait(DEADLINE_S)
    bench.work()
    report = bench.reports[number]
    assert (report.ok, report.timed_out) == (False, True)
    assert report.reason == "requests for the adapter it replaces did not end"
    assert [server.loaded for server in bench.servers] == [{}, {}]


def test_how_a_load_failed_is_told_apart() -> None:
    bench = started(max_loras=1)
    timed_out = bench.load("a", "/a")
    bench.wait(DEADLINE_S)
    for send in list(bench.pending):
        bench.answer(send, Answer(None, "no answer", timed_out=True))
    bench.wait(RETRY_S)
    bench.work()
    refused = bench.load("b", "/b")
    for send in list(bench.pending):
        bench.answer(send, error(500, "boom"))
    bench.work()
    bench.load("c", "/c")
    bench.work()
    no_slot = bench.load("d", "/d")
    failures = [bench.reports[number] for number in (timed_out, refused, no_slot)]
    assert [(one.ok, one.timed_out, one.refused) for one in failures] == [
        (False, True, False), (False, False, False), (False, False, True),
    ]  # fmt: skip


def test_attempts_are_spread_over_the_second_half_of_the_retry_time() -> None:
    draws = iter([0.0, 1.0, 0.5])
    bench = started(replicas=1, jitter=lambda: next(draws))
    bench.load("trl-policy-v1", "/1")
    waits = []
    for _ in range(3):
        bench.answer(bench.pending[0], missing("trl-policy-v1"))
        wake = bench.registry.next_wake
        assert wake is not None
        waits.append(wake - bench.now)
        bench.wait(waits[-1])
    assert waits == pytest.approx([SHORTEST_RETRY * RETRY_S, RETRY_S, 0.75 * RETRY_S])


def test_each_replica_says_when_it_had_accepted() -> None:
    bench = started()
    number = bench.load("trl-policy-v1", "/1")
    first, second = bench.pending
    bench.wait(0.25)
    bench.answer(first, bench.arrive(first))
    bench.wait(0.5)
    bench.answer(second, bench.arrive(second))
    seconds = {first.replica: 0.25, second.replica: 0.75}
    assert [part.seconds for part in bench.reports[number].replicas] == [seconds[0], seconds[1]]


def test_pushed_files_are_loaded_from_where_they_were_put() -> None:
    bench = started(pushes=True)
    number = bench.load("trl-policy-v1", "/1")
    push = bench.pending[0]
    assert (push.action, push.path, push.timeout_s) == ("push", "/1", DEADLINE_S)
    bench.answer(push, bench.arrive(push))
    load = next(send for send in bench.pending if send.replica == push.replica)
    assert (load.action, load.path, load.serial) == ("load", "/pushed/1", push.serial)
    bench.work()
    assert bench.reports[number].ok
    assert [part.attempts for part in bench.reports[number].replicas] == [1, 1]
    assert bench.registry.live == {"trl-policy-v1": "/1"}


def test_pushed_files_are_discarded_one_version_late() -> None:
    bench = started(replicas=1, pushes=True)
    for version in range(1, 5):
        bench.load(f"trl-policy-v{version}", f"/{version}")
        bench.work()
        if version > 1:
            bench.unload(f"trl-policy-v{version - 1}")
            bench.work()
    assert bench.servers[0].loaded == {"trl-policy-v4": "/4"}
    assert bench.servers[0].disk == {"/pushed/3", "/pushed/4"}


def test_pushed_files_that_are_gone_are_pushed_again() -> None:
    bench = started(replicas=1, pushes=True)
    bench.load("trl-policy-v1", "/1")
    bench.work()
    bench.servers[0] = bench.server()  # the replica is restarted with an empty disk
    bench.take(bench.registry.replica_left(0, bench.now))
    bench.sent.clear()
    bench.take(bench.registry.replica_back(0, bench.now))
    bench.work()
    bench.wait(RETRY_S)
    bench.work()
    assert bench.actions(0) == ["list", "load trl-policy-v1", "push trl-policy-v1", "load trl-policy-v1", "resume"]
    assert bench.routable == [True]


def test_a_replica_that_was_only_unreachable_keeps_what_was_pushed_to_it() -> None:
    bench = started(pushes=True)
    bench.load("trl-policy-v1", "/1")
    bench.work()
    bench.take(bench.registry.replica_left(1, bench.now))
    bench.sent.clear()
    bench.take(bench.registry.replica_back(1, bench.now))
    bench.work()
    assert bench.actions(1) == ["list", "resume"]


@pytest.mark.parametrize(
    ("answer", "attempts"),
    [(Answer(None, "refused"), 2), (error(503, "4 adapters are being sent already"), 2), (error(401, "no token"), 1)],
)
def test_a_push_is_tried_again_when_the_receiver_did_not_judge_it(answer: Answer, attempts: int) -> None:
    bench = started(replicas=1, pushes=True)
    number = bench.load("trl-policy-v1", "/1")
    bench.answer(bench.pending[0], answer)
    bench.wait(RETRY_S)
    bench.work()
    assert bench.reports[number].ok == (attempts == 2)
    assert bench.actions(0).count("push trl-policy-v1") == attempts
    if attempts == 1:
        assert bench.reports[number].reason == "replica 0: push: no token"


@pytest.mark.parametrize(
    ("answer", "attempts"),
    [(Answer(503, "starting"), 2), (error(500, "boom"), 2), (Answer(None, "reset"), 2), (error(404, "Not Found"), 1)],
)
def test_a_replica_joins_when_it_has_resumed_and_not_when_somebody_else_says_something(
    answer: Answer, attempts: int
) -> None:
    bench = Bench(replicas=1)
    bench.take(bench.registry.replica_back(0, bench.now))
    while bench.pending[0].action != "resume":
        bench.answer(bench.pending[0], bench.arrive(bench.pending[0]))
    bench.answer(bench.pending[0], answer)
    assert bench.routable == [attempts == 1]
    bench.wait(RETRY_S)
    bench.work()
    assert (bench.actions(0).count("resume"), bench.routable) == (attempts, [True])


NAMES = ("trl-policy-v1", "trl-policy-v2", "trl-policy-v3", "eval")
MAX_LORAS = 3


@dataclass(eq=False)
class Running:
    """A request under way: what it asked for, where it runs, and with whose weights."""

    name: str
    replica: int
    weights: str


class Fleet(RuleBasedStateMachine):
    """Anything may happen in any order: what may be asked for is on every routable replica, with its own weights."""

    @initialize(
        leftovers=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        pushes=st.booleans(),
        joined=st.sampled_from([True, True, False]),
    )
    def begin(self, leftovers: list[str], pushes: bool, joined: bool) -> None:
        self.bench = Bench(replicas=3, max_loras=MAX_LORAS, pushes=pushes)
        self.loads = 0
        self.asked: list[int] = []
        self.running: list[Running] = []
        self.bench.servers[0].loaded = {name: "/leftover" for name in leftovers if name != "eval"}
        for name in self.bench.servers[0].loaded:
            self.bench.servers[0].use(name)
        if joined:
            self.bench.start()

    @rule(name=st.sampled_from(NAMES), at_once=st.booleans())
    def load(self, name: str, at_once: bool) -> None:
        self.loads += 1
        self.asked.append(self.bench.load(name, f"/{self.loads}"))
        if at_once:
            self.bench.work()

    @rule(name=st.sampled_from(NAMES), at_once=st.booleans())
    def unload(self, name: str, at_once: bool) -> None:
        self.asked.append(self.bench.unload(name))
        if at_once:
            self.bench.work()

    @precondition(lambda self: self.bench.pending)
    @rule(which=st.integers(0, 2))
    def arrive(self, which: int) -> None:
        self.bench.arrive(self.bench.pending[which % len(self.bench.pending)])

    @precondition(lambda self: self.bench.pending)
    @rule(which=st.integers(0, 2), how=st.sampled_from(["ok", "ok", "ok", "lags", "final", "503", "lost", "late"]))
    def deliver(self, which: int, how: str) -> None:
        send = self.bench.pending[which % len(self.bench.pending)]
        answer = Answer(None, "reset")
        if how in ("ok", "late") or send.ticket in self.bench.arrived:
            done = self.bench.arrive(send)
            answer = done if how == "ok" else answer
        elif how == "503":
            answer = Answer(503, "not yet")
        elif how == "lags" and send.action == "load":
            answer = missing(send.name)
        elif how == "final" and send.action in ("load", "push"):
            answer = error(500, "LoRA rank 16 is greater than max_lora_rank 8.")
        self.bench.answer(send, answer)

    @rule(replica=st.integers(0, 2), restarted=st.booleans())
    def leave(self, replica: int, restarted: bool) -> None:
        if restarted:
            self.bench.servers[replica] = self.bench.server()
        # What was on its way to it is lost with the connection.
        self.bench.pending = [send for send in self.bench.pending if send.replica != replica]
        self.bench.take(self.bench.registry.replica_left(replica, self.bench.now))
        if restarted:
            self.finish([request for request in self.running if request.replica == replica])

    @rule(replica=st.integers(0, 2))
    def come_back(self, replica: int) -> None:
        self.bench.take(self.bench.registry.replica_back(replica, self.bench.now))

    @rule(seconds=st.sampled_from([0.1, RETRY_S, DRAIN_S, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.bench.wait(seconds)

    @rule()
    def work(self) -> None:
        self.bench.work()

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused: bool) -> None:
        serving = [replica for replica, routable in enumerate(self.bench.routable) if routable]
        for replica in serving:
            self.bench.servers[replica].paused = paused
        self.bench.take(self.bench.registry.set_paused(paused, serving, self.bench.now))

    @rule(which=st.integers(0, 3), replica=st.integers(0, 2))
    def start_request(self, which: int, replica: int) -> None:
        # One that is live, when there is one.
        live = sorted(self.bench.registry.live) or NAMES
        name = live[which % len(live)]
        if not self.bench.registry.admit(name):
            return
        loaded = self.bench.servers[replica].loaded
        if self.bench.routable[replica] and name in loaded:
            self.running.append(Running(name, replica, loaded[name]))
            self.bench.servers[replica].use(name)
        else:
            self.bench.end(name)  # no replica, or vLLM's own 404

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 20))
    def end_request(self, which: int) -> None:
        self.finish([self.running[which % len(self.running)]])

    @rule()
    def end_what_is_to_be_aborted(self) -> None:
        self.finish([request for request in self.running if request.name in self.bench.aborted])
        self.bench.aborted.clear()

    @rule()
    def generate(self) -> None:
        for request in self.running:
            self.bench.servers[request.replica].use(request.name, request.weights)

    def finish(self, requests: list[Running]) -> None:
        for request in requests:
            self.running.remove(request)
            self.bench.end(request.name)

    @invariant()
    def live_adapters_are_on_every_routable_replica_with_their_own_weights_and_cache(self) -> None:
        live = self.bench.registry.live
        assert all(self.bench.registry.is_open(name) for name in live)
        for replica, routable in enumerate(self.bench.routable):
            assert routable == self.bench.registry.serves(replica)
            if routable:
                server = self.bench.servers[replica]
                assert {name: server.loaded.get(name) for name in live} == live
                assert all(server.cached.get(name, {path}) == {path} for name, path in live.items())

    @invariant()
    def when_nothing_is_under_way_routable_replicas_hold_nothing_else(self) -> None:
        if len(self.bench.reports) == len(self.asked):
            for server, routable in zip(self.bench.servers, self.bench.routable, strict=True):
                assert not routable or server.loaded == self.bench.registry.live

    @invariant()
    def vllm_never_has_to_evict_an_adapter(self) -> None:
        assert all(len(server.loaded) <= MAX_LORAS for server in self.bench.servers)

    @invariant()
    def a_name_keeps_its_weights_while_a_request_uses_it(self) -> None:
        for request in self.running:
            for server, routable in zip(self.bench.servers, self.bench.routable, strict=True):
                assert not routable or server.loaded.get(request.name, request.weights) == request.weights

    @invariant()
    def what_is_open_is_everywhere(self) -> None:
        for name in NAMES:
            if self.bench.registry.is_open(name):
                holders = {
                    server.loaded.get(name)
                    for server, routable in zip(self.bench.servers, self.bench.routable, strict=True)
                    if routable
                }
                assert len(holders) <= 1

    @invariant()
    def one_request_per_replica_at_a_time(self) -> None:
        replicas = [send.replica for send in self.bench.pending]
        assert len(replicas) == len(set(replicas))

    @invariant()
    def it_never_asks_to_be_woken_in_the_past(self) -> None:
        wake = self.bench.registry.next_wake
        assert wake is None or wake > self.bench.now

    def teardown(self) -> None:
        """Left alone with working replicas, everything comes to its end."""
        if not hasattr(self, "bench"):
            return
        for replica in range(3):
            self.come_back(replica)
        for _ in range(1000):
            self.bench.work()
            self.end_what_is_to_be_aborted()
            if len(self.bench.reports) == len(self.asked) and all(self.bench.routable):
                break
            wake = self.bench.registry.next_wake
            if wake is not None:
                self.bench.wait(max(0.0, wake - self.bench.now))
            else:
                for replica in range(3):
                    self.come_back(replica)
        else:
            raise AssertionError("the registry does not come to an end")
        self.bench.work()
        self.live_adapters_are_on_every_routable_replica_with_their_own_weights_and_cache()
        self.when_nothing_is_under_way_routable_replicas_hold_nothing_else()
        wanted = self.bench.registry._paused
        assert [server.paused for server in self.bench.servers] == [wanted] * 3


Fleet.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
test_any_sequence_of_events = Fleet.TestCase
