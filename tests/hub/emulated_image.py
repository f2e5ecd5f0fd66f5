"""What the Jobs' emulated image has in the place of vLLM and of accelerate: modules, by their path.

Its vLLM is the emulated replica, and its `accelerate launch` simulates the trainer's steps and publishes their
adapters.
"""

from __future__ import annotations

VLLM = """
import sys
from rlkit.serving import emulated
given = sys.argv
sys.argv = ["vllm", *given[(port := given.index("--port")) : port + 2]]
emulated.main()
"""
ACCELERATE = """
import argparse, json, pathlib, httpx, numpy
from safetensors.numpy import save_file
from rlkit.engines.sim import launch_sim
from rlkit.recipe import load_recipe
from rlkit.run_folder import RunFolder
parser = argparse.ArgumentParser()
for name in ("folder", "server-url", "shared"):
    parser.add_argument("--" + name, required=True)
options, _ = parser.parse_known_args()
folder = pathlib.Path(options.folder)
recipe = load_recipe(folder / "recipe.yaml")
def post(path, **body):
    httpx.post(options.server_url + path, json=body, timeout=60).raise_for_status()
for version in range(1, 1 + recipe.train.steps // recipe.rollout.weight_sync_steps):
    policy = pathlib.Path(options.shared, ".vllm_lora", "trl-policy-v%d" % version)
    policy.mkdir(parents=True)
    config = {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (policy / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora_A": numpy.full(4, version, numpy.float32)}, policy / "adapter_model.safetensors")
    post("/v1/load_lora_adapter", lora_name=policy.name, lora_path=str(policy))
    for prompt in range(16):
        post("/v1/completions", model=policy.name, prompt=[prompt] * 200, max_tokens=4)
launch_sim(recipe, RunFolder(folder), lambda event: print(event.kind, event.step, event.text, flush=True))
RunFolder(folder).state.unlink()  # a trainer has none
"""
IMAGE = {
    **dict.fromkeys(["vllm/__init__.py", "vllm/entrypoints/__init__.py", "vllm/entrypoints/openai/__init__.py"], ""),
    "vllm/entrypoints/openai/api_server.py": VLLM,
    **dict.fromkeys(["accelerate/__init__.py", "accelerate/commands/__init__.py"], ""),
    "accelerate/commands/launch.py": ACCELERATE,
}
