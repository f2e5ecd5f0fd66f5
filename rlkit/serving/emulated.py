"""`python -m rlkit.serving.emulated --port 8000`: a replica without a model, by itself (`EmulatedReplica`)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from functools import partial
from pathlib import Path

from rlkit.errors import BadInput
from rlkit.serving.emulated_engine import EmulatedEngine
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.emulated_timing import EmulatedTiming, rates_of
from rlkit.simulation.replica import Capacity


async def _serve(replica: EmulatedReplica, port: int) -> None:
    await replica.start(port)
    print(replica.url, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run one emulated replica until it is interrupted; prints its address."""
    parser = argparse.ArgumentParser(description="A replica without a model, for tests and dry runs.")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--token-delay-s", type=float, default=0.0, help="seconds per generated token")
    parser.add_argument("--gpu", help="take as long as a 1.5 B model on this GPU (h200, h100, ...), KV cache and all")
    parser.add_argument("--kv-tokens", type=int, default=300_000, help="tokens the KV cache holds, with --gpu")
    parser.add_argument("--speed", type=float, default=1.0, help="emulated seconds in a real one, with --gpu")
    parser.add_argument("--mean-tokens", type=float, help="mean length of a completion; default: anything allowed")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--mount", type=Path, help="files in this folder show late")
    parser.add_argument("--mount-lag-s", type=float, default=0.0, help="by so many seconds")
    options = parser.parse_args()

    def engine() -> EmulatedEngine:
        blocks = options.kv_tokens // EmulatedEngine.block_size + 1
        sizes = {"num_gpu_blocks": blocks, "max_model_len": options.max_model_len}
        return EmulatedEngine(**sizes, mean_tokens=options.mean_tokens)

    async def run() -> None:
        timing = None
        if options.gpu is not None:
            rates, capacity = rates_of(options.gpu), Capacity(options.kv_tokens, block_size=EmulatedEngine.block_size)
            timing = partial(EmulatedTiming, rates, capacity, options.speed)
        replica = EmulatedReplica(engine=engine, timing=timing)
        replica.faults.token_delay_s = options.token_delay_s
        replica.faults.mount, replica.faults.mount_lag_s = options.mount, options.mount_lag_s
        await _serve(replica, options.port)

    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(run())
        except BadInput as problem:
            sys.exit(f"emulated: {problem}")


if __name__ == "__main__":
    main()
