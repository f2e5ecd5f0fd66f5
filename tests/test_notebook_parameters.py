"""What a notebook declares, read from its file."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from rlkit.errors import BadInput
from rlkit.notebook_parameters import checked_parameters, declared_parameters


def written(path: Path, source: str, *tags: str) -> Path:
    cells = [new_code_cell("unrelated = 1"), new_code_cell(source, metadata={"tags": [*tags]})]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_parameters_are_read_with_their_types(tmp_path: Path) -> None:
    source = '# first\nname: str = "a=b"  # with x=1 in it\nsteps: list[int] = [\n    1,\n]\nrate = 0.1\n'
    source += "other: str | None = None"
    notebook = written(tmp_path / "n.ipynb", source, "parameters")
    assert declared_parameters(notebook) == {"name": "str", "steps": "list[int]", "rate": "", "other": "str | None"}
    assert declared_parameters(written(tmp_path / "m.ipynb", "x = 1")) == {}


@pytest.mark.parametrize("content", ["", "{}", "[1]", "null", '{"cells": 3}', '{"cells": [1]}', '{"cells": [{}]}'])
def test_what_is_no_notebook_is_told_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "n.ipynb").write_text(content)
    with pytest.raises(BadInput, match=r"n\.ipynb: not a Jupyter notebook$"):
        declared_parameters(tmp_path / "n.ipynb")


def test_files_are_named_from_where_the_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    notebook = written(tmp_path / "n.ipynb", "folder: str = ''\nruns: list = []", "parameters")
    given = checked_parameters(notebook, {"folder": "a", "runs": ["there", "local/first"]})
    assert given == {"folder": str(tmp_path / "a"), "runs": [str(tmp_path / "there"), "local/first"]}
