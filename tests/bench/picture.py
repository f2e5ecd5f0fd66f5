"""The picture of a report that the README shows: `make picture`, or with RUN=folder that of a run of one's own.

Without a run it is that of the recorded one in tests/data. The page is photographed by the machine's Chromium, offline,
and reduced to few colours, so that the file stays small.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

OUT = Path(__file__).parents[2] / "notebooks" / "report.png"
# Down to the first figure with its caption. Fewer colours than a PNG can list would lose that of a narrow band.
WIDTH, HEIGHT, COLOURS = 960, 1590, 256
MOST_BYTES = 200_000


def main() -> None:
    """Render, photograph, write; the path is printed."""
    parser = argparse.ArgumentParser(description="Make the README's picture of a report.")
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder, else the recorded run of the tests")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        os.environ["TRACKIO_DIR"] = str(Path(folder) / "trackio")  # the recording stays out of the user's own
        from run_folders import run_folder

        from rlkit.report import report_run
        from rlkit.run_folder import RunFolder

        if arguments.run is None:
            report = report_run(run_folder(Path(folder) / "learning", "learning-run"))
        else:
            report = RunFolder(arguments.run).report
        arguments.out.write_bytes(photograph(report))
    print(f"{arguments.out} ({arguments.out.stat().st_size:,} bytes)")


def photograph(report: Path) -> bytes:
    """The top of a report as a PNG; an error when it is larger than a README should load."""
    from browser import open_browser, open_offline
    from PIL import Image

    with open_browser() as browser:
        page = open_offline(browser, report, "light", width=WIDTH).page
        page.wait_for_function("document.querySelectorAll('.rlkit-figure svg.main-svg').length > 0")
        shot = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT}, full_page=True)
    small = io.BytesIO()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, Image.Quantize.FASTOCTREE).save(
        small, "PNG", optimize=True
    )
    if small.tell() > MOST_BYTES:
        raise SystemExit(f"error: the picture has {small.tell():,} bytes, more than {MOST_BYTES:,}")
    return small.getvalue()


if __name__ == "__main__":
    main()
