"""News of a run as trackio's alerts, in the run that they are about.

`trackio.alert` needs the process that logs the run; a watch is another one, so it writes what that function writes
(trackio 0.43): a row of the project's alerts (`SQLiteStorage.bulk_alert`, or a server's `/bulk_alert`), and the webhook
that TRACKIO_WEBHOOK_URL names, from TRACKIO_WEBHOOK_MIN_LEVEL on.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rlkit.errors import BadInput, RlkitError
from rlkit.machine import trackio_folder
from rlkit.tracking import Run
from rlkit.trackio_source import LocalSource, RemoteSource, Source, on_disk_name, open_source


def raise_alert(
    run: Run,
    title: str,
    text: str,
    level: Literal["info", "warn", "error"],
    source: Source | str | Path | None = None,
) -> None:
    """Store an alert at the run's last step, where the run was read from. Raises BadInput where that is not to be."""
    place = open_source(source)
    entry = {
        "project": on_disk_name(run.project),
        "run": run.name,
        "run_id": run.run_id,
        "title": title,
        "text": text,
        "level": level,
        "step": int(run.frame.index.max()) if len(run.frame) else None,
        "timestamp": datetime.now(UTC).isoformat(),
        "alert_id": uuid.uuid4().hex,
    }
    if isinstance(place, RemoteSource):
        place.write("/bulk_alert", alerts=[entry])
    elif isinstance(place, LocalSource):
        _store(entry, place)
    else:
        raise BadInput(f"source {place.where}: alerts go to a folder or a server of trackio's")
    _tell_webhook(entry)


def _store(entry: Mapping[str, Any], place: LocalSource) -> None:
    if place.directory.resolve() != trackio_folder().resolve():
        raise BadInput(f"source {place.where}: trackio writes alerts to its own folder only (TRACKIO_DIR)")
    from trackio import utils  # a second or two, and only writing needs it
    from trackio.sqlite_storage import SQLiteStorage

    if Path(utils.TRACKIO_DIR).resolve() != place.directory.resolve():
        raise RlkitError(f"TRACKIO_DIR is {place.directory}, but trackio was imported with {utils.TRACKIO_DIR}")
    SQLiteStorage.bulk_alert(
        entry["project"],
        entry["run"],
        [entry["title"]],
        [entry["text"]],
        [entry["level"]],
        [entry["step"]],
        [entry["timestamp"]],
        [entry["alert_id"]],
        run_id=entry["run_id"],
    )


def _tell_webhook(entry: Mapping[str, Any]) -> None:
    url = os.environ.get("TRACKIO_WEBHOOK_URL")
    if not url:
        return
    from trackio.alerts import parse_alert_level, resolve_webhook_min_level, send_webhook, should_send_webhook

    level = parse_alert_level(str(entry["level"]))
    if should_send_webhook(level, resolve_webhook_min_level(os.environ.get("TRACKIO_WEBHOOK_MIN_LEVEL"))):
        about = (entry["title"], entry["text"], entry["project"], entry["run"], entry["step"], entry["timestamp"])
        send_webhook(url, level, *about)
