"""The Jobs of a run, as data: what each is asked for, from the recipe alone.

A run is one trainer Job, `serve.replicas` replica Jobs and a folder of one bucket, which every Job mounts at the same
path: TRL tells the replicas where a policy lies by its path in the trainer. Nothing here talks to the Hub.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from rlkit.engines.hf_addresses import Address
from rlkit.recipe import Recipe
from rlkit.serving.replica import vllm_environment

Role = Literal["trainer", "replica"]

# Where every Job finds the bucket.
MOUNT = "/rlkit-bucket"
SERVER_PORT = 8000
RECEIVER_PORT = 8001
# What the Jobs proxy and the Hub's client take the token from; it is only ever sent as a secret.
TOKEN_VARIABLE = "HF_TOKEN"
# What the Hub puts before an alias to make it a name that the Jobs of the same network group can look up.
PREFIX_VARIABLE = "HF_NETWORK_GROUP_PREFIX"
# Labels all Jobs of this program carry, so that they can be listed without those of others.
TOOL_LABEL = {"tool": "rlkit"}
# Label values are stored as tags: letters, digits, - and _ (huggingface_hub._jobs_api._sanitize_job_name).
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_-]")

# The image holds vLLM and torch. A replica needs of rlkit only what starts and watches vLLM, so nothing of the image
# is touched; the trainer takes what rlkit's wheel asks for, trl first.
_INSTALL_REPLICA = 'python3 -m pip install --quiet --no-deps "$1" "$2" && shift 2 && exec "$@"'
_INSTALL_TRAINER = 'python3 -m pip install --quiet "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Place:
    """Where a run lives on the Hub: who pays, which bucket, the wheel in it, the run's name, this launch's id.

    `launch` is new with every start: a request whose answer was lost can then be told from an earlier one. `group` is
    the network its Jobs share, None when the trainer reaches the replicas through the Jobs proxy.
    """

    namespace: str
    bucket: str
    wheel: str
    run: str
    launch: str
    group: str | None = None

    @property
    def bucket_id(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.bucket}"

    @property
    def folder(self) -> str:
        """The run's folder in the bucket."""
        return bucket_folder(self.run)

    def mounted(self, path: str) -> str:
        """A path of the bucket as the Jobs see it."""
        return f"{MOUNT}/{path}"


@dataclass(frozen=True)
class JobRequest:
    """One Job to ask for. `secrets` names what is taken from the launching side's environment at the last moment."""

    role: Role
    replica: int | None
    image: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    flavor: str
    timeout_s: int
    labels: Mapping[str, str]
    volumes: tuple[tuple[str, str, bool], ...]  # bucket, mount path, read only
    expose: tuple[int, ...] = ()
    secrets: tuple[str, ...] = field(default=())
    group: str | None = None
    alias: str | None = None  # its name in the group

    @property
    def name(self) -> str:
        """What a person calls it: `trainer`, `replica-0`."""
        return self.role if self.replica is None else f"{self.role}-{self.replica}"

    def arguments(self, secrets: Mapping[str, str]) -> dict[str, Any]:
        """The arguments of huggingface_hub's run_job, without namespace and token."""
        # Imported here: a replica's Job reads this module for its names, and the client takes seconds to import.
        from huggingface_hub import Volume

        network: dict[str, Any] = {} if self.group is None else {"network_group": self.group}
        if self.alias is not None:
            network["network_aliases"] = [self.alias]
        return {
            **network,
            "image": self.image,
            "command": list(self.command),
            "env": dict(self.env),
            "secrets": {name: secrets[name] for name in self.secrets} or None,
            "flavor": self.flavor,
            "timeout": self.timeout_s,
            "labels": dict(self.labels),
            "volumes": [
                Volume(type="bucket", source=source, mount_path=path, read_only=read_only)
                for source, path, read_only in self.volumes
            ],
            "expose": list(self.expose) or None,
        }


def bucket_folder(run: str) -> str:
    """A run's folder in the bucket."""
    return f"runs/{run}"


def network_group_of(recipe: Recipe, launch: str) -> str | None:
    """The network that the Jobs of a launch share; None when the recipe wants none, or the client cannot ask for it."""
    from huggingface_hub import HfApi

    can = "network_group" in inspect.signature(HfApi.run_job).parameters
    return f"{TOOL_LABEL['tool']}-{launch}" if can and recipe.hardware.network_group else None


