from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import recorded
from typer.testing import CliRunner, Result

import rlkit.engines
import rlkit.report
from rlkit import preflight
from rlkit.cli import app
from rlkit.engines import Event, Outcome
from rlkit.errors import BadInput, RunFailed
from rlkit.inputs import inspect_folder
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.tracking import write_run

ROOT = Path(__file__).parents[1]
LOCAL = str(ROOT / "runs" / "local.yaml")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, on a machine that suits every recipe."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    facts = preflight.MachineFacts(reward_problem=None)
    monkeypatch.setattr(preflight, "gather_facts", lambda recipe, folder: facts)
    return folder


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, RunFolder]]:
    """An engine that logs the recorded run to trackio; what it was asked to launch."""
    calls: list[tuple[Recipe, RunFolder]] = []

    def launch(recipe: Recipe, folder: RunFolder, on_event: Callable[[Event], None], *_: object) -> Outcome:
        calls.append((recipe, folder))
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.recipe.write_text(as_recorded(recipe).to_yaml())
        on_event(Event("phase", text="training"))
        log_run(recipe, folder.name)
        on_event(Event("step", step=50, total=50, metrics={"reward": 0.9}))
        return Outcome(folder, 50, 12.5)

    monkeypatch.setattr(rlkit.engines, "launch", launch)
    monkeypatch.setattr(rlkit.report, "report_run", write_page)
    return calls


def write_page(folder: RunFolder, out: Path | None = None) -> Path:
    """In the place of a notebook that takes seconds."""
    page = out or folder.report
    assert folder.verdict.exists()
    page.write_text("<html>")
    return page


def as_recorded(recipe: Recipe) -> Recipe:
    """With the queue that the recorded run had, which its verdict rests on."""
    return recipe.with_overrides(["rollout.queue_maxsize=256"])


def log_run(recipe: Recipe, name: str) -> None:
    frame = recorded("trainer-bound-run").drop(columns="timestamp").reset_index().astype(float)
    rows = [{str(key): value for key, value in row.items() if value == value} for row in frame.to_dict("records")]
    write_run(recipe.tracking.project, name, rows, config={"recipe": as_recorded(recipe).to_dict()})


def rlkit_(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def one_error(result: Result, exit_code: int = 2) -> str:
    """The one line that a command was refused with."""
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    lines = ANSI.sub("", result.stderr).splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


# run


def test_a_run_ends_with_the_verdict_the_next_action_and_the_report(launched: list[Any], checkout: Path) -> None:
    result = rlkit_("run", LOCAL)
    assert result.exit_code == 0, result.output
    ((recipe, folder),) = launched
    assert recipe == load_recipe(LOCAL)
    assert folder.path == Path("runs/out/local")
    headline, action, report = result.stdout.splitlines()
    assert headline.startswith("Trainer-bound: ")
    assert action.startswith("Next: ")
    assert report == "Report: runs/out/local/report.html"
    assert "training" in result.stderr
    assert "step 50/50  reward 0.90" in result.stderr
    assert json.loads(folder.verdict.read_text())["bound"] == "trainer"
    assert folder.metrics.exists()
    assert folder.report.exists()


def test_a_second_run_has_a_folder_of_its_own(launched: list[Any]) -> None:
    for _ in range(3):
        assert rlkit_("run", LOCAL).exit_code == 0
    assert [folder.name for _, folder in launched] == ["local", "local-2", "local-3"]


def test_a_name_that_trackio_knows_from_elsewhere_is_not_taken_again(launched: list[Any]) -> None:
    for name in ("local", "local-3"):
        log_run(load_recipe(LOCAL), name)
    for _ in range(2):
        assert rlkit_("run", LOCAL).exit_code == 0
    assert [folder.name for _, folder in launched] == ["local-2", "local-4"]


def test_overrides_and_the_engine_reach_the_recipe(launched: list[Any]) -> None:
    result = rlkit_("run", LOCAL, "--engine", "sim", "--set", "train.steps=7", "--set", "name=mine")
    assert result.exit_code == 0, result.output
    recipe, folder = launched[0]
    assert (recipe.engine, recipe.train.steps, folder.name) == ("sim", 7, "mine")


def test_json_is_all_there_is_on_stdout(launched: list[Any]) -> None:
    result = rlkit_("run", LOCAL, "--name", "mine", "--json")
    answer = json.loads(result.stdout)
    assert answer["folder"] == "runs/out/mine"
    assert (answer["steps"], answer["seconds"]) == (50, 12.5)
    assert answer["report"] == "runs/out/mine/report.html"
    assert answer["verdict"]["bound"] == "trainer"


def test_a_run_without_its_report(launched: list[Any]) -> None:
    result = rlkit_("run", LOCAL, "--no-report")
    assert result.exit_code == 0
    assert "Report" not in result.stdout
    assert not launched[0][1].report.exists()


def test_the_same_folder_again_continues_its_run(launched: list[Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "elsewhere")
    for arguments in ([LOCAL, "--folder", folder], [LOCAL, "--folder", folder, "--resume"], [folder]):
        assert rlkit_("run", *arguments).exit_code == 0
    assert [str(run.path) for _, run in launched] == [folder] * 3
    assert launched[2][0] == as_recorded(launched[0][0])


def test_resume_takes_the_newest_run_of_the_recipe(launched: list[Any]) -> None:
    for name in ("local", "local-2", "local-cold"):
        rlkit_("run", LOCAL, "--name", name)
    assert rlkit_("run", LOCAL, "--resume").exit_code == 0
    assert launched[-1][1].name == "local-2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume"], "there is no run of local under runs/out"),
        (["--resume", "--name", "x"], "runs/out/x holds no run"),
        (["--name", "x", "--folder", "y"], "give one of them"),
        (["--name", "../x"], "--name '../x': give a name of a folder"),
        (["--name", ".."], "--name '..': give a name of a folder"),
        (["--name", ""], "--name: its value is empty ('')"),
    ],
)
def test_a_folder_that_cannot_be_meant(launched: list[Any], arguments: list[str], words: str) -> None:
    assert words in one_error(rlkit_("run", LOCAL, *arguments))
    assert launched == []


