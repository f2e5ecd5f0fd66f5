"""The same checks run against trackio's folder and against a trackio server; what is written is written by trackio."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.errors import BadInput, RlkitError
from rlkit.recipe import Recipe, load_recipe
from rlkit.tracking import LoggedRow, list_runs, load_frame, load_run, save_frame, tidy_frame, write_run
from rlkit.trackio_source import open_source

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
ROOT = Path(__file__).parents[1]

# One more row for the first run, its JSON as given: what trackio would never write itself.
INSERT_RAW = (
    "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics)"
    " SELECT run_id, timestamp, run_name, 9, ? FROM metrics LIMIT 1"
)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A real trackio server. It follows the folder that `clean_environment` gives each test."""
    import trackio

    app, url, _, _ = trackio.show(open_browser=False, block_thread=False)
    yield url
    app.close()


@pytest.fixture(params=["folder", "server"])
def source(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "folder" else str(request.getfixturevalue("server"))


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(ROOT / "runs" / "published" / "r1-dp2.yaml")


def times(count: int, start: datetime = START) -> list[datetime]:
    return [start + timedelta(seconds=i) for i in range(count)]


def store(metrics: list[dict[str, Any]], project: str = "p", run: str = "r", run_id: str = "id", **more: Any) -> None:
    """Rows under their stored names, as trackio gets them."""
    import trackio  # noqa: F401  (completes the import of trackio.sqlite_storage)
    from trackio.sqlite_storage import SQLiteStorage

    more.setdefault("timestamps", [t.isoformat() for t in times(len(metrics))])
    SQLiteStorage.bulk_log(project, run, metrics, run_id=run_id, **more)


def steps_of(count: int, first: int = 1, loss: float = 1.0) -> list[dict[str, float]]:
    return [
        {"global_step": first + i, "loss": loss, "reward": 0.5, "perf/fwd_bwd_s": 1.5, "perf/step_s": 2.0}
        for i in range(count)
    ]


def test_a_run_comes_back_as_a_tidy_frame(source: str | None, recipe: Recipe) -> None:
    config = {
        "recipe": recipe.to_dict(),
        "versions": {"trl": "1.16.0"},
        "limits": {"queue_maxsize": 512, "x": math.inf},
    }
    rows = [{**row, "perf/weight_sync_s": 8.5} if row["global_step"] == 2 else row for row in steps_of(3)]
    run_id = write_run("my.chase", "r1-dp2", rows, times(3), config)

    run = load_run("my.chase", source=source)

    assert (run.project, run.name, run.run_id) == ("my.chase", "r1-dp2", run_id)
    assert list(run.frame.index) == [1, 2, 3]
    assert run.frame.index.name == "global_step"
    assert run.frame.index.dtype == "int64"
    assert set(run.frame.columns) == {
        "loss", "reward", "perf/fwd_bwd_s", "perf/step_s", "perf/weight_sync_s", "timestamp"
    }  # fmt: skip
    assert run.frame["perf/weight_sync_s"].dropna().to_dict() == {2: 8.5}
    assert all(run.frame[c].dtype == "float64" for c in run.frame.columns if c != "timestamp")
    assert list(run.frame["timestamp"]) == [pd.Timestamp(t) for t in times(3)]
    assert run.recipe == recipe
    assert run.config["versions"] == {"trl": "1.16.0"}
    assert run.config["limits"]["queue_maxsize"] == 512


def test_what_trackio_itself_logs_is_read(source: str | None) -> None:
    """trackio.init, log and finish as transformers' callback uses them, text and histograms included."""
    import trackio

    trackio.init(project="live", name="run", config={"recipe": {"name": "not a recipe"}}, embed=False)
    for step in (1, 2):
        trackio.log({"train/loss": 1 / step, "train/note": "words", "train/global_step": step})
    trackio.log({"train/hist": trackio.Histogram([1, 2, 3]), "train/global_step": 2})
    trackio.log({"eval/reward": 0.5, "train/global_step": 2})
    trackio.log({"train/epoch": 1.0, "train/global_step": 2})
    trackio.finish()

    run = load_run("live", "run", source=source)

    assert run.frame.drop(columns="timestamp").to_dict("index") == {
        1: {"loss": 1.0, "eval/reward": pytest.approx(math.nan, nan_ok=True)},
        2: {"loss": 0.5, "eval/reward": 0.5},
    }
    assert run.recipe is None


def test_reading_agrees_with_trackios_own_call(source: str | None) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    write_run("p", "r", [{"global_step": i, "a": i / 7, **({"b": 1.0} if i % 4 == 0 else {})} for i in range(1, 30)])
    own = pd.DataFrame(SQLiteStorage.get_logs("p", "r", max_points=None)).set_index("train/global_step")

    frame = load_run("p", source=source).frame

    pd.testing.assert_frame_equal(
        frame[["a", "b"]], own[["train/a", "train/b"]].set_axis(["a", "b"], axis=1), check_names=False
    )


def test_more_rows_than_a_server_returns_at_once(source: str | None) -> None:
    """trackio's own server call would thin these out to 3000, and drop the one rare metric."""
    rows = [{"train/global_step": i, "train/a": 1.0} for i in range(1, 12_001)]
    rows[6543]["train/rare"] = 7.0
    store(rows)

    frame = load_run("p", source=source).frame

    assert len(frame) == 12_000
    assert frame["rare"].dropna().to_dict() == {6544: 7.0}


def test_nan_and_infinities_are_numbers_again(source: str | None) -> None:
    store([{"train/global_step": 1, "train/a": math.nan, "train/b": -math.inf, "train/c": math.inf, "train/d": 1.0}])

    row = load_run("p", source=source).frame.drop(columns="timestamp").loc[1].to_dict()

    assert math.isnan(row.pop("a"))
    assert row == {"b": -math.inf, "c": math.inf, "d": 1.0}


def test_after_a_resume_the_newest_attempt_of_a_step_counts(source: str | None) -> None:
    first = [{**row, "sample/dropped_stale_total": 9.0} for row in steps_of(6, loss=1.0)]
    run_id = write_run("p", "r", first, times(6))
    second = steps_of(3, first=5, loss=2.0)
    del second[0]["perf/step_s"]  # a trainer that has just started has no step before it to measure from
    assert write_run("p", "r", second, times(3, START + timedelta(hours=1)), run_id=run_id) == run_id

    frame = load_run("p", source=source).frame

    assert frame["loss"].to_dict() == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 2.0, 7: 2.0}
    assert list(frame["perf/step_s"].dropna().index) == [1, 2, 3, 4, 6, 7]
    assert list(frame["sample/dropped_stale_total"].dropna().index) == [1, 2, 3, 4]
    assert frame.loc[5, "timestamp"] == START + timedelta(hours=1)
    assert list_runs("p", source).loc[0, "steps"] == 7


