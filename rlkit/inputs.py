"""What a run needs, looked at before anything starts: its folder, the model, the prompts, the reward function.

Nothing is downloaded: a Hub id is looked at as far as it is already in the local cache, and otherwise unknown. Each
`problem` is a clause that follows the field's name in a message.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlkit import machine
from rlkit.errors import BadInput
from rlkit.recipe import DataSection, ModelSection, Recipe
from rlkit.run_folder import RunFolder
from rlkit.training import toy_model, toy_task
from rlkit.training.rewards import load_reward

# Prompts tokenised to find the longest; a thousand take under a second.
SAMPLED_PROMPTS = 1000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ModelFacts:
    """What can be seen of a model without loading it; None where it was not looked at or does not say."""

    problem: str | None = None
    folder: Path | None = None
    head_size: int | None = None
    max_positions: int | None = None
    chat_template_known: bool | None = None  # TRL can split a completion's turns


def inspect_model(section: ModelSection) -> ModelFacts:
    """Look at the toy models' constants, at a folder, or at what the Hub cache holds."""
    if section.name in toy_task.MODEL_NAMES:
        # Built with Qwen2.5's template, one that TRL knows (toy_model.build_tokenizer).
        return ModelFacts(
            head_size=toy_model.HIDDEN // toy_model.HEADS,
            max_positions=toy_model.POSITIONS,
            chat_template_known=True,
        )
    try:
        if not is_path(section.name):
            snapshot = _cached_snapshot(section.name, section.revision)
            return ModelFacts() if snapshot is None else _read_model(snapshot)
        folder = Path(section.name).expanduser()
        problem = _folder_problem(folder)
        return ModelFacts(problem=problem) if problem else _read_model(folder)
    except (OSError, RuntimeError) as error:
        return ModelFacts(problem=_unreadable(section.name, error))


def inspect_folder(folder: Path) -> str | None:
    """Why a run cannot be in `folder`, or None: it must be free or hold a run, and be writable."""
    problem = machine.unwritable(folder)
    if problem is None and folder.exists():
        others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
        if others and not RunFolder(folder).recipe.is_file():
            return f"{folder} holds other things and no run ({min(others)})"
    return problem


def is_path(name: str) -> bool:
    """Whether `name` means a folder or file here rather than a Hub id (`name` or `organisation/name`)."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or Path(name).exists()


def inspect_data(section: DataSection) -> str | None:
    """What is wrong with the prompts, or None; of a file, its first row is read."""
    try:
        path = Path(section.name).expanduser()
        if section.name == toy_task.DATA_NAME or not (is_path(section.name) or path.suffix in {".json", ".jsonl"}):
            return None
        if not path.is_file():
            return f"{section.name} {'is a folder, not a file' if path.is_dir() else 'does not exist'}"
        with path.open(encoding="utf-8") as lines:
            first = next((line for line in lines if line.strip()), None)
        if first is None:
            return f"{section.name} is empty"
        row = json.loads(first)
    except (OSError, RuntimeError) as error:
        return _unreadable(section.name, error)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return f"the first line of {section.name} is not JSON"
    if not isinstance(row, dict):
        return f"the first line of {section.name} is a {type(row).__name__}, not an object with columns"
    # A dotted name is a column and the keys inside it.
    wanted = [column.split(".")[0] for column in (section.prompt_column, section.answer_column)]
    missing = [column for column in wanted if column not in row]
    return f"{section.name} has no column {missing[0]!r}, it has {sorted(row)}" if missing else None


def inspect_reward(recipe: Recipe) -> str | None:
    """Why the reward function cannot be used, or None: it must import, be callable, and reach a spawned process."""
    path = sys.path
    sys.path = ["", *path]  # as in the trainer: `python -m` looks in the working directory first
    try:
        pickle.dumps(load_reward(recipe.reward, recipe.sampling.max_completion_length))
    except BadInput as error:
        return str(error).removeprefix("reward: ")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"{recipe.reward!r} cannot be pickled for the rollout process: {_first_line(error)}"
    except Exception as error:  # whatever a user's module raises while it is imported
        return f"cannot import {recipe.reward!r}: {type(error).__name__}: {_first_line(error)}"
    finally:
        sys.path = path
    return None


def longest_prompt_tokens(recipe: Recipe, folder: Path | None) -> int | None:
    """Tokens of the longest of the first prompts in a local file, with the model's chat template; None if unknown.

    Takes seconds (transformers and datasets are imported), so only a local model with local prompts is looked at.
    Raises BadInput for rows without the columns, and for a tokenizer or template that does not take them.
    """
    data = recipe.data
    if folder is None or not Path(data.name).expanduser().is_file() or not _installed("transformers", "datasets"):
        return None
    with warnings.catch_warnings(action="ignore"):
        from datasets.utils.logging import disable_progress_bar
        from transformers import AutoTokenizer

        from rlkit.training.data import load_rows

        disable_progress_bar()
        limit = min(data.limit or SAMPLED_PROMPTS, SAMPLED_PROMPTS)
        rows, _ = load_rows(data.model_copy(update={"limit": limit}))
        try:
            render = AutoTokenizer.from_pretrained(folder).apply_chat_template
            return max(len(render(row["prompt"], add_generation_prompt=True, return_dict=False)) for row in rows)
        except Exception as error:  # tokenizers, transformers and jinja each raise their own
            cause = f"{type(error).__name__}: {_first_line(error)}"
            raise BadInput(f"model.name: the tokenizer in {folder} cannot read {data.name}: {cause}") from None


def trl_knows_template(template: str) -> bool | None:
    """Whether TRL can split a completion's turns under this chat template; None without TRL.

    TRL's own lookup is asked. Importing it takes seconds, so this is for models that are not built here.
    """
    if not _installed("trl"):
        return None
    with warnings.catch_warnings(action="ignore"):
        from trl.chat_template_utils import add_response_schema

        try:
            add_response_schema(SimpleNamespace(chat_template=template))
        except ValueError:
            return False
    return True


def _folder_problem(folder: Path) -> str | None:
    if not folder.is_dir():
        return f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}"
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if _read_json(folder / "config.json") is None:
        return f"{folder / 'config.json'} is not a JSON object"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return f"{folder} has no tokenizer (tokenizer.json)"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return f"{folder} has no weights (*.safetensors)"
    if _chat_template(folder) is None:
        return f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
    return None


def _read_model(folder: Path) -> ModelFacts:
    config = _read_json(folder / "config.json") or {}
    text = config.get("text_config", config)
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    head_size = text.get("head_dim") or (hidden // heads if hidden and heads else None)
    template = _chat_template(folder)
    if (_read_json(folder / "tokenizer_config.json") or {}).get("response_template"):
        known: bool | None = True
    else:
        known = None if template is None else trl_knows_template(template)
    return ModelFacts(
        folder=folder,
        head_size=head_size,
        max_positions=text.get("max_position_embeddings"),
        chat_template_known=known,
    )


def _chat_template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = (_read_json(folder / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    if not _installed("huggingface_hub"):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def _unreadable(name: str, error: OSError | RuntimeError) -> str:
    """No permission, a name that is too long, or (RuntimeError) the home of nobody."""
    return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def inspect_simulation(recipe: Recipe) -> str | None:
    """Why a recipe cannot be simulated, `field: reason`, or None."""
    from rlkit.simulation.recipes import translate

    try:
        translate(recipe)
    except BadInput as error:
        return str(error)
    return None