def test_a_runs_folder_needs_no_other_name(launched: list[Any]) -> None:
    rlkit_("run", LOCAL)
    assert "leave --name and --folder out" in one_error(rlkit_("run", "runs/out/local", "--name", "x"))


def test_a_folder_without_a_run_is_not_a_recipe(launched: list[Any], checkout: Path) -> None:
    (checkout / "empty").mkdir()
    assert "empty: the folder holds no recipe (no recipe.yaml)" in one_error(rlkit_("run", "empty"))
    assert launched == []


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, logged: bool) -> None:
    def launch(recipe: Recipe, folder: RunFolder, on_event: Callable[[Event], None], *_: object) -> Outcome:
        folder.path.mkdir(parents=True)
        folder.recipe.write_text(recipe.to_yaml())
        if logged:
            log_run(recipe, folder.name)
        raise error

    monkeypatch.setattr(rlkit.engines, "launch", launch)


def test_a_run_that_fails_keeps_its_metrics_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RunFailed("replica-1 was killed (signal 9); its last log lines (x.log):\nout of memory"), True)
    result = rlkit_("run", LOCAL)
    assert result.exit_code == 3
    assert result.stdout == ""
    lines = ANSI.sub("", result.stderr).splitlines()
    assert lines[-3:] == [
        "metrics so far: runs/out/local/metrics.parquet; continue with: rlkit run runs/out/local",
        "error: replica-1 was killed (signal 9); its last log lines (x.log):",
        "out of memory",
    ]
    assert Path("runs/out/local/metrics.parquet").exists()


def test_a_run_that_fails_before_its_first_step_has_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RunFailed("replica-0 ended"), logged=False)
    result = rlkit_("run", LOCAL)
    assert result.exit_code == 3
    assert "metrics so far" not in result.stderr
    assert "continue with: rlkit run runs/out/local" in result.stderr


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt(), logged=True)
    result = rlkit_("run", LOCAL)
    assert result.exit_code == 130
    assert ANSI.sub("", result.stderr).splitlines()[-1] == "rlkit: stopped"
    assert Path("runs/out/local/metrics.parquet").exists()


def test_a_terminated_run_keeps_its_metrics_too(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, SystemExit(143), logged=True)
    result = rlkit_("run", LOCAL)
    assert result.exit_code == 143
    assert "metrics so far: runs/out/local/metrics.parquet" in result.stderr
    assert Path("runs/out/local/metrics.parquet").exists()


