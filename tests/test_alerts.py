"""Alerts in real trackio storage: a watch writes them, trackio reads them."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from recorded_runs import recipe, recorded
from typer.testing import CliRunner

from rlkit.alerts import raise_alert
from rlkit.cli import app
from rlkit.errors import BadInput
from rlkit.tracking import load_run, write_run


def written(project: str, last_step_ago: timedelta) -> str:
    logged = recorded("learning-run").drop(columns="timestamp").reset_index().to_dict("records")
    rows = [{str(name): float(value) for name, value in row.items() if pd.notna(value)} for row in logged]
    end = datetime.now(UTC) - last_step_ago
    moments = [end - timedelta(seconds=2 * (len(rows) - number - 1)) for number in range(len(rows))]
    return write_run(project, "run", rows, moments, {"recipe": recipe().with_overrides(["train.steps=60"]).to_dict()})


def alerts(project: str) -> list[dict[str, Any]]:
    from trackio import Api

    (run,) = Api().runs(project)
    found: list[dict[str, Any]] = run.alerts()
    return found


def test_an_alert_is_the_run_s_own_at_its_last_step() -> None:
    written("followed", timedelta(0))

    raise_alert(load_run("followed"), "Generation-bound", "the trainer waits.", "warn")

    (alert,) = alerts("followed")
    assert (alert["run"], alert["title"], alert["text"], alert["level"], alert["step"]) == (
        "run", "Generation-bound", "the trainer waits.", "warn", 50)  # fmt: skip


def test_a_watch_raises_one_alert_for_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    written("silent", timedelta(minutes=30))
    looks: list[float] = []

    def third_look_ends(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", third_look_ends)
    result = CliRunner().invoke(app, ["watch", "silent"])

    assert len(looks) == 3
    assert result.stdout.count("Stalled: the last step was logged") == 1
    (alert,) = alerts("silent")
    assert (alert["title"], alert["level"]) == ("stalled", "error")


def test_no_alerts_are_written_where_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    written("silent", timedelta(minutes=30))

    def first_look_ends(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", first_look_ends)
    CliRunner().invoke(app, ["watch", "silent", "--no-alerts"])

    assert alerts("silent") == []


def test_a_folder_that_trackio_does_not_write_to_is_said(tmp_path: Path) -> None:
    written("followed", timedelta(0))
    run = load_run("followed")
    (tmp_path / "elsewhere").mkdir()

    with pytest.raises(BadInput, match="its own folder only"):
        raise_alert(run, "t", "x", "warn", tmp_path / "elsewhere")


@pytest.mark.parametrize(("least", "told"), [("warn", True), ("error", False)])
def test_a_webhook_is_told_from_its_level_on(monkeypatch: pytest.MonkeyPatch, least: str, told: bool) -> None:
    bodies: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    written("followed", timedelta(0))
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("TRACKIO_WEBHOOK_URL", f"http://127.0.0.1:{server.server_port}/hook")
        monkeypatch.setenv("TRACKIO_WEBHOOK_MIN_LEVEL", least)
        raise_alert(load_run("followed"), "stalled", "no rollouts", "warn")
        server.shutdown()
        thread.join()

    assert bool(bodies) == told
    assert not told or "no rollouts" in json.dumps(bodies)
