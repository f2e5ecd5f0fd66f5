"""`rlkit jobs` against the emulated Hub, with the client as the command makes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub.hub_server import EmulatedHub
from huggingface_hub import HfApi
from typer.testing import CliRunner

from rlkit.cli import app
from rlkit.engines.hf_figures import Figures
from rlkit.engines.hf_measured import as_measured
from rlkit.recipe import load_recipe

pytestmark = pytest.mark.hub

PUBLISHED = Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml"


def start(api: HfApi, run: str, role: str, command: list[str], replica: str | None = None) -> str:
    labels = {"tool": "rlkit", "run": run, "role": role} | ({} if replica is None else {"replica": replica})
    return api.run_job(
        image="python:3.12", command=command, labels=labels, flavor="h200", namespace="tester", timeout=60
    ).id


@pytest.fixture
def jobs(api: HfApi, hub: EmulatedHub) -> list[str]:
    waits = ["sleep", "60"]
    ids = [start(api, "one", "replica", waits, "0"), start(api, "one", "trainer", ["sh", "-c", "seq 3"])]
    ids.append(start(api, "two", "replica", waits, "0"))
    hub.until(lambda: [hub.jobs[job].stage for job in ids] == ["RUNNING", "COMPLETED", "RUNNING"])
    return ids


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["jobs", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_shows_stage_and_cost(jobs: list[str]) -> None:
    text = run("list")
    assert "replica-0" in text
    assert "2 not over" in text
    shown = json.loads(run("list", "one", "--json"))
    assert [(job["name"], job["stage"]) for job in shown["jobs"]] == [
        ("replica-0", "RUNNING"),
        ("trainer", "COMPLETED"),
    ]
    assert [job["id"] for job in json.loads(run("list", "--alive", "--json"))["jobs"]] == [jobs[0], jobs[2]]


def test_logs_of_a_job(jobs: list[str]) -> None:
    assert run("logs", "one") == "1\n2\n3\n"
    assert run("logs", "one", "trainer", "--follow") == "1\n2\n3\n"


def test_cancel_ends_one_run_and_no_other(jobs: list[str], hub: EmulatedHub) -> None:
    text = run("cancel", "one")
    assert f"cancelled replica-0 {jobs[0]}" in text
    assert [job.id for job in hub.running()] == [jobs[2]]


@pytest.mark.parametrize("arguments", [["cancel", "none"], ["logs", "one", "replica-7"]])
def test_what_is_not_there_is_said(jobs: list[str], arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["jobs", *arguments])
    assert result.exit_code == 2
    assert "error: " in result.stderr


def test_measured_figures_are_kept_for_the_next_runs(
    hub: EmulatedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path))
    figures = Figures(6.0, 3.0, True, 3.0, True, 401, True, 120.0)
    monkeypatch.setattr("rlkit.engines.hf_measure.measure", lambda *_: figures)
    result = CliRunner().invoke(app, ["check", str(PUBLISHED), "--measure", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["figures"]["early_s"] == 6.0
    adapted, _ = as_measured(load_recipe(PUBLISHED), "tester")
    assert adapted.transport.retry_s == 1.0
