"""Pages are rendered from notebooks that were executed by hand here; only what needs a kernel starts one."""

import base64
import gzip
import os
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from html_page import Page
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from plotly.offline import get_plotlyjs
from recorded_runs import recorded
from run_folders import run_folder

from rlkit import figures
from rlkit.errors import BadInput, NotLogged, RlkitError, RunFailed
from rlkit.report import render, render_notebook, report_run
from rlkit.run_folder import RunFolder

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def written(path: Path, *cells: NotebookNode) -> Path:
    nbformat.write(new_notebook(cells=list(cells), metadata=KERNEL), path)
    return path


def parameters(source: str) -> NotebookNode:
    return new_code_cell(source, metadata={"tags": ["parameters"]})


def shown(data: dict[str, Any], *tags: str) -> NotebookNode:
    return new_code_cell(
        "secret_input()", metadata={"tags": list(tags)}, outputs=[new_output("display_data", data=data)]
    )


def page(*cells: NotebookNode) -> str:
    return render(new_notebook(cells=list(cells)), "title")


def figure_data(**layout: Any) -> dict[str, Any]:
    figure = figures.reward(recorded("learning-run")).update_layout(**layout)
    return {"application/vnd.plotly.v1+json": figure.to_plotly_json(), "text/html": "<b>loads a CDN</b>"}


# Parameters


@pytest.mark.parametrize("content", ["", "{}", "[1]", "nothing", '{"cells": 3, "nbformat": 4, "nbformat_minor": 5}'])
def test_a_file_that_is_no_notebook_is_told_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "n.ipynb").write_text(content)
    with pytest.raises(BadInput, match=r"n\.ipynb: not a Jupyter notebook$"):
        render_notebook(tmp_path / "n.ipynb", {}, tmp_path / "out.html")


def test_a_notebook_that_is_missing_or_has_broken_parameters(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"n\.ipynb: cannot read the notebook: No such file"):
        render_notebook(tmp_path / "n.ipynb", {}, tmp_path / "out.html")
    with pytest.raises(BadInput, match=r"cell of parameters: .* \(line 2\)"):
        render_notebook(written(tmp_path / "n.ipynb", parameters("a = 1\nb = (")), {}, tmp_path / "out.html")


def test_an_unknown_parameter_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    notebook = written(tmp_path / "n.ipynb", parameters("steps: int = 1\nname: str = ''"))
    with pytest.raises(BadInput, match=r"no parameter step; it has steps, name$"):
        render_notebook(notebook, {"step": 2}, tmp_path / "out.html")
    with pytest.raises(BadInput, match=r"no parameter step; it has none$"):
        render_notebook(written(tmp_path / "m.ipynb", new_code_cell("step = 1")), {"step": 2}, tmp_path / "out.html")


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("int", "3"),
        ("int", True),
        ("int", 3.5),
        ("float", "x"),
        ("str", 3),
        ("str", None),
        ("list[str]", "a"),
        ("bool", 1),
    ],
)
def test_a_value_of_another_type_is_an_error(tmp_path: Path, declared: str, value: object) -> None:
    notebook = written(tmp_path / "n.ipynb", parameters(f"it: {declared} = None"))
    with pytest.raises(BadInput, match=r"parameter it: expected .*, got "):
        render_notebook(notebook, {"it": value}, tmp_path / "out.html")


