"""What runs in the two Jobs of `rlkit check --measure`: one writes into the bucket, the other looks and listens.

`python3 -m rlkit.engines.hf_probe write --folder DIR` and `... look --folder DIR --port N`. Each says what it did as
lines of JSON with its clock's time; `rlkit.engines.hf_figures` makes figures of both. Standard library alone, so that a
plain Python image will do.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import os
import socketserver
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

MARK = "rlkit-probe "
# As large as a rank-1 adapter of a 1.5 B model.
PAYLOAD_BYTES = 4 * 2**20
LOOK_EVERY_S = 0.25
# Looked for from the start on: a mount may remember that it was not there.
EARLY = "early.bin"
# Looked for only once the first was seen.
LATE = "late.bin"
# A folder that appears by a rename, as TRL publishes an adapter.
RENAMED = "renamed"
RENAMED_FILES = ("adapter_config.json", "adapter_model.safetensors")
PATIENCE_S = 180.0


def main() -> None:
    """Write, or look and listen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("write", "look"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S)
    options = parser.parse_args()
    if options.role == "write":
        write(options.folder)
    else:
        serve_and_look(options.folder, options.port, options.patience_s)


def write(folder: Path) -> None:
    """One file, another, and a folder by a rename; says when each was complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (EARLY, LATE):
        payload = os.urandom(PAYLOAD_BYTES)
        (folder / name).write_bytes(payload)
        _say(event="written", name=name, sha256=hashlib.sha256(payload).hexdigest())
    staging = folder / f".{RENAMED}"
    staging.mkdir()
    for name in RENAMED_FILES:
        (staging / name).write_bytes(os.urandom(2**16))
    staging.rename(folder / RENAMED)
    _say(event="written", name=RENAMED)


def serve_and_look(folder: Path, port: int, patience_s: float) -> None:
    """Listen on `port`, and say when each of the writer's files shows, and whether it shows whole."""
    server = _Server(("0.0.0.0", port), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _say(event="listening")
    deadline = time.monotonic() + patience_s
    for name in (EARLY, LATE):
        if not _look_for(folder / name, deadline):
            _say(event="unseen", name=name)
    _look_for_folder(folder / RENAMED, deadline)
    _say(event="looked")
    # The other side now asks the port how long it may hold a response; it cancels this Job.
    while time.monotonic() < deadline + patience_s:
        time.sleep(LOOK_EVERY_S)


def _look_for(path: Path, deadline: float) -> bool:
    partial = 0
    while time.monotonic() < deadline:
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        if len(data) == PAYLOAD_BYTES:
            _say(event="seen", name=path.name, sha256=hashlib.sha256(data).hexdigest(), partial_looks=partial)
            return True
        partial += bool(data)
        time.sleep(LOOK_EVERY_S)
    return False


def _look_for_folder(path: Path, deadline: float) -> None:
    partial = 0
    while time.monotonic() < deadline:
        there = [name for name in RENAMED_FILES if (path / name).is_file()]
        if len(there) == len(RENAMED_FILES):
            _say(event="seen", name=path.name, partial_looks=partial)
            return
        partial += bool(there)
        time.sleep(LOOK_EVERY_S)
    _say(event="unseen", name=path.name)


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """`/hold?s=5` answers after five seconds; `authorization` says whether the token came through."""
        query = parse_qs(urlsplit(self.path).query)
        time.sleep(float(query.get("s", ["0"])[0]))
        body = json.dumps({"authorization": "Authorization" in self.headers}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests are the other side's to tell."""


def _say(**values: object) -> None:
    print(MARK + json.dumps({"at": time.time(), **values}), flush=True)


if __name__ == "__main__":
    main()