def test_what_the_engine_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, BadInput("runs/out/local: a run is going on here"), logged=False)
    result = rlkit_("run", LOCAL)
    assert one_error(result) == "error: runs/out/local: a run is going on here"


def test_a_place_is_shown_as_a_shell_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RunFailed("it ended"), logged=False)
    assert "continue with: rlkit run 'a place'" in rlkit_("run", LOCAL, "--folder", "a place").stderr


def test_a_run_that_never_began_cannot_be_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rlkit.engines, "launch", launch)
    ended = rlkit_("run", LOCAL)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (130, "", "rlkit: stopped\n")


def test_a_run_interrupted_while_its_jobs_stop_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(recipe: Recipe, folder: RunFolder, *_: object) -> Outcome:
        folder.path.mkdir(parents=True)
        folder.recipe.write_text(recipe.to_yaml())
        folder.state.write_text('{"status": "finished"}')
        raise KeyboardInterrupt

    monkeypatch.setattr(rlkit.engines, "launch", launch)
    ended = rlkit_("run", LOCAL)
    assert "the run itself is complete; read it with: rlkit report" in ended.stderr
    assert "continue with" not in ended.stderr
    assert "error" not in ended.stderr


@pytest.mark.parametrize(("options", "command"), [([], "report"), (["--no-report"], "diagnose")])
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_whose_results_are_interrupted_says_how_to_read_it(
    options: list[str],
    command: str,
    number: signal.Signals,
    exit_code: int,
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("rlkit.results.write_results", interrupted)
    result = rlkit_("run", LOCAL, *options)
    assert result.exit_code == exit_code
    lines = ANSI.sub("", result.stderr).splitlines()
    assert lines[-2:] == [f"the run itself is complete; read it with: rlkit {command} runs/out/local", "rlkit: stopped"]


# Bad input: one line, exit code 2, nothing started. `check` refuses the same.


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "recipe.yaml: no such recipe; give a recipe (YAML), a run's folder, or the name of a run under"),
        ("name: [open", "broken YAML (line 1"),
        (f"extends: {LOCAL}\nlearning_rat: 1", "learning_rat: unknown field"),
        (
            f"extends: {LOCAL}\ntrain: {{steps: fifty}}",
            "train.steps: expected a whole number above 0 and at most 1000000, got 'fifty'",
        ),
        (f"extends: {LOCAL}\nname: a\nname: b", "duplicate key"),
    ],
)
def test_a_bad_recipe(command: str, content: str | None, words: str, launched: list[Any], checkout: Path) -> None:
    if content is not None:
        (checkout / "recipe.yaml").write_text(content)
    assert words in one_error(rlkit_(command, "recipe.yaml"))
    assert launched == []
    assert not (checkout / "runs").exists()


@pytest.mark.parametrize("override", ["train.steps", "train.stepz=3", "train.steps=many"])
def test_a_bad_override(override: str, launched: list[Any], checkout: Path) -> None:
    one_error(rlkit_("run", LOCAL, "--set", override))
    assert launched == []
    assert not (checkout / "runs").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward=nowhere:score", "reward: cannot import 'nowhere:score'"),
        ("model.name=./model", "model.name: model has no tokenizer"),
        ("data.name=rows.jsonl", "data.name: rows.jsonl does not exist"),
        ("serve.max_loras=5", "serve.max_loras: 5 slots, and max_staleness 4 needs 6"),
    ],
)
def test_what_preflight_finds_starts_nothing(
    override: str, words: str, launched: list[Any], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(rlkit.engines, "launch", lambda *_: launched.append(_))
    (checkout / "model").mkdir()
    (checkout / "model" / "config.json").write_text("{}")
    assert words in one_error(rlkit_("run", LOCAL, "--set", override))
    assert launched == []
    assert not (checkout / "runs").exists()


def test_a_folder_that_cannot_hold_the_run_is_not_announced(
    launched: list[Any], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(rlkit.engines, "launch", lambda *_: launched.append(_))
    (checkout / "a-file").write_text("")
    assert "error: folder: a-file cannot be a folder, it is a file" in one_error(
        rlkit_("run", LOCAL, "--folder", "a-file")
    )
    assert launched == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", ""], "an argument is empty ('')"),
        (["check", ""], "an argument is empty ('')"),
        (["diagnose", ""], "an argument is empty ('')"),
        (["report", ""], "an argument is empty ('')"),
        (["run", LOCAL, "--folder", ""], "--folder: its value is empty ('')"),
        (["run", LOCAL, "--folder="], "--folder: its value is empty ('')"),
        (["report", "x", "--out", ""], "--out: its value is empty ('')"),
        (["report", "x.ipynb", "-p", ""], "-p: its value is empty ('')"),
        (["runs", "x", "--source", ""], "--source: its value is empty ('')"),
    ],
)
def test_an_empty_value_is_not_the_current_folder(arguments: list[str], words: str, launched: list[Any]) -> None:
    assert one_error(rlkit_(*arguments)) == f"error: {words}"
    assert launched == []


