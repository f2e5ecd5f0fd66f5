"""What a run's folder says of who runs in it and how the run ended (`state.json`); reading it needs no lock."""

from __future__ import annotations

import json
from typing import Any, Literal

import psutil

from rlkit.run_folder import RunFolder

Status = Literal["running", "finished", "failed", "stopped"]


def read_state(folder: RunFolder) -> dict[str, Any]:
    """What `state.json` says, empty when there is none."""
    try:
        state = json.loads(folder.state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def is_going_on(folder: RunFolder) -> bool:
    """Whether an engine runs in the folder now."""
    state = read_state(folder)
    return state.get("status") == "running" and _is_alive(state)


def has_finished(folder: RunFolder) -> bool:
    """Whether a run came to its end in this folder; one that was stopped or broke is gone on with."""
    return read_state(folder).get("status") == "finished"


def has_ended(folder: RunFolder) -> bool:
    """Whether its engine noted an end, whichever; a killed one noted none, and rented Jobs may go on without it."""
    return read_state(folder).get("status") in ("finished", "failed", "stopped")


def state_in_words(folder: RunFolder) -> str:
    """Whether the run is going on or how it ended, as a clause whose subject is the run."""
    state = read_state(folder)
    match state.get("status"):
        case "running" if _is_alive(state):
            return f"it is running (process {state['pid']})"
        case "running":
            return "it was killed"
        case "failed":
            reason = str(state.get("error", "")).strip().splitlines()
            return f"it failed: {reason[0].rstrip(':')}" if reason else "it failed"  # a log's last lines may follow
        case "stopped":
            return "it was stopped"
        case "finished":
            return "it finished"
        case _:
            return "it was not started"


def _is_alive(state: dict[str, Any]) -> bool:
    """Whether the process that noted the state is there still; one that began later only has its number."""
    try:
        return psutil.Process(int(state["pid"])).create_time() <= float(state["updated"])
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
