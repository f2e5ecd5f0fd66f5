"""A recipe in TRL's words, and what a run's record holds."""

import json
import types
from pathlib import Path

import pytest

from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.training.entry import (
    CHATML_RESPONSE,
    RunRecord,
    build_trainer,
    installed_versions,
    lora_config,
    training_arguments,
)
from rlkit.training.toy_model import build_tokenizer

LOCAL = Path(__file__).parents[2] / "runs" / "local.yaml"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(LOCAL)


def test_every_field_reaches_trl(recipe: Recipe, tmp_path: Path) -> None:
    changed = recipe.with_overrides(
        ["train.steps=7", "train.learning_rate=3e-4", "train.adam_beta2=0.9", "train.token_budget=640",
         "train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=3",
         "train.gradient_checkpointing=true",
         "train.save_steps=2", "train.seed=5", "sampling.num_generations=4", "sampling.max_completion_length=20",
         "sampling.temperature=0.7", "sampling.top_p=0.9", "sampling.top_k=11", "rollout.max_staleness=3",
         "rollout.weight_sync_steps=2", "rollout.max_inflight_tasks=33", "rollout.queue_maxsize=99",
         "rollout.request_timeout=44", "tracking.project=other"]
    )  # fmt: skip
    args = training_arguments(changed, RunFolder(tmp_path / "run"), "http://127.0.0.1:1")
    for section in (changed.train, changed.sampling, changed.rollout):
        for name, value in section.model_dump().items():
            if name not in {"steps", "processes", "precision"}:
                assert getattr(args, name) == value, name
    assert (args.max_steps, args.project, args.run_name) == (7, "other", "run")
    assert (args.bf16, args.fp16, args.dtype) == (False, False, "float32")
    assert args.vllm_server_base_url == "http://127.0.0.1:1"
    assert args.report_to == ["trackio"]


def test_lora_in_pefts_words(recipe: Recipe) -> None:
    config = lora_config(recipe.with_overrides(["lora.r=4", "lora.alpha=9", "lora.dropout=0.1", "lora.bias=all"]))
    assert config is not None
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (4, 9, 0.1, "all")
    assert config.target_modules == "all-linear"
    assert lora_config(recipe.with_overrides(["lora=null"])) is None


def test_a_logged_step_becomes_one_line(recipe: Recipe, tmp_path: Path) -> None:
    record = RunRecord(recipe, RunFolder(tmp_path), None)
    state = types.SimpleNamespace(is_world_process_zero=True, global_step=3, max_steps=5)
    record.on_log(None, state, None, logs={"reward": 0.5, "ratio": float("nan"), "text": "no number"})
    record.on_log(None, state, None, logs={"train_runtime": 3.0})
    lines = RunFolder(tmp_path).steps.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"global_step": 3, "reward": 0.5, "ratio": None}]


def test_versions_name_what_is_installed() -> None:
    assert {"rlkit", "trl", "torch", "trackio"} <= set(installed_versions())


@pytest.mark.parametrize("ending", ["<|im_end|>", ""])
def test_the_chatml_response_template_reads_a_turn(ending: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.response_template = CHATML_RESPONSE
    turn = tokenizer.encode(f"ones 7+5=12 \\boxed{{82}}{ending}", add_special_tokens=False)
    prefix = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], add_generation_prompt=True)
    parsed = tokenizer.parse_response(turn, prefix=list(prefix["input_ids"]))
    assert parsed == {"role": "assistant", "content": "ones 7+5=12 \\boxed{82}"}


def test_a_pinned_revision_is_the_tokenizers_too(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def from_pretrained(model: str, **options: object) -> None:
        asked.update(options)
        raise FileNotFoundError(model)

    monkeypatch.setattr("rlkit.training.entry.AutoTokenizer.from_pretrained", from_pretrained)
    pinned = recipe.with_overrides(["model.name=some/model", "model.revision=abc"])
    with pytest.raises(FileNotFoundError):
        build_trainer(pinned, RunFolder(tmp_path), "some/model", "http://127.0.0.1:1", None)
    assert asked == {"revision": "abc", "trust_remote_code": False}