@pytest.mark.parametrize(
    ("code", "exit_code"), [(errno.EACCES, 2), (errno.EROFS, 2), (errno.ENOENT, 2), (errno.ENOSPC, 1), (errno.EIO, 1)]
)
def test_a_file_that_cannot_be_had_is_one_line(code: int, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), "/some/file")

    monkeypatch.setattr("rlkit.tracking.list_runs", refuse)
    assert one_error(rlkit_("runs", "x"), exit_code) == f"error: /some/file: {os.strerror(code)}"


def test_a_full_disk_is_one_line_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(*_: object) -> None:
        raise full

    monkeypatch.setattr("rlkit.results.write_results", write)
    result = rlkit_("run", LOCAL)
    assert result.exit_code == 1
    lines = ANSI.sub("", result.stderr).splitlines()
    assert lines[-2:] == [
        "the run itself is complete; read it with: rlkit report runs/out/local",
        "error: cannot write: No space left on device",
    ]
    failing(monkeypatch, full, logged=True)
    monkeypatch.setattr("rlkit.tracking.save_frame", write)
    lines = ANSI.sub("", rlkit_("run", LOCAL, "--name", "full").stderr).splitlines()
    assert lines == ["continue with: rlkit run runs/out/full", "error: cannot write: No space left on device"]


def test_a_name_that_no_filesystem_takes_is_one_line() -> None:
    for command in ("run", "check", "diagnose", "report"):
        assert "File name too long" in one_error(rlkit_(command, "a" * 300))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument 'RECIPE'; see"),
        (["chek"], "No such command 'chek'"),
        (["run", "x", "--wat"], "No such option: --wat"),
        (["check", "x", "--set"], "Option '--set' requires an argument; see"),
        (["check", "x", "--engine", "moon"], "--engine: 'moon' is not one of 'local', 'hf', 'sim'; see"),
        (["proxy", "--replica", "http://x:1", "--port", "many"], "--port: expected a whole number, got 'many'; see"),
    ],
)
def test_a_command_that_is_misspelt_is_one_line(arguments: list[str], words: str) -> None:
    error = one_error(rlkit_(*arguments))
    assert words in error
    assert error.endswith("--help")


