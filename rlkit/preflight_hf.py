"""What would go wrong with a recipe on Hugging Face Jobs, found before anything is rented. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlkit.inputs import is_path
from rlkit.preflight import Finding
from rlkit.recipe import Recipe
from rlkit.training.toy_task import DATA_NAME

# The Hub's flavors say how many GPUs they have at their end: h200x2, a10g-largex4; without, it is one or none.
_QUANTITY = re.compile(r"x(\d+)$")
# The recipe's default for a machine without GPUs, and the Hub's cheapest flavor.
NO_FLAVOR = "cpu"


def gpus_of(flavor: str) -> int:
    """How many GPUs a flavor has by its name."""
    if flavor.startswith("cpu"):
        return 0
    match = _QUANTITY.search(flavor)
    return int(match.group(1)) if match else 1


def hf_findings(recipe: Recipe) -> Iterator[Finding]:
    """Everything that Jobs need and a local run does not."""
    hardware, serve, train = recipe.hardware, recipe.serve, recipe.train
    for role in ("trainer", "replica"):
        if getattr(hardware, role) == NO_FLAVOR:
            fix = "name one of `hf jobs hardware`, for example h200 (or cpu-upgrade for a toy model)"
            yield Finding("error", f"hardware.{role}", f"{NO_FLAVOR!r} is no flavor of Hugging Face Jobs", fix)
    if hardware.trainer != NO_FLAVOR and max(gpus_of(hardware.trainer), 1) != train.processes:
        message = f"{train.processes}, and {hardware.trainer} has {gpus_of(hardware.trainer)} GPUs"
        yield Finding("error", "train.processes", message, "make them equal: one process trains on one GPU")
    wanted = serve.tensor_parallel_size * serve.data_parallel_size
    if hardware.replica != NO_FLAVOR and max(gpus_of(hardware.replica), 1) != wanted:
        message = f"{wanted} GPUs are used of the {gpus_of(hardware.replica)} of {hardware.replica}"
        fix = "choose a flavor with as many, or ask for more replicas"
        yield Finding("error", "serve.tensor_parallel_size", message, fix)
    if recipe.data.name != DATA_NAME and is_path(recipe.data.name):
        message = f"{recipe.data.name} is a file here, and the Jobs have only the bucket and the Hub"
        yield Finding("error", "data.name", message, "upload it as a dataset of the Hub and name that")
    if recipe.reward.split(":")[0].split(".")[0] != "rlkit":
        message = f"{recipe.reward} is not part of rlkit, whose wheel is all the code the Jobs get"
        yield Finding("error", "reward", message, "use one of rlkit.training.rewards, or add yours there")
    tag = hardware.image.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest") and "@" not in hardware.image:
        message = f"{hardware.image} names no version: two Jobs of a run may get different ones"
        yield Finding("warning", "hardware.image", message, "add its tag, for example vllm/vllm-openai:v0.31.0")
