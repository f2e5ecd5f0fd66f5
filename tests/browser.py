"""A headless Chromium from the machine, watched: what it says on its console, and what it asks of the network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Request, Route, sync_playwright

Theme = Literal["light", "dark"]
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
# Two cores that others use, too: what takes a second there alone may take many here.
PATIENCE_MS = 60_000


class Watched:
    """A page, the errors it reported and the addresses it asked for beyond this machine's files."""

    def __init__(self, context: BrowserContext) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("request", self._see)

    def violations(self, within: str = "html", rules: tuple[str, ...] = ()) -> list[str]:
        """What axe-core finds wrong inside a selector, a line each; `rules` are all it looks for (none: everything)."""
        options: dict[str, Any] = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
        found = Axe().run(self.page, context=within, options=options).response["violations"]
        return [
            f"{one['id']}: {node['html'][:200]} {' '.join(node['failureSummary'].split())}"
            for one in found
            for node in one["nodes"]
        ]

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _see(self, request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.requests.append(request.url)


def chromium() -> str:
    """The browser's path; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if found is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    return found


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser of its own, closed at the end."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


def open_offline(browser: Browser, file: Path, theme: Theme, width: int = 1100) -> Watched:
    """A file in a context of its own, with the network off."""
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900}, offline=True)
    context.route("**/*", _only_files)
    watched = Watched(context)
    watched.page.goto(file.as_uri())
    return watched


def reached_by_tab(page: Page, most: int = 400) -> list[str]:
    """What the Tab key comes to, from the top until it leaves the page: tag and name of each."""
    page.evaluate("document.activeElement.blur()")
    seen: list[str] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        name = page.evaluate(_FOCUSED)
        if not name:
            break
        seen.append(name)
    return seen


def _only_files(route: Route) -> None:
    if route.request.url.startswith("file:"):
        route.continue_()
    else:
        route.abort()


_FOCUSED = """() => {
  const one = document.activeElement;
  if (!one || one === document.body || one.dataset.reached) return "";
  one.dataset.reached = "yes";
  return `${one.tagName.toLowerCase()} ${one.getAttribute("aria-label") || one.innerText || one.title || one.id}`;
}"""
