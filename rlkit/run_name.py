"""What a command line calls a run: its folder, its bare name under runs/out, or what trackio knows it by.

One rule for every command. A path that holds a run is that run. A word is a run's name under runs/out, but where a
command takes a trackio project as well: there a project of that name comes first, and means its newest run.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from rlkit.errors import BadInput
from rlkit.run_folder import RUNS, RunFolder

# What an argument that calls a run says in help.
RUN = "A run's folder, or its name under runs/out."
RECIPE = "A recipe (YAML), or a run: its folder, or its name under runs/out."
RUN_OR_PROJECT = (
    "A run's folder, PROJECT/RUN, a trackio project (its newest run), or a run's name under runs/out; of a project and"
    " a run of one name the project is meant."
)

# From here runs/out says which folder is meant; from elsewhere it may be another than the one in mind.
CHECKOUT = Path(__file__).parents[1]

# Of a word that is meant as a file, not as a run's name.
FILE_SUFFIXES = (".yaml", ".yml", ".ipynb")

# Names that are near enough to one that is not there; more are no help in one line.
LISTED_NAMES = 3


@dataclass(frozen=True)
class Named:
    """A run in its folder, or else in trackio: `run` is empty for the newest of the project."""

    folder: RunFolder | None
    project: str = ""
    run: str = ""
    passed_over: RunFolder | None = None  # a run under runs/out whose name is the project's, too

    def note(self, read: str) -> str | None:
        """What to say of the run that was passed over, once it is known that the run called `read` was taken."""
        other = self.passed_over
        if other is None or other.name == read:
            return None
        return f"{self.project}: the newest run of the trackio project, {read}; for the run of that name: {other.path}"


def find_folder(wanted: str | Path, under: Path = RUNS) -> RunFolder | None:
    """The folder of the run at a path, else of the run of that name `under` the folder of runs; None: there is none."""
    return next((RunFolder(path) for path in (Path(wanted), under / wanted) if _holds_run(path)), None)


def folder_of(wanted: str | Path, under: Path = RUNS) -> RunFolder:
    """The same. Raises BadInput that names both ways to call a run."""
    found = find_folder(wanted, under)
    if found is None:
        raise BadInput(f"{wanted}: {no_run(wanted, under)}; give a run's folder, or the name of a run under {under}")
    return found


def recipe_of(wanted: Path) -> tuple[Path, RunFolder | None]:
    """A recipe's file as it is given, else that of the run that is meant, with its folder.

    Raises BadInput for what is neither.
    """
    if wanted.exists() and not wanted.is_dir():  # also what a shell gives for `<(...)`
        return wanted, None
    found = find_folder(wanted)
    if found is not None:
        return found.recipe, found
    raise BadInput(
        f"{wanted}: {no_run(wanted, what='recipe')}; give a recipe (YAML), a run's folder, or the name of a run under"
        f" {RUNS}"
    )


def named(subject: str, run: str | None = None, source: str | None = None) -> Named:
    """What is meant where trackio projects are taken, too: a folder, PROJECT/RUN, a project, or a run's name.

    With a `run` (of the project) or a `source` (where trackio's runs are) only trackio is meant. Raises BadInput for
    what is none of these.
    """
    if _holds_run(Path(subject)):
        if run or source:
            raise BadInput(f"{subject}: is a run's folder, leave --run and --source out")
        return Named(RunFolder(Path(subject)))
    project, _, of_project = subject.strip("/").partition("/")
    is_path = "/" in of_project or subject.startswith(("/", ".", "~"))
    found = None if run or source else find_folder(subject)
    if not is_path and (run or source or _is_project(project)):
        return Named(None, project, run or of_project, found if not of_project else None)
    if found is not None:
        return Named(found)
    raise BadInput(
        f"{subject}: {no_run(subject)}; give a run's folder, the name of a run under {RUNS}, a trackio project"
        f"{_projects()}, or PROJECT/RUN"
    )


def run_name(wanted: str) -> str:
    """The name of a run that need not be on this machine: that of its folder, else what is given."""
    found = find_folder(wanted)
    return wanted if found is None else found.name


def no_run(wanted: str | Path, under: Path = RUNS, what: str = "run") -> str:
    """Why nothing was found by a path or a name, with the names that are near."""
    if Path(wanted).is_dir():
        return f"the folder holds no {what} (no {RunFolder(Path(wanted)).recipe.name})"
    there = [path.name for path in under.glob("*") if _holds_run(path)]
    near = difflib.get_close_matches(str(wanted), there, n=LISTED_NAMES)
    missing = f"no such {what}"
    if _is_name(wanted) and Path.cwd() != CHECKOUT:
        elsewhere = f"no run of that name under {under.absolute()}"
        missing = elsewhere if what == "run" else f"{missing}, and {elsewhere}"
    return missing + (f" (did you mean {' or '.join(near)}?)" if near else "")


def _is_name(wanted: str | Path) -> bool:
    return Path(wanted).name == str(wanted) and Path(wanted).suffix not in FILE_SUFFIXES


def _holds_run(path: Path) -> bool:
    return RunFolder(path).recipe.is_file()


def _is_project(name: str) -> bool:
    from rlkit.trackio_source import on_disk_name, open_source  # it imports huggingface_hub

    return on_disk_name(name) in open_source().projects()


def _projects() -> str:
    from rlkit.trackio_source import open_source

    names = open_source().projects()
    return f" (there are: {', '.join(names)})" if names else " (there are none)"
