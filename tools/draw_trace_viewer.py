"""Draws the picture of TensorBoard's trace viewer in notebook 6, as a browser shows it.

    python tools/draw_trace_viewer.py

It records the train step of notebook 6, starts TensorBoard on a free port, opens the record in
headless Chromium, zooms in on one step and selects its longest operation. The trace viewer is
part of the plugin and needs no internet.

Needs TensorBoard with its profile plugin (in the course's environment), Playwright
(`pip install playwright`) and Chromium (`apt install chromium`; `$CHROMIUM` names another one).
Run it on an idle machine, since the picture shows times.
"""

import base64
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax
import nbformat

from course_lib import configs, training
from course_lib.lessons import profiling_study
from course_lib.one_device import profiling

NOTEBOOK = pathlib.Path(__file__).parent.parent / "notebooks" / "06_profiling.ipynb"
PICTURE = "trace_viewer.png"
STEPS = 3
SECONDS = 120  # until everything is on the screen

LOADED = "document.querySelector('tr-ui-timeline-view')?.model !== undefined"

# Runs in the viewer's page: shows the shortest step and selects the longest operation in it.
ZOOM = """() => {
    const view = document.querySelector('tr-ui-timeline-view');
    const threads = view.model.getAllProcesses().flatMap(p => Object.values(p.threads));
    const slices = threads.flatMap(thread => [...thread.sliceGroup.slices]);
    const longest = (a, b) => b.duration - a.duration;
    const step = slices.filter(s => /^train \\d/.test(s.title)).sort(longest).at(-1);
    const op = slices.filter(s => /fusion|dot/.test(s.title) && !s.title.includes('::')
        && s.start >= step.start && s.end <= step.end).sort(longest)[0];
    const viewport = view.trackView.viewport;
    const zoomed = viewport.currentDisplayTransform.clone();
    const pixels = viewport.modelTrackContainer.canvas.clientWidth * devicePixelRatio;
    zoomed.xSetWorldBounds(step.start - 0.02 * step.duration, step.end, pixels);
    viewport.setDisplayTransformImmediately(zoomed);
    const events = new tr.model.EventSet(op);
    view.brushingStateController.changeSelectionFromTimeline(events);
    return `${step.title}, ${step.duration.toFixed(1)} ms; selected ${op.title}`;
}"""


def record(folder: pathlib.Path) -> None:
    """Records steps of the small Transformer of notebook 6."""
    run = training.build(configs.get("cpu"))
    batch = profiling_study.first_batch(run.config)
    state = run.init(jax.random.key(0))
    step: Any = run.train_step
    compiled = step.lower(state, batch).compile()
    profiling.trace(folder, compiled, state, batch, steps=STEPS)


@contextlib.contextmanager
def tensorboard(folder: pathlib.Path) -> Iterator[str]:
    """Serves the records of a folder and yields the page of the trace viewer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    page = f"http://127.0.0.1:{port}"
    [run] = (folder / "plugins" / "profile").iterdir()
    try:
        until = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{page}/data/plugin/profile/runs", timeout=5).close()
                break
            except (urllib.error.URLError, TimeoutError):
                if server.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.2)
        yield f"{page}/?run={run.name}&tag=trace_viewer@#profile"
    finally:
        server.terminate()
        server.wait()


def draw(page: str) -> tuple[bytes, str]:
    """Returns a picture of the trace viewer as a PNG, and what is in it."""
    from playwright import sync_api

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("no Chromium: install it, or name one in $CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": 1200, "height": 1000})
        tab.goto(page)
        iframe = tab.wait_for_selector("iframe", timeout=1e3 * SECONDS)
        plugin = iframe.content_frame()
        inner = plugin.wait_for_selector("iframe", timeout=1e3 * SECONDS)
        viewer = inner.content_frame()
        viewer.wait_for_function(LOADED, timeout=1e3 * SECONDS)
        tab.wait_for_load_state("networkidle")
        shown = viewer.evaluate(ZOOM)
        viewer.wait_for_selector("text=hlo_module", timeout=1e3 * SECONDS)
        picture = inner.screenshot()
        browser.close()
    return picture, shown


def store(picture: bytes) -> None:
    """Attaches the picture to the notebook's cell that shows it."""
    notebook = nbformat.read(NOTEBOOK, 4)
    [cell] = [cell for cell in notebook.cells if f"attachment:{PICTURE}" in cell.source]
    cell.attachments = {PICTURE: {"image/png": base64.b64encode(picture).decode()}}
    NOTEBOOK.write_text(nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record(pathlib.Path(folder))
        with tensorboard(pathlib.Path(folder)) as page:
            picture, shown = draw(page)
    store(picture)
    print(f"drew {shown}")
