"""The kinds of numbers that a recipe's fields hold, each with the bounds beyond which it can only be a slip.

The upper bounds are far above what runs use, and low enough that what reads a recipe ends: preflight and the simulator
count in replicas, rollouts and steps. Whether a value suits its machine is `rlkit.preflight`'s business.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_STEPS = 1_000_000  # twelve days at a second a step; the published runs have 500
MAX_LEARNING_RATE = 1.0  # Adam moves every weight by about this much a step, and weights are smaller
MAX_PROCESSES = 1024  # each has a GPU of its own
MAX_REPLICAS = 1024  # each has GPUs of its own; the published runs have up to three
MAX_PARALLEL = 64  # GPUs or engines of one vLLM server: eight nodes of eight
MAX_IN_FLIGHT = 65_536  # a rollout is a connection, and two addresses have ports for no more
MAX_QUEUE = 1_000_000  # samples; they lie in the trainer's memory, and each is some ten to hundred KB
MAX_GROUP = 4096  # rollouts of one prompt; the published runs have 8
MAX_BATCH = 4096  # rows of a rank at once, and microbatches of a step; the published runs have 64
MAX_STALENESS = 1024  # policy versions; each is an adapter slot on every replica
MAX_TOKENS = 2**24  # of a sequence, a row or a prefill batch; the longest contexts of models are of ten million
MAX_RANK = 65_536  # of an adapter; more than layers are wide
MAX_TOP_K = 10_000_000  # tokens; vocabularies have some hundred thousand
MAX_TEMPERATURE = 100.0  # long before, every token is as likely as any other
MAX_BLOCK = 65_536  # tokens; vLLM's blocks have 16 to some hundreds
MAX_BLOCKS = 100_000_000  # of a KV cache; at 16 tokens each more than a rack of GPUs holds
MAX_CACHE_GIB = 65_536.0  # more memory than any server has
MAX_SEED = 2**32 - 1  # numpy takes no larger one
MAX_USD = 1_000_000.0  # of an hour as of a run; a person who spends more does not do so by a recipe
MAX_HOURS = 168.0  # a week, for whatever is waited for
NEVER = 1_000_000_000  # where a huge number is a way to say never or all, and does no harm

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]

Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]
LearningRate = Annotated[float, Field(ge=0, le=MAX_LEARNING_RATE)]
Processes = Annotated[int, Field(gt=0, le=MAX_PROCESSES)]
Replicas = Annotated[int, Field(gt=0, le=MAX_REPLICAS)]
Parallel = Annotated[int, Field(gt=0, le=MAX_PARALLEL)]
InFlight = Annotated[int, Field(ge=-1, le=MAX_IN_FLIGHT)]
Sequences = Annotated[int, Field(gt=0, le=MAX_IN_FLIGHT)]
QueueSize = Annotated[int, Field(gt=0, le=MAX_QUEUE)]
Group = Annotated[int, Field(ge=2, le=MAX_GROUP)]
Batch = Annotated[int, Field(gt=0, le=MAX_BATCH)]
Staleness = Annotated[int, Field(ge=0, le=MAX_STALENESS)]
Slots = Annotated[int, Field(gt=0, le=MAX_STALENESS + 2)]  # see Recipe.adapter_slots_needed
Tokens = Annotated[int, Field(gt=0, le=MAX_TOKENS)]
Budget = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Rank = Annotated[int, Field(gt=0, le=MAX_RANK)]
TopK = Annotated[int, Field(ge=0, le=MAX_TOP_K)]
Temperature = Annotated[float, Field(gt=0, le=MAX_TEMPERATURE)]
Block = Annotated[int, Field(gt=0, le=MAX_BLOCK)]
Blocks = Annotated[int, Field(gt=0, le=MAX_BLOCKS)]
CacheGib = Annotated[float, Field(gt=0, le=MAX_CACHE_GIB)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Usd = Annotated[float, Field(gt=0, le=MAX_USD)]
UsdOrNothing = Annotated[float, Field(ge=0, le=MAX_USD)]
Hours = Annotated[float, Field(gt=0, le=MAX_HOURS)]
Minutes = Annotated[float, Field(gt=0, le=MAX_HOURS * 60)]
Seconds = Annotated[float, Field(gt=0, le=MAX_HOURS * 3600)]
WholeSeconds = Annotated[int, Field(gt=0, le=int(MAX_HOURS * 3600))]
OrNever = Annotated[int, Field(gt=0, le=NEVER)]
Ahead = Annotated[int, Field(ge=0, le=NEVER)]