def test_the_engine_need_not_look_again(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    looks: list[Path] = []

    def look(recipe: Recipe, folder: Path) -> preflight.MachineFacts:
        looks.append(folder)
        return preflight.MachineFacts(engine_problem=None)

    monkeypatch.setattr(preflight, "gather_facts", look)
    monkeypatch.setattr("rlkit.engines.local.launch_local", lambda *_: (_ for _ in ()).throw(RunFailed("it ended")))
    assert rlkit_("run", LOCAL).exit_code == 3
    assert looks == [Path("runs/out/local")]


def test_all_errors_are_told_at_once(launched: list[Any]) -> None:
    result = rlkit_("run", LOCAL, "--set", "serve.max_loras=5", "--set", "lora.use_dora=true")
    assert result.exit_code == 2
    lines = ANSI.sub("", result.stderr).splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["serve.max_loras", "lora.use_dora"]
    assert launched == []


def test_a_warning_does_not_stop_a_run(launched: list[Any]) -> None:
    result = rlkit_("run", LOCAL, "--set", "rollout.max_inflight_tasks=500")
    assert result.exit_code == 0
    assert "warning: rollout.max_inflight_tasks: 500 in flight" in ANSI.sub("", result.stderr)
    assert len(launched) == 1


# check


def test_check_says_when_there_is_nothing_to_change() -> None:
    result = rlkit_("check", LOCAL)
    assert (result.exit_code, result.stdout) == (0, f"{LOCAL}: nothing to change\n")
    result = rlkit_("check", LOCAL, "--engine", "sim", "--set", "train.steps=40", "--set", "train.seed=1")
    assert result.stdout == f"{LOCAL} with engine=sim, train.steps=40, train.seed=1: nothing to change\n"


def test_check_as_json() -> None:
    result = rlkit_("check", LOCAL, "--set", "serve.max_loras=5", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 2
    assert answer["recipe"] == "local"
    assert [set(finding) for finding in answer["findings"]] == [{"severity", "field", "message", "fix"}]


def test_check_with_warnings_alone_succeeds() -> None:
    result = rlkit_("check", LOCAL, "--set", "train.token_budget=64")
    assert result.exit_code == 0
    assert ANSI.sub("", result.stdout).startswith("warning: train.token_budget: 64")


# diagnose, runs, report


@pytest.fixture
def logged() -> Recipe:
    recipe = load_recipe(LOCAL)
    log_run(recipe, "first")
    return recipe


def test_diagnose_a_project(logged: Recipe) -> None:
    result = rlkit_("diagnose", "local")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    assert lines[0].startswith("Trainer-bound: ")
    assert any(line.startswith("  Of a step: forward backward") for line in lines)
    assert lines[-2].startswith("  Confidence: ")
    assert lines[-1].startswith("Next: ")


def test_diagnose_as_json(logged: Recipe) -> None:
    answer = json.loads(rlkit_("diagnose", "local", "--run", "first", "--json").stdout)
    assert (answer["project"], answer["run"], answer["verdict"]["bound"]) == ("local", "first", "trainer")


def test_diagnose_a_runs_folder_reads_what_is_in_it(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rlkit_("run", LOCAL)
    monkeypatch.setenv("TRACKIO_DIR", "/nowhere")
    result = rlkit_("diagnose", "runs/out/local")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Trainer-bound: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diagnose", "nothing-here"], "nothing-here"),
        (["diagnose", "local", "--run", "second"], "second"),
        (["runs", "nothing-here"], "nothing-here"),
        (["diagnose", ".", "--run", "x"], ".: the folder holds no run"),
        (["diagnose", "."], ".: the folder holds no run (no recipe.yaml)"),
        (
            ["report", "nothing"],
            "/runs/out; give a run's folder, the name of a run under runs/out, or a notebook",
        ),
        (["report", "gone.ipynb"], "gone.ipynb"),
        (["report", ".", "-p", "a=1"], "only a notebook takes parameters"),
        (["report", "n.ipynb", "-p", "a"], "-p a: expected name=value"),
        (["report", "n.ipynb", "-p", "a=[1"], "-p a=[1: '[1' is not a YAML value"),
        (["proxy", "--replica", "localhost:8000"], "replicas"),
        (["proxy", "--replica", "http://h:1", "--port", "70000"], "port"),
        (["proxy", "--replica", "http://h:1", "--host", "::"], "proxy: incoming_token_env: needed when"),
        (["proxy", "--replica", "http://h:1", "--receiver", "http://h:2"], "receiver_token_env: transport push needs"),
        (["proxy", "--replica", "http://h:1", "--set", "a=1"], "give one with --recipe"),
        (["proxy", "--replica", "http://h:1", "--token-env", "NOT_SET"], "NOT_SET is not set"),
    ],
)
def test_what_does_not_exist_is_named(logged: Recipe, arguments: list[str], words: str) -> None:
    assert words in one_error(rlkit_(*arguments))


def test_a_run_of_nothing_but_nan_is_refused() -> None:
    write_run("broken", "nan", [{"global_step": 1.0, "perf/step_s": float("nan")}])
    assert "only NaN" in one_error(rlkit_("diagnose", "broken"))


def test_a_run_without_a_time_is_listed(tmp_path: Path) -> None:
    fragment = tmp_path / "trackio" / "inbox" / "writer" / "1.jsonl"
    fragment.parent.mkdir(parents=True)
    fragment.write_text(json.dumps({"kind": "metric", "project": "p", "run": "timeless", "metrics": {"reward": 1}}))
    result = rlkit_("runs", "p")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].split() == ["timeless", "1", "unknown", "unknown"]


