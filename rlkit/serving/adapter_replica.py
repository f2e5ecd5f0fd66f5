"""What one replica is known to hold, and what to ask it next so that it holds what is wanted. Pure.

vLLM's prefix cache keys its blocks by the adapter's name and path, so blocks of other weights under the same two would
be reused silently. Two rules keep that out: a name that was on a replica with other weights is loaded again only after
that replica's prefix cache was reset, and a replica met for the first time is swept of leftover policy versions and
reset.

With pushed adapters the files are brought to the replica's own disk first, and loaded from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlkit.serving.adapter_answers import (
    Answer,
    Meaning,
    adapter_paths,
    done_or_gone_meaning,
    is_transient,
    load_meaning,
    load_reason,
    message_of,
    push_meaning,
    pushed_path,
    reset_meaning,
)
from rlkit.serving.adapter_commands import Action

# A replica that three times in a row refuses what it cannot refuse (to list, unload, reset) is not working.
MAX_CONTROL_FAILURES = 3

# Pushed files that nobody wants any more: the newest stay until the next ones, as TRL keeps its own folders for one
# sync more. A request that is still running with them may make vLLM read them again.
KEPT_DISCARDS = 1

NO_RESET = "no /reset_prefix_cache, and the name was used before: start the replica with VLLM_SERVER_DEV_MODE=1"


@dataclass
class WantedAdapter:
    """An adapter that the replicas should hold; `serial` tells the weights of two loads of one name apart."""

    name: str
    path: str
    serial: int
    live: bool = False  # on every replica in service, and open to requests


@dataclass(frozen=True)
class Request:
    """The next thing to ask a replica for; `serial` is the load's."""

    action: Action
    name: str = ""
    path: str = ""
    serial: int = 0

    @property
    def brings_an_adapter(self) -> bool:
        """Whether it is a step towards holding an adapter."""
        return self.action in ("push", "load")

    def is_wanted(self, wanted: Mapping[str, WantedAdapter]) -> bool:
        """Whether the weights it brings are still wanted under this name."""
        return self.name in wanted and wanted[self.name].serial == self.serial


@dataclass
class ReplicaAdapters:
    """The adapters of one replica.

    `out` is a replica that does not answer, `joining` one that is being brought up to date, `serving` one that requests
    go to.
    """

    policy_prefix: str  # names swept from a replica that is met for the first time
    pushes: bool = False  # files are pushed to the replica before they are loaded
    phase: Literal["out", "joining", "serving"] = "out"
    held: dict[str, int | None] = field(default_factory=dict)  # name -> serial; None: weights of unknown origin
    placed: dict[int, str] = field(default_factory=dict)  # serial -> where the pushed files are on the replica
    seen: dict[str, int | None] = field(default_factory=dict)  # names whose blocks may be in its prefix cache, likewise
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

    def leave(self, asked: Request | None) -> None:
        """It does not answer any more; `asked` is what it was asked for last."""
        self.phase = "out"
        if asked is not None and asked.action == "load":
            # It may have come to that, or come to it yet.
            self.held[asked.name] = None

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
        if not self._swept or any(self.seen.get(one.name, one.serial) != one.serial for one in missing):
            return Request("reset")
        if missing:
            return self._bring(missing[0])
        if self.paused != paused:
            return Request("pause" if paused else "resume")
        return self._discard(wanted)

    def _is_due(self, adapter: WantedAdapter, loading: str | None) -> bool:
        return adapter.live or (adapter.name == loading and self.phase == "serving")

    def _bring(self, adapter: WantedAdapter) -> Request:
        if self.pushes and adapter.serial not in self.placed:
            return Request("push", adapter.name, adapter.path, adapter.serial)
        return Request("load", adapter.name, self._path_of(adapter), adapter.serial)

    def _path_of(self, adapter: WantedAdapter) -> str:
        return self.placed.get(adapter.serial, adapter.path)

    def _discard(self, wanted: Mapping[str, WantedAdapter]) -> Request | None:
        # A joining replica has more urgent things to do.
        if self.phase == "joining":
            return None
        needed = {adapter.serial for adapter in wanted.values()}
        stale = sorted(serial for serial in self.placed if serial not in needed)
        if len(stale) <= KEPT_DISCARDS:
            return None
        return Request("discard", path=self.placed[stale[0]], serial=stale[0])

    def take(
        self, asked: Request, answer: Answer, wanted: Mapping[str, WantedAdapter], running: Mapping[str, int | None]
    ) -> Meaning:
        """Take note of the answer to a request and say what it means for it.

        `running` are the names that requests used when it was sent, with the serials of their weights.
        """
        match asked.action:
            case "list":
                meaning = self._take_list(answer, wanted)
            case "unload":
                meaning = done_or_gone_meaning(answer)
                if meaning is Meaning.DONE:
                    self.held.pop(asked.name, None)
            case "reset":
                meaning = self._take_reset(answer, running)
            case "push":
                meaning = self._take_push(asked, answer)
            case "load":
                meaning = self._take_load(asked, answer)
            case "pause" | "resume":
                meaning = done_or_gone_meaning(answer)
                # Without its own answer it may have been done or not.
                self.paused = asked.action == "pause" if meaning is Meaning.DONE else None
            case "discard":
                # The receiver bounds what it keeps by itself; a file that stays does no harm.
                self.placed.pop(asked.serial, None)
                meaning = Meaning.DONE
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
                is_known = name in wanted and self._path_of(wanted[name]) == path
                held[name] = self.held.get(name) if is_known else None
        self.held = held
        self.seen.update(held)
        self._listed = True
        return Meaning.DONE

    def _take_reset(self, answer: Answer, running: Mapping[str, int | None]) -> Meaning:
        meaning = reset_meaning(answer)
        if meaning is Meaning.UNAVAILABLE and not self._swept:
            # Nothing is known to be in the cache yet; a name that needs the reset will say so when it is loaded.
            self._swept = True
            return Meaning.DONE
        if meaning is Meaning.DONE:
            self._swept = True
            # A request that outlived the unload of its adapter fills the cache again.
            self.seen = {**running, **self.held}
        return meaning

    def _take_push(self, asked: Request, answer: Answer) -> Meaning:
        path = pushed_path(answer)
        if path is not None:
            # The same files pushed for an earlier load: they are this load's now, and not to be discarded with that.
            self.placed = {serial: place for serial, place in self.placed.items() if place != path}
            self.placed[asked.serial] = path
        return push_meaning(answer)

    def _take_load(self, asked: Request, answer: Answer) -> Meaning:
        meaning = load_meaning(answer, asked.name)
        if meaning is Meaning.DONE:
            self.held[asked.name] = self.seen[asked.name] = asked.serial
        elif meaning is Meaning.REPLACE:
            self.held[asked.name] = self.seen[asked.name] = None
        elif is_transient(answer):
            # It may have been loaded or not: take it off before the next attempt. Its blocks are nowhere, since nobody
            # could ask for it yet.
            self.held[asked.name] = None
        elif meaning is Meaning.RETRY and self.pushes:
            # What was pushed is not there any more (the replica's disk is new): push it again.
            self.placed.pop(asked.serial, None)
        return meaning
