from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from recorded_runs import recipe, recorded
from run_folders import run_folder
from typer.testing import CliRunner

from rlkit.cli import app
from rlkit.diagnosis import NamedCause, Verdict, diagnose
from rlkit.errors import BadInput
from rlkit.tracking import write_run
from rlkit.watch import Watch


def verdict(bound: str, cause: str = "replicas", confidence: str = "high") -> Verdict:
    named = NamedCause(name=cause, text=cause, seconds=None, next_action="Change it.")
    update = {"bound": bound, "causes": [named], "confidence": confidence, "headline": f"{bound} says it."}
    return diagnose(recorded("learning-run"), recipe()).model_copy(update=update)


def test_the_first_verdict_is_news_and_the_same_one_is_not() -> None:
    watch = Watch()

    assert watch.look(verdict("undetermined")) is None
    first = watch.look(verdict("generation"))
    assert first is not None
    assert (first.text, first.level, first.stop) == ("generation says it.", "info", False)
    assert watch.look(verdict("generation")) is None


def test_a_change_is_news_once_it_holds() -> None:
    watch = Watch()
    watch.look(verdict("generation"))

    assert watch.look(verdict("trainer", "compute")) is None
    change = watch.look(verdict("trainer", "compute"))
    assert change is not None
    assert (change.text, change.level) == ("trainer says it. It was generation before.", "warn")
    assert watch.look(verdict("trainer", "compute")) is None


def test_a_stall_is_news_at_once_and_only_once() -> None:
    watch = Watch()
    watch.look(verdict("generation"))

    stall = watch.look(verdict("stalled"))
    assert stall is not None
    assert stall.level == "error"
    assert watch.look(verdict("stalled")) is None


def test_a_clear_answer_ends_the_watch() -> None:
    watch = Watch(stop_when_clear=True)

    looks = [watch.look(verdict("trainer", "tiny-rows")) for _ in range(3)]

    assert [look is not None and look.stop for look in looks] == [False, True, False]
    assert looks[1] is not None
    assert " Next: " in looks[1].text
    unsure = Watch(stop_when_clear=True)
    assert not any(look.stop for look in [unsure.look(verdict("trainer", confidence="low"))] * 3 if look is not None)


@pytest.mark.parametrize("steps", [60, 50])
def test_the_command_looks_until_the_verdict_is_sure_or_the_run_over(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = recorded("learning-run").drop(columns="timestamp").reset_index().to_dict("records")
    rows = [{str(name): float(value) for name, value in row.items() if pd.notna(value)} for row in logged]
    moments = [datetime.now(UTC) - timedelta(seconds=len(rows) - number) for number in range(len(rows))]
    write_run("followed", "run", rows, moments, {"recipe": recipe().with_overrides([f"train.steps={steps}"]).to_dict()})
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    result = CliRunner().invoke(app, ["watch", "followed/run", "--every", "2", "--until-clear"])

    assert result.exit_code == 0, result.output
    if steps == 50:
        assert result.stdout.startswith("step 50: The run is over. Generation-bound: ")
        assert slept == []
        return
    first, last = result.stdout.splitlines()
    assert first.startswith("step 50: Generation-bound: the trainer waits 67 %")
    assert " Next: Raise rollout.max_inflight_tasks" in last
    assert slept == [2.0]


def test_a_run_on_other_machines_is_followed_where_its_rows_were_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "mine")
    (folder.path / "trackio").mkdir()
    folder.metrics.unlink()
    asked: list[object] = []

    def load_run(project: str, name: str | None, source: object) -> None:
        asked.append((project, name, source))
        raise BadInput("looked")

    monkeypatch.setattr("rlkit.tracking.load_run", load_run)
    monkeypatch.setattr(time, "sleep", None)
    assert CliRunner().invoke(app, ["watch", str(folder.path)]).exit_code == 2
    assert asked == [("recorded", "mine", folder.path / "trackio")]


def test_a_rented_run_that_goes_on_is_followed_by_what_its_trainer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "mine")
    folder.metrics.unlink()
    hardware = ["engine=hf", "hardware.trainer=h200", "hardware.replica=h200"]
    rented = recipe().with_overrides([*hardware, "train.steps=2", "tracking.project=elsewhere"])
    folder.recipe.write_text(rented.to_yaml())
    folder.steps.write_text('{"global_step": 1, "reward": 0.5}\n{"global_step": 2, "reward": 0.5}\n')
    monkeypatch.setattr(time, "sleep", None)
    result = CliRunner().invoke(app, ["watch", str(folder.path)])

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("step 2: The run is over.")


def test_a_run_is_followed_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    result = CliRunner().invoke(app, ["watch", str(run_folder(tmp_path / "mine").path), "--no-alerts"])
    assert result.stdout.startswith("step 14: Stalled: the last step was logged")


def test_a_run_that_was_stopped_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "mine")
    folder.recipe.write_text(recipe().with_overrides(["train.steps=100"]).to_yaml())
    folder.state.write_text('{"status": "stopped"}')
    monkeypatch.setattr(time, "sleep", None)
    result = CliRunner().invoke(app, ["watch", str(folder.path)])

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("step 14: The run does not go on: it was stopped.")
