"""Notebooks run headless, and the one self-contained HTML page each becomes.

Papermill runs the notebook; nbconvert renders it through our own template. The page needs no network: figures are kept
as JSON and drawn by a copy of plotly.js that travels gzipped in the page (2 MB instead of 5).
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from functools import cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import papermill
from jupyter_core.paths import jupyter_path
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from rlkit import machine
from rlkit.errors import BadInput, NotLogged, RlkitError, RunFailed
from rlkit.notebook_parameters import checked_parameters
from rlkit.past_run import open_past_run
from rlkit.report_data import report_data
from rlkit.results import read_run
from rlkit.run_folder import RunFolder

DIAGNOSE = Path(__file__).parents[1] / "notebooks" / "02_diagnose.ipynb"

# What a tag on a cell means in a report.
HEADLINE_TAG = "headline"  # its output comes first, wherever the cell stands in the notebook
NOTEBOOK_ONLY_TAG = "notebook-only"  # introductions that a reader of the result does not need

# The kernel shares our stderr; what it says there (no encryption on localhost, interrupted at its end) helps nobody.
_QUIET_KERNEL = "--IPKernelApp.log_level=CRITICAL"

# Seconds until a kernel answers, and between a cell's end and its last output: a second or less, and a hundred times
# that on cores that others use. A kernel that died is noticed at once.
KERNEL_START_S, OUTPUT_S = 300, 60

# What a cell raised comes back from the kernel as the name of its class and the message.
_OURS = {kind.__name__: kind for kind in (RlkitError, BadInput, NotLogged, RunFailed)}

_PLOTLY_MIME = "application/vnd.plotly.v1+json"
# No widgets, JavaScript or LaTeX: what they show needs a kernel or the network.
_MIME_ORDER = ["text/html", "text/markdown", "image/svg+xml", "image/png", "text/plain"]
_TEMPLATE = resources.files("rlkit") / "report_template"
# px: room for a legend of one row (plotly makes more), the height a title takes in `rlkit.chart`, plotly's own height.
_TOP_MARGIN, _TITLE_HEIGHT, _DEFAULT_HEIGHT = 34, 34, 450


class KernelDied(RunFailed):
    """The kernel of a notebook is gone before the notebook ended; it may have been short of memory."""


def report_run(folder: RunFolder, out: Path | None = None) -> Path:
    """The report of one run: notebooks/02_diagnose.ipynb for its folder, written to `out` (None: `folder.report`).

    Beside it, under the same name with the suffix .json, lies what the page says for machines (`rlkit.report_data`).
    Raises BadInput for a folder that is not there or holds no run, RunFailed when the notebook fails.
    """
    if not folder.path.is_dir():
        raise BadInput(f"{folder.path}: no such run folder; rlkit run creates one under runs/out/")
    read_run(folder)  # what is wrong with it is told as it is, and before a kernel starts
    target = folder.report if out is None else out
    if twin(target) == target:
        raise BadInput(f"{target}: --out names the page, whose twin for machines gets the suffix .json; name it .html")
    written = render_notebook(DIAGNOSE, {"folder": str(folder.path.resolve())}, target, title=folder.name)
    data = report_data(open_past_run(str(folder.path)))
    write_page(twin(written), json.dumps(data, indent=2, allow_nan=False) + "\n")
    return written


def twin(report: Path) -> Path:
    """Where the JSON of a report is.

    >>> twin(Path("runs/out/local/report.html")).as_posix()
    'runs/out/local/report.json'
    """
    return report.with_suffix(".json")


def render_notebook(notebook: Path, parameters: dict[str, Any], out: Path, title: str | None = None) -> Path:
    """Run a notebook with papermill and write it as one HTML page to `out`, which is returned.

    The notebook runs in its own folder, so that its relative paths are the ones it has in JupyterLab; `parameters` as
    `checked_parameters` takes them: files are named from the current folder, and types are kept. Raises BadInput for
    a notebook that cannot be read, a page that cannot be written, and a parameter not declared or declared with
    another type; what a cell raises of `rlkit.errors`, as it is; RunFailed in one line, with the cell, when it raises
    anything else, KernelDied when the kernel dies.
    """
    values = checked_parameters(notebook, parameters)
    if out.is_dir():
        raise BadInput(f"{out}: is a folder; name the HTML file to write")
    problem = machine.unwritable(out.parent)
    if problem is not None:  # said before a notebook runs for minutes
        raise BadInput(f"{out}: cannot write the page, {problem}; name another file with --out")
    page = render(execute_notebook(notebook, values), title or notebook.stem)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, page)
    return out


def write_page(out: Path, page: str) -> None:
    """Write a page to a file, whole or not at all."""
    unfinished = out.with_name(f".{out.name}.part")
    try:
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)


def render(executed: NotebookNode, title: str) -> str:
    """The page of an executed notebook, which is left as it is."""
    cells = [_rendered(cell, index) for index, cell in enumerate(executed.cells)]
    cells = [cell for cell in cells if NOTEBOOK_ONLY_TAG not in cell.metadata.get("tags", [])]
    cells.sort(key=lambda cell: HEADLINE_TAG not in cell.metadata.get("tags", []))
    drawn = any("rlkit-figure" in output.get("data", {}).get("text/html", "") for output in _outputs(cells))
    page = {
        "title": title,
        "css": (_TEMPLATE / "report.css").read_text(encoding="utf-8"),
        "script": (_TEMPLATE / "report.js").read_text(encoding="utf-8"),
        "plotly": _packed_plotly() if drawn else "",
    }
    # nbconvert would look for templates in the working directory first; these are the paths it would come to last.
    installed = [path for path in jupyter_path("nbconvert", "templates") if Path(path).is_dir()]
    with resources.as_file(_TEMPLATE) as folder:
        exporter = HTMLExporter(
            template_paths=[str(folder), *installed],
            template_file=str(folder / "report.html.j2"),
            exclude_input=True,
            exclude_input_prompt=True,
            exclude_output_prompt=True,
        )
        exporter.config.NbConvertBase.display_data_priority = _MIME_ORDER
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})
        body, _ = exporter.from_notebook_node(notebook, resources={"report": page})
    return str(body)


def execute_notebook(notebook: Path, parameters: dict[str, Any], **client: Any) -> NotebookNode:
    """A notebook run in its own folder, in a kernel of its own; `client` are options of nbclient's.

    `parameters` as `checked_parameters` gives them.
    """
    # Not papermill's `cwd`: that is the whole process's, and a sweep's notebooks run in threads beside each other.
    place = {"metadata": {"path": str(notebook.parent.resolve())}}
    with TemporaryDirectory() as folder:
        # Papermill saves here as it goes: a kernel that dies cannot tell which cell it was in.
        progress = Path(folder) / notebook.name
        try:
            return papermill.execute_notebook(
                str(notebook),
                str(progress),
                parameters,
                resources=place,
                start_timeout=KERNEL_START_S,
                iopub_timeout=OUTPUT_S,
                progress_bar=False,
                log_output=False,
                extra_arguments=[_QUIET_KERNEL],
                **client,
            )
        except PapermillExecutionError as error:
            told = _OURS.get(error.ename)
            if told is not None:  # it says what is wrong by itself; the cell it came up in tells nothing more
                raise told(error.evalue) from None
            # The rest of a failed run's message is the tail of a log, which its first line names.
            cause = f"{error.ename}: {error.evalue.partition(chr(10))[0]}"
            number, source, kind = error.exec_count, error.source, RunFailed
        except DeadKernelError:
            cause = "the kernel died (out of memory?)"
            cells = [cell for cell in nbformat.read(progress, as_version=4).cells if cell.cell_type == "code"]
            started = [number for number, cell in enumerate(cells, 1) if cell.metadata.papermill.start_time]
            if not started:
                raise KernelDied(f"{notebook.name}: {cause.replace('died', 'died before the first cell')}") from None
            number, source, kind = started[-1], cells[started[-1] - 1].source, KernelDied
    # Papermill adds a cell of its own for the parameters.
    cell = f"code cell {number - bool(parameters)} ({_first_line(source)})"
    raise kind(f"{notebook.name}: {cell}: {' '.join(cause.split())}") from None


def _first_line(source: str) -> str:
    """The first line of a cell that does something, by which its author knows it."""
    skipped = ("#", "%", "import ", "from ")
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(skipped)), lines[0] if lines else "empty")


def _rendered(cell: NotebookNode, index: int) -> NotebookNode:
    copy = nbformat.from_dict({key: value for key, value in cell.items() if key != "outputs"})
    if cell.cell_type == "code":
        copy.outputs = [
            _with_figure(output, f"fig-{index}-{number}")
            for number, output in enumerate(cell.outputs)
            if not output.get("data") or set(output.data) & {_PLOTLY_MIME, *_MIME_ORDER}
        ]
    return copy


def _with_figure(output: NotebookNode, name: str) -> NotebookNode:
    spec = output.get("data", {}).get(_PLOTLY_MIME)
    if spec is None:
        return output
    layout = dict(spec["layout"])
    # The title becomes a heading, which wraps on a narrow screen; the plot moves up into its place.
    title = html.escape(layout.pop("title", {}).get("text", ""))
    layout["margin"] = layout.get("margin", {}) | {"t": _TOP_MARGIN}
    layout["height"] = layout.get("height", _DEFAULT_HEIGHT) - _TITLE_HEIGHT
    alt = html.escape(layout.get("meta", {}).get("alt", ""))
    caption = alt.replace(" %", "&nbsp;%")  # no line break between a number and its unit
    # In a script element only "</script" and "<!--" end the text: without any "<" there is neither.
    text = to_json_plotly({"data": spec["data"], "layout": layout}).replace("<", "\\u003c")
    figure = (
        f'<figure class="rlkit-figure"><h3>{title}</h3><div class="plot" id="{name}" role="group" aria-label="{alt}"'
        f' style="min-height:{layout["height"]}px"></div><figcaption aria-hidden="true">{caption}</figcaption>'
        f'<script type="application/json">{text}</script></figure>'
    )
    return nbformat.v4.new_output("display_data", data={"text/html": figure})


def _outputs(cells: list[NotebookNode]) -> list[NotebookNode]:
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


@cache
def _packed_plotly() -> str:
    # mtime 0: the same report twice is the same file.
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode("ascii")
