"""Buckets of the emulated Hub: folders on this disk, reached through the client's real upload and download code.

The client moves a bucket's bytes with hf_xet, which speaks to a content-addressed store. It takes a folder as one
(`local://`), so every token the emulated Hub hands out names a folder of its own: what a client uploads is found there
when it registers the file, and what it may download is put there first. A folder's database is locked by the process
that opened it, so this side always works on a copy.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_xet import SKIP_SHA256, XetFileInfo, XetSession

CREATED = "2026-01-01T00:00:00.000Z"


@dataclass
class Buckets:
    """All buckets under `root`; `token_url` is where hf_xet is told which folder a token names."""

    root: Path
    token_url: str = ""
    stores: dict[str, Path] = field(default_factory=dict)
    full: bool = False  # refuse every file that is added

    def __post_init__(self) -> None:
        self._uploads: list[Path] = []
        self._numbers = itertools.count()
        self._hashes: dict[tuple[Path, int, int], str] = {}
        self._lock = threading.Lock()
        self._session = XetSession()

    def folder(self, bucket: str) -> Path:
        """Where the bucket `namespace/name` keeps its files."""
        return self.root / "buckets" / bucket

    def create(self, bucket: str) -> bool:
        """Whether it is new."""
        folder = self.folder(bucket)
        if folder.exists():
            return False
        folder.mkdir(parents=True)
        return True

    def info(self, bucket: str) -> dict[str, Any]:
        """What the Hub says of a bucket."""
        files = [path for path in self.folder(bucket).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        return {"id": bucket, "private": True, "createdAt": CREATED, "size": size, "totalFiles": len(files)}

    def new_store(self, purpose: str) -> tuple[str, Path]:
        """A token and the empty folder it names."""
        number = next(self._numbers)
        token, folder = f"{purpose}-{number}", self.root / "stores" / f"{purpose}-{number}"
        folder.mkdir(parents=True)
        self.stores[token] = folder
        if purpose == "write":
            self._uploads.append(folder)
        return token, folder

    def tree(self, bucket: str, prefix: str, recursive: bool) -> list[dict[str, Any]]:
        """Files whose path begins with `prefix`, letter by letter as on the Hub; those, and folders, in it when not
        recursive."""
        root = self.folder(bucket)
        begin = [path for path in root.rglob("*") if str(path.relative_to(root)).startswith(prefix)]
        found = sorted(begin if recursive else (root / prefix).glob("*"))
        files = [self.describe(bucket, str(path.relative_to(root))) for path in found if path.is_file()]
        folders = [path for path in found if path.is_dir() and not recursive]
        return [entry for entry in files if entry] + [
            {"type": "directory", "path": str(path.relative_to(root)), "uploadedAt": CREATED} for path in folders
        ]

    def describe(self, bucket: str, path: str) -> dict[str, Any] | None:
        """One file with its hash, or None when it is not there."""
        file = self.folder(bucket) / path
        if not file.is_file():
            return None
        return {"type": "file", "path": path, "size": file.stat().st_size, "xetHash": self._hash(file)}

    def add(self, bucket: str, path: str, xet_hash: str) -> str | None:
        """Take an uploaded file into a bucket; why not, else None."""
        if self.full:
            return "Storage limit reached"
        target = self.folder(bucket) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not xet_hash.strip("0"):  # an empty file's
            target.write_bytes(b"")
            return None
        for store in reversed(self._uploads):
            staging = target.with_name(f".{target.name}.incoming-{next(self._numbers)}")  # two may come at once
            if self._download(store, xet_hash, staging):
                staging.replace(target)
                return None
        return f"unknown content {xet_hash}"

    def fill(self, store: Path, bucket: str) -> None:
        """Put a bucket's files where the holder of a read token finds them."""
        files = [path for path in self.folder(bucket).rglob("*") if path.is_file() and path.stat().st_size]
        self._upload(store, files)

    def _hash(self, file: Path) -> str:
        stat = file.stat()
        key = (file, stat.st_mtime_ns, stat.st_size)
        if key not in self._hashes:
            _, store = self.new_store("hash")
            self._hashes[key] = self._upload(store, [file])[0] if stat.st_size else "0" * 64
        return self._hashes[key]

    def _upload(self, store: Path, files: list[Path]) -> list[str]:
        # In a folder beside it: the reader opens `store` itself, from another process.
        with self._lock:
            work = store.with_name(f"{store.name}-filling-{time.monotonic_ns()}")
            shutil.copytree(store, work)
            self.stores[work.name] = work
            url = f"{self.token_url}/{work.name}"
            with self._session.new_upload_commit(
                token_refresh_url=url, token_refresh_headers={}, custom_headers={}
            ) as commit:
                handles = [commit.start_upload_file(str(file), sha256=SKIP_SHA256) for file in files]
            hashes = [str(handle.result().xet_info.hash) for handle in handles]
            shutil.copytree(work, store, dirs_exist_ok=True)
            return hashes

    def _download(self, store: Path, xet_hash: str, target: Path) -> bool:
        with self._lock:
            work = store.with_name(f"{store.name}-reading-{time.monotonic_ns()}")
            shutil.copytree(store, work)
            self.stores[work.name] = work
            url = f"{self.token_url}/{work.name}"
            try:
                with self._session.new_file_download_group(
                    token_refresh_url=url, token_refresh_headers={}, custom_headers={}
                ) as group:
                    group.start_download_file(XetFileInfo(xet_hash), str(target))
            except Exception:  # hf_xet raises several kinds for content it does not know
                return False
            finally:
                shutil.rmtree(work, ignore_errors=True)
            # A store that does not have it may leave an empty file, and no error.
            return target.is_file() and target.stat().st_size > 0