def test_rows_may_come_out_of_order(source: str | None) -> None:
    order = [3, 1, 4, 2]
    store([{"train/global_step": i, "train/a": float(i)} for i in order])

    frame = load_run("p", source=source).frame

    assert frame["a"].to_dict() == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


def test_the_last_row_of_a_run_does_not_spoil_its_last_step(source: str | None) -> None:
    store(
        [
            {"train/global_step": 7, "train/loss": 0.5, "train/epoch": 1.0},
            {"train/global_step": 7, "train/train_runtime": 79.1, "train/train_loss": 0.7, "train/epoch": 1.0},
            {"train/global_step": 7, "train/epoch": 1.0},
        ]
    )

    frame = load_run("p", source=source).frame

    assert frame.loc[7, "loss"] == 0.5
    assert frame.loc[7, "train_runtime"] == 79.1
    assert frame.loc[7, "timestamp"] == START
    assert len(frame) == 1


def test_rows_without_metrics_are_dropped(source: str | None) -> None:
    trace = {"_type": "trackio.trace", "messages": [], "metadata": {}}
    store([{"train/global_step": 1, "train/a": 1.0}, {"completions": trace}, {}, {"train/global_step": 5}])

    assert list(load_run("p", source=source).frame.index) == [1]


def test_without_a_global_step_the_call_counter_is_the_index(source: str | None) -> None:
    store([{"a": 1.0}, {"a": 2.0}])

    assert load_run("p", source=source).frame["a"].to_dict() == {0: 1.0, 1: 2.0}
    assert list_runs("p", source).loc[0, "steps"] == 2


