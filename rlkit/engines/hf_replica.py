"""What runs in a replica's Job: vLLM, a receiver beside it when adapters are pushed, and a lease that ends both.

`python -m rlkit.engines.hf_replica --recipe FILE --port N --lease FILE --lease-s S [-- COMMAND]`
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from rlkit.engines.hf_child import start_child
from rlkit.engines.hf_lease import Lease
from rlkit.engines.hf_token import receiver_token_variable
from rlkit.recipe import Recipe, load_recipe
from rlkit.serving.replica import vllm_command, vllm_environment
from rlkit.training.toy_task import MODEL_NAMES

# A mount serves what it knows for ten seconds; looking more often shows nothing new.
LEASE_LOOKS = 20  # per lease
STOP_GRACE_S = 10.0  # vLLM ends its workers; the Job's container gives half a minute
ABANDONED = 75  # the exit code for a lease that ran out (sysexits' EX_TEMPFAIL: nobody was there)


def main() -> None:
    """Serve until a child ends, the Job is cancelled, or nobody renews the lease."""
    parser = argparse.ArgumentParser(description="A replica's Job.")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lease", type=Path, required=True)
    parser.add_argument("--lease-s", type=float, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--receiver-port", type=int)
    parser.add_argument("--direct", action="store_true", help="nothing stands before the receiver")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe)
    on_cpu = not has_gpu()
    # 0.0.0.0: on localhost the exposed port would answer nothing.
    command = options.command or vllm_command(
        recipe, model_argument(recipe, options.models), options.port, "0.0.0.0", on_cpu
    )
    signal.signal(signal.SIGTERM, _exit_now)
    with contextlib.ExitStack() as stack:
        children = [start_child(stack, command, STOP_GRACE_S, vllm_environment(recipe, on_cpu))]
        if options.receiver_port is not None:
            from rlkit.serving.receiver import receiver_command

            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlkit-adapters-")))
            children.append(
                start_child(
                    stack,
                    receiver_command(
                        root, receiver_token_variable(options.direct), options.receiver_port, host="0.0.0.0"
                    ),
                    STOP_GRACE_S,
                )
            )
        lease = Lease(options.lease_s, time.monotonic())
        while True:
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(options.lease_s / LEASE_LOOKS / len(children))
                    sys.exit(code if code >= 0 else 128 - code)
            if not lease.observe(time.monotonic(), _read(options.lease)):
                print(f"nobody renewed the lease for {options.lease_s:g} s: this replica ends", flush=True)
                sys.exit(ABANDONED)


def model_argument(recipe: Recipe, models: Path) -> str:
    """What vLLM and the trainer load: a folder that the launch put into the bucket, else the Hub id."""
    delivered = models / delivered_name(recipe)
    return str(delivered) if delivered.is_dir() else recipe.model.name


def delivered_name(recipe: Recipe) -> str:
    """The folder's name for a model that is not on the Hub; a toy model is another for each seed."""
    if recipe.model.name in MODEL_NAMES:
        return f"{recipe.model.name}-{recipe.train.seed}"
    return recipe.model.name.strip("/").replace("/", "--").replace("~", "")


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU here, without importing torch."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia"))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _exit_now(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
