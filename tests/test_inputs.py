from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlkit import inputs
from rlkit.errors import BadInput
from rlkit.inputs import ModelFacts, inspect_data, inspect_model, inspect_reward, is_path, longest_prompt_tokens
from rlkit.recipe import DataSection, ModelSection, load_recipe

LOCAL = load_recipe(Path(__file__).parents[1] / "runs" / "local.yaml")
CONFIG = {"hidden_size": 96, "num_attention_heads": 4, "max_position_embeddings": 512}


def write_model(folder: Path, **files: Any) -> Path:
    """A model folder with everything in it but what `files` sets to None."""
    contents: dict[str, Any] = {
        "config.json": CONFIG,
        "tokenizer.json": {},
        "tokenizer_config.json": {"response_template": {}, "chat_template": "{{ messages }}"},
        "model.safetensors": "",
    }
    contents["tokenizer_config.json"]["response_template"] = {"defaults": {"role": "assistant"}}
    folder.mkdir()
    for name, content in (contents | files).items():
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def model_facts(folder: Path) -> ModelFacts:
    return inspect_model(ModelSection(name=str(folder)))


@pytest.mark.parametrize("name", ["toy-arithmetic", "toy-untrained"])
def test_the_toy_models_are_known_without_being_built(name: str) -> None:
    facts = inspect_model(ModelSection(name=name))
    assert (facts.problem, facts.head_size, facts.max_positions, facts.chat_template_known) == (None, 32, 512, True)


def test_a_hub_id_that_is_not_cached_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert inspect_model(ModelSection(name="organisation/model")) == ModelFacts()


def test_a_hub_model_in_the_cache_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "snapshot")
    monkeypatch.setattr(inputs, "_cached_snapshot", lambda name, revision: folder)
    assert inspect_model(ModelSection(name="organisation/model")).head_size == 24


@pytest.mark.parametrize(
    ("name", "path"),
    [("./model", True), ("/m", True), ("~/m", True), ("a/b/c", True), ("org/model", False), ("gpt2", False)],
)
def test_what_is_a_path_and_what_a_hub_id(
    name: str, path: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_path(name) == path


def test_a_folder_that_exists_is_a_path_whatever_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_path("org/model")


def test_a_whole_model_folder(tmp_path: Path) -> None:
    facts = model_facts(write_model(tmp_path / "m"))
    assert (facts.problem, facts.head_size, facts.max_positions) == (None, 24, 512)
    assert facts.chat_template_known


def test_a_head_size_of_its_own_and_a_nested_text_config(tmp_path: Path) -> None:
    config = {"text_config": CONFIG | {"head_dim": 128}}
    assert model_facts(write_model(tmp_path / "m", **{"config.json": config})).head_size == 128


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"config.json": None}, "has no config.json"),
        ({"config.json": "{broken"}, "config.json is not a JSON object"),
        ({"tokenizer.json": None}, "has no tokenizer"),
        ({"model.safetensors": None}, "has no weights"),
        ({"tokenizer_config.json": None}, "has no chat template"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tools", "template": "x"}]}}, "has no chat template"),
    ],
)
def test_an_incomplete_model_folder(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    folder = write_model(tmp_path / "m", **files)
    assert problem in (model_facts(folder).problem or "")


def test_a_model_folder_that_is_not_there_or_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert model_facts(tmp_path / "gone").problem == f"{tmp_path / 'gone'} does not exist"
    assert model_facts(tmp_path / "file").problem == f"{tmp_path / 'file'} is not a folder"


def test_trl_says_which_chat_templates_it_knows(tmp_path: Path) -> None:
    from trl.chat_template_utils import qwen2_5_chat_template

    files = {"tokenizer_config.json": {}, "chat_template.jinja": qwen2_5_chat_template}
    assert model_facts(write_model(tmp_path / "known", **files)).chat_template_known is True
    files["chat_template.jinja"] = "{{ messages[0].content }}"
    assert model_facts(write_model(tmp_path / "unknown", **files)).chat_template_known is False


def test_without_trl_a_template_is_neither_known_nor_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_installed", lambda *names: False)
    folder = write_model(tmp_path / "m", **{"tokenizer_config.json": {"chat_template": "x"}})
    assert model_facts(folder).chat_template_known is None


ROW = json.dumps({"problem": "1+1", "answer": "2"})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (ROW, None),
        (f"\n{ROW}\nnot looked at", None),
        ("", "is empty"),
        ("problem,answer", "the first line of"),
        ("[1, 2]", "is a list, not an object"),
        (json.dumps({"problem": "1+1"}), "has no column 'answer', it has ['problem']"),
    ],
)
def test_a_file_of_prompts(tmp_path: Path, content: str, problem: str | None) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    answer = inspect_data(DataSection(name=str(path)))
    assert answer is None if problem is None else problem in (answer or "")


def test_a_dotted_column_is_looked_for_by_its_first_part(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1", "reward_model": {"ground_truth": "2"}}))
    section = DataSection(name=str(path), prompt_column="prompt", answer_column="reward_model.ground_truth")
    assert inspect_data(section) is None


def test_prompts_that_are_not_there(tmp_path: Path) -> None:
    assert inspect_data(DataSection(name="rows.jsonl")) == "rows.jsonl does not exist"
    assert inspect_data(DataSection(name=str(tmp_path))) == f"{tmp_path} is a folder, not a file"


def test_prompts_that_are_made_or_on_the_hub_are_not_looked_for() -> None:
    assert inspect_data(DataSection(name="toy-addition")) is None
    assert inspect_data(DataSection(name="sail/Sanity-Test-R1D-1.5B")) is None


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def score(completions, **_): return [0.0] * len(completions)", None),
        ("def other(): ...", "cannot import 'my_reward:score'"),
        ("score = 3", "is a int, not a function"),
        ("score = lambda completions: []", "cannot be pickled"),
        ("def score(:", "SyntaxError"),
        ("import package_that_is_not_there", "No module named 'package_that_is_not_there'"),
        ("raise RuntimeError('first line\\nsecond')", "RuntimeError: first line"),
    ],
)
def test_a_reward_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, problem: str | None
) -> None:
    (tmp_path / "my_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    path = list(sys.path)
    answer = inspect_reward(LOCAL.with_overrides(["reward=my_reward:score"]))
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    assert sys.path == path
    assert answer is None if problem is None else problem in (answer or "")
    assert "\n" not in (answer or "")


def test_the_longest_prompt_is_counted_with_the_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit.training.toy_model import build_tokenizer

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"problem": "1+1", "answer": "2"}, {"problem": "12+34", "answer": "46"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    recipe = LOCAL.with_overrides([f"data.name={tmp_path / 'rows.jsonl'}", "data.system_prompt=Add."])
    conversation = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12+34"}]
    expected = len(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))
    assert longest_prompt_tokens(recipe, tmp_path / "model") == expected
    assert longest_prompt_tokens(recipe, None) is None
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(BadInput, match=r"model\.name: the tokenizer in .*: TemplateError: no system message$"):
        longest_prompt_tokens(recipe, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"model\.name: the tokenizer in .* cannot read .*rows\.jsonl"):
        longest_prompt_tokens(recipe, tmp_path / "model")
