from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import recorded

from rlkit.diagnosis import diagnose
from rlkit.engines import LAUNCHERS
from rlkit.launch_plan import recipes_under
from rlkit.preflight import (
    CPU_HEAD_SIZES,
    LORA_RANKS,
    Finding,
    MachineFacts,
    check,
    gather_facts,
    memory_needed_gib,
    ports_needed,
)
from rlkit.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[1]
COMMITTED = recipes_under(ROOT / "runs")
LOCAL, CHASE, CAP = (
    load_recipe(ROOT / "runs" / name) for name in ("local.yaml", "published/r1-dp2.yaml", "adaptive-cap/kv8g-main.yaml")
)
VERSIONS = {"trl": "1.16.0", "transformers": "5.17.0", "vllm": "0.31.0", "torch": "2.13.0+cpu"}
# A machine without a GPU on which the local recipe runs.
FITTING = MachineFacts(
    memory_gib=20.0,
    free_disk_gib=50.0,
    free_ports=3,
    versions=VERSIONS,
    head_size=32,
    max_positions=512,
    chat_template_known=True,
    longest_prompt_tokens=20,
)
# What is known of the published runs, whose jobs are elsewhere.
ELSEWHERE = replace(FITTING, head_size=128, max_positions=131072, longest_prompt_tokens=500)
WITH_GPUS = replace(FITTING, cuda_devices=8, versions=VERSIONS | {"torch": "2.13.0+cu130"})


def found(recipe: Recipe, facts: MachineFacts = FITTING) -> dict[str, Finding]:
    """Findings by field; two on one field would hide one another."""
    findings = check(recipe, facts)
    assert len({finding.field for finding in findings}) == len(findings)
    return {finding.field: finding for finding in findings}


def only(findings: dict[str, Finding]) -> Finding:
    (finding,) = findings.values()
    return finding


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_recipes_have_no_errors(path: Path) -> None:
    recipe = load_recipe(path)
    findings = check(recipe, FITTING if recipe.engine == "local" else ELSEWHERE)
    assert [str(finding) for finding in findings if finding.severity == "error"] == []


@pytest.mark.parametrize("name", ["local", "local-trainer-bound", "local-generation-bound"])
def test_the_local_recipes_have_nothing_to_change(name: str) -> None:
    assert check(load_recipe(ROOT / "runs" / f"{name}.yaml"), FITTING) == []


def test_nothing_is_concluded_from_what_is_not_known() -> None:
    assert check(LOCAL, MachineFacts()) == []


def test_all_findings_come_at_once_errors_first() -> None:
    overrides = ["serve.max_loras=2", "lora.use_dora=true", "train.token_budget=51", "serve.block_size=16"]
    findings = check(LOCAL.with_overrides(overrides), replace(FITTING, reward_problem="no"))
    assert [finding.severity for finding in findings] == ["error"] * 4 + ["warning"]
    fields = {finding.field for finding in findings}
    assert fields == {"serve.max_loras", "lora.use_dora", "train.token_budget", "serve.block_size", "reward"}


def test_a_finding_reads_as_one_line() -> None:
    finding = only(found(LOCAL.with_overrides(["serve.max_loras=5"])))
    assert str(finding) == (
        "serve.max_loras: 5 slots, and max_staleness 4 needs 6; set serve.max_loras to 6 or lower rollout.max_staleness"
    )


def test_what_only_a_product_makes_huge_is_an_error_too() -> None:
    batch = ["train.gradient_accumulation_steps=4096", "train.per_device_train_batch_size=4096"]
    many = check(LOCAL.with_overrides([*batch, "rollout.max_inflight_tasks=-1"]), FITTING)
    (error,) = [str(finding) for finding in many if finding.severity == "error"]
    assert error.startswith("rollout.max_inflight_tasks: TRL's formula makes 67108864 of it, more than 65536 connect")
    served = ["serve.replicas=1024", "serve.data_parallel_size=2"]
    assert "serve.replicas: 1024 replicas of 2 engines are 2048; ask for at most 1024 engines" in [
        str(finding) for finding in check(CHASE.with_overrides(served), ELSEWHERE)
    ]


