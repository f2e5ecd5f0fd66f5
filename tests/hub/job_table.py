"""What the published run asks the Hub for: a table of every field, and huggingface_hub's own account of them.

`known_fields` derives from the client's signature and types which JSON field each argument of run_job ends up in;
`asked_for` writes down by hand what the run asks for. A request must agree with both.
"""

from __future__ import annotations

import inspect
import types
import typing
from importlib import metadata
from typing import Any

from huggingface_hub import HfApi, Volume
from huggingface_hub._jobs_api import _create_job_spec
from pydantic import TypeAdapter

from rlkit.engines.hf_jobs import MOUNT, Place, label_value

_SAMPLES: dict[Any, Any] = {
    str: "sample", bool: True, int: 7, list[str]: ["sample"], list[int]: [7], dict[str, str]: {"a": "sample"},
    dict[str, Any]: {"a": "sample"}, list[Volume]: [Volume(type="bucket", source="a/b", mount_path="/c")],
}  # fmt: skip
_NEEDED: dict[str, Any] = {
    "image": "base",
    "command": ["base"],
    "env": None,
    "secrets": None,
    "flavor": None,
    "timeout": None,
}


def known_fields() -> dict[str, tuple[str, Any]]:
    """By the path of a JSON field (`network.group`): the argument it comes from, and that argument's type."""
    hints = typing.get_type_hints(_create_job_spec)
    asked = set(inspect.signature(HfApi.run_job).parameters) - {"self", "namespace", "token"}
    parameters = set(inspect.signature(_create_job_spec).parameters)
    assert asked == parameters, "run_job and the JSON it sends have different fields"
    plain, found = _create_job_spec(**_NEEDED), dict[str, tuple[str, Any]]()
    for name in sorted(parameters):
        more = {"network_group": "base"} if name == "network_aliases" else {}
        without = _create_job_spec(**_NEEDED | more) if more else plain
        spec = _create_job_spec(**_NEEDED | more | {name: _sample(hints[name])})
        (path,) = _differing(without, spec)
        found[path] = (name, hints[name])
    return found


def arguments_of(spec: dict[str, Any]) -> dict[str, Any]:
    """The arguments of run_job that a request was made of; every field must be one of theirs, and of its type."""
    arguments, left = dict(_NEEDED), dict(spec)
    assert left.pop("arguments") == []
    for path, (name, kind) in known_fields().items():
        outer, _, inner = path.partition(".")
        if name == "name" or outer not in left or (inner and inner not in left[outer]):
            continue  # a name is one of the labels
        value = left[outer][inner] if inner else left[outer]
        if name == "volumes":
            value = [Volume(**volume) for volume in value]
        else:
            TypeAdapter(kind).validate_python(value, strict=True)
        arguments[name] = value
        if inner:
            left[outer] = {key: other for key, other in left[outer].items() if key != inner}
        if not inner or not left[outer]:
            del left[outer]
    assert not left, f"fields that huggingface_hub does not have: {left}"
    return arguments


def asked_for(place: Place, token: str, replica: int | None, urls: list[str], deadline_s: int) -> dict[str, Any]:
    """The request for a replica, or for the trainer (None), of runs/published/r1-dp2.yaml."""
    run, wheel = f"{MOUNT}/runs/{place.run}", f"{MOUNT}/{place.wheel}"
    volume = {"type": "bucket", "source": f"{place.namespace}/rlkit", "mountPath": MOUNT, "readOnly": True}
    role = "trainer" if replica is None else "replica"
    name = role if replica is None else f"{role}-{replica}"
    labels = {
        "tool": "rlkit", "project": "five-run-chase", "run": place.run, "role": role, "launch": place.launch,
        "version": label_value(metadata.version("rlkit")), "name": f"{place.run}-{name}",
    }  # fmt: skip
    common = {"dockerImage": "vllm/vllm-openai:v0.31.0", "arguments": [], "timeoutSeconds": deadline_s}
    if replica is None:
        install = 'python3 -m pip install --quiet "$1" && shift && exec "$@"'
        listed = [part for url in urls for part in ("--replica", url)]
        return {
            **common,
            "command": [
                *("bash", "-c", install, "rlkit", wheel, "python3", "-m", "rlkit.engines.hf_trainer"),
                *("--run", place.run, "--folder", run, "--models", f"{MOUNT}/models", "--namespace", place.namespace),
                *listed,
            ],
            "environment": {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"},
            "secrets": {"HF_TOKEN": token},
            "flavor": "h200x2",
            "labels": labels,
            "volumes": [{**volume, "readOnly": False}],
            **({} if place.group is None else {"network": {"group": place.group}}),
        }
    install = 'python3 -m pip install --quiet --no-deps "$1" "$2" && shift 2 && exec "$@"'
    network = {"network": {"group": place.group, "aliases": [f"replica-{replica}"]}}
    return {
        **common,
        "command": [
            *("bash", "-c", install, "rlkit", wheel, f"ruamel.yaml=={metadata.version('ruamel.yaml')}"),
            *("python3", "-m", "rlkit.engines.hf_replica", "--recipe", f"{run}/recipe.yaml", "--port", "8000"),
            *("--lease", f"{run}/lease", "--lease-s", "900", "--models", f"{MOUNT}/models"),
        ],
        "environment": {
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1",
        },
        "flavor": "h200",
        "labels": labels | {"replica": str(replica)},
        "volumes": [volume],
        "expose": {"ports": [8000]},
        **({} if place.group is None else network),
    }  # fmt: skip


def _sample(kind: Any) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next(_SAMPLES[option] for option in options if option in _SAMPLES)


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    paths = []
    for key in after:
        if isinstance(after[key], dict) and key in ("network", "expose", "ssh", "labels") and key not in before:
            inner = list(after[key])
            paths += [f"{key}.{name}" for name in inner] if key != "labels" or inner == ["name"] else [key]
        elif key in before and isinstance(before[key], dict) and key == "network" and before[key] != after[key]:
            paths += [f"{key}.{name}" for name in after[key] if before[key].get(name) != after[key][name]]
        elif before.get(key) != after[key]:
            paths.append(key)
    return paths
