"""What one replica is known to hold, and what to ask it next so that it holds what is wanted. Pure.

vLLM's prefix cache keys its blocks by the adapter's name, so blocks of other weights under the same name would be
reused silently. Two rules keep that out: a name that was on a replica before is loaded again only after that replica's
prefix cache was reset, and a replica met for the first time is swept of leftover policy versions and reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlkit.serving.adapter_answers import (
    Answer,
    Meaning,
    adapter_paths,
    load_meaning,
    load_reason,
    message_of,
    reset_meaning,
    unload_meaning,
)
from rlkit.serving.adapter_commands import Action

# A replica that three times in a row refuses what it cannot refuse (to list, unload, reset) is not working.
MAX_CONTROL_FAILURES = 3

NO_RESET = "no /reset_prefix_cache, and the name was used before: start the replica with VLLM_SERVER_DEV_MODE=1"


@dataclass
class WantedAdapter:
    """An adapter that the replicas should hold; `serial` tells the weights of two loads of one name apart."""

    name: str
    path: str
    serial: int
    live: bool = False  # on every replica in service


@dataclass(frozen=True)
class Request:
    """The next thing to ask a replica for; `serial` is the load's."""

    action: Action
    name: str = ""
    path: str = ""
    serial: int = 0

    def is_wanted(self, wanted: Mapping[str, WantedAdapter]) -> bool:
        """Whether the weights it loads are still wanted under this name."""
        return self.name in wanted and wanted[self.name].serial == self.serial


@dataclass
class ReplicaAdapters:
    """The adapters of one replica.

    `out` is a replica that does not answer, `joining` one that is being brought up to date, `serving` one that requests
    go to.
    """

    policy_prefix: str  # names swept from a replica that is met for the first time
    phase: Literal["out", "joining", "serving"] = "out"
    held: dict[str, int | None] = field(default_factory=dict)  # name -> serial; None: weights of unknown origin
    seen: set[str] = field(default_factory=set)  # names whose blocks may be in its prefix cache
    paused: bool | None = None
    failures: int = 0  # in a row
    reason: str | None = None  # the last refusal
    _listed: bool = False
    _swept: bool = False

    def holds(self, adapter: WantedAdapter) -> bool:
        """Whether the replica has this adapter with these weights."""
        return self.held.get(adapter.name) == adapter.serial

    def unwanted(self, wanted: Mapping[str, WantedAdapter]) -> list[str]:
        """Names it holds that nobody wants, or not with these weights."""
        return [name for name in self.held if name not in wanted or not self.holds(wanted[name])]

    @property
    def is_broken(self) -> bool:
        """Whether it failed too often in a row to be of use."""
        return self.failures >= MAX_CONTROL_FAILURES

    def join(self) -> None:
        """It answers (again). It may have been restarted meanwhile, so it is asked what it holds."""
        self.phase = "joining"
        self.failures = 0
        self.paused = None
        self._listed = False

    def next_request(self, wanted: Mapping[str, WantedAdapter], loading: str | None, paused: bool) -> Request | None:
        """What to ask for next, or None when the replica is as it should be.

        It should hold every live adapter and nothing that is not wanted; the one being loaded (`loading`) only concerns
        a replica that serves.
        """
        if not self._listed:
            return Request("list")
        unwanted = self.unwanted(wanted)
        if unwanted:
            return Request("unload", unwanted[0])
        missing = [adapter for adapter in wanted.values() if not self.holds(adapter) and self._is_due(adapter, loading)]
        if not self._swept or any(adapter.name in self.seen for adapter in missing):
            return Request("reset")
        if missing:
            return Request("load", missing[0].name, missing[0].path, missing[0].serial)
        if self.paused != paused:
            return Request("pause" if paused else "resume")
        return None

    def _is_due(self, adapter: WantedAdapter, loading: str | None) -> bool:
        return adapter.live or (adapter.name == loading and self.phase == "serving")

    def take(self, asked: Request, answer: Answer, wanted: Mapping[str, WantedAdapter]) -> Meaning:
        """Take note of the answer to a request and say what it means for it."""
        match asked.action:
            case "list":
                meaning = self._take_list(answer, wanted)
            case "unload":
                meaning = unload_meaning(answer)
                if meaning is Meaning.DONE:
                    self.held.pop(asked.name, None)
            case "reset":
                meaning = self._take_reset(answer)
            case "load":
                meaning = self._take_load(asked, answer)
            case "pause" | "resume":
                # Any answer will do: a server without these endpoints cannot be paused either.
                meaning = Meaning.RETRY if answer.status is None else Meaning.DONE
                if meaning is Meaning.DONE:
                    self.paused = asked.action == "pause"
        if meaning is Meaning.DONE:
            self.failures = 0
            self.reason = None
        elif meaning is Meaning.UNAVAILABLE:
            self.reason = NO_RESET
        else:
            self.reason = load_reason(answer) if asked.action == "load" else f"{asked.action}: {message_of(answer)}"
        return meaning

    def _take_list(self, answer: Answer, wanted: Mapping[str, WantedAdapter]) -> Meaning:
        paths = adapter_paths(answer)
        if paths is None:
            return Meaning.RETRY
        held: dict[str, int | None] = {}
        for name, path in paths.items():
            if name.startswith(self.policy_prefix) or name in wanted or name in self.held:
                is_known = name in wanted and wanted[name].path == path
                held[name] = self.held.get(name) if is_known else None
        self.held = held
        self.seen.update(held)
        self._listed = True
        return Meaning.DONE

    def _take_reset(self, answer: Answer) -> Meaning:
        meaning = reset_meaning(answer)
        if meaning is Meaning.UNAVAILABLE and not self._swept:
            # Nothing is known to be in the cache yet; a name that needs the reset will say so when it is loaded.
            self._swept = True
            return Meaning.DONE
        if meaning is Meaning.DONE:
            self._swept = True
            self.seen = set(self.held)
        return meaning

    def _take_load(self, asked: Request, answer: Answer) -> Meaning:
        meaning = load_meaning(answer, asked.name)
        if meaning is Meaning.DONE:
            self.held[asked.name] = asked.serial
            self.seen.add(asked.name)
        elif meaning is Meaning.REPLACE or answer.status is None:
            # Without an answer the adapter may be there or not: take it off before the next attempt.
            self.held[asked.name] = None
            self.seen.add(asked.name)
        return meaning
