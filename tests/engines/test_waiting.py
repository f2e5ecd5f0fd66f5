from __future__ import annotations

from rlkit.engines.waiting import Waiting


def test_what_is_not_ready_is_told_now_and_then() -> None:
    waiting = Waiting(30.0)
    assert waiting.look(29.9, ["replica-0", "replica-1"]) is None
    assert waiting.look(30.2, ["replica-0", "replica-1"]) == "not ready after 30 s: replica-0, replica-1"
    assert waiting.look(59.0, ["replica-1"]) is None
    assert waiting.look(60.3, []) is None
    assert waiting.look(60.5, ["replica-1"]) == "not ready after 60 s: replica-1"
