"""Take the pictures of docs/img again, from real runs.

    python scripts/view_pictures.py RUNS --out docs/img --runs sums sums-high-lr --cluster two-hosts

RUNS is a folder of run directories: two of one process to look at and to compare, and one of a cluster that lost a worker. Needs
`pip install 'rollcall-rl[view,browser]'` and a Chromium (Debian: apt install chromium).
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]  # of the extra `browser`

from rollcall.view.api import ShownRuns
from rollcall.view.server import PageServer

WIDTH, HEIGHT = 1360, 860
WAIT_MS = 120_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    parser.add_argument("--runs", nargs=2, required=True, metavar="RUN", help="two runs of one process")
    parser.add_argument(
        "--step", type=int, default=3, help="whose samples and tokens are shown: an early one, where rewards differ"
    )
    parser.add_argument("--cluster", required=True, metavar="RUN", help="a run of a cluster")
    args = parser.parse_args()
    places = ShownRuns([args.folder])
    server = PageServer(places)
    threading.Thread(target=server.run, daemon=True).start()
    with sync_playwright() as driver:
        # As root in a container Chromium has no sandbox of its own; what it opens here is this page alone.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=[*options, "--disable-gpu"])
        page = chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light").new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(server.new_address())
        page.wait_for_selector("table.runs tbody tr")
        take(page, args.out / "view-runs.png")
        ids = {place.name: place.id for place in places.all()}
        first, second = (ids[name] for name in args.runs)
        look(page, "compare", wait_for=".js-plotly-plot", run=[first, second])
        take(page, args.out / "view-compare.png")
        look(page, "curves", wait_for=".js-plotly-plot", run=first, smooth=0.6)
        take(page, args.out / "view-curves.png")
        look(page, "samples", wait_for=".completion", run=first, at=args.step)
        take(page, args.out / "view-samples.png")
        page.click(".completion >> text=tokens")
        page.wait_for_selector(".t.special")
        page.select_option("select[aria-label='colour by']", "logprob")
        page.hover(".t[data-place='1']")
        take(page, args.out / "view-tokens.png")
        look(page, "timeline", wait_for=".js-plotly-plot", run=ids[args.cluster])
        take(page, args.out / "view-timeline.png")
        look(page, "cluster", wait_for="table", run=ids[args.cluster])
        take(page, args.out / "view-cluster.png")
        chromium.close()
    server.stop()


def look(page: Any, view: str, *, wait_for: str, **parameters: Any) -> None:
    page.evaluate("address => { location.hash = address }", f"#/{view}?{urlencode(parameters, doseq=True)}")
    page.wait_for_selector(f"main {wait_for}")


def take(page: Any, path: Path) -> None:
    """Of what the view fills, at most a screen."""
    page.wait_for_timeout(1500)
    end = page.evaluate(
        "Math.max(...[...document.querySelectorAll('main > *')].map(one => one.getBoundingClientRect().bottom))"
    )
    page.screenshot(path=str(path), clip={"x": 0, "y": 0, "width": WIDTH, "height": min(HEIGHT, int(end) + 16)})
    print(path)


if __name__ == "__main__":
    main()