def test_weights_that_are_synced_once_are_told() -> None:
    assert found(LOCAL.with_overrides(["rollout.weight_sync_steps=48", "rollout.queue_maxsize=64"])) == {}
    finding = only(found(LOCAL.with_overrides(["rollout.weight_sync_steps=49", "rollout.queue_maxsize=64"])))
    assert (finding.severity, str(finding)) == (
        "warning",
        "rollout.weight_sync_steps: 49 is more than train.steps 48: every rollout comes from the first weights; "
        "set it to at most 48, or raise train.steps",
    )


@pytest.mark.parametrize(("staleness", "needed"), [(0, 4), (4, 8), (20, 13)])
def test_too_few_steps_for_a_verdict_are_told_and_that_many_give_one(staleness: int, needed: int) -> None:
    changes = [f"rollout.max_staleness={staleness}", f"serve.max_loras={staleness + 2}"]
    assert found(LOCAL.with_overrides([*changes, f"train.steps={needed}"])) == {}
    short = LOCAL.with_overrides([*changes, f"train.steps={needed - 1}"])
    finding = only(found(short))
    assert (finding.severity, finding.field, finding.fix) == ("warning", "train.steps", f"set it to at least {needed}")
    frame = recorded("learning-run")
    assert "can be used" in diagnose(frame.iloc[: needed - 1], short).headline
    assert "can be used" not in diagnose(frame.iloc[:needed], short).headline


# The adapter


@pytest.mark.parametrize(("slots", "staleness", "fits"), [(6, 4, True), (5, 4, False), (2, 0, True), (1, 0, False)])
def test_adapter_slots_cover_staleness_and_the_one_being_loaded(slots: int, staleness: int, fits: bool) -> None:
    recipe = LOCAL.with_overrides([f"serve.max_loras={slots}", f"rollout.max_staleness={staleness}"])
    assert ("serve.max_loras" not in found(recipe)) == fits


@pytest.mark.parametrize(
    ("rank", "served", "field", "fix"),
    [
        (1, 1, None, ""),
        (4, 8, None, ""),
        (16, 8, "lora.r", "serve.max_lora_rank to 16 or lora.r to at most 8"),
        (4, 1, "lora.r", "serve.max_lora_rank to 8"),
        (4, 4, "serve.max_lora_rank", "to 8"),
        (300, 300, "serve.max_lora_rank", "to 320"),
        (513, 512, "lora.r", "at most 512"),
        (512, 512, None, ""),
    ],
)
def test_ranks_are_those_vllm_serves(rank: int, served: int, field: str | None, fix: str) -> None:
    findings = found(LOCAL.with_overrides([f"lora.r={rank}", f"serve.max_lora_rank={served}"]))
    assert set(findings) == ({field} if field else set())
    assert field is None or fix in findings[field].fix


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("serve.data_parallel_size=2", "serve.data_parallel_size"),
        ("lora.use_dora=true", "lora.use_dora"),
        ("lora.modules_to_save=[embed_tokens]", "lora.modules_to_save"),
        ("lora.bias=all", "lora.bias"),
        ("lora.target_modules=[q_proj, lm_head]", "lora.target_modules"),
        ("lora.target_modules=.*(q_proj|lm_head)", "lora.target_modules"),
        ("lora.target_modules=[embed_tokens]", "lora.target_modules"),
    ],
)
def test_what_vllm_cannot_serve_as_an_adapter_is_an_error(override: str, field: str) -> None:
    finding = only(found(LOCAL.with_overrides([override])))
    assert (finding.field, finding.severity) == (field, "error")


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [(LOCAL, ["lora=null"]), (CHASE, ["transport.kind=merged"]), (CAP, ["transport.kind=push"])],
    ids=["adapter transport without lora", "merged with lora", "push without lora"],
)
def test_transport_and_lora_belong_together(recipe: Recipe, overrides: list[str]) -> None:
    findings = found(recipe.with_overrides(overrides), WITH_GPUS)
    assert findings["transport.kind"].severity == "error"


