"""rlkit as a wheel, packed from what runs here: the Jobs get the very code that launches them.

No build tool: an editable checkout and an installed package are packed alike, and the same files give the same bytes,
so the wheel is uploaded once per version of the code.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata
from pathlib import Path

import rlkit

_SKIPPED = {"__pycache__"}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first a zip can hold


def pack_wheel() -> tuple[str, bytes]:
    """The wheel's file name and its bytes."""
    distribution = metadata.distribution("rlkit")
    version = distribution.version
    info = f"rlkit-{version}.dist-info"
    package = Path(rlkit.__file__).parent
    files = {f"rlkit/{path.relative_to(package).as_posix()}": path.read_bytes() for path in _sources(package)}
    # In a checkout the first found may be the build's egg-info, whose metadata has another name.
    about = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    files[f"{info}/METADATA"] = about.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: rlkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"rlkit-{version}-py3-none-any.whl", stream.getvalue()


def wheel_path(name: str, data: bytes) -> str:
    """Where it lies in a bucket: under its own hash, so that a running Job's wheel is never replaced."""
    return f"wheels/{hashlib.sha256(data).hexdigest()[:16]}/{name}"


def _sources(package: Path) -> list[Path]:
    found = [path for path in package.rglob("*") if path.is_file()]
    return [path for path in found if not _SKIPPED.intersection(path.parts) and path.suffix != ".pyc"]


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