def test_values_reach_the_notebook_with_their_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "text": "007",
        "whole": 3,
        "whole_float": 3,
        "real": 1e-5,
        "flag": False,
        "nothing": None,
        "items": ["a", 1],
        "scalar": np.float32(0.5),
        "pair": (1, 2),
        "recipe": "runs/local.yaml",
        "folder": "",
    }
    source = "text: str = ''\nwhole: int = 0\nwhole_float: float = 0.0\nreal: float = 0.0\nflag: bool = True\n"
    source += "nothing: str | None = ''\nitems: list = []\nscalar = 0\npair = 0\nrecipe: str = ''\nfolder: str = ''"
    (tmp_path / "notebooks").mkdir()
    notebook = written(
        tmp_path / "notebooks" / "n.ipynb",
        parameters(source),
        new_code_cell(
            "import os\nprint([text, whole, whole_float, real, flag, nothing, items, scalar, pair, recipe, folder])"
        ),
        new_code_cell("print('here:', os.getcwd())"),
    )
    monkeypatch.chdir(tmp_path)
    gone_to: list[Path] = []
    go = os.chdir

    def noted(path: str) -> None:
        gone_to.append(Path(path).resolve())
        go(path)

    monkeypatch.setattr(os, "chdir", noted)
    written_to = render_notebook(notebook, values, Path("new/folder/out.html"))
    assert set(gone_to) <= {tmp_path}  # whoever runs beside it in this process has relative paths, too
    text = Page(written_to.read_text()).text
    recipe = str(tmp_path / "runs/local.yaml")  # relative to the caller; the notebook runs in its own folder
    assert str(["007", 3, 3, 1e-5, False, None, ["a", 1], 0.5, [1, 2], recipe, ""]) in text
    assert f"here: {notebook.parent}" in text
    assert list(written_to.parent.iterdir()) == [written_to.relative_to(".")]
    assert nbformat.read(notebook, as_version=4).cells[1].outputs == []


def test_an_error_in_a_cell_is_one_line_and_leaves_the_old_page(tmp_path: Path) -> None:
    source = "# reads the run\nfrom os import path\n\nraise ValueError('no such run\\nsecond line')"
    notebook = written(tmp_path / "n.ipynb", parameters("x: int = 1"), new_code_cell("y = x"), new_code_cell(source))
    out = tmp_path / "out.html"
    out.write_text("old")
    with pytest.raises(RunFailed) as failure:
        render_notebook(notebook, {"x": 2}, out)
    line = "raise ValueError('no such run\\nsecond line')"
    assert str(failure.value) == f"n.ipynb: code cell 3 ({line}): ValueError: no such run"
    assert out.read_text() == "old"


@pytest.mark.parametrize("kind", [BadInput, NotLogged, RunFailed, RlkitError])
def test_what_a_cell_was_refused_with_is_told_as_on_the_command_line(tmp_path: Path, kind: type[RlkitError]) -> None:
    source = f"from rlkit.errors import *\nraise {kind.__name__}('runs/out/x: no such run\\nits log')"
    notebook = written(tmp_path / "n.ipynb", parameters("x: int = 1"), new_code_cell(source))
    with pytest.raises(kind) as failure:
        render_notebook(notebook, {"x": 2}, tmp_path / "out.html")
    assert (type(failure.value), str(failure.value)) == (kind, "runs/out/x: no such run\nits log")


def test_a_page_that_cannot_be_written_is_told_before_the_notebook_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notebook = written(tmp_path / "n.ipynb", parameters("x: int = 1"), new_code_cell("open('ran', 'w')"))
    with pytest.raises(
        BadInput, match=r"out\.html: cannot write the page, .*file is a file; name another file with --out"
    ):
        render_notebook(notebook, {"x": 2}, tmp_path / "file" / "deep" / "out.html")
    assert not (tmp_path / "ran").exists()


def test_a_kernel_that_dies_is_one_line(tmp_path: Path) -> None:
    dying = new_code_cell("import os\nos._exit(1)")
    notebook = written(tmp_path / "n.ipynb", parameters("x: int = 1"), new_code_cell("1"), dying, new_code_cell("2"))
    with pytest.raises(RunFailed, match=r"^n\.ipynb: code cell 3 \(os\._exit\(1\)\): the kernel died"):
        render_notebook(notebook, {"x": 2}, tmp_path / "out.html")


# The page


def test_the_headline_comes_first_and_inputs_and_introductions_are_left_out() -> None:
    introduction = new_markdown_cell("# How to use this notebook", metadata={"tags": ["notebook-only"]})
    text = Page(
        page(introduction, new_markdown_cell("## Later"), shown({"text/html": "<strong>Verdict.</strong>"}, "headline"))
    ).lines
    assert text[:2] == ["Verdict.", "Later"]
    assert "secret_input" not in "".join(text)
    assert "How to use" not in "".join(text)


def test_a_figure_becomes_a_described_figure_and_not_what_else_it_offered() -> None:
    html = Page(page(shown(figure_data())))
    [words] = html.images
    assert words.startswith("Mean reward 0.404 in the first quarter")
    assert html.lines == ["Does it learn?", words]  # the title as a heading, the words once more as the caption
    assert html.external == []


