"""Prompts as TRL takes them."""

import json
from pathlib import Path

import pytest

from rlkit.errors import BadInput
from rlkit.recipe import DataSection
from rlkit.training.data import load_rows


def write(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_toy_rows_hold_the_answer_and_keep_some_back() -> None:
    rows, held_out = load_rows(DataSection(name="toy-addition", limit=5))
    assert len(rows) == 5
    a, b = rows[0]["prompt"][-1]["content"].split("+")
    assert int(rows[0]["answer"]) == int(a) + int(b)
    assert len(held_out) == 810


def test_a_file_with_plain_prompts(tmp_path: Path) -> None:
    name = write(tmp_path / "p.jsonl", {"problem": "1+1?", "answer": 2}, {"problem": "2+2?", "answer": 4})
    rows, held_out = load_rows(DataSection(name=name, system_prompt="Be right."))
    assert rows[0]["prompt"] == [{"role": "system", "content": "Be right."}, {"role": "user", "content": "1+1?"}]
    assert rows["answer"] == ["2", "4"]
    assert held_out == []


def test_a_file_in_the_home_folder_whatever_its_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "prompts.txt", {"problem": "1+1?", "answer": 2})
    rows, _ = load_rows(DataSection(name="~/prompts.txt"))
    assert rows["answer"] == ["2"]


def test_a_file_with_conversations(tmp_path: Path) -> None:
    name = write(tmp_path / "p.jsonl", {"chat": [{"role": "user", "content": "hi"}], "gold": "x"})
    rows, _ = load_rows(DataSection(name=name, prompt_column="chat", answer_column="gold"))
    assert rows[0] == {"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}


def test_a_dotted_column_reaches_into_an_object(tmp_path: Path) -> None:
    name = write(tmp_path / "p.jsonl", {"problem": "1+1?", "judge": {"gold": "2"}})
    rows, _ = load_rows(DataSection(name=name, answer_column="judge.gold"))
    assert rows["answer"] == ["2"]
    with pytest.raises(BadInput, match=r"no 'judge\.absent'"):
        load_rows(DataSection(name=name, answer_column="judge.absent"))


def test_bad_data_is_one_line(tmp_path: Path) -> None:
    name = write(tmp_path / "p.jsonl", {"question": "1+1?"})
    with pytest.raises(BadInput, match=r"data\.prompt_column.*no column 'problem'.*question"):
        load_rows(DataSection(name=name))
    with pytest.raises(BadInput, match=r"data\.name: .*absent\.jsonl does not exist"):
        load_rows(DataSection(name=str(tmp_path / "absent.jsonl")))
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(BadInput, match=r"data\.name: cannot load") as error:
        load_rows(DataSection(name=str(tmp_path / "broken.jsonl")))
    assert "\n" not in str(error.value)
