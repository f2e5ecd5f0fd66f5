"""Where trackio keeps its runs, and how they are read from there without writing to it.

Both adapters answer the same read-only SQL on trackio's documented tables (`metrics`, `configs`), so one contract test
covers them. trackio's own log calls are not used for reading: the server's stop at 3000 rows and leave out sparse
metrics, the local ones open the database for writing, and both import trackio first, which takes a second or two.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from huggingface_hub import get_token

from rlkit.errors import BadInput, NotLogged
from rlkit.machine import trackio_folder

Query = Callable[[str], list[dict[str, Any]]]

# SQLite keeps what a checkpoint has not moved into the database yet beside it: "-wal", or "-journal" in rollback mode.
_SIDECARS = ("-wal", "-journal")

# A writer commits once per logged row and holds the files for milliseconds, so a second attempt nearly always succeeds.
_COPY_ATTEMPTS = 5
_COPY_RETRY_S = 0.05

# Databases of trackio's artifact registries lie beside the projects' and hold no runs.
_REGISTRY_PREFIX = "registry-"


class Source(Protocol):
    """A place that holds trackio projects."""

    @property
    def where(self) -> str:
        """The place, in words for an error message."""
        ...

    def projects(self) -> list[str]:
        """Names of the projects, sorted, in trackio's on-disk spelling."""
        ...

    def reading(self, project: str) -> AbstractContextManager[Query]:
        """A consistent, read-only view of one project: a function from SQL to rows. Raises BadInput."""
        ...


def open_source(source: Source | str | Path | None = None) -> Source:
    """The place that `source` names: trackio's own folder (None), a folder, a server's URL, or a Space `user/name`."""
    if source is None:
        return LocalSource(trackio_folder())
    if isinstance(source, Path):
        return LocalSource(source)
    if not isinstance(source, str):
        return source
    if source.startswith(("http://", "https://")):
        return RemoteSource(source)
    if Path(source).is_dir():
        return LocalSource(Path(source))
    if source.count("/") == 1 and all(source.split("/")) and not source.startswith((".", "~")):
        return RemoteSource(source)
    raise BadInput(f"source {source!r}: not a folder, not an http(s) URL, and not a Space named user/name")


def on_disk_name(project: str) -> str:
    """The name trackio files a project under: letters, digits, - and _ only, so `my.runs` and `myruns` are one."""
    return "".join(c for c in project if c.isalnum() or c in "-_") or "default"


class LocalSource:
    """trackio's folder on this machine, one SQLite database per project.

    The database is copied before it is opened. Opening it in place would write to it (a reader of a WAL database needs
    a shared-memory file beside it), would fail on a read-only mount, and is unsafe on a network filesystem, where the
    locks of another machine's writer do not hold.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def where(self) -> str:
        return str(self.directory)

    def projects(self) -> list[str]:
        names = {f.stem for f in self.directory.glob("*.db") if not f.stem.startswith(_REGISTRY_PREFIX)}
        return sorted(names | {on_disk_name(str(record.get("project"))) for record in self._inbox()})

    @contextmanager
    def reading(self, project: str) -> Iterator[Query]:
        database = self.directory / f"{on_disk_name(project)}.db"
        waiting = [r for r in self._inbox() if on_disk_name(str(r.get("project"))) == on_disk_name(project)]
        if not database.is_file() and not waiting:
            raise missing_project(project, self)
        with tempfile.TemporaryDirectory(prefix="rlkit-trackio-") as folder:
            copy = Path(folder) / "project.db"
            if database.is_file():
                _copy_database(database, copy)
            with closing(sqlite3.connect(copy)) as connection:
                connection.row_factory = sqlite3.Row
                try:
                    _add_waiting(connection, waiting)
                except sqlite3.Error as error:
                    raise _unreadable(database, error) from None

                def query(sql: str) -> list[dict[str, Any]]:
                    try:
                        return [_decoded(dict(row)) for row in connection.execute(sql)]
                    except sqlite3.Error as error:
                        raise _unreadable(database, error) from None

                yield query

    def _inbox(self) -> Iterator[dict[str, Any]]:
        """Metric rows that trackio has not put into a database yet.

        On a network filesystem it appends JSON lines to `inbox/<writer>/`, which only its dashboard imports
        (trackio.fragments); a file appears and disappears in one piece.
        """
        for fragment in sorted(self.directory.glob("inbox/*/*.jsonl")):
            with suppress(OSError):  # imported and deleted since the listing
                for line in fragment.read_text(encoding="utf-8", errors="replace").splitlines():
                    with suppress(ValueError):
                        record = json.loads(line)
                        if isinstance(record, dict) and record.get("kind") == "metric" and record.get("run"):
                            yield record


class RemoteSource:
    """A trackio server: the dashboard of this or another machine (its URL), or a Space (`user/name`)."""

    # The server refuses to return more than 10,000 rows (trackio.sqlite_storage._QUERY_MAX_ROWS); callers page by id.
    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def where(self) -> str:
        # A dashboard's full URL carries a write token in its query string, which must not end up in a message.
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}{parts.path}" if parts.scheme else self.address

    def projects(self) -> list[str]:
        return self._projects(self._client())

    @contextmanager
    def reading(self, project: str) -> Iterator[Query]:
        client = self._client()
        name = on_disk_name(project)
        if name not in self._projects(client):
            raise missing_project(project, self)

        def query(sql: str) -> list[dict[str, Any]]:
            rows = self._call(client, "/query_project", name, sql)["rows"]
            return [dict(row) for row in rows]

        yield query

    def write(self, name: str, **arguments: Any) -> None:
        """Call one of the server's writing functions. Raises BadInput when it does not let us, or is not there."""
        client = self._client()
        try:
            client.predict(**arguments, hf_token=get_token(), api_name=name)
        except Exception as error:  # as in _call
            raise BadInput(f"source {self.where}: {name} failed: {self._reason(error)}") from None

    def _projects(self, client: Any) -> list[str]:
        return sorted(p for p in self._call(client, "/get_all_projects") if not p.startswith(_REGISTRY_PREFIX))

    def _client(self) -> Any:
        from trackio.remote_client import RemoteClient  # a second or two, and only remote reading needs it

        try:
            # The client itself keeps the token from hosts that are not the Hub's.
            return RemoteClient(self.address, hf_token=get_token())
        except Exception as error:
            raise BadInput(f"source {self.where}: no trackio server answers there: {self._reason(error)}") from None

    def _call(self, client: Any, name: str, *arguments: str) -> Any:
        try:
            return client.predict(*arguments, api_name=name)
        except Exception as error:  # httpx, gradio and trackio each raise their own
            raise BadInput(f"source {self.where}: {name} failed: {self._reason(error)}") from None

    def _reason(self, error: Exception) -> str:
        lines = str(error).replace(self.address, self.where).splitlines()
        return next(
            (line for line in reversed(lines) if line.strip() and "For more information" not in line), "unknown"
        )


