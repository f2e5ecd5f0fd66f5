"""What size a setting should have: one rule for each, whoever asks. Pure.

The verdict's next action, the advice and with it the chase, the plan and the what-if all take their values from here,
so that they never name different ones for one run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlkit.errors import RlkitError
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.simulation.hardware import CPU_FLAVOR
from rlkit.simulation.recipes import translate
from rlkit.simulation.training_memory import training_memory

# How full a packed row gets (batch/row_fill_frac of the published run 2).
PACKED_FILL = 0.95

# Longest sequences that a packed row holds: four as published (16,384 tokens for 4,096), fewer where those do not fit
# into the trainer's GPU, and once more for a row that has as many already.
ROWS_OF_CONTEXTS = (4, 2, 1)
MOST_CONTEXTS = 8

# The in-flight limit comes with a queue of twice its size, so that finished groups find room (published: 384 and 768).
QUEUE_PER_INFLIGHT = 2

# What vLLM takes at once where the recipe leaves it open: its smallest default on a CPU, and on a GPU.
CPU_SLOTS = 128
GPU_SLOTS = 256

# More rollouts in flight are at least twice as many: a step that is worth a run.
LEAST_STEP_UP = 2.0

# Beyond the staleness window samples are thrown away, so that it is left by a tenth at a time.
BEYOND_WINDOW = 1.1

# A trainer cannot be waited for longer than this part of the step.
MOST_WAIT = 0.99

# Seconds between two attempts to load an adapter: the published choices end here.
SHORT_RETRY_S = 0.5


@dataclass(frozen=True)
class Situation:
    """A recipe, and what its run says of the samples of a step (their number, and tokens of each, prompt included).

    `wait_share` is the part of a step for which the trainer waits.
    """

    recipe: Recipe
    samples_per_step: float
    sample_tokens: float
    wait_share: float = 0.0

    @property
    def shares_cores(self) -> bool:
        """Trainer and replicas run on one machine without GPUs: more of them only divide it."""
        return self.recipe.hardware.replica.lower() == CPU_FLAVOR

    @property
    def window(self) -> int:
        """Samples that are trained on before they are too stale."""
        return math.floor(self.recipe.fresh_samples(self.samples_per_step))


def situation(recipe: Recipe, signals: Signals) -> Situation | None:
    """What a run logged of its samples, and where it did not what its recipe makes likely; None: nobody can say."""
    tokens = signals.sample_tokens
    if tokens is None and signals.row_tokens is not None and signals.samples_per_row:
        tokens = signals.row_tokens / signals.samples_per_row
    try:
        tokens = tokens or tokens_per_sample(recipe)
    except RlkitError:  # of hardware or a model that nothing is known of
        if signals.samples_per_step is None:
            return None
        tokens = float(recipe.serve.max_model_len)
    samples = signals.samples_per_step or samples_per_step(recipe, tokens)
    return Situation(recipe, samples, tokens, signals.wait_share or 0.0)


def samples_per_step(recipe: Recipe, sample_tokens: float | None = None) -> float:
    """Samples of an optimizer step: the fixed count, or what packed rows hold of so many tokens each.

    Without `sample_tokens` they are as long as the simulator takes them to be. Raises BadInput for a packed recipe of a
    model or hardware that nothing is known of.
    """
    if recipe.samples_per_step is not None:
        return float(recipe.samples_per_step)
    tokens = tokens_in_row(recipe, sample_tokens or tokens_per_sample(recipe))
    rows = recipe.train.gradient_accumulation_steps * recipe.train.processes
    return rows * row_tokens(recipe) * PACKED_FILL / tokens


def tokens_per_sample(recipe: Recipe) -> float:
    """Prompt and completion of an average sample, over the whole run. Raises BadInput for an unknown model."""
    lengths = translate(recipe).setup.lengths
    return lengths.prompt_tokens + (lengths.mean_start + lengths.mean_end) / 2


def tokens_in_row(recipe: Recipe, sample_tokens: float) -> float:
    """What a sample of so many tokens takes of a packed row.

    Where rows are trees (TRL from 1.16 on) the samples of a group have their prompt in common, and a row is full when
    either what is forwarded or what is trained on reaches the budget.
    """
    try:
        setup = translate(recipe).setup
    except RlkitError:
        return sample_tokens
    sharing = setup.trainer.sharing
    if sharing is None:
        return sample_tokens
    prompt = min(setup.lengths.prompt_tokens, sample_tokens)
    completion = sample_tokens - prompt
    group = recipe.sampling.num_generations
    first, others = min(sharing.template_tokens, prompt), prompt + sharing.completion_share * completion
    return max(1.0, completion, sample_tokens - (first + (group - 1) * others) / group)


def row_tokens(recipe: Recipe) -> int:
    """Tokens of a packed row, 0 where rows are not packed."""
    budget = recipe.train.token_budget
    return recipe.serve.max_model_len if budget is None else budget


def packed(recipe: Recipe, samples: float, sample_tokens: float, budget: int) -> list[str]:
    """The changes that pack rows of `budget` tokens, as many for each process as hold so many samples a step."""
    tokens = samples * tokens_in_row(recipe, sample_tokens)
    rows = max(1, math.ceil(tokens / (budget * PACKED_FILL * recipe.train.processes)))
    return [f"train.token_budget={budget}", f"train.gradient_accumulation_steps={rows}"]


def packed_budget(recipe: Recipe) -> int:
    """Tokens of a row that samples are packed into: four longest sequences, or what of them the trainer's GPU holds."""
    sizes = [contexts * recipe.serve.max_model_len for contexts in ROWS_OF_CONTEXTS]
    return next((size for size in sizes if _fits(recipe, size)), sizes[-1])