def test_adapters_can_be_pushed_wherever_they_can_be_shared() -> None:
    enough_ports = replace(FITTING, free_ports=5)
    assert found(LOCAL.with_overrides(["transport.kind=push"]), enough_ports) == found(LOCAL, enough_ports) == {}
    assert found(CHASE.with_overrides(["transport.kind=push"]), ELSEWHERE) == {}


def test_more_in_flight_than_the_caches_hold_wants_a_cap() -> None:
    small = ["serve.num_gpu_blocks=33", "cap.policy=none"]  # 32 blocks of 32 tokens on each of two replicas
    finding = only(found(LOCAL.with_overrides(small)))
    assert (finding.severity, finding.field) == ("warning", "cap.policy")
    assert "64 in flight may need 3,328 tokens of cache where there are 2,048" in finding.message  # 52 tokens each
    assert finding.fix.endswith("at most 39")
    for change in ("cap.policy=rlkit", "cap.policy=published", "rollout.max_inflight_tasks=39"):
        assert found(LOCAL.with_overrides([*small, change])) == {}


def test_adapter_rules_do_not_apply_to_merged_weights() -> None:
    assert found(CAP.with_overrides(["serve.max_loras=1", "rollout.queue_maxsize=512"]), ELSEWHERE) == {}


def test_a_kept_cache_of_merged_weights_is_a_warning() -> None:
    findings = found(CAP.with_overrides(["transport.keep_cache=true", "rollout.queue_maxsize=512"]), ELSEWHERE)
    assert only(findings).field == "transport.keep_cache"
    assert only(findings).severity == "warning"
    simulated = CAP.with_overrides(["engine=sim", "rollout.queue_maxsize=512", "transport.keep_cache=true"])
    assert found(simulated, ELSEWHERE) == {}


# Lengths


@pytest.mark.parametrize(
    ("completion", "prompt", "fits"),
    [(108, 20, True), (109, 20, False), (127, None, True), (128, None, False)],
)
def test_prompt_and_completion_fit_into_the_context(completion: int, prompt: int | None, fits: bool) -> None:
    recipe = LOCAL.with_overrides([f"sampling.max_completion_length={completion}"])
    findings = found(recipe, replace(FITTING, longest_prompt_tokens=prompt))
    assert ("serve.max_model_len" not in findings) == fits
    if not fits:
        assert f"at least {(prompt or 1) + completion}" in findings["serve.max_model_len"].fix


@pytest.mark.parametrize(
    ("budget", "prompt", "drops"),
    [
        ("0", 20, False),
        ("null", 20, False),
        ("52", 20, False),
        ("51", 20, True),
        ("127", None, True),
        ("128", None, False),
    ],
)
def test_a_budget_below_the_longest_sample_drops_samples(budget: str, prompt: int | None, drops: bool) -> None:
    # Eight generations and a batch of one would be another finding.
    recipe = LOCAL.with_overrides([f"train.token_budget={budget}", "train.gradient_accumulation_steps=64"])
    findings = found(recipe, replace(FITTING, longest_prompt_tokens=prompt))
    assert ("train.token_budget" in findings) == drops


def test_the_context_stays_within_the_models_positions() -> None:
    finding = only(found(LOCAL, replace(FITTING, max_positions=100)))
    assert (finding.field, finding.fix) == ("serve.max_model_len", "set it to at most 100")


@pytest.mark.parametrize(
    ("blocks", "block_size", "fits"), [(5, 32, True), (4, 32, False), (2, "null", True), (1, "null", False)]
)
def test_a_small_cache_still_holds_one_sequence(blocks: int, block_size: object, fits: bool) -> None:
    # One block is vLLM's null block, and without a GPU a block is 128 tokens unless it is named.
    recipe = LOCAL.with_overrides([f"serve.num_gpu_blocks={blocks}", f"serve.block_size={block_size}"])
    assert ("serve.num_gpu_blocks" not in found(recipe)) == fits


# Pipeline