def test_runs_are_listed(logged: Recipe) -> None:
    log_run(logged, "second")
    lines = rlkit_("runs", "local").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "first", "second"]
    answer = json.loads(rlkit_("runs", "local", "--json").stdout)
    assert [row["name"] for row in answer] == ["first", "second"]


def test_report_of_a_run_by_folder_or_name(launched: list[Any], tmp_path: Path) -> None:
    rlkit_("run", LOCAL)
    assert rlkit_("report", "runs/out/local").stdout == "runs/out/local/report.html\n"
    assert rlkit_("report", "local", "--out", str(tmp_path / "x.html")).stdout == f"{tmp_path / 'x.html'}\n"


def test_report_gives_a_notebook_its_parameters_with_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def render(notebook: Path, parameters: dict[str, Any], out: Path) -> Path:
        given.append((notebook, parameters))
        return out

    monkeypatch.setattr(rlkit.report, "render_notebook", render)
    result = rlkit_("report", "n/a.ipynb", "-p", "steps=3", "-p", "rate=1e-3", "-p", "name=007x", "-p", "empty=")
    assert result.stdout == "runs/out/a.html\n"
    assert given == [(Path("n/a.ipynb"), {"steps": 3, "rate": 1e-3, "name": "007x", "empty": ""})]


def test_the_proxy_takes_its_rules_from_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []

    async def run_until_stopped(config: Any) -> None:
        served.append(config)

    monkeypatch.setattr("rlkit.serving.proxy.run_until_stopped", run_until_stopped)
    overrides = ["--set", "transport.retry_s=0.25", "--set", "serve.max_loras=8"]
    result = rlkit_("proxy", "--replica", "http://a:1/", "--replica", "http://b:1", "--recipe", LOCAL, *overrides)
    assert result.exit_code == 0, result.output
    (config,) = served
    assert config.replicas == ["http://a:1", "http://b:1"]
    assert (config.transport.retry_s, config.max_loras, config.exit_with_parent) == (0.25, 8, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "65536"], "proxy: port: expected a whole number of at least 0 and below 65536, got 65536"),
        (["--replica", "nonsense"], "proxy: replicas: expected base URLs such as http://127.0.0.1:8000"),
        (["--host", "0.0.0.0"], "proxy: incoming_token_env: needed when the proxy listens beyond this machine"),
        (["--stats-file", "gone/stats.json"], "--stats-file gone/stats.json: there is no folder"),
        (["--set", "routing.spill_threshold=3"], "--set routing.spill_threshold=3: changes a recipe"),
    ],
)
def test_a_proxy_that_cannot_serve_says_why(arguments: list[str], words: str) -> None:
    assert words in one_error(rlkit_("proxy", "--replica", "http://a:1", *arguments))


def test_the_proxy_beyond_this_machine_and_with_receivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[Any] = []

    async def run_until_stopped(config: Any) -> None:
        served.append(config)

    monkeypatch.setattr("rlkit.serving.proxy.run_until_stopped", run_until_stopped)
    options = ["--host", "0.0.0.0", "--incoming-token-env", "MINE", "--adapter-root", str(tmp_path)]
    options += ["--receiver", "http://a:2", "--receiver-token-env", "THEIRS"]
    assert rlkit_("proxy", "--replica", "http://a:1", *options).exit_code == 0
    (config,) = served
    assert (config.host, config.incoming_token_env, config.adapter_root) == ("0.0.0.0", "MINE", tmp_path)
    assert (config.transport.kind, config.receivers, config.receiver_token_env) == ("push", ["http://a:2"], "THEIRS")


# predict and simulate

PUBLISHED = str(ROOT / "runs" / "published" / "r1-dp3-inflight384.yaml")


