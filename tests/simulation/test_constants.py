from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.simulation.cells import STATISTICS, TOLERANCES, TOLERANCES_OF_RUNS
from rlkit.simulation.constants import ADAPTIVE_CAP, CHASE, WORKLOAD_ORIGINS, Physics, physics_origins
from rlkit.simulation.hardware import GPUS, MODELS, QWEN2_1_5B, TOY_MODEL, Machine, gpu, model_shape
from rlkit.simulation.published import published_runs

# The most that may be fitted, of the physics and of the workloads.
MOST_FITTED = (12, 6)


def test_few_constants_are_fitted_and_each_says_where_it_comes_from() -> None:
    origins = [*physics_origins(Physics()), *WORKLOAD_ORIGINS]
    for origin in origins:
        assert origin.unit
        assert origin.source
        assert bool(origin.cells) == (origin.kind == "fitted")
    fitted = [origin for origin in physics_origins(Physics()) if origin.kind == "fitted"]
    workload = [origin for origin in WORKLOAD_ORIGINS if origin.kind == "fitted"]
    assert (len(fitted), len(workload)) <= MOST_FITTED
    assert len(fitted) <= MOST_FITTED[0]
    assert len(workload) <= MOST_FITTED[1]


def test_fitted_constants_name_figures_that_were_published() -> None:
    published = {f"{run.name}:{figure}" for run in published_runs() for figure in run.figures}
    for origin in [*physics_origins(Physics()), *WORKLOAD_ORIGINS]:
        assert set(origin.cells) <= published, origin.name


def test_the_cap_experiment_s_completions_shrink_as_the_chase_s_do() -> None:
    assert ADAPTIVE_CAP.mean_end / ADAPTIVE_CAP.mean_start == pytest.approx(CHASE.mean_end / CHASE.mean_start, rel=0.05)


def test_every_published_figure_has_its_statistic_and_every_tolerance_a_figure() -> None:
    figures = {figure for run in published_runs() for figure in run.figures}
    assert figures == set(STATISTICS)
    assert set(TOLERANCES) <= figures
    for name, figure in TOLERANCES_OF_RUNS:
        assert any(run.name == name and figure in run.figures for run in published_runs())


def test_the_model_s_bytes_and_flops_are_the_published_ones() -> None:
    assert QWEN2_1_5B.kv_bytes == 28_672
    assert QWEN2_1_5B.parameters == pytest.approx(1.54e9, rel=0.01)
    # 3.9 % of two H100 peaks in 21.9 s for 128 samples of 1,200 tokens, as TRL 1.14 counted.
    assert QWEN2_1_5B.flops_per_token(1200) * 128 * 1200 / (21.9 * 2 * 989.5e12) == pytest.approx(0.039, rel=0.03)


def test_the_toy_model_has_the_shape_that_is_built() -> None:
    from rlkit.training import toy_model

    built = (toy_model.HIDDEN, toy_model.LAYERS, toy_model.VOCABULARY, toy_model.HEADS)
    assert (TOY_MODEL.hidden, TOY_MODEL.layers, TOY_MODEL.vocabulary, TOY_MODEL.heads) == built


def test_a_shape_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 1536, "num_hidden_layers": 28, "vocab_size": 151936, "num_attention_heads": 12,'
        ' "num_key_value_heads": 2, "intermediate_size": 8960}'
    )
    assert model_shape(str(tmp_path)) == MODELS["Qwen/Qwen2.5-Math-1.5B"]


def test_twice_the_bandwidth_halves_what_reading_takes() -> None:
    slow = Machine(QWEN2_1_5B, GPUS["a100"], GPUS["a100"]).rates(Physics(), adapters=True)
    fast = Machine(QWEN2_1_5B, GPUS["h200"], GPUS["h200"]).rates(Physics(), adapters=True)
    assert slow.token_s / fast.token_s == pytest.approx(4.8e12 / 2.039e12)
    assert gpu("h200x2", "hardware.trainer") == GPUS["h200"]
