"""How the trainer job is started: one process on a CPU, `accelerate launch` with FSDP2 on several GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder

ENTRY = "rlkit.training.entry"


def trainer_command(
    recipe: Recipe, folder: RunFolder, model: str, server_url: str, checkpoint: Path | None = None
) -> list[str]:
    """The argument list of the trainer job."""
    arguments = ["--folder", str(folder.path), "--model", model, "--server-url", server_url]
    if folder.shared_at is not None:
        arguments += ["--shared", str(folder.shared_at)]
    if checkpoint is not None:
        arguments += ["--resume-from", str(checkpoint)]
    return [sys.executable, *_launcher(recipe), "-m", ENTRY, *arguments]


def trainer_environment(on_cpu: bool) -> dict[str, str]:
    """What the trainer's environment must hold beside what it inherits."""
    # The cores are shared with the replicas: one thread more for the trainer only takes theirs.
    threads = {"OMP_NUM_THREADS": "1"} if on_cpu else {}
    return {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false", **threads}


def _launcher(recipe: Recipe) -> list[str]:
    train = recipe.train
    if train.processes == 1:
        return []
    return [
        *("-m", "accelerate.commands.launch", "--num_processes", str(train.processes), "--num_machines", "1"),
        *("--mixed_precision", train.precision, "--dynamo_backend", "no"),
        *("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        # Parameters are a few GB beside H200s: gathering them again in every backward costs more than holding them.
        *("--fsdp_reshard_after_forward", "false"),
        # A full state dict keeps only rank 0's shard of each adapter tensor, and a resume loses learnt reward
        # (accelerate issue 4206).
        *("--fsdp_state_dict_type", "SHARDED_STATE_DICT"),
    ]
