"""A run started beside the process that asks for it: what a notebook does, whose kernel must stay free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder

# A Jupyter kernel asks its children for colours; in a log they are escape sequences, and a progress bar redraws itself.
COLOURS = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")


def start_in_background(
    recipe: Recipe, folder: RunFolder, report: bool = True, is_agreed: bool = False
) -> subprocess.Popen[bytes]:
    """`rlkit run` of `recipe` in `folder` as a child; what it says goes to `folder.engine_log`. Raises BadInput.

    Rented hardware only when its price is agreed to (`is_agreed`): the child asks nobody. The child ends as on Ctrl-C
    when it gets SIGTERM, which a Jupyter kernel sends its children when it is shut down; an interrupted cell does not
    end it.
    """
    if recipe.engine == "hf" and not is_agreed:
        raise BadInput("engine: hf: rented hardware costs money, and nobody has agreed to its price")
    plan = folder.path / ".plan.yaml"
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        plan.write_text(recipe.to_yaml(), encoding="utf-8")
        with folder.engine_log.open("wb") as log:
            command = [sys.executable, "-m", "rlkit", "run", str(plan), "--folder", str(folder.path), "--yes"]
            command += [] if report else ["--no-report"]
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name not in COLOURS},
                preexec_fn=_ignore_interrupts,
            )
    except OSError as error:
        raise BadInput(f"{folder.path}: cannot start a run here: {error.strerror}") from None
    # Whoever ended and was not waited for still counts as alive.
    threading.Thread(target=child.wait, name="rlkit-run", daemon=True).start()
    return child


def _ignore_interrupts() -> None:
    # Jupyter interrupts a cell by a signal to the whole process group of its kernel, of which the child stays a member.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