def test_a_row_without_a_step_belongs_to_the_step_it_was_logged_in(source: str | None) -> None:
    store([{"before": 1.0}, {"train/global_step": 1, "train/a": 1.0}, {"proxy/load": 3.0}])

    frame = load_run("p", source=source).frame

    assert list(frame.index) == [0, 1]
    assert frame.loc[1, "proxy/load"] == 3.0


def test_runs_of_one_name_are_told_apart_by_id(source: str | None) -> None:
    old = write_run("p", "same", steps_of(2, loss=1.0), times(2))
    new = write_run("p", "same", steps_of(3, loss=2.0), times(3, START + timedelta(days=1)))
    other = write_run("p", "it's other", steps_of(1, loss=3.0), times(1, START + timedelta(hours=1)))

    runs = list_runs("p", source)

    assert list(runs.columns) == ["name", "run_id", "created", "steps", "last_update"]
    assert list(runs["run_id"]) == [old, other, new]
    assert list(runs["steps"]) == [2, 1, 3]
    assert runs.loc[0, "created"] == START
    assert runs.loc[0, "last_update"] == START + timedelta(seconds=1)
    assert load_run("p", source=source).run_id == new
    assert load_run("p", "same", source=source).run_id == new
    assert load_run("p", run_id=old, source=source).frame["loss"].unique().tolist() == [1.0]
    assert load_run("p", "it's other", source=source).run_id == other


def test_a_project_that_does_not_exist(source: str | None) -> None:
    write_run("first", "r", steps_of(1))
    write_run("second", "r", steps_of(1))

    with pytest.raises(BadInput, match=r"'third' does not exist in .*; there are: first, second$"):
        load_run("third", source=source)


def test_no_project_at_all(source: str | None) -> None:
    with pytest.raises(BadInput, match=r"'p' does not exist in .*; there are none$"):
        list_runs("p", source)


def test_a_run_that_does_not_exist(source: str | None) -> None:
    run_id = write_run("p", "r", steps_of(1))

    with pytest.raises(BadInput, match=r"'p' has no run with the name 'x'; there are: r$"):
        load_run("p", "x", source=source)
    with pytest.raises(BadInput, match=rf"no run with the id 'x'; there are: r \({run_id}\)$"):
        load_run("p", run_id="x", source=source)


def test_a_project_without_runs(source: str | None) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    SQLiteStorage.init_db("p")

    with pytest.raises(BadInput, match="has no runs yet"):
        load_run("p", source=source)


def test_an_empty_run(source: str | None) -> None:
    store([{"train/global_step": 1, "train/epoch": 0.1}, {"train/note": "words"}])

    with pytest.raises(BadInput, match="run 'r' of trackio project 'p' has no metrics yet: 2 rows, none with a number"):
        load_run("p", source=source)


def test_a_run_with_only_nan(source: str | None) -> None:
    store([{"train/global_step": i, "train/a": math.nan, "train/epoch": 1.0} for i in range(3)])

    with pytest.raises(BadInput, match="holds only NaN: none of its 1 metrics"):
        load_run("p", source=source)


def test_reading_leaves_the_folder_alone(tmp_path: Path) -> None:
    write_run("p", "r", steps_of(3))
    folder = tmp_path / "trackio"
    held = sqlite3.connect(folder / "p.db")  # an open connection keeps the WAL from being folded in
    held.execute(INSERT_RAW, ('{"train/global_step": 9, "train/loss": 5}',))
    held.commit()
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    assert "p.db-wal" in before

    frame = load_run("p").frame

    assert frame.loc[9, "loss"] == 5.0
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    held.close()