def test_a_batch_that_splits_groups_is_a_warning() -> None:
    recipe = LOCAL.with_overrides(
        ["train.token_budget=0", "train.gradient_accumulation_steps=12", "rollout.queue_maxsize=48"]
    )
    finding = only(found(recipe))
    assert (finding.field, finding.severity) == ("train.gradient_accumulation_steps", "warning")
    assert "12 samples" in finding.message
    assert "multiple of 8" in finding.fix


def test_with_a_budget_the_batch_is_not_a_count() -> None:
    assert found(LOCAL.with_overrides(["train.gradient_accumulation_steps=3"])) == {}


@pytest.mark.parametrize(
    ("queue", "staleness", "interval", "limit"),
    [(512, 4, 1, None), (513, 4, 1, 512), (1024, 4, 4, None), (2049, 4, 4, 2048), (129, 0, 1, 128)],
)
def test_a_queue_beyond_what_stays_fresh_is_a_warning(
    queue: int, staleness: int, interval: int, limit: int | None
) -> None:
    overrides = [f"rollout.queue_maxsize={queue}", f"rollout.max_staleness={staleness}"]
    findings = found(CHASE.with_overrides([*overrides, f"rollout.weight_sync_steps={interval}"]), ELSEWHERE)
    assert set(findings) == (set() if limit is None else {"rollout.queue_maxsize"})
    if limit is not None:
        assert findings["rollout.queue_maxsize"].fix == f"set it to {limit}"


def test_more_in_flight_than_the_replicas_run_is_a_warning() -> None:
    assert found(LOCAL.with_overrides(["rollout.max_inflight_tasks=256"])) == {}
    finding = only(found(LOCAL.with_overrides(["rollout.max_inflight_tasks=257"])))
    assert (finding.field, finding.severity) == ("rollout.max_inflight_tasks", "warning")
    assert "257 in flight" in finding.message


def test_no_rollout_in_flight_is_an_error() -> None:
    finding = only(found(LOCAL.with_overrides(["rollout.max_inflight_tasks=0"])))
    assert (finding.field, finding.severity) == ("rollout.max_inflight_tasks", "error")


def test_a_router_that_cuts_other_blocks_than_the_cache_is_a_warning() -> None:
    same = LOCAL.with_overrides(["serve.block_size=64", "routing.block_size=64"])
    assert found(same) == {}
    assert only(found(same.with_overrides(["routing.block_size=32"]))).field == "routing.block_size"


# Precision


@pytest.mark.parametrize(
    ("precision", "model", "served", "field"),
    [
        ("bf16", "float32", "bfloat16", None),  # compute counts, not the master weights
        ("bf16", "float32", "float32", "serve.dtype"),
        ("bf16", "bfloat16", "float16", "serve.dtype"),
        ("fp16", "float32", "float16", None),
        ("no", "float32", "float32", None),
        ("no", "float32", "bfloat16", "serve.dtype"),
        ("no", "bfloat16", "bfloat16", None),
        ("no", "float32", "auto", "serve.dtype"),
        ("no", "auto", "float32", "model.dtype"),
        ("no", "auto", "auto", "serve.dtype"),
        ("bf16", "auto", "bfloat16", None),
    ],
)
def test_what_is_served_is_what_the_trainer_computes_in(
    precision: str, model: str, served: str, field: str | None
) -> None:
    overrides = [f"train.precision='{precision}'", f"model.dtype={model}", f"serve.dtype={served}"]
    findings = found(CHASE.with_overrides(overrides), ELSEWHERE)
    assert set(findings) == ({field} if field else set())
    assert all(finding.severity == "warning" for finding in findings.values())


# What the recipe names


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"model_problem": "/models/x does not exist"}, "model.name"),
        ({"data_problem": "rows.jsonl is empty"}, "data.name"),
        ({"reward_problem": "cannot import 'a:b'"}, "reward"),
        ({"chat_template_known": False}, "model.chat_template"),
    ],
)
def test_what_cannot_be_loaded_is_an_error(facts: dict[str, Any], field: str) -> None:
    finding = only(found(LOCAL, replace(FITTING, **facts)))
    assert (finding.field, finding.severity) == (field, "error")
    assert facts.get(next(iter(facts))) is False or next(iter(facts.values())) in finding.message