def test_plotly_travels_once_packed_and_only_when_there_is_a_figure() -> None:
    html = page(shown(figure_data()), shown(figure_data()))
    [packed] = Page(html).scripts["plotly-gzip"]
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()
    assert len(html) < 3_000_000
    assert len(page(shown({"text/html": "<p>text</p>"}))) < 20_000


def test_a_name_in_a_figure_cannot_end_its_script() -> None:
    html = page(shown(figure_data(title={"text": "</script><script>bad()</script>"}, meta={"alt": '"><b>x'})))
    assert "<script>bad()" not in html
    assert '"><b>x' not in html


def test_numbers_that_json_does_not_know_are_drawn_as_gaps() -> None:
    data = figure_data()
    data["application/vnd.plotly.v1+json"]["data"] = [{"type": "scatter", "y": [1.0, float("nan"), float("inf")]}]
    assert '"y":[1.0,null,null]' in page(shown(data))


def test_what_needs_a_kernel_or_the_network_is_left_out() -> None:
    widget = shown({"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/html": "<p>values</p>"})
    alone = shown({"application/vnd.jupyter.widget-view+json": {"model_id": "2"}})
    script = shown({"application/javascript": "fetch('https://example.org')"})
    html = page(widget, alone, script)
    assert "<p>values</p>" in html
    assert "model_id" not in html
    assert "example.org" not in html


def test_text_streams_images_and_markdown_are_kept_and_escaped() -> None:
    streams = new_code_cell(
        "",
        outputs=[new_output("stream", name="stdout", text="a < b"), new_output("stream", name="stderr", text="warned")],
    )
    result = new_code_cell("", outputs=[new_output("execute_result", data={"text/plain": "<Object 1>"})])
    image = shown({"image/png": "aGVsbG8=", "text/plain": "<Figure>"})
    html = page(streams, result, image, shown({"text/markdown": "*emphasis*"}))
    assert "<pre>a &lt; b</pre>" in html
    assert '<pre class="stderr">warned</pre>' in html
    assert "<pre>&lt;Object 1&gt;</pre>" in html
    assert 'src="data:image/png;base64,aGVsbG8="' in html
    assert "<em>emphasis</em>" in html
    assert Page(html).external == []


def test_rendering_twice_is_the_same_page_and_leaves_the_notebook_alone() -> None:
    notebook = new_notebook(cells=[shown(figure_data())])
    before = nbformat.writes(notebook)
    assert render(notebook, "title") == render(notebook, "title")
    assert nbformat.writes(notebook) == before


def test_templates_in_the_working_directory_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("report.html.j2", "base/display_priority.j2", "lab/index.html.j2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("not ours")
    monkeypatch.chdir(tmp_path)
    html = page(shown({"text/html": "<p>ours</p>"}))
    assert "<p>ours</p>" in html
    assert "not ours" not in html


def test_the_page_may_load_nothing_from_anywhere() -> None:
    assert "default-src 'none'" in page(shown({"text/html": "<p></p>"}))


def test_a_title_is_escaped() -> None:
    assert "<title>a &lt;b&gt;</title>" in render(new_notebook(cells=[]), "a <b>")


def test_a_run_without_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere: no such run folder"):
        report_run(RunFolder(tmp_path / "nowhere"))


def test_a_folder_without_a_run_is_bad_input_and_starts_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.report.papermill.execute_notebook", lambda *_, **__: pytest.fail("a kernel was started"))
    with pytest.raises(BadInput, match=r"not a run folder, it has no recipe\.yaml"):
        report_run(RunFolder(tmp_path))


def test_a_page_is_not_written_where_its_twin_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.report.papermill.execute_notebook", lambda *_, **__: pytest.fail("a kernel was started"))
    with pytest.raises(BadInput, match=r"page\.json: --out names the page, .* name it \.html"):
        report_run(run_folder(tmp_path / "run"), tmp_path / "page.json")


def test_a_folder_in_the_place_of_the_page_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder; name the HTML file"):
        render_notebook(Path(__file__).parents[1] / "notebooks" / "01_launch.ipynb", {}, tmp_path)
