"""What the published run asks Hugging Face Jobs for, field by field, against the client's own request."""

from __future__ import annotations

import inspect
from importlib import metadata
from pathlib import Path

import pytest
from hub.hub_server import EmulatedHub
from huggingface_hub import HfApi
from huggingface_hub._jobs_api import JobHardware, _create_job_spec, _sanitize_job_name

from rlkit.engines.hf_addresses import Address
from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_jobs import (
    MOUNT,
    JobRequest,
    Place,
    label_value,
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
RUN = f"{MOUNT}/runs/smoke-1"
VOLUME = {"type": "bucket", "source": "me/rlkit", "mountPath": MOUNT}
URLS = [Address("https://a--8000.hf.jobs"), Address("https://b--8000.hf.jobs")]


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(SMOKE, ["train.steps=20", "hardware.deadline_hours=2"])


def labels_of(role: str, **more: str) -> dict[str, str]:
    version = label_value(metadata.version("rlkit"))
    return {
        "tool": "rlkit", "project": "five-run-chase", "run": "smoke-1", "role": role, "version": version,
        "launch": "cafe0123", **more,
    }  # fmt: skip


def spec_of(request: JobRequest, token: str = "hf_secret") -> dict[str, object]:
    """The JSON that the client would send."""
    arguments = request.arguments({"HF_TOKEN": token})
    assert arguments.keys() <= inspect.signature(HfApi.run_job).parameters.keys()
    return _create_job_spec(**arguments)


def test_replica_of_the_published_run(recipe: Recipe) -> None:
    install = 'python3 -m pip install --quiet --no-deps "$1" "$2" && shift 2 && exec "$@"'
    assert spec_of(replica_request(recipe, PLACE, 1, lease_s=900)) == {
        "dockerImage": "vllm/vllm-openai:v0.31.0",
        "command": [
            *("bash", "-c", install, "rlkit", f"{MOUNT}/{PLACE.wheel}"),
            f"ruamel.yaml=={metadata.version('ruamel.yaml')}",
            *("python3", "-m", "rlkit.engines.hf_replica", "--recipe", f"{RUN}/recipe.yaml", "--port", "8000"),
            *("--lease", f"{RUN}/lease", "--lease-s", "900", "--models", f"{MOUNT}/models"),
        ],
        "arguments": [],
        "environment": {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        "flavor": JobHardware.H200,
        "timeoutSeconds": 7200,
        "labels": labels_of("replica", name="smoke-1-replica-1", replica="1"),
        "volumes": [{**VOLUME, "readOnly": True}],
        "expose": {"ports": [8000]},
    }  # fmt: skip


def test_trainer_of_the_published_run(recipe: Recipe) -> None:
    install = 'python3 -m pip install --quiet "$1" && shift && exec "$@"'
    assert spec_of(trainer_request(recipe, PLACE, URLS)) == {
        "dockerImage": "vllm/vllm-openai:v0.31.0",
        "command": [
            *("bash", "-c", install, "rlkit", f"{MOUNT}/{PLACE.wheel}"),
            *("python3", "-m", "rlkit.engines.hf_trainer", "--run", "smoke-1", "--folder", RUN),
            *("--models", f"{MOUNT}/models", "--namespace", "me", "--replica", URLS[0].url, "--replica", URLS[1].url),
        ],
        "arguments": [],
        "environment": {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"},
        "secrets": SECRETS,
        "flavor": JobHardware.H200X2,
        "timeoutSeconds": 7200,
        "labels": labels_of("trainer", name="smoke-1-trainer"),
        "volumes": [{**VOLUME, "readOnly": False}],
    }  # fmt: skip


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
