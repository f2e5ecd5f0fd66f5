from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlkit.errors import BadInput
from rlkit.launch_plan import recipes_under
from rlkit.recipe import Recipe, load_recipe, parse_recipe, recipe_diff

ROOT = Path(__file__).parents[1]
COMMITTED = recipes_under(ROOT / "runs")

# Each example writes its file anew; how long that takes is the machine's business.
FILES_IN_A_SLOW_PLACE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

MINIMAL = """\
name: small
model: {name: toy-arithmetic}
data: {name: toy-addition}
reward: rlkit.training.rewards:toy_sum
train: {steps: 3}
serve: {max_model_len: 128}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, overrides: list[str] | None = None) -> str:
    """The one line that `load_recipe` refuses with."""
    with pytest.raises(BadInput) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def refusal_of(attempt: Callable[[], object]) -> str | None:
    """What `attempt` was refused with, None when it was not."""
    try:
        attempt()
    except BadInput as error:
        return str(error)
    return None


def minimal_data() -> dict[str, Any]:
    return {
        "name": "small",
        "model": {"name": "toy-arithmetic"},
        "data": {"name": "toy-addition"},
        "reward": "rlkit.training.rewards:toy_sum",
        "train": {"steps": 3},
        "serve": {"max_model_len": 128},
    }


def test_a_minimal_recipe_has_trls_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert (recipe.rollout.max_staleness, recipe.rollout.queue_maxsize, recipe.rollout.weight_sync_steps) == (
        4,
        1024,
        1,
    )
    assert recipe.train.gradient_checkpointing
    assert recipe.train.token_budget is None
    assert recipe.sampling.num_generations == 8


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_recipes_load_and_are_named_like_their_file(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_there_are_the_recipes_the_readme_speaks_of() -> None:
    assert {"local", "local-trainer-bound", "local-generation-bound"} <= {path.stem for path in COMMITTED}
    assert len([path for path in COMMITTED if path.parent.name == "published"]) == 5
    assert len([path for path in COMMITTED if path.parent.name == "adaptive-cap"]) == 4


def test_the_published_chain_reads_as_its_changes() -> None:
    names = ["r1-dp2", "r1-dp2-tb16k", "r1-dp2-tb16k-nockpt", "r1-dp3-tb16k-nockpt", "r1-dp3-inflight384"]
    chain = [load_recipe(ROOT / "runs" / "published" / f"{name}.yaml") for name in names]
    changed = [{field for field, _, _ in recipe_diff(old, new)} for old, new in pairwise(chain)]
    assert changed == [
        {"train.token_budget", "train.gradient_accumulation_steps"},
        {"train.gradient_checkpointing"},
        {"serve.replicas", "transport.retry_s", "hardware.usd_per_hour"},
        {"rollout.max_inflight_tasks", "rollout.queue_maxsize"},
    ]


def test_the_cap_experiment_is_two_by_two() -> None:
    names = ["kv8g-main", "kv8g-pausefix", "kv8g-caponly", "kv8g-cap"]
    recipes = [load_recipe(ROOT / "runs" / "adaptive-cap" / f"{name}.yaml") for name in names]
    assert [(recipe.cap.policy, recipe.transport.keep_cache) for recipe in recipes] == [
        ("none", False),
        ("none", True),
        ("published", False),
        ("published", True),
    ]
    assert all(recipe.lora is None and recipe.transport.kind == "merged" for recipe in recipes)


# Bad input, one line each.


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    assert refusal(path) == f"{path}: cannot read the recipe: No such file or directory"


def test_a_folder_is_not_a_recipe(tmp_path: Path) -> None:
    assert "cannot read the recipe" in refusal(tmp_path)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"name: \xff\xfe")
    assert "not UTF-8" in refusal(path)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("name: [open\nmodel: 1", "line 2"),
        ("name: a\n\tmodel: b", "line 2"),
        ("name: a\nname: b", "duplicate key"),
        ("train: {steps: 1, steps: 2}", "duplicate key"),
        ("name: *nobody", "undefined alias"),
    ],
)
def test_broken_yaml_says_where(tmp_path: Path, text: str, where: str) -> None:
    message = refusal(write(tmp_path, text))
    assert "broken YAML (line" in message
    assert where in message


def test_yaml_that_is_no_value_is_refused(tmp_path: Path) -> None:
    assert "broken YAML: month must be in 1..12" in refusal(write(tmp_path, "name: 2024-13-01"))
    assert "'2024-13-01' is not a YAML value" in refusal(write(tmp_path, MINIMAL), ["name=2024-13-01"])


@pytest.mark.parametrize(
    ("text", "what"), [("", "empty"), ("- a\n- b", "a list"), ("just words", "a str"), ("7", "a int")]
)
def test_yaml_that_is_not_a_mapping(tmp_path: Path, text: str, what: str) -> None:
    assert f"a recipe is a mapping of sections, this is {what}" in refusal(write(tmp_path, text))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("learning_rate_typo", "learning_rate_typo: 1\n"),
        ("rollout.max_stalenes", "rollout: {max_stalenes: 4}\n"),
        ("lora.rank", "lora: {rank: 1}\n"),
    ],
)
def test_an_unknown_key_is_named_with_its_section(tmp_path: Path, section: str, text: str) -> None:
    assert f"{section}: unknown field" in refusal(write(tmp_path, MINIMAL + text))


@pytest.mark.parametrize(
    ("assignment", "field", "value"),
    [
        ("train.steps='50'", "train.steps", "'50'"),
        ("train.steps=true", "train.steps", "true"),
        ("train.steps=0", "train.steps", "0"),
        ("train.steps=2.5", "train.steps", "2.5"),
        ("train.learning_rate=-1", "train.learning_rate", "-1"),
        ("train.learning_rate=.nan", "train.learning_rate", "nan"),
        ("train.gradient_checkpointing=1", "train.gradient_checkpointing", "1"),
        ("sampling.num_generations=1", "sampling.num_generations", "1"),
        ("serve.dtype=fp8", "serve.dtype", "'fp8'"),
        ("transport.kind=carrier-pigeon", "transport.kind", "'carrier-pigeon'"),
        ("reward=not a function", "reward", "'not a function'"),
        ("name=../up", "name", "'../up'"),
        ("rollout.max_inflight_tasks=-2", "rollout.max_inflight_tasks", "-2"),
        ("tracking.project=", "tracking.project", "''"),
        ("model=7", "model", "7"),
        ("model.name=", "model.name", "''"),
        ("data.name=", "data.name", "''"),
        ("tracking.space_id=", "tracking.space_id", "''"),
        ("lora.target_modules=", "lora.target_modules", "''"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(tmp_path: Path, assignment: str, field: str, value: str) -> None:
    message = refusal(write(tmp_path, MINIMAL), [assignment])
    assert message.startswith(f"--set: {field}: expected ")
    assert message.endswith(f", got {value}")


@pytest.mark.parametrize(
    ("assignment", "limit"),
    [
        ("serve.replicas=100000", "1024"),
        ("serve.data_parallel_size=1000", "64"),
        ("rollout.max_inflight_tasks=999999999999999999", "65536"),
        ("rollout.queue_maxsize=10000000", "1000000"),
        ("rollout.max_staleness=100000", "1024"),
        ("rollout.weight_sync_steps=10000000", "1000000"),
        ("train.steps=10000000", "1000000"),
        ("train.learning_rate=1e30", "1"),
        ("train.processes=100000", "1024"),
        ("train.gradient_accumulation_steps=100000", "4096"),
        ("train.seed=4294967296", "4294967295"),
        ("sampling.num_generations=100000", "4096"),
        ("sampling.temperature=1e30", "100"),
        ("serve.max_model_len=100000000", "16777216"),
        ("hardware.budget_usd=1e30", "1000000"),
        ("transport.deadline_s=1e30", "604800"),
    ],
)
def test_a_value_that_can_only_be_a_slip_is_refused_with_its_limit(tmp_path: Path, assignment: str, limit: str) -> None:
    field, _, value = assignment.partition("=")
    message = refusal(write(tmp_path, MINIMAL), [assignment])
    assert re.fullmatch(
        rf"--set: {field}: expected a (whole )?number .* at most {limit}( or null)?, got {value.replace('e', 'e.')}",
        message,
    )
    at_the_limit = load_recipe(write(tmp_path, MINIMAL), [f"{field}={float(limit) if 'e30' in value else limit}"])
    assert f"{field.rpartition('.')[2]}: {limit}" in at_the_limit.to_yaml()


def test_no_number_of_a_recipe_is_without_a_limit() -> None:
    unlimited = [
        f"{name}.{field}"
        for name, section in Recipe.model_json_schema()["$defs"].items()
        for field, node in section["properties"].items()
        for kind in node.get("anyOf", [node])
        if kind.get("type") in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & set(kind)
    ]
    assert unlimited == []


def test_a_name_that_no_filesystem_takes_is_refused(tmp_path: Path) -> None:
    assert "name: expected up to 100 letters" in refusal(write(tmp_path, MINIMAL), [f"name={'a' * 101}"])
    assert load_recipe(write(tmp_path, MINIMAL), [f"name={'a' * 100}"]).name == "a" * 100


def test_missing_fields_are_all_told_at_once(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "name: small\n"))
    assert [f"{field}: missing" in message for field in ("model", "data", "reward", "train", "serve")] == [True] * 5


# extends


def test_extends_merges_sections_and_replaces_values(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + "lora: {r: 8, target_modules: [q_proj, k_proj]}\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nname: other\nlora: {target_modules: [v_proj]}\n")
    recipe = load_recipe(path)
    assert recipe.lora is not None
    assert (recipe.name, recipe.train.steps, recipe.lora.r, recipe.lora.target_modules) == ("other", 3, 8, ["v_proj"])


def test_extends_can_take_a_section_away(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "base.yaml")
    assert load_recipe(write(tmp_path, "extends: base.yaml\nlora: null\n")).lora is None


def test_extends_is_read_from_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, MINIMAL, "base.yaml")
    path = write(tmp_path / "deep", "extends: ../base.yaml\n")
    monkeypatch.chdir("/")
    assert load_recipe(path).name == "small"


@pytest.mark.parametrize(
    ("content", "recipe"),
    [
        ("recipe: ../local.yaml\ngrid: {engine: [sim]}\n", "; its recipe is local.yaml"),
        ("recipe: 5\n", ""),
        ("grid: {engine: [sim]}\n", ""),
    ],
)
def test_a_grid_is_no_recipe_and_told_in_a_short_line(
    content: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps").mkdir()
    write(tmp_path / "sweeps", content, "g.yaml")
    told = f"sweeps/g.yaml: a grid, not a recipe; `rlkit sweep sweeps/g.yaml` runs its points{recipe}"
    with pytest.raises(BadInput) as failure:
        load_recipe("sweeps/g.yaml")
    assert str(failure.value) == told
    with pytest.raises(BadInput, match="a grid, not a recipe"):
        load_recipe(write(tmp_path, "extends: sweeps/g.yaml\n"))


def test_an_extends_cycle_ends(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert "the chain of recipes comes back to this file" in refusal(tmp_path / "a.yaml")
    assert "comes back" in refusal(write(tmp_path, "extends: recipe.yaml\n"))


def test_extends_of_a_missing_file_names_both_files(tmp_path: Path) -> None:
    extending = write(tmp_path, "extends: gone.yaml\n", "middle.yaml")
    wanted = f"{extending}: extends: {tmp_path / 'gone.yaml'}: cannot read the recipe: No such file or directory"
    assert refusal(extending) == refusal(write(tmp_path, "extends: middle.yaml\n")) == wanted


@pytest.mark.parametrize(("text", "given"), [("3", "3"), ("''", "''"), ("[a]", "['a']")])
def test_extends_must_be_a_name(tmp_path: Path, text: str, given: str) -> None:
    assert f"extends: expected a file name, got {given}" in refusal(write(tmp_path, f"extends: {text}\n"))


def test_a_wrong_value_is_told_of_the_file_that_has_it(tmp_path: Path) -> None:
    base = write(tmp_path, MINIMAL + "lora: {r: 0}\nsampling: {top_p: 2}\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\ntrain: {seed: -1}\nsampling: {top_p: 3}\n")
    assert refusal(path, ["serve.replicas=0"]) == (
        f"{base}: lora.r: expected a whole number above 0 and at most 65536, got 0; "
        f"{path}: sampling.top_p: expected a number above 0 and at most 1, got 3; "
        "train.seed: expected a whole number of at least 0 and at most 4294967295, got -1; "
        "--set: serve.replicas: expected a whole number above 0 and at most 1024, got 0"
    )


def test_a_missing_field_is_told_of_the_file_that_has_its_section(tmp_path: Path) -> None:
    base = write(tmp_path, "serve: {replicas: 1}\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nname: a\n")
    message = refusal(path)
    assert message.startswith(f"{path}: model: missing; ")
    assert message.endswith(f"{base}: serve.max_model_len: missing")


# --set


def test_set_reads_values_as_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    overrides = ["train.learning_rate=1e-5", "lora.target_modules=[q_proj]", "sampling.top_p=0.5", "serve.env.A='1'"]
    recipe = load_recipe(path, overrides)
    assert recipe.lora is not None
    assert (recipe.train.learning_rate, recipe.lora.target_modules) == (1e-5, ["q_proj"])
    assert (recipe.sampling.top_p, recipe.serve.env) == (0.5, {"A": "1"})


def test_set_null_takes_a_section_away_and_a_later_set_brings_it_back(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert load_recipe(path, ["lora=null"]).lora is None
    again = load_recipe(path, ["lora=null", "lora.r=8"]).lora
    assert again is not None
    assert again.r == 8


@pytest.mark.parametrize("assignment", ["steps", "=3", ".steps=3", "train.=3", "train..steps=3"])
def test_set_needs_a_field_and_a_value(tmp_path: Path, assignment: str) -> None:
    assert f"--set {assignment}: expected field=value" in refusal(write(tmp_path, MINIMAL), [assignment])


def test_set_of_an_unknown_field_is_refused(tmp_path: Path) -> None:
    assert "train.stepz: unknown field" in refusal(write(tmp_path, MINIMAL), ["train.stepz=3"])


def test_set_below_a_value_is_refused(tmp_path: Path) -> None:
    assert "name is a value, not a section" in refusal(write(tmp_path, MINIMAL), ["name.first=x"])


def test_set_with_broken_yaml_is_refused(tmp_path: Path) -> None:
    assert "'[1' is not a YAML value" in refusal(write(tmp_path, MINIMAL), ["serve.flags=[1"])


# What follows from a recipe


@pytest.mark.parametrize(
    ("train", "samples"),
    [
        ({"token_budget": 0, "gradient_accumulation_steps": 64, "processes": 2}, 128),
        ({"token_budget": 16384, "gradient_accumulation_steps": 6}, None),
        ({"token_budget": None}, None),
    ],
)
def test_samples_per_step_are_known_only_for_a_fixed_count(train: dict[str, Any], samples: int | None) -> None:
    data = minimal_data()
    data["train"] |= train
    assert parse_recipe(data, "test").samples_per_step == samples


@pytest.mark.parametrize(
    ("given_limit", "staleness", "expected"),
    [(128, 4, 128), (-1, 4, 4 * 6 * 2), (-1, 0, 6 * 2), (0, 4, 0)],
)
def test_inflight_limit_is_trls_formula_when_it_is_not_given(given_limit: int, staleness: int, expected: int) -> None:
    data = minimal_data()
    data["train"] |= {"gradient_accumulation_steps": 6, "processes": 2}
    data["rollout"] = {"max_inflight_tasks": given_limit, "max_staleness": staleness}
    assert parse_recipe(data, "test").inflight_limit == expected


@pytest.mark.parametrize(("staleness", "interval", "fresh"), [(4, 1, 400), (4, 3, 1200), (0, 1, 100), (0, 3, 300)])
def test_fresh_samples_are_those_consumed_before_a_version_expires(staleness: int, interval: int, fresh: int) -> None:
    data = minimal_data() | {"rollout": {"max_staleness": staleness, "weight_sync_steps": interval}}
    assert parse_recipe(data, "test").fresh_samples(100) == fresh


def test_a_recipe_does_not_change(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    changed = recipe.with_overrides(["train.steps=9"])
    assert (recipe.train.steps, changed.train.steps) == (3, 9)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 5  # type: ignore[misc]  # that it cannot is the point


def test_a_difference_is_told_by_field_without_the_name() -> None:
    old = parse_recipe(minimal_data(), "test")
    new = old.with_overrides(["name=other", "rollout.queue_maxsize=64", "lora=null"])
    changes = {field: (before, after) for field, before, after in recipe_diff(old, new)}
    assert changes["rollout.queue_maxsize"] == (1024, 64)
    assert "name" not in changes
    assert changes["lora.r"] == (1, None)
    assert recipe_diff(old, old) == []


text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
positive = st.integers(1, 10**6)
ranks = st.integers(1, 512)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Recipes whose every kind of field varies."""
    data = minimal_data() | {
        "name": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)),
        "model": {"name": draw(text), "revision": draw(st.none() | text)},
        "data": {"name": draw(text), "system_prompt": draw(st.none() | st.text(max_size=30))},
        "lora": draw(
            st.none() | st.just({"r": draw(st.integers(1, 512)), "target_modules": draw(st.lists(text) | text)})
        ),
        "train": {
            "steps": draw(positive),
            "learning_rate": draw(st.floats(0, 1)),
            "token_budget": draw(st.none() | st.integers(0, 10**6)),
            "precision": draw(st.sampled_from(["no", "bf16", "fp16"])),
            "gradient_checkpointing": draw(st.booleans()),
        },
    }
    data["serve"] = {
        "max_model_len": draw(positive),
        "kv_cache_gib": draw(st.none() | st.floats(0.001, 1000)),
        "flags": draw(st.lists(text, max_size=3)),
        "env": draw(st.dictionaries(text, st.text(max_size=8), max_size=3)),
    }
    return parse_recipe(data, "test")


@given(recipe=recipes())
@settings(suppress_health_check=FILES_IN_A_SLOW_PLACE, max_examples=40)
def test_a_written_recipe_is_read_back_unchanged(recipe: Recipe, tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


@given(
    content=st.text(max_size=60) | st.sampled_from([MINIMAL + "lora: ", "extends: ", "? ", "!!python/name:os.system x"])
)
@settings(suppress_health_check=FILES_IN_A_SLOW_PLACE, max_examples=100)
def test_whatever_a_file_holds_the_refusal_is_one_line(content: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    message = refusal_of(lambda: load_recipe(path))
    assert message is None or (message.startswith(f"{path}: ") and "\n" not in message)


@given(assignment=st.text(max_size=40))
@settings(max_examples=100)
def test_whatever_is_set_the_refusal_is_one_line(assignment: str) -> None:
    recipe = parse_recipe(minimal_data(), "test")
    message = refusal_of(lambda: recipe.with_overrides([assignment]))
    assert message is None or message.startswith("--set")