def test_a_locked_database_is_read(tmp_path: Path) -> None:
    write_run("p", "r", steps_of(3))
    writer = sqlite3.connect(tmp_path / "trackio" / "p.db")
    writer.execute("PRAGMA locking_mode = EXCLUSIVE")
    writer.execute("BEGIN EXCLUSIVE")

    assert len(load_run("p").frame) == 3
    writer.close()


def test_a_database_in_rollback_mode_is_read_as_of_its_last_commit(tmp_path: Path) -> None:
    write_run("p", "r", steps_of(3))
    writer = sqlite3.connect(tmp_path / "trackio" / "p.db")
    writer.execute("PRAGMA journal_mode = DELETE")
    writer.execute("PRAGMA cache_size = 1")  # spills the open transaction into the database file
    writer.execute("BEGIN IMMEDIATE")
    writer.executemany("INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES ('x', 't', 'x', 0, ?)",
                       [("y" * 3000,)] * 200)  # fmt: skip
    assert (tmp_path / "trackio" / "p.db-journal").exists()

    assert list(list_runs("p")["name"]) == ["r"]
    writer.close()


def test_a_copy_that_a_writer_came_between_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = write_run("p", "r", steps_of(3))
    copies: list[str] = []
    real_copy = shutil.copyfile

    def copy_and_write(origin: str, target: Path) -> None:
        real_copy(origin, target)
        if not copies:
            write_run("p", "r", steps_of(1, first=4), run_id=run_id)
        copies.append(origin)

    monkeypatch.setattr(shutil, "copyfile", copy_and_write)

    assert list(load_run("p").frame.index) == [1, 2, 3, 4]
    assert copies.count(str(tmp_path / "trackio" / "p.db")) == 2


def test_runs_are_readable_while_they_are_written() -> None:
    run_id = write_run("p", "r", steps_of(1))
    stop = threading.Event()

    def write() -> None:
        step = 1
        while not stop.is_set():
            step += 1
            write_run("p", "r", steps_of(1, first=step), run_id=run_id)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        lengths = [len(load_run("p").frame) for _ in range(20)]
    finally:
        stop.set()
        writer.join()

    assert lengths == sorted(lengths)
    assert list(load_run("p").frame.index) == list(range(1, len(load_run("p").frame) + 1))