@pytest.mark.parametrize("recipe", [LOCAL, CHASE], ids=["local", "hf"])
def test_an_engine_that_cannot_run_and_a_folder_that_cannot_be_used_are_errors(recipe: Recipe) -> None:
    findings = found(recipe, replace(FITTING, engine_problem="moon cannot run yet", folder_problem="x is a file"))
    assert {finding.field for finding in findings.values() if finding.severity == "error"} >= {"engine", "folder"}
    assert str(findings["engine"]) == f"engine: moon cannot run yet; use --engine {' or '.join(LAUNCHERS)}"


@pytest.mark.parametrize(("problem", "field"), [("trackio_problem", "TRACKIO_DIR"), ("cache_problem", "RLKIT_CACHE")])
def test_where_a_local_run_cannot_write_is_an_error(problem: str, field: str) -> None:
    told: dict[str, Any] = {problem: "/x cannot be written"}
    facts = replace(FITTING, **told)
    assert only(found(LOCAL, facts)).field == field
    assert found(CHASE, facts) == found(CHASE, FITTING)


def test_a_template_that_is_set_by_hand_need_not_be_known() -> None:
    assert found(CHASE, replace(ELSEWHERE, chat_template_known=False)) == {}


def test_a_simulated_run_loads_nothing() -> None:
    facts = MachineFacts(model_problem="gone", data_problem="gone", reward_problem="gone", chat_template_known=False)
    assert found(LOCAL.with_overrides(["engine=sim"]), facts) == {}


# The machine


@pytest.mark.parametrize(
    ("package", "version", "fits"),
    [
        ("trl", "1.16.0", True),
        ("trl", "1.16.3", True),
        ("trl", "1.17.0", False),
        ("trl", None, False),
        ("vllm", "0.22.0", True),
        ("vllm", "0.31.1", True),
        ("vllm", "0.32.0", False),
        ("vllm", "0.21.0", False),
        ("vllm", None, False),
        ("transformers", "5.13.0", True),
        ("transformers", "5.17.9", True),
        ("transformers", "5.18.0", False),
        ("transformers", "5.12.0", False),
        ("torchvision", None, True),
        ("torchvision", "0.28.0", False),
        ("torchvision", "0.28.0+cpu", True),
    ],
)
def test_versions_that_run_together(package: str, version: str | None, fits: bool) -> None:
    findings = found(LOCAL, replace(FITTING, versions=VERSIONS | {package: version}))
    assert (package not in findings) == fits
    assert fits or findings[package].fix.startswith("pip ")


def test_torchvision_beside_a_gpu_build_of_torch_is_fine() -> None:
    facts = replace(WITH_GPUS, versions={**WITH_GPUS.versions, "torchvision": "0.28.0"})
    assert found(LOCAL, facts) == {}


def test_versions_here_do_not_matter_where_the_jobs_run_elsewhere() -> None:
    assert (
        found(CHASE, replace(ELSEWHERE, versions={"trl": None, "vllm": None}, free_disk_gib=0.1, memory_gib=1.0)) == {}
    )


@pytest.mark.parametrize(
    ("facts", "field", "severity"),
    [
        ({"free_ports": 2}, "serve.replicas", "error"),
        ({"free_disk_gib": 0.5}, "disk", "error"),
        ({"memory_gib": 3.0}, "serve.replicas", "warning"),
    ],
)
def test_what_a_machine_is_short_of(facts: dict[str, Any], field: str, severity: str) -> None:
    finding = only(found(LOCAL, replace(FITTING, **facts)))
    assert (finding.field, finding.severity) == (field, severity)