def test_a_prediction_in_lines_and_as_json(checkout: Path) -> None:
    result = rlkit_("predict", PUBLISHED, "--set", "train.steps=12", "--seeds", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(("Trainer-bound", "Generation-bound", "Balanced", "Undetermined"))
    assert any(line.split()[:1] == ["cost"] and "USD" in line for line in lines)
    answer = json.loads(rlkit_("predict", PUBLISHED, "--set", "train.steps=12", "--seeds", "1", "--json").stdout)
    assert answer["steps"] == 12
    assert answer["wall_clock_min"]["low"] == answer["wall_clock_min"]["mean"]


def test_what_cannot_be_predicted_is_told_in_one_line(checkout: Path) -> None:
    line = one_error(rlkit_("predict", PUBLISHED, "--set", "hardware.replica=abacus"))
    assert line.startswith("error: hardware.replica: 'abacus' has no data sheet here")


def test_runs_that_are_there_already_do_not_keep_a_recipe_from_being_predicted(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[Path | None] = []

    def facts(recipe: Recipe, folder: Path | None) -> preflight.MachineFacts:
        looked_at.append(folder)
        return preflight.MachineFacts(folder_problem=None if folder is None else inspect_folder(folder))

    monkeypatch.setattr(preflight, "gather_facts", facts)
    (checkout / "runs" / "out" / "r1-dp3-inflight384").mkdir(parents=True)
    (checkout / "runs" / "out" / "notes.txt").write_text("mine")
    assert rlkit_("predict", PUBLISHED, "--set", "train.steps=12", "--seeds", "1").exit_code == 0
    assert looked_at == [Path("runs/out/r1-dp3-inflight384-2")]


def test_the_comparison_in_a_table_and_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit.simulation import published

    def cell(figure: str, within: bool | None) -> published.Cell:
        statistic = "share of what was routed x in flight"
        return published.Cell(
            "r1-dp2-tb16k-nockpt",
            figure,
            statistic,
            10.0,
            12.0,
            11.0,
            0.5,
            0.0,
            "5%" if within is not None else None,
            within,
        )

    def compared(*withins: bool | None) -> published.Comparison:
        cells = [cell(f"figure-{number}", within) for number, within in enumerate(withins)]
        return published.Comparison(
            cells, [published.VerdictCell("r1", "trainer-bound", ["trainer"], None, True)], 9.0, 4.0
        )

    monkeypatch.setattr(published, "compare", lambda seeds, on_done: compared(True, None))
    good = rlkit_("simulate", "--published")
    assert good.exit_code == 0
    assert "0 of 2 judged figures are out of tolerance." in good.stdout
    # Nobody's terminal: the whole row is there, the last column too.
    assert any(
        re.fullmatch(r" r1-dp2-tb16k-nockpt  figure-0  share .* yes: 5% *", line) for line in good.stdout.splitlines()
    )
    monkeypatch.setattr(published, "compare", lambda seeds, on_done: compared(True, False))
    bad = rlkit_("simulate", "--published", "--json")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["misses"] == ["r1-dp2-tb16k-nockpt figure-1"]
    assert "--published" in one_error(rlkit_("simulate"))


# doctor, and the program itself


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert rlkit_("--version").stdout == f"rlkit {project['version']}\n"


def test_doctor_as_json_and_as_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit import doctor

    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Line("a", "ok", "[fine]"), doctor.Line("long", "note", "x")])
    assert rlkit_("doctor").stdout.splitlines() == ["ok   a     [fine]", "note long  x"]
    assert json.loads(rlkit_("doctor", "--json").stdout)[0] == {"name": "a", "state": "ok", "text": "[fine]"}
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Line("a", "fail", "x")])
    assert rlkit_("doctor").exit_code == 1


def test_help_and_check_import_nothing_heavy() -> None:
    """A second of start-up is what makes people stop asking."""
    code = (
        "import sys; from typer.testing import CliRunner; from rlkit.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        f"assert CliRunner().invoke(app, ['check', {LOCAL!r}]).exit_code in (0, 2)\n"
        "print(sorted({'torch', 'transformers', 'trl', 'vllm', 'pandas', 'plotly', 'papermill'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_every_command_has_a_help_page() -> None:
    for command in (
        "run",
        "check",
        "predict",
        "calibrate",
        "plan",
        "simulate",
        "diagnose",
        "report",
        "runs",
        "proxy",
        "doctor",
    ):
        assert rlkit_(command, "--help").exit_code == 0