def test_rows_in_trackios_inbox_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What trackio does on a network filesystem: fragments first, a database only once the dashboard ran."""
    import trackio
    from trackio.fragments import import_inbox_dir

    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    trackio.init(project="net", name="run", config={"k": 1}, embed=False)
    for step in (1, 2):
        trackio.log({"train/loss": math.nan if step == 1 else 2.0, "train/global_step": step})
    trackio.finish()
    assert not (tmp_path / "trackio" / "net.db").exists()

    from_inbox = load_run("net")
    assert open_source().projects() == ["net"]
    fragments = {f: f.read_bytes() for f in (tmp_path / "trackio").glob("inbox/*/*.jsonl")}
    import_inbox_dir()
    imported = load_run("net")
    for fragment, content in fragments.items():  # as if the dashboard had died between importing and deleting
        fragment.parent.mkdir(exist_ok=True)
        fragment.write_bytes(content)

    for other in (imported, load_run("net")):
        pd.testing.assert_frame_equal(other.frame, from_inbox.frame)
        assert other.config == from_inbox.config
        assert other.run_id == from_inbox.run_id
    assert from_inbox.config["k"] == 1
    assert from_inbox.frame["loss"].dropna().to_dict() == {2: 2.0}


@pytest.mark.parametrize("content", [b"not a database" * 100, b""])
def test_a_file_that_is_no_trackio_database(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trackio").mkdir()
    (tmp_path / "trackio" / "p.db").write_bytes(content)

    with pytest.raises(BadInput, match=r"p\.db: not a trackio database this version reads"):
        load_run("p")


def test_the_source_may_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run("p", "r", steps_of(2))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "elsewhere"))

    assert len(load_run("p", source=tmp_path / "trackio").frame) == 2
    assert len(load_run("p", source=str(tmp_path / "trackio")).frame) == 2
    with pytest.raises(BadInput, match="elsewhere"):
        load_run("p")


def test_a_source_that_is_nothing() -> None:
    with pytest.raises(BadInput, match=r"source 'a/b/c': not a folder, not an http"):
        load_run("p", source="a/b/c")


def test_a_server_that_does_not_answer_is_one_line_without_its_token() -> None:
    with pytest.raises(BadInput) as error:
        load_run("p", source="http://127.0.0.1:9/?write_token=secret")

    assert str(error.value).startswith("source http://127.0.0.1:9/: no trackio server answers there: ")
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_space_is_asked_for_by_its_name() -> None:
    with pytest.raises(BadInput, match=r"source user/space: no trackio server answers there: .*offline"):
        load_run("p", source="user/space")


def test_writing_after_trackio_dir_changed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_run("p", "r", steps_of(1))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "new"))

    with pytest.raises(RlkitError, match=r"TRACKIO_DIR is .*new, but trackio was imported when it was .*trackio"):
        write_run("p", "r", steps_of(1))


def test_a_saved_frame_is_the_run(tmp_path: Path, recipe: Recipe) -> None:
    rows = [
        {"global_step": i, "a": math.nan if i == 2 else i, **({"b": math.inf} if i == 3 else {})} for i in (1, 2, 3)
    ]
    write_run("p", "r", rows, times(3), {"recipe": recipe.to_dict(), "odd": math.nan})
    run = load_run("p")
    path = tmp_path / "metrics.parquet"

    save_frame(run, path)
    save_frame(run, path)
    again = load_frame(path)

    pd.testing.assert_frame_equal(again.frame, run.frame)
    assert again.recipe == recipe
    assert (again.project, again.name, again.run_id) == (run.project, run.name, run.run_id)
    assert again.config["recipe"] == run.config["recipe"]
    assert [f.name for f in tmp_path.glob("*.parquet*")] == ["metrics.parquet"]


def break_missing(path: Path) -> None:
    assert not path.exists()


def break_text(path: Path) -> None:
    path.write_text("step,loss\n1,2\n")


def break_foreign(path: Path) -> None:
    pd.DataFrame({"a": [1]}).to_parquet(path)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (break_missing, "there are no saved metrics"),
        (break_text, "not a parquet file"),
        (break_foreign, "not one that"),
    ],
)
def test_a_file_that_is_no_saved_frame(prepare: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.parquet"
    prepare(path)

    with pytest.raises(BadInput, match=says) as error:
        load_frame(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()),
                   st.sampled_from(["NaN", "Infinity", "-Infinity"]))  # fmt: skip
NAMES = st.one_of(
    st.sampled_from(["train/global_step", "train/epoch", "train/loss", "loss", "eval/reward", "timestamp"]), st.text()
)


@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=5), st.dictionaries(NAMES, VALUES, max_size=6))))
def test_any_rows_make_a_tidy_frame(rows: list[tuple[int, str, dict[str, Any]]]) -> None:
    frame = tidy_frame([LoggedRow(step, timestamp, metrics) for step, timestamp, metrics in rows])

    assert frame.index.dtype == "int64"
    assert frame.index.is_monotonic_increasing
    assert frame.index.is_unique
    assert all(dtype == "float64" for name, dtype in frame.dtypes.items() if name != "timestamp")
    assert isinstance(frame["timestamp"].dtype, pd.DatetimeTZDtype)
    assert frame["timestamp"].notna().all()


@given(st.permutations(range(1, 8)))
def test_the_order_of_arrival_does_not_matter(order: list[int]) -> None:
    rows = [LoggedRow(i, (START + timedelta(seconds=i)).isoformat(), {"train/global_step": i, "a": i}) for i in order]

    assert tidy_frame(rows)["a"].to_dict() == {i: float(i) for i in range(1, 8)}


def test_broken_metrics_in_a_row_are_skipped(tmp_path: Path) -> None:
    write_run("p", "r", steps_of(2))
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        for text in ("{", "[1]", json.dumps({"train/global_step": 4, "train/loss": 10**400})):
            database.execute(INSERT_RAW, (text,))
    database.close()

    assert list(load_run("p").frame.index) == [1, 2]
    assert len(list_runs("p")) == 1
