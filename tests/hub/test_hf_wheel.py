"""The wheel that the Jobs install."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rlkit
from rlkit.engines.hf_wheel import pack_wheel, wheel_path

pytestmark = pytest.mark.hub


def test_same_code_gives_the_same_bytes() -> None:
    assert pack_wheel() == pack_wheel()


def test_holds_every_file_with_its_digest() -> None:
    _, data = pack_wheel()
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        names = set(wheel.namelist())
        record = next(name for name in names if name.endswith("/RECORD"))
        rows = {row[0]: row[1] for row in csv.reader(wheel.read(record).decode().splitlines())}
        assert rows.keys() == names
        for name in names - {record}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
            assert rows[name] == f"sha256={digest}"
    package = Path(rlkit.__file__).parent
    assert {f"rlkit/{path.relative_to(package)}" for path in package.rglob("*.py")} <= names
    assert "rlkit/report_template/report.css" in names
    assert not [name for name in names if "__pycache__" in name]


def test_unpacked_it_is_the_installed_package(tmp_path: Path) -> None:
    name, data = pack_wheel()
    (tmp_path / name).write_bytes(data)
    target = tmp_path / "site"
    unpack = [sys.executable, "-m", "zipfile", "-e", str(tmp_path / name), str(target)]
    subprocess.run(unpack, check=True)
    code = "import rlkit, importlib.metadata as m; print(rlkit.__file__, m.version('rlkit'))"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    where, version = shown.stdout.split()
    assert Path(where).is_relative_to(target)
    assert name == f"rlkit-{version}-py3-none-any.whl"
    assert wheel_path(name, data).endswith(f"/{name}")