def test_ports_and_memory_grow_with_the_replicas() -> None:
    assert ports_needed(LOCAL) == 3
    assert ports_needed(LOCAL.with_overrides(["serve.replicas=4"])) == 5
    assert ports_needed(LOCAL.with_overrides(["serve.replicas=4", "transport.kind=push"])) == 9
    # Two replicas with 1 GiB each were measured at 4.8 GB, and one with the trainer at 4.7.
    one = LOCAL.with_overrides(["serve.replicas=1"])
    assert memory_needed_gib(one) == pytest.approx(4.7)
    assert memory_needed_gib(LOCAL) - memory_needed_gib(one) == pytest.approx(2.4)


# Without a GPU


def test_a_part_of_a_gib_of_cache_is_told_as_what_it_becomes() -> None:
    half = LOCAL.with_overrides(["serve.kv_cache_gib=0.5"])
    finding = only(found(half))
    assert (finding.field, finding.severity) == ("serve.kv_cache_gib", "warning")
    assert "0.5 becomes 1" in finding.message
    assert memory_needed_gib(half) == memory_needed_gib(LOCAL)


@pytest.mark.parametrize(
    ("override", "field", "fix"),
    [
        ("serve.block_size=16", "serve.block_size", "a multiple of 32"),
        ("serve.max_num_batched_tokens=16383", "serve.max_num_batched_tokens", "= 16384"),
        ("serve.max_num_batched_tokens=null", "serve.max_num_batched_tokens", "= 16384"),
        ("serve.max_num_seqs=129", "serve.max_num_batched_tokens", "= 16512"),
        ("train.processes=2", "train.processes", "1"),
    ],
)
def test_what_the_cpu_engine_does_not_do(override: str, field: str, fix: str) -> None:
    recipe = LOCAL.with_overrides([override])
    assert found(recipe, WITH_GPUS) == {}
    finding = only(found(recipe))
    assert (finding.field, finding.severity) == (field, "error")
    assert fix in finding.fix


def test_mixed_precision_needs_a_gpu() -> None:
    recipe = LOCAL.with_overrides(["train.precision=bf16", "serve.dtype=bfloat16"])
    assert found(recipe, WITH_GPUS) == {}
    assert only(found(recipe)).field == "train.precision"


def test_merged_weights_need_gpus() -> None:
    recipe = LOCAL.with_overrides(["lora=null", "transport.kind=merged", "transport.keep_cache=false"])
    assert found(recipe, WITH_GPUS) == {}
    assert only(found(recipe)).field == "transport.kind"


@pytest.mark.parametrize(("size", "fits"), [(24, False), (32, True), (48, False), (64, True), (128, True)])
def test_head_sizes_of_the_cpu_attention(size: int, fits: bool) -> None:
    facts = replace(FITTING, head_size=size)
    assert ("model.name" not in found(LOCAL, facts)) == fits
    assert found(LOCAL, replace(WITH_GPUS, head_size=size)) == {}


def test_more_jobs_than_gpus_is_a_warning() -> None:
    finding = only(found(LOCAL, replace(WITH_GPUS, cuda_devices=2)))
    assert (finding.field, finding.severity) == ("serve.replicas", "warning")
    assert found(LOCAL, replace(WITH_GPUS, cuda_devices=3)) == {}


def test_the_facts_of_this_machine_suit_the_local_recipe() -> None:
    facts = gather_facts(LOCAL)
    assert (facts.head_size, facts.max_positions, facts.chat_template_known) == (32, 512, True)
    assert (facts.model_problem, facts.data_problem, facts.reward_problem) == (None, None, None)
    assert facts.free_ports == 3
    assert facts.engine_problem is None
    assert facts.free_disk_gib is not None
    assert facts.free_disk_gib > 0


def test_a_folder_is_looked_at_once_it_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert gather_facts(LOCAL, tmp_path).folder_problem == f"{tmp_path} holds other things and no run (file)"
    monkeypatch.chdir(tmp_path)
    assert gather_facts(LOCAL).folder_problem is None


@pytest.mark.slow
def test_ranks_and_head_sizes_are_those_of_the_installed_packages() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import VLLM_LORA_RANKS

    cpu = pytest.importorskip("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert tuple(VLLM_LORA_RANKS) == LORA_RANKS
    assert tuple(cpu.get_supported_head_sizes()) == CPU_HEAD_SIZES
