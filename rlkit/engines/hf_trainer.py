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
from collections.abc import Callable
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import httpx

from rlkit.engines import hf_addresses
from rlkit.engines.checkpoint import newest_checkpoint
from rlkit.engines.hf_addresses import Address, from_json, moved
from rlkit.engines.hf_child import start_child
from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_jobs import TOKEN_VARIABLE, run_labels
from rlkit.engines.hf_lease import renewal
from rlkit.engines.hf_records import keep_records, restore_records
from rlkit.engines.hf_replica import has_gpu, model_argument
from rlkit.engines.hf_token import receiver_token_variable
from rlkit.engines.hf_watch import phase_of
from rlkit.engines.step_lines import StepLines
from rlkit.errors import RlkitError
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.serving.replica import DIRECT, healthy
from rlkit.training.launch import trainer_command, trainer_environment

STEP_MARK = "rlkit-step "
LEASE_MARK = "rlkit-lease taken over"
RENEW_EVERY_S = 30.0
RECORDS_EVERY_S = 60.0
# A resume goes back to the newest checkpoint, so what was logged before it must be kept with it.
CHECKPOINT_LOOK_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
PROXY_TIMEOUT_S = 120.0
# A replica loads, compiles and captures for minutes on a GPU.
REPLICA_TIMEOUT_S = 900.0
# The mount shows a changed file ten seconds late; the proxy answers at once.
MOVED_LOOK_EVERY_S = 5.0
MOVE_TIMEOUT_S = 10.0
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
        with contextlib.ExitStack() as stack:
            code = _TrainerJob(recipe, options, stack).train()
    finally:
        _cancel_replicas(recipe, options)
    sys.exit(code)


