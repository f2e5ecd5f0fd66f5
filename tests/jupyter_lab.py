"""A JupyterLab of its own on this machine, with the committed notebooks in it, and what a test does there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import PATIENCE_MS, Theme, Watched
from playwright.sync_api import Browser, Locator

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 90
RUN_ALL_TIMEOUT_MS = 180_000


class Lab:
    """A running server. `folder` holds copies of `notebooks/` and of the recipes, `address` opens it."""

    def __init__(self, folder: Path, url: str, token: str) -> None:
        self.folder, self._url, self._token = folder, url, token

    def open(self, browser: Browser, notebook: str, theme: Theme = "light") -> LabPage:
        """A notebook in a window of its own."""
        context = browser.new_context(viewport={"width": 1500, "height": 1000}, color_scheme=theme)
        watched = Watched(context)
        # A workspace of its own: the default one opens again what the window before had open.
        workspace = notebook.replace("/", "-").replace(".", "-")
        watched.page.goto(f"{self._url}lab/workspaces/{workspace}?token={self._token}")
        watched.page.wait_for_function("window.jupyterapp && window.jupyterapp.commands.hasCommand('docmanager:open')")
        watched.page.evaluate(
            "async path => { await window.jupyterapp.restored;"
            " await window.jupyterapp.commands.execute('docmanager:open', {path}) }",
            notebook,
        )
        page = LabPage(watched)
        page.wait_for_kernel()
        return page


class LabPage:
    """One notebook in JupyterLab."""

    def __init__(self, watched: Watched) -> None:
        self.watched, self.page = watched, watched.page

    def wait_for_kernel(self) -> None:
        """Wait until cells can be run."""
        self.page.wait_for_function(_READY, timeout=PATIENCE_MS)

    def run_all(self) -> None:
        """Run all cells, as the Run menu does, and wait for the last; fails when one raised."""
        self.page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        self.page.wait_for_function(_DONE, timeout=RUN_ALL_TIMEOUT_MS)
        assert self.page.locator("[data-mime-type='application/vnd.jupyter.error']").all_inner_texts() == []

    def output(self, cell: int) -> Locator:
        """What the cell of that number (0 is the first) shows."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-OutputArea-output").first

    def errors(self) -> list[str]:
        """What the console said, without JupyterLab's own look-ups of what is not installed."""
        return [error for error in self.watched.errors if "404" not in error]

    def outside_requests(self) -> list[str]:
        """Addresses beyond this machine."""
        return [url for url in self.watched.requests if "//127.0.0.1:" not in url and "//localhost:" not in url]


@contextmanager
def open_lab(folder: Path) -> Iterator[Lab]:
    """Start JupyterLab in `folder`, and end it and its kernels by process id."""
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    recipes = shutil.ignore_patterns("out")
    shutil.copytree(ROOT / "runs", folder / "runs", ignore=recipes)
    own = {f"JUPYTER_{name}_DIR": str(folder / ".jupyter" / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(folder / ".ipython"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / ".jupyter" / "spaces")}
    own |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={folder}"]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with (folder / "lab.log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, cwd=folder)
    try:
        about = _announced(Path(own["JUPYTER_RUNTIME_DIR"]) / f"jpserver-{server.pid}.json", server, folder / "lab.log")
        yield Lab(folder, about["url"], about["token"])
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _announced(file: Path, server: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        if file.exists() and file.read_text().endswith("}"):
            return dict(json.loads(file.read_text()))
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


_READY = """() => {
  const session = window.jupyterapp.shell.currentWidget?.sessionContext?.session;
  return session?.kernel?.status === "idle" && document.querySelectorAll(".jp-Notebook .jp-Cell").length > 0;
}"""
_DONE = """() => {
  const cells = window.jupyterapp.shell.currentWidget.content.widgets.filter((one) => one.model.type === "code");
  const busy = cells.filter((one) => one.model.sharedModel.getSource().trim() && one.model.executionCount === null);
  return busy.length === 0 || document.querySelector("[data-mime-type='application/vnd.jupyter.error']") !== null;
}"""
