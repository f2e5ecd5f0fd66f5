from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.errors import BadInput
from rlkit.serving.adapter_files import (
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    Manifest,
    check_name,
    confine,
    describe,
    has_digest,
    read_manifest,
)

Write = Callable[..., str]


def test_a_manifest_stands_for_names_sizes_and_contents(adapter: Write) -> None:
    folder = Path(adapter("a"))
    (folder / ".hidden").write_text("x")
    (folder / "below").mkdir()
    manifest = describe(folder)
    assert [file.name for file in manifest.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert manifest.size == sum((folder / file.name).stat().st_size for file in manifest.files)
    assert read_manifest(manifest.line) == manifest
    assert has_digest(folder, manifest.digest)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert not has_digest(folder, manifest.digest)
    assert describe(Path(adapter("b"))).digest == manifest.digest  # the folder's name is no part of it
    assert not has_digest(folder / "nowhere", manifest.digest)


def test_what_is_not_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: cannot read the adapter: No such file"):
        describe(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="not an adapter: List should have at least 1 item"):
        describe(tmp_path)
    for number in range(MAX_FILES + 1):
        (tmp_path / f"{number}").touch()
    with pytest.raises(BadInput, match="not an adapter: 17 files, an adapter has at most 16"):
        describe(tmp_path)


DIGEST = "0" * 64


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "a\0b", "a\n", "é", "a" * 129, "C:x", "-rf"],
)
def test_names_that_a_file_system_reads_as_something_else(name: str) -> None:
    file = {"name": name, "size": 1, "sha256": DIGEST}
    with pytest.raises(ValueError, match="should match pattern"):
        Manifest.model_validate({"files": [file]})
    with pytest.raises(BadInput, match="lora_name"):
        check_name(name)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([("a", 1, DIGEST), ("A", 1, DIGEST)], "a file is listed twice"),
        ([("b", 1, DIGEST), ("a", 1, DIGEST)], "the files are not sorted by name"),
        ([("a", -1, DIGEST)], "greater than or equal to 0"),
        ([("a", 1.0, DIGEST)], "valid integer"),
        ([("a", 1, DIGEST.upper().replace("0", "G"))], "match pattern"),
    ],
)
def test_manifests_that_are_refused(files: list[tuple[object, ...]], problem: str) -> None:
    listed = [dict(zip(("name", "size", "sha256"), file, strict=True)) for file in files]
    with pytest.raises(ValueError, match=problem):
        Manifest.model_validate({"files": listed})


def test_the_largest_manifest_fits_its_limit() -> None:
    files = [{"name": f"{number:0128d}", "size": 10**12, "sha256": DIGEST} for number in range(MAX_FILES)]
    assert len(Manifest.model_validate({"files": files}).line) < MAX_MANIFEST_BYTES


@given(st.binary())
def test_any_line_is_a_manifest_or_refused(line: bytes) -> None:
    with contextlib.suppress(BadInput):
        assert read_manifest(line).files


def test_an_adapter_stays_inside_its_root_with_links_resolved(adapter: Write, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    inside = Path(adapter("root/inside"))
    confine(str(inside), root)
    confine(str(root / "not" / "there" / "yet"), root)
    confine("/anywhere", None)
    linked_root = tmp_path / "linked"
    linked_root.symlink_to(root)
    confine(str(linked_root / "inside"), root)
    confine(str(inside), linked_root)

    outside.mkdir()
    (root / "way-out").symlink_to(outside)
    (inside / "adapter_model.bin").symlink_to(outside / "secret")
    loop = root / "loop"
    loop.symlink_to(loop)
    for path in (
        str(outside), str(root / "way-out"), str(root / ".." / "outside"), f"{root}-other", str(inside), str(loop),
        "inside", "", "org/adapter", "/", f"{root}/a\0b", f"{root}/{'x' * 5000}",
    ):  # fmt: skip
        with pytest.raises(BadInput, match="lora_path: "):
            confine(path, root)