def missing_project(project: str, source: Source) -> NotLogged:
    """The error for a project that is not there, with those that are."""
    names = source.projects()
    there = f"there are: {', '.join(names)}" if names else "there are none"
    return NotLogged(f"trackio project {project!r} does not exist in {source.where}; {there}")


def _add_waiting(connection: sqlite3.Connection, records: list[dict[str, Any]]) -> None:
    """Put inbox rows into the copy, as trackio's import would; one that the database already has shares its log id."""
    if not records:
        return
    connection.execute(
        "CREATE TABLE IF NOT EXISTS metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT, timestamp TEXT,"
        " run_name TEXT, step INTEGER, metrics TEXT, log_id TEXT)"
    )
    connection.execute(
        "CREATE TABLE IF NOT EXISTS configs (id INTEGER PRIMARY KEY, run_id TEXT, run_name TEXT,"
        " config TEXT, created_at TEXT, UNIQUE(run_id))"
    )
    for r in records:
        run_id, log_id = r.get("run_id") or r["run"], r.get("log_id")
        connection.execute(
            "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics, log_id) SELECT ?, ?, ?,"
            " COALESCE(?, (SELECT MAX(step) + 1 FROM metrics WHERE run_id = ?), 0), ?, ?"
            " WHERE ? IS NULL OR NOT EXISTS (SELECT 1 FROM metrics WHERE log_id = ?)",
            (run_id, r.get("timestamp") or "", r["run"], r.get("step"), run_id, json.dumps(r.get("metrics") or {}),
             log_id, log_id, log_id),
        )  # fmt: skip
        if r.get("config"):
            connection.execute(
                "INSERT OR REPLACE INTO configs (run_id, run_name, config, created_at) VALUES (?, ?, ?, ?)",
                (run_id, r["run"], json.dumps(r["config"]), r.get("timestamp") or ""),
            )


def _copy_database(database: Path, copy: Path) -> None:
    """Copy a database and its sidecars so that they belong together, although a run may be writing. Raises BadInput."""
    try:
        for attempt in range(_COPY_ATTEMPTS):
            if attempt:
                time.sleep(_COPY_RETRY_S)
            before = _fingerprint(database)
            for suffix in ("", *_SIDECARS):
                target = Path(f"{copy}{suffix}")
                target.unlink(missing_ok=True)
                try:
                    shutil.copyfile(f"{database}{suffix}", target)
                except FileNotFoundError:
                    if not suffix:
                        raise
            if _fingerprint(database) == before:
                return
        # Larger than what can be copied between two commits: what came over is used if it holds together.
        with closing(sqlite3.connect(copy)) as connection:
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise BadInput(f"{database}: it is written faster than it can be copied; read it when the run pauses")
    except (OSError, sqlite3.Error) as error:
        raise _unreadable(database, error) from None


def _fingerprint(database: Path) -> list[tuple[int, int, int] | None]:
    """What changes whenever a writer touches the database or its sidecars."""
    marks: list[tuple[int, int, int] | None] = []
    for suffix in ("", *_SIDECARS):
        try:
            stat = Path(f"{database}{suffix}").stat()
        except FileNotFoundError:
            marks.append(None)
        else:
            marks.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return marks


def _decoded(row: dict[str, Any]) -> dict[str, Any]:
    # trackio stores its JSON as bytes; its server decodes them before they travel.
    return {k: v.decode("utf-8", "replace") if isinstance(v, bytes) else v for k, v in row.items()}


def _unreadable(database: Path, error: Exception) -> BadInput:
    reason = getattr(error, "strerror", None) or error
    return BadInput(
        f"{database}: not a trackio database this version reads ({reason}); `trackio show` upgrades an old one"
    )
