"""What runs in the emulated Jobs in the place of vLLM and of TRL's trainer, and what must hold after every run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hub.hub_server import EmulatedHub

from rlkit.engines.base import Event
from rlkit.run_folder import RunFolder

SERVE = ("python3", "-m", "rlkit.serving.emulated", "--port", "8000")

# What the trainers below are made of.
_TOOLS = """
import json, os, pathlib, time, httpx, numpy
from safetensors.numpy import save_file
url, folder, shared, checkpoint = (
    os.environ["RLKIT_" + name] for name in ("SERVER_URL", "RUN_FOLDER", "SHARED", "CHECKPOINT")
)
def log(*steps):
    with open(folder + "/steps.jsonl", "a") as lines:
        lines.writelines(json.dumps({"global_step": step, "reward": step / 4}) + chr(10) for step in steps)
def publish(version):
    policy = pathlib.Path(shared, ".vllm_lora", "trl-policy-v%d" % version)
    policy.mkdir(parents=True, exist_ok=True)
    config = {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (policy / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora_A": numpy.ones(4, numpy.float32)}, policy / "adapter_model.safetensors")
    body = {"lora_name": policy.name, "lora_path": str(policy)}
    answer = httpx.post(url + "/v1/load_lora_adapter", json=body, timeout=60)
    print("load", policy.name, answer.status_code, answer.text, flush=True)
    answer.raise_for_status()
    if version > 5:  # max_staleness + 1, as TRL counts
        httpx.post(url + "/v1/unload_lora_adapter", json={"lora_name": "trl-policy-v%d" % (version - 5)}, timeout=60)
def complete(version, prompt):
    body = {"model": "trl-policy-v%d" % version, "prompt": [prompt] * 40, "max_tokens": 2, "seed": 1}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
def well():
    return httpx.get(url + "/health", timeout=60).status_code == 200
def until(condition):
    for _ in range(3000):  # a busy machine starts a replica in a minute
        if condition():
            return
        time.sleep(0.1)
    raise SystemExit("waited for five minutes in vain")
"""
# Publishes a policy through the proxy as TRL does, then logs three steps.
TRAINS = f"{_TOOLS}\npublish(1)\nlog(1, 2, 3)\n"
# Two policies, each asked for something: a mount may show their files late.
LATE = f"""{_TOOLS}
for version in (1, 2):
    publish(version)
    complete(version, 0)
    log(version)
log(3)
"""
CRASHES = "print('about to fail', flush=True); raise SystemExit('no more memory')"
WAITS = "import time; time.sleep(600)"
# Goes on when the proxy has lost a replica, and again when all are back with the live adapter.
SURVIVES = f"""{_TOOLS}
publish(1)
log(1)
for _ in range(300):  # half a minute: one that is replaced at once may never be missed
    if not well():
        break
    time.sleep(0.1)
complete(1, 0)
log(2)
until(well)
for prompt in range(8):
    complete(1, prompt)
publish(2)
log(3)
"""
# Twenty steps with a policy each and a checkpoint at every tenth. Preempted at step 15, and started again from the
# newest checkpoint, it counts its policies from one as TRL does.
PREEMPTED = f"""{_TOOLS}
from rlkit.recipe import load_recipe
from rlkit.tracking import write_run
project = load_recipe(folder + "/recipe.yaml").tracking.project
first = int(checkpoint.rpartition("-")[2]) + 1 if checkpoint else 1
print("from step", first, flush=True)
for version, step in enumerate(range(first, 21), 1):
    publish(version)
    write_run(project, "my-run", [{{"global_step": step, "reward": step / 20}}], run_id="1")
    log(step)
    if step % 10 == 0:
        kept = pathlib.Path(shared, "checkpoint-%d" % step)
        kept.mkdir(exist_ok=True)
        (kept / "trainer_state.json").write_text("{{}}")
    if step == 15 and not checkpoint:
        time.sleep(600)
"""


def when(text: str, act: Callable[[], object], events: list[Event], times: int = 1) -> Callable[[Event], None]:
    """An event handler that acts at the first events whose text has this in it, or that are this step."""
    pending = [act] * times

    def handle(event: Event) -> None:
        events.append(event)
        if pending and (text in event.text or text == f"step {event.step}"):
            pending.pop()()

    return handle


def assert_nothing_is_lost(hub: EmulatedHub, folder: RunFolder, bucket: str = "tester/rlkit") -> None:
    """Nothing runs, and what the run kept in the bucket is in its folder."""
    assert not hub.running()
    kept = hub.buckets.folder(bucket) / "runs" / folder.name / "records"
    for path in kept.rglob("*"):
        name = path.relative_to(kept)
        if path.is_file() and not path.name.startswith(".") and path.name != folder.recipe.name:
            assert (folder.path / name).read_bytes() == path.read_bytes(), name


def leaks(token: str, *roots: Path) -> list[str]:
    """Files under these folders that have the token in them."""
    found = [path for root in roots for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in found if token.encode() in path.read_bytes()]
