"""A run's report in a real browser: offline, light and dark, by keyboard, for people who cannot see it, on paper."""

from __future__ import annotations

import re
import subprocess
import unicodedata
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from browser import Theme, Watched, chromium, open_browser, open_offline, reached_by_tab
from isolation import isolate
from playwright.sync_api import Browser
from pypdf import PdfReader
from run_folders import run_folder

from rlkit.report import report_run

pytestmark = pytest.mark.slow
THEMES: tuple[Theme, ...] = ("light", "dark")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    chromium()
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("report")
        isolate(folder / "trackio", monkeypatch)
        yield report_run(run_folder(folder / "measured"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


def drawn(browser: Browser, report: Path, theme: Theme, width: int = 1100) -> Watched:
    watched = open_offline(browser, report, theme, width)
    figures = watched.page.locator(".rlkit-figure .plot")
    watched.page.wait_for_function(
        "[...document.querySelectorAll('.rlkit-figure .plot')].every(one => one.querySelector('svg.main-svg'))"
    )
    assert figures.count() == 9
    return watched


@pytest.mark.parametrize("theme", THEMES)
def test_every_figure_is_drawn_offline_without_an_error_or_a_request(
    browser: Browser, report: Path, theme: Theme
) -> None:
    watched = drawn(browser, report, theme)
    assert watched.errors == []
    assert watched.requests == []
    heights = watched.page.eval_on_selector_all(
        ".rlkit-figure .plot svg.main-svg", "all => all.map(one => one.getBoundingClientRect().height)"
    )
    assert min(heights) > 80
    paper = watched.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[theme]


@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_nothing_wrong(browser: Browser, report: Path, theme: Theme) -> None:
    watched = drawn(browser, report, theme)
    watched.page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    assert watched.violations() == []


def test_the_keyboard_reaches_what_can_be_opened_and_scrolled(browser: Browser, report: Path) -> None:
    page = drawn(browser, report, "light").page
    reached = reached_by_tab(page)
    assert any(name.startswith("summary") for name in reached), reached
    page.locator("summary").first.focus()
    assert page.locator("details[open]").count() == 0
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 1
    assert any(name.lower().startswith("button zoom in") for name in reached), reached
    assert not any("share" in name.lower() for name in reached)


def test_a_narrow_screen_scrolls_down_only(browser: Browser, report: Path) -> None:
    page = drawn(browser, report, "light", width=390).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_printed_page_has_every_figure(report: Path, tmp_path: Path) -> None:
    pdf = tmp_path / "report.pdf"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--no-pdf-header-footer", "--virtual-time-budget=30000", f"--print-to-pdf={pdf}"]
    subprocess.run([chromium(), *options, report.as_uri()], check=True, capture_output=True, timeout=300)
    pages = PdfReader(pdf).pages
    words = " ".join(" ".join(page.extract_text().split()) for page in pages)
    text = unicodedata.normalize("NFKC", words)  # fonts set ffi and fl as one letter
    html = report.read_text(encoding="utf-8")
    titles = [title for title in re.findall(r"<h3>(.*?)</h3>", html) if title]
    assert len(titles) == 9
    for title in titles:
        assert unescape(title) in text
    # Each figure's own axis and legend: the drawing is there, not its caption alone.
    assert text.count("Optimizer step") == 8
    for drawn in ("queue_maxsize 256", "max_inflight_tasks 64", "mean of the last 5 steps", "affinity"):
        assert drawn in text
    assert len(pages) <= 15
