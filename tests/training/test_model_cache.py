"""A built model is kept, and built once."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkit.training import model_cache, toy_model, toy_task
from rlkit.training.model_cache import cached_model, ensure_built

PATIENCE_S = 20.0


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return cached_model(tmp_path / "cache", 0)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The builds that took place; each leaves an empty folder."""
    made: list[Path] = []

    def build(out: Path, seed: int, on_progress: Callable[[int, int, float], None], *, untrained: bool) -> None:
        made.append(out)
        on_progress(200, 1800, 1.5)
        out.mkdir()

    monkeypatch.setattr(toy_model, "build", build)
    return made


def test_a_model_is_built_once_and_kept(out: Path, builds: list[Path]) -> None:
    lines: list[str] = []
    for _ in range(2):
        ensure_built(out, 0, lines.append)
    assert builds == [out]
    assert lines == ["pretraining 200/1800 loss 1.500"]


def test_each_seed_has_a_model_of_its_own(tmp_path: Path) -> None:
    assert cached_model(tmp_path, 0) != cached_model(tmp_path, 1)
    assert cached_model(tmp_path, 0) != cached_model(tmp_path, 0, toy_task.UNTRAINED_NAME)


def test_the_second_waits_says_so_and_builds_nothing(out: Path, builds: list[Path]) -> None:
    told = threading.Event()
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        told.set()

    second = threading.Thread(target=ensure_built, args=(out, 0, tell))
    with model_cache._alone(out, lambda: pytest.fail("nobody else builds")):
        second.start()
        assert told.wait(PATIENCE_S)
        out.mkdir()  # what the first was about
    second.join(PATIENCE_S)
    assert not second.is_alive()
    assert lines == ["another run is building this model: waiting for it"]
    assert builds == []


def test_a_builder_that_is_killed_leaves_no_lock(out: Path, builds: list[Path]) -> None:
    code = f"""
        import pathlib, time
        from rlkit.training import model_cache, toy_model
        toy_model.build = lambda *_, **__: (print("building", flush=True), time.sleep(600))
        model_cache.ensure_built(pathlib.Path({str(out)!r}), 0, print)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        builder.kill()
    lines: list[str] = []
    ensure_built(out, 0, lines.append)
    assert builds == [out]
    assert lines == ["pretraining 200/1800 loss 1.500"]
