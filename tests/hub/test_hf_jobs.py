"""What the published run asks Hugging Face Jobs for, field by field, against the client's own request."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub.hub_server import EmulatedHub
from hub.job_table import arguments_of, asked_for, known_fields
from huggingface_hub import HfApi
from huggingface_hub._jobs_api import _create_job_spec, _sanitize_job_name
from pydantic import ValidationError

from rlkit.engines.hf_addresses import Address
from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_jobs import (
    JobRequest,
    Place,
    direct_url,
    label_value,
    network_group_of,
    replica_request,
    run_labels,
    trainer_request,
)
from rlkit.recipe import Recipe, load_recipe
from rlkit.serving.replica import vllm_command

pytestmark = pytest.mark.hub

SMOKE = Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml"
PLACE = Place("me", "rlkit", "wheels/0123456789abcdef/rlkit-0.1.0-py3-none-any.whl", "smoke-1", "cafe0123")
SECRETS = {"HF_TOKEN": "hf_secret"}
URLS = [Address("https://a--8000.hf.jobs"), Address("https://b--8000.hf.jobs")]


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(SMOKE, ["train.steps=20", "hardware.deadline_hours=2"])


def spec_of(request: JobRequest, token: str = "hf_secret") -> dict[str, Any]:
    """The JSON that the client would send."""
    arguments = request.arguments({"HF_TOKEN": token})
    assert arguments.keys() <= inspect.signature(HfApi.run_job).parameters.keys()
    return _create_job_spec(**arguments)


@pytest.mark.parametrize("group", [None, "rlkit-cafe0123"])
@pytest.mark.parametrize("replica", [0, 1, None])
def test_request_of_the_published_run(recipe: Recipe, group: str | None, replica: int | None) -> None:
    """Field by field, and each of them one that huggingface_hub has, of its type."""
    place = replace(PLACE, group=group)
    if replica is None:
        spec = spec_of(trainer_request(recipe, place, URLS))
    else:
        spec = spec_of(replica_request(recipe, place, replica, lease_s=900))
    assert spec == asked_for(place, "hf_secret", replica, [address.url for address in URLS], 7200)
    assert _create_job_spec(**arguments_of(spec)) == spec


def test_client_names_each_field_once() -> None:
    arguments = [name for name, _ in known_fields().values()]
    assert {"command", "secrets", "timeout", "labels", "volumes", "expose", "network_group"} <= set(arguments)
    assert len(set(arguments)) == len(arguments)
    assert known_fields()["network.aliases"][0] == "network_aliases"


def test_field_that_the_client_does_not_have_is_noticed(recipe: Recipe) -> None:
    spec = spec_of(trainer_request(recipe, PLACE, URLS))
    with pytest.raises(AssertionError, match="does not have"):
        arguments_of({**spec, "gpu": "h200"})
    with pytest.raises(ValidationError):
        arguments_of({**spec, "command": "a string"})


def test_group_is_asked_for_where_the_recipe_wants_it(recipe: Recipe) -> None:
    assert network_group_of(recipe, "cafe0123") == "rlkit-cafe0123"
    assert network_group_of(recipe.with_overrides(["hardware.network_group=false"]), "cafe0123") is None
    assert direct_url(1, 8000) == "http://${HF_NETWORK_GROUP_PREFIX}replica-1:8000"


def test_client_without_groups_is_not_asked_for_one(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "run_job", lambda self, *, image, command: None)
    assert network_group_of(recipe, "cafe0123") is None


def test_vllm_of_the_published_replica(recipe: Recipe) -> None:
    """The flags of the published set-up, in the order they are built."""
    flags = vllm_command(recipe, recipe.model.name, 8000, "0.0.0.0")[3:]
    assert flags == [
        *("--model", "Qwen/Qwen2.5-Math-1.5B", "--host", "0.0.0.0", "--port", "8000", "--dtype", "bfloat16"),
        *("--max-model-len", "4096", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--tensor-parallel-size", "1", "--disable-uvicorn-access-log", "--enable-lora", "--max-lora-rank", "1"),
        *("--max-loras", "6", "--max-cpu-loras", "6", "--gpu-memory-utilization", "0.85"),
    ]  # fmt: skip


def test_pushing_replica_exposes_its_receiver_and_holds_the_token(recipe: Recipe) -> None:
    pushing = recipe.with_overrides(["transport.kind=push"])
    spec = spec_of(replica_request(pushing, PLACE, 0, lease_s=900))
    assert spec["expose"] == {"ports": [8000, 8001]}
    assert spec["secrets"] == SECRETS
    command = spec["command"]
    assert isinstance(command, list)
    assert command[-2:] == ["--receiver-port", "8001"]


def test_request_shows_no_secret_before_it_is_sent(recipe: Recipe) -> None:
    assert "hf_secret" not in repr(trainer_request(recipe, PLACE, URLS))


@pytest.mark.parametrize("text", ["plain_name-1", "dotted.name", "spaced name", "ünïcode", "a/b"])
def test_labels_are_what_the_hub_takes_and_stay_apart(text: str) -> None:
    value = label_value(text)
    assert value == _sanitize_job_name(value)
    assert label_value(text + "x") != value
    assert label_value("a.b") != label_value("a-b")


def test_jobs_of_a_run_are_found_by_its_labels(recipe: Recipe) -> None:
    common = run_labels(recipe, "smoke-1").items()
    assert common <= replica_request(recipe, PLACE, 0, lease_s=1).labels.items()
    assert common <= trainer_request(recipe, PLACE, URLS).labels.items()


def test_what_is_sent_is_what_the_table_says(api: HfApi, hub: EmulatedHub, recipe: Recipe) -> None:
    hub.faults.stuck_flavors |= {"h200", "h200x2"}
    client = Hub.connect("me", first_wait_s=0.001, api=api)
    requests = [replica_request(recipe, PLACE, index, lease_s=900) for index in range(2)]
    requests.append(trainer_request(recipe, PLACE, URLS))
    for request in requests:
        client.start(request)
    sent = [(seen.path, seen.body) for seen in hub.requests if seen.method == "POST"]
    assert sent == [("/api/jobs/me", spec_of(request, hub.token)) for request in requests]
