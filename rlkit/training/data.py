"""The prompts of a recipe, as TRL takes them: one row a prompt, with `prompt` (a conversation) and `answer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.errors import BadInput
from rlkit.recipe import DataSection
from rlkit.training import toy_task

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]


def load_rows(section: DataSection) -> tuple[Dataset, list[Row]]:
    """The rows to train on, and rows never trained on that are kept for a final look (the toy task only has those).

    Raises BadInput naming `data.name` or the column.
    """
    from datasets import Dataset

    if section.name == toy_task.DATA_NAME:
        trained, held_out = toy_task.split_problems()
        rows = [{"prompt": problem.prompt(), "answer": problem.answer} for problem in trained[: section.limit]]
        return Dataset.from_list(rows), [{"prompt": p.prompt(), "answer": p.answer} for p in held_out]
    table = _read_table(section)
    for field, column in [("prompt_column", section.prompt_column), ("answer_column", section.answer_column)]:
        if column.split(".")[0] not in table.column_names:
            raise BadInput(f"data.{field}: {section.name} has no column {column!r}, it has {table.column_names}")
    if section.limit is not None:
        table = table.select(range(min(section.limit, len(table))))
    # Not table.map: it casts a column whose name stays back to its old type, and answers must be text.
    return Dataset.from_list([_as_row(row, section) for row in table]), []


def _read_table(section: DataSection) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path = Path(section.name).expanduser()
    try:
        if path.is_file() or path.suffix in {".json", ".jsonl"}:
            if not path.is_file():
                raise BadInput(f"data.name: {path} does not exist")
            return load_dataset("json", data_files=str(path), split="train")
        return load_dataset(section.name, split=section.split)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        cause = error.__cause__ or error
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise BadInput(f"data.name: cannot load {section.name!r}: {reason}") from None


def _as_row(row: Row, section: DataSection) -> Row:
    prompt = _value(row, section.prompt_column)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if section.system_prompt is not None:
        messages = [{"role": "system", "content": section.system_prompt}, *messages]
    return {"prompt": messages, "answer": str(_value(row, section.answer_column))}


def _value(row: Row, column: str) -> Any:
    """The value of a column, or with a dotted name of a key inside it. Raises BadInput."""
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise BadInput(f"data: a row has no {column!r}, it has {sorted(row)}")
        value = value[part]
    return value
