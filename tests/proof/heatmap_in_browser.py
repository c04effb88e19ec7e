"""A browser finds the variance heatmap in TensorBoard, at the size at which it was drawn.

``python -m tests.proof.heatmap_in_browser`` trains for a few steps, serves the log folder with TensorBoard, opens it in
headless Chromium and writes one row to tests/benchmarks/results/heatmap_in_browser.csv: 1 when the image card is there
and its picture has the size of the array, else 0; about half a minute. Playwright may lie in an environment of its
own, named by ``PLAYWRIGHT_PYTHON``; the browser is Debian's.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from lightning_moeclip.binding import pl
from lightning_moeclip.callbacks import VarianceHeatmap
from tests.benchmarks import measure
from tests.models import TwoTowers, batches, loader, quiet_trainer

CHROMIUM = "/usr/bin/chromium"
TAG = "grad_var/heatmap"
NUM_STEPS = 12
START_S, PAGE_S = 60.0, 60.0
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

# run by the Python that has Playwright; the last line is the natural size of the heatmap's card
LOOK = """
import json, sys
from playwright.sync_api import sync_playwright

url, tag, chromium, timeout_s, flags, shot = json.loads(sys.argv[1])
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium, args=flags)
    page = browser.new_page(viewport={"width": 1400, "height": 1200})
    page.set_default_timeout(1000 * timeout_s)
    page.goto(url)
    group, _, name = tag.partition("/")
    card = page.locator("image-card", has_text=name).first
    image = card.locator("img").first
    image.wait_for(state="visible")
    page.wait_for_function("e => e.complete && e.naturalWidth > 0", arg=image.element_handle())
    size = image.evaluate("e => [e.naturalHeight, e.naturalWidth]")
    if shot:
        page.screenshot(path=shot)
    browser.close()
print(json.dumps(size))
"""


def playwright_python() -> str:
    """The Python that has Playwright.

    Raises:
        SystemExit: it, or the browser, is missing.
    """
    python = os.environ.get("PLAYWRIGHT_PYTHON") or (sys.executable if find_spec("playwright") else "")
    if python and Path(CHROMIUM).exists():
        return python
    lacks = [name for name, is_there in (("Playwright", python), (CHROMIUM, Path(CHROMIUM).exists())) if not is_there]
    raise SystemExit(
        f"Not here: {', '.join(lacks)}. Run:\n"
        "  apt-get update && apt-get install -y chromium\n"
        f"  {sys.executable} -m pip install -e '.[proof]'"
    )


def train(folder: Path) -> tuple[int, int]:
    """A short run that logs to ``folder``; returns the height and width at which the heatmap was drawn."""
    callback = VarianceHeatmap(every_n_steps=1, figure_every_n_steps=5)
    logger = pl.loggers.TensorBoardLogger(folder, name="", version="")
    trainer = quiet_trainer(1, logger=logger, callbacks=[callback], log_every_n_steps=1)
    trainer.fit(TwoTowers(), loader(batches(NUM_STEPS)))
    height, width, _ = callback.picture.render().shape
    return height, width


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """TensorBoard on a folder, at the address that is returned."""
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    log = folder.parent / "tensorboard.log"
    with log.open("w") as output, subprocess.Popen([*command, "--port", str(port)], stderr=output) as server:
        try:
            wait_for(address, server, log)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    """Until the server answers.

    Raises:
        RuntimeError: it ended, or took too long.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"TensorBoard at {address} does not answer: {log.read_text()[-2000:]}")


def size_in_browser(python: str, address: str, shot: str = "") -> tuple[int, int]:
    """Natural height and width of the picture on the heatmap's card.

    Raises:
        RuntimeError: the card is not found.
    """
    request = json.dumps([f"{address}#timeseries", TAG, CHROMIUM, PAGE_S, FLAGS, shot])
    done = subprocess.run(
        [python, "-c", LOOK, request], capture_output=True, text=True, timeout=3 * PAGE_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"The browser found no picture of {TAG}:\n{done.stderr[-3000:]}")
    height, width = json.loads(done.stdout.splitlines()[-1])
    return height, width


def main() -> int:
    """Train, serve, look; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--screenshot", default="", metavar="PNG", help="keep what the browser shows")
    arguments = parser.parse_args()
    python = playwright_python()
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        drawn = train(logs)
        with served(logs) as address:
            seen = size_in_browser(python, address, arguments.screenshot)
    print(f"drawn {drawn}, seen {seen}: height, width")
    found = measure.exact(float(seen == drawn))
    rows = [measure.row("heatmap in TensorBoard: found at its size", found, rounds=1, ranks=1)]
    measure.write_rows(measure.RESULTS / "heatmap_in_browser.csv", rows)
    return 0 if seen == drawn else 1


if __name__ == "__main__":
    sys.exit(main())
