"""The files of one adapter: their list with sizes and digests, and where on a disk they may be.

The list (`Manifest`) is what a pushed adapter is announced and checked by; its digest names the adapter's folder on the
receiving side, so that other weights never come under a path that vLLM has seen.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rlkit.errors import BadInput

# One path component that no file system reads as anything else: no separator, no leading dot, no NUL.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"

# peft writes a configuration, the weights and a README; vLLM reads the first two. A folder with more than this is
# something else.
MAX_FILES = 16

# Names, sizes and digests of MAX_FILES files are at most 4 kB of JSON.
MAX_MANIFEST_BYTES = 16 * 1024

CHUNK_BYTES = 1024**2


class AdapterFile(BaseModel):
    """One file: its name in the folder, its size in bytes, its SHA-256."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=DIGEST_PATTERN)]


class Manifest(BaseModel):
    """What an adapter consists of, sorted by name: the order in which the files travel, and one digest a folder."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    files: Annotated[list[AdapterFile], Field(min_length=1, max_length=MAX_FILES)]

    @field_validator("files")
    @classmethod
    def _are_different(cls, files: list[AdapterFile]) -> list[AdapterFile]:
        # Some file systems do not tell upper from lower case.
        if len({file.name.lower() for file in files}) < len(files):
            raise ValueError("a file is listed twice")
        if files != sorted(files, key=lambda file: file.name):
            raise ValueError("the files are not sorted by name")
        return files

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def line(self) -> bytes:
        """The manifest as one line of JSON, its end included."""
        return self.model_dump_json().encode() + b"\n"

    @property
    def digest(self) -> str:
        """The SHA-256 of the line: it stands for names, sizes and contents of all files."""
        return hashlib.sha256(self.line).hexdigest()


def check_name(name: str) -> None:
    """Check that an adapter's name can be that of a folder. Raises BadInput."""
    if re.fullmatch(NAME_PATTERN, name) is None:
        reason = "only letters, digits, '.', '_' and '-' are pushed as a name, with a letter or digit first"
        raise BadInput(f"lora_name: {name!r}: {reason}")


def read_manifest(line: bytes) -> Manifest:
    """A manifest from its line. Raises BadInput."""
    try:
        return Manifest.model_validate_json(line)
    except ValidationError as error:
        item = error.errors()[0]
        raise BadInput(f"manifest: {'.'.join(map(str, item['loc'])) or 'line'}: {item['msg']}") from None


def describe(folder: Path) -> Manifest:
    """The manifest of an adapter's folder. Reads every file. Raises BadInput.

    Files only: vLLM reads nothing below the folder itself.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        if len(paths) > MAX_FILES:  # before they are read, whatever folder this is
            raise BadInput(f"{folder}: not an adapter: {len(paths)} files, an adapter has at most {MAX_FILES}")
        files = [{"name": path.name, "size": path.stat().st_size, "sha256": sha256_of(path)} for path in paths]
    except OSError as error:
        raise BadInput(f"{folder}: cannot read the adapter: {error.strerror}") from None
    except ValueError:  # a NUL, which no system call takes
        raise BadInput(f"{str(folder)!r}: not a path") from None
    try:
        return Manifest.model_validate({"files": files})
    except ValidationError as error:
        raise BadInput(f"{folder}: not an adapter: {error.errors()[0]['msg']}") from None


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def has_digest(folder: Path, digest: str) -> bool:
    """Whether a folder's files are exactly those that a manifest's digest stands for."""
    try:
        return describe(folder).digest == digest
    except BadInput:
        return False


def confine(path: str, root: Path | None) -> None:
    """Check that an adapter's folder and everything in it lie inside `root`, links resolved. Raises BadInput.

    A folder that is not there is judged by where it would be. None: anywhere.
    """
    if root is None:
        return
    try:
        inside = root.resolve()
        folder = Path(path)
        entries = list(folder.iterdir()) if folder.is_dir() else []
        outside = [entry for entry in (folder, *entries) if not entry.resolve().is_relative_to(inside)]
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, a loop of links, no permission
        raise BadInput(f"lora_path: {path!r} cannot be resolved") from None
    if not Path(path).is_absolute() or outside:
        raise BadInput(f"lora_path: {path!r} is not inside {root}, where adapters are loaded from (adapter_root)")