class _TrainerJob:
    """What goes on in the Job: `train` to the end, `_look_after` in between."""

    def __init__(self, recipe: Recipe, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._recipe, self._options, self._stack = recipe, options, stack
        # On the Job's own disk: a mounted bucket is no place for a database, nor for a file that grows by the line.
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlkit-", ignore_cleanup_errors=True)))
        self._local = RunFolder(own / options.run, shared_at=options.folder / "shared")
        self._local.path.mkdir()
        self._local.shared.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TRACKIO_DIR", str(self._local.path / "trackio"))
        pairs = zip_longest(options.replica, options.receiver)
        self._known = {number: Address(url, receiver) for number, (url, receiver) in enumerate(pairs)}
        self._due = {work: 0.0 for work in (self._renew, self._find_moved, self._find_checkpoint, self._keep)}
        self._proxy_url = ""
        self._newest: Path | None = None

    def train(self) -> int:
        """The trainer's exit code, or 1 when the proxy ended."""
        local, options = self._local, self._options
        self._look_after(self._renew)
        print(LEASE_MARK, flush=True)
        restore_records(options.folder, local)
        checkpoint = self._newest = newest_checkpoint(local.shared, before=self._recipe.train.steps)
        self._steps = StepLines(local.steps)
        self._stack.callback(self._keep)
        proxy = self._start_proxy()
        model = model_argument(self._recipe, options.models)
        command = options.command or trainer_command(self._recipe, local, model, self._proxy_url, checkpoint)
        environment = trainer_environment(not has_gpu())
        if options.command:
            environment |= {"RLKIT_SERVER_URL": self._proxy_url, "RLKIT_RUN_FOLDER": str(local.path)}
            environment |= {"RLKIT_SHARED": str(local.shared), "RLKIT_CHECKPOINT": str(checkpoint or "")}
        if checkpoint is not None:
            print(f"resuming from {checkpoint.name}", flush=True)
        trainer = start_child(self._stack, command, STOP_GRACE_S, environment)
        while trainer.poll() is None:
            self._look_after(self._renew, self._find_moved, self._find_checkpoint, self._keep)
            self._say_steps()
            if proxy.poll() is not None:
                print(f"the proxy ended with code {proxy.returncode}", flush=True)
                return 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainer.wait(LOOK_EVERY_S)
        self._say_steps()
        code = trainer.returncode
        return code if code >= 0 else 128 - code

    def _look_after(self, *works: Callable[[], float]) -> None:
        """Do what is due; each says in how many seconds it is due again."""
        for work in works:
            if time.monotonic() >= self._due[work]:
                self._due[work] = time.monotonic() + work()

    def _renew(self) -> float:
        try:
            _replace(self._options.folder / "lease", renewal())
        except OSError as error:  # the lease outlasts many of these; what lasts, ends the trainer at its checkpoint
            print(f"the replicas' lease was not renewed: {error}", flush=True)
        return RENEW_EVERY_S

    def _keep(self) -> float:
        keep_records(self._local, self._options.folder)
        return RECORDS_EVERY_S

    def _find_checkpoint(self) -> float:
        found = newest_checkpoint(self._local.shared)
        if found != self._newest:
            self._newest = found
            self._keep()
        return CHECKPOINT_LOOK_EVERY_S

    def _find_moved(self) -> float:
        """Tell the proxy which replicas were started anew somewhere else; it is told again when it does not answer."""
        try:
            data = (self._options.folder / hf_addresses.FILE).read_bytes()
        except OSError:
            data = None
        for number, address in moved(self._known, from_json(data)).items():
            body = {"replica": number, **asdict(address.expanded())}
            with contextlib.suppress(httpx.HTTPError), _client(self._proxy_url) as client:
                answer = client.post("/proxy/replicas", json=body, timeout=MOVE_TIMEOUT_S)
                print(answer.text, flush=True)
                self._known[number] = address
        return MOVED_LOOK_EVERY_S

    def _start_proxy(self) -> subprocess.Popen[bytes]:
        local, recipe = self._local, self._recipe
        port_file = local.path / ".proxy-port"
        config_file = local.path / ".proxy-config.json"
        config_file.write_text(json.dumps(self._proxy_config(port_file), indent=2))
        command = [sys.executable, "-m", "rlkit.serving.proxy", "--config", str(config_file)]
        proxy = start_child(self._stack, command, STOP_GRACE_S)
        started = time.monotonic()
        while proxy.poll() is None:
            waited = time.monotonic() - started
            if self._proxy_url:
                with _client(self._proxy_url) as client:
                    if healthy(client):
                        return proxy
                # A replica that was lost meanwhile is replaced: on other hardware, with a start of its own.
                if waited > recipe.hardware.scheduling_minutes * 60 + REPLICA_TIMEOUT_S:
                    raise SystemExit(f"not every replica is well after {waited / 60:.0f} minutes")
                self._look_after(self._renew, self._find_moved)
            elif port_file.exists() and port_file.read_text().strip():
                self._proxy_url = f"http://127.0.0.1:{port_file.read_text().strip()}"
            elif waited > PROXY_TIMEOUT_S:
                raise SystemExit(f"the proxy does not listen after {PROXY_TIMEOUT_S:g} s")
            time.sleep(LOOK_EVERY_S / 5)
        raise SystemExit(f"the proxy ended with code {proxy.returncode}")

    def _proxy_config(self, port_file: Path) -> dict[str, Any]:
        recipe, local = self._recipe, self._local
        here = [self._known[number].expanded() for number in sorted(self._known)]
        is_direct = self._known[0].is_direct
        config: dict[str, Any] = {
            "replicas": [address.url for address in here],
            "routing": recipe.routing.model_dump(),
            "transport": recipe.transport.model_dump(),
            "max_loras": recipe.serve.max_loras,
            "adapter_root": str(local.shared.resolve()),
            "port_file": str(port_file),
            "stats_file": str(local.proxy),
        }
        if not is_direct:  # the Jobs proxy before an exposed port asks for the Hub's token
            config["token_env"] = TOKEN_VARIABLE
        if self._options.receiver:
            config["receivers"] = [address.receiver for address in here]
            config["receiver_token_env"] = receiver_token_variable(is_direct)
        return config

    def _say_steps(self) -> None:
        """Say each new step on the log, marked."""
        for line in self._steps.new():
            print(f"{STEP_MARK}{line}", flush=True)


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, mounts=DIRECT)


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


def _replace(path: Path, data: bytes) -> None:
    # Whole or not at all, where the mount allows it.
    staging = path.with_name(f".{path.name}.new")
    staging.write_bytes(data)
    shutil.move(staging, path)


def _exit_now(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