def longer_rows(now: Situation) -> list[str] | None:
    """The changes that pack samples, or make packed rows longer; None where they are as long as it pays."""
    recipe, packs = now.recipe, row_tokens(now.recipe)
    filled = packs or recipe.train.per_device_train_batch_size * now.sample_tokens / PACKED_FILL
    if packs and recipe.train.gradient_accumulation_steps < 2:
        return None
    sizes = (packed_budget(recipe), MOST_CONTEXTS * recipe.serve.max_model_len)
    budget = next((size for size in sizes if size > filled), None)
    return None if budget is None else packed(recipe, now.samples_per_step, now.sample_tokens, budget)


def _fits(recipe: Recipe, budget: int) -> bool:
    memory = training_memory(recipe.with_overrides([f"train.token_budget={budget}"]))
    return memory is None or memory.fits


def slots(recipe: Recipe) -> int:
    """Sequences that all replicas together may run at once."""
    default = CPU_SLOTS if recipe.hardware.replica.lower() == CPU_FLAVOR else GPU_SLOTS
    return (recipe.serve.max_num_seqs or default) * recipe.serve.engines


def more_in_flight(now: Situation) -> int | None:
    """Rollouts in flight for a client that asks for too few; None where the replicas have no slot for one more.

    As many for each engine as there were for all of them, or what the waiting says is missing: without its waits the
    trainer would take samples 1 / (1 - wait) times as fast. No more than have a slot and are trained on in time.
    """
    limit = now.recipe.inflight_limit
    wanted = limit * max(LEAST_STEP_UP, now.recipe.serve.engines, 1 / (1 - min(now.wait_share, MOST_WAIT)))
    most = min(slots(now.recipe), max(now.window, math.ceil(BEYOND_WINDOW * limit)))
    found = min(math.ceil(wanted), most)
    return found if found > limit else None


def fewer_in_flight(recipe: Recipe) -> int | None:
    """Half of the rollouts in flight; None where that is less than a group."""
    half = recipe.inflight_limit // 2
    return half if half >= recipe.sampling.num_generations else None


def queue_for(now: Situation, in_flight: int) -> int:
    """Samples the queue may hold: as many as now, or more for what is in flight and still trained on in time."""
    return max(now.recipe.rollout.queue_maxsize, min(QUEUE_PER_INFLIGHT * in_flight, now.window - in_flight))


def queue_in_time(now: Situation) -> int | None:
    """The queue whose samples are all trained on in time; None where it is no larger."""
    window = max(1, now.window)
    return window if now.recipe.rollout.queue_maxsize > window else None


def generation(now: Situation, in_flight: int) -> list[str]:
    """The changes that keep so many rollouts in flight, the queue with them."""
    found = [f"rollout.max_inflight_tasks={in_flight}"]
    queue = queue_for(now, in_flight)
    return found if queue == now.recipe.rollout.queue_maxsize else [*found, f"rollout.queue_maxsize={queue}"]


def rarer_sync(recipe: Recipe) -> int:
    """Steps between two weight syncs where they take too long."""
    return 2 * recipe.rollout.weight_sync_steps


def shorter_retry(recipe: Recipe) -> float | None:
    """Seconds between two attempts to load an adapter; None where they are as short, or there are none."""
    transport = recipe.transport
    retries = transport.kind == "bucket" and recipe.lora is not None
    return SHORT_RETRY_S if retries and transport.retry_s > SHORT_RETRY_S else None