def direct_url(index: int, port: int) -> str:
    """Where a replica is for the Jobs of its group; the prefix is known inside a Job only."""
    return f"http://${{{PREFIX_VARIABLE}}}replica-{index}:{port}"


def label_value(text: str) -> str:
    """`text` as a label: unchanged when it fits, else its fitting letters and a hash that tells it from its like."""
    fitting = _NOT_IN_LABELS.sub("-", text)
    return fitting if fitting == text else f"{fitting}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def run_labels(recipe: Recipe, run: str) -> dict[str, str]:
    """The labels by which the Jobs of one run are found again."""
    return {**TOOL_LABEL, "project": label_value(recipe.tracking.project), "run": label_value(run)}


def replica_request(recipe: Recipe, place: Place, index: int, lease_s: float, serve: Sequence[str] = ()) -> JobRequest:
    """The Job of replica `index`; `serve` takes the place of the vLLM command line."""
    pushes = recipe.transport.kind == "push"
    arguments = ["--recipe", place.mounted(f"{place.folder}/recipe.yaml"), "--port", str(SERVER_PORT)]
    arguments += ["--lease", place.mounted(f"{place.folder}/lease"), "--lease-s", f"{lease_s:g}"]
    arguments += ["--models", place.mounted("models")]
    if pushes:
        arguments += ["--receiver-port", str(RECEIVER_PORT)]
    if pushes and place.group is not None:
        arguments += ["--direct"]
    if serve:
        arguments += ["--", *serve]
    yaml = f"ruamel.yaml=={metadata.version('ruamel.yaml')}"
    installing = ("bash", "-c", _INSTALL_REPLICA, "rlkit", place.mounted(place.wheel), yaml)
    return JobRequest(
        role="replica",
        replica=index,
        image=recipe.hardware.image,
        command=(*installing, "python3", "-m", "rlkit.engines.hf_replica", *arguments),
        env=vllm_environment(recipe),
        flavor=recipe.hardware.replica,
        timeout_s=_timeout_s(recipe),
        labels=_labels(recipe, place, "replica", index),
        volumes=((place.bucket_id, MOUNT, True),),
        expose=(SERVER_PORT, RECEIVER_PORT) if pushes else (SERVER_PORT,),
        # The receiver asks for a token of its own; without one beside it a replica holds no secret.
        secrets=(TOKEN_VARIABLE,) if pushes else (),
        group=place.group,
        alias=None if place.group is None else f"replica-{index}",
    )


def trainer_request(
    recipe: Recipe,
    place: Place,
    replicas: Sequence[Address],
    train: Sequence[str] = (),
) -> JobRequest:
    """The trainer's Job, whose replicas are there when it starts; `train` takes the place of the trainer's command."""
    arguments = ["--run", place.run, "--folder", place.mounted(place.folder), "--models", place.mounted("models")]
    arguments += ["--namespace", place.namespace]
    for replica in replicas:
        arguments += ["--replica", replica.url]
    for replica in replicas:
        arguments += [] if replica.receiver is None else ["--receiver", replica.receiver]
    if train:
        arguments += ["--", *train]
    installing = ("bash", "-c", _INSTALL_TRAINER, "rlkit", place.mounted(place.wheel))
    return JobRequest(
        role="trainer",
        replica=None,
        image=recipe.hardware.image,
        command=(*installing, "python3", "-m", "rlkit.engines.hf_trainer", *arguments),
        env={"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"},
        flavor=recipe.hardware.trainer,
        timeout_s=_timeout_s(recipe),
        labels=_labels(recipe, place, "trainer", None),
        volumes=((place.bucket_id, MOUNT, False),),
        # The proxy passes the Jobs proxy with it, and the watchdog cancels the replicas with it.
        secrets=(TOKEN_VARIABLE,),
        group=place.group,
    )


def _labels(recipe: Recipe, place: Place, role: Role, index: int | None) -> dict[str, str]:
    name = role if index is None else f"{role}-{index}"
    own = {"role": role, "version": label_value(metadata.version("rlkit")), "launch": place.launch}
    own |= {"name": label_value(f"{place.run}-{name}")}
    return {**run_labels(recipe, place.run), **own, **({} if index is None else {"replica": str(index)})}


def _timeout_s(recipe: Recipe) -> int:
    return int(recipe.hardware.deadline_hours * 3600)
