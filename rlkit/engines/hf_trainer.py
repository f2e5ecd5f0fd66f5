"""What runs in the trainer's Job: the proxy, the trainer, and what must happen around them.

While it trains it renews the replicas' lease, says every step on its log (which is what the launching side follows),
and keeps the run's records in the bucket. When it ends, however it ends, it cancels the replicas: the kernel that
launched them may be long gone. A Job started again for the same run takes its records and its newest checkpoint from
the bucket, so the run in trackio goes on.

`python -m rlkit.engines.hf_trainer --run NAME --folder DIR --models DIR --namespace N --replica URL ... [-- COMMAND]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import httpx

from rlkit.engines.checkpoint import newest_checkpoint
from rlkit.engines.hf_child import start_child
from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_jobs import TOKEN_VARIABLE, run_labels
from rlkit.engines.hf_lease import renewal
from rlkit.engines.hf_records import keep_records, restore_records
from rlkit.engines.hf_replica import has_gpu, model_argument
from rlkit.engines.hf_watch import phase_of
from rlkit.engines.step_lines import StepLines
from rlkit.errors import RlkitError
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.serving.replica import healthy
from rlkit.training.launch import trainer_command, trainer_environment

STEP_MARK = "rlkit-step "
LEASE_MARK = "rlkit-lease taken over"
RENEW_EVERY_S = 30.0
RECORDS_EVERY_S = 60.0
# A resume goes back to the newest checkpoint, so what was logged before it must be kept with it.
CHECKPOINT_LOOK_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
PROXY_TIMEOUT_S = 120.0
STOP_GRACE_S = 15.0  # the Trainer writes nothing at its end that a checkpoint does not have


def main() -> None:
    """Train; exits with the trainer's code."""
    parser = argparse.ArgumentParser(description="The trainer's Job.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the run's folder in the mounted bucket")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--replica", action="append", required=True)
    parser.add_argument("--receiver", action="append", default=[])
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _exit_now)
    recipe = load_recipe(options.folder / "recipe.yaml")
    try:
        code = _train(recipe, options)
    finally:
        _cancel_replicas(recipe, options)
    sys.exit(code)


def _train(recipe: Recipe, options: argparse.Namespace) -> int:
    # On the Job's own disk: a mounted bucket is no place for a database, nor for a file that grows by the line.
    local = RunFolder(Path(tempfile.mkdtemp(prefix="rlkit-")) / options.run, shared_at=options.folder / "shared")
    local.path.mkdir()
    local.shared.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRACKIO_DIR", str(local.path / "trackio"))
    _replace(options.folder / "lease", renewal())
    print(LEASE_MARK, flush=True)
    restore_records(options.folder, local)
    checkpoint = newest_checkpoint(local.shared, before=recipe.train.steps)
    steps = StepLines(local.steps)
    with contextlib.ExitStack() as stack:
        stack.callback(keep_records, local, options.folder)
        proxy, url = _start_proxy(stack, recipe, options, local)
        model = model_argument(recipe, options.models)
        command = options.command or trainer_command(recipe, local, model, url, checkpoint)
        environment = trainer_environment(not has_gpu())
        if options.command:
            environment |= {"RLKIT_SERVER_URL": url, "RLKIT_RUN_FOLDER": str(local.path)}
            environment |= {"RLKIT_SHARED": str(local.shared), "RLKIT_CHECKPOINT": str(checkpoint or "")}
        if checkpoint is not None:
            print(f"resuming from {checkpoint.name}", flush=True)
        trainer = start_child(stack, command, STOP_GRACE_S, environment)
        renewed = kept = looked = time.monotonic()
        newest = checkpoint
        while trainer.poll() is None:
            now = time.monotonic()
            if now - renewed >= RENEW_EVERY_S:
                _replace(options.folder / "lease", renewal())
                renewed = now
            found = newest
            if now - looked >= CHECKPOINT_LOOK_EVERY_S:
                found, looked = newest_checkpoint(local.shared), now
            if found != newest or now - kept >= RECORDS_EVERY_S:
                keep_records(local, options.folder)
                newest, kept = found, now
            _say(steps)
            if proxy.poll() is not None:
                print(f"the proxy ended with code {proxy.returncode}", flush=True)
                return 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainer.wait(LOOK_EVERY_S)
        _say(steps)
        code = trainer.returncode
        return code if code >= 0 else 128 - code


def _start_proxy(
    stack: contextlib.ExitStack, recipe: Recipe, options: argparse.Namespace, local: RunFolder
) -> tuple[subprocess.Popen[bytes], str]:
    port_file = local.path / ".proxy-port"
    config: dict[str, Any] = {
        "replicas": options.replica,
        "routing": recipe.routing.model_dump(),
        "transport": recipe.transport.model_dump(),
        "max_loras": recipe.serve.max_loras,
        "adapter_root": str(local.shared.resolve()),
        "port_file": str(port_file),
        "stats_file": str(local.proxy),
        # The Jobs proxy before an exposed port asks for the Hub's token.
        "token_env": TOKEN_VARIABLE,
    }
    if options.receiver:
        config |= {"receivers": options.receiver, "receiver_token_env": TOKEN_VARIABLE}
    config_file = local.path / ".proxy-config.json"
    config_file.write_text(json.dumps(config, indent=2))
    proxy = start_child(
        stack, [sys.executable, "-m", "rlkit.serving.proxy", "--config", str(config_file)], STOP_GRACE_S
    )
    deadline = time.monotonic() + PROXY_TIMEOUT_S
    url = ""
    while time.monotonic() < deadline and proxy.poll() is None:
        if not url and port_file.exists() and port_file.read_text().strip():
            url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        if url:
            with httpx.Client(base_url=url, mounts={"all://127.0.0.1": None}) as client:
                if healthy(client):
                    return proxy, url
        time.sleep(LOOK_EVERY_S / 5)
    raise SystemExit(f"the proxy did not reach its replicas within {PROXY_TIMEOUT_S:g} s")


def _cancel_replicas(recipe: Recipe, options: argparse.Namespace) -> None:
    labels = run_labels(recipe, options.run) | {"role": "replica"}
    try:
        hub = Hub.connect(options.namespace)
        for job in hub.find(labels):
            if phase_of(job.status.stage) != "ended":
                hub.cancel(job.id)
                print(f"cancelled {job.id}", flush=True)
    except RlkitError as error:
        # They end by themselves once their lease runs out.
        print(f"the replicas could not be cancelled: {error}", flush=True)


def _say(steps: StepLines) -> None:
    """Say each new step on the log, marked."""
    for line in steps.new():
        print(f"{STEP_MARK}{line}", flush=True)


def _replace(path: Path, data: bytes) -> None:
    # Whole or not at all, where the mount allows it.
    staging = path.with_name(f".{path.name}.new")
    staging.write_bytes(data)
    shutil.move(staging, path)


def _exit_now(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
