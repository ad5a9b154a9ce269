"""A headless Chromium, and servers for it: for tests of what a person sees."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
_FAR = ("cdn.jsdelivr.net", "favicon")  # Voila's own page asks a CDN for icons; there may be no network
PATIENCE = 400  # seconds: two cores may be shared


def chromium():
    """Path of a Chromium, and of the driver that belongs to it; skips the test where there is none."""
    pytest.importorskip("selenium", reason="selenium is not installed (it is in the extra 'dev'): no browser tests")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if not found or not driver:
        pytest.skip(
            "no Chromium with chromedriver (Debian, Ubuntu: apt install chromium chromium-driver): no browser tests"
        )
    return found, driver


def open_browser(width=1280, height=1400):
    """A headless browser; call ``quit`` on it."""
    found, driver = chromium()
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = found
    for flag in (*_FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_page_load_timeout(PATIENCE)
    browser.set_script_timeout(PATIENCE)
    return browser


def errors(browser):
    """What the console complains of, without what a missing network explains."""
    return [
        entry["message"] for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE" and not any(word in entry["message"] for word in _FAR)
    ]  # fmt: skip


def until(ready, what, seconds=PATIENCE):
    """Wait for ``ready()`` to be true and return it; fails naming ``what``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = ready()
        if found:
            return found
        time.sleep(0.3)
    raise AssertionError(f"{what}: not within {seconds} s")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(command, port, folder, **variables):
    """``command`` in a process group of its own while the block runs. The port is polled, never a page: of Voila each
    request for a page starts a kernel."""
    log = Path(folder) / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | variables, stdout=sink, stderr=sink, start_new_session=True
        )

        def listening():
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            until(listening, "the server")
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def jupyterlab(folder):
    """JupyterLab on the notebooks of ``folder``, with settings of its own: no announcements, all cells attached."""
    home = Path(folder) / ".lab"
    settings = home / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    config = home / "config" / "labconfig" / "page_config.json"
    for path, document in (
        (settings, {"windowingMode": "none"}),
        (config, {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))
    port = free_port()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True",
        f"--ServerApp.root_dir={folder}",
    ]  # fmt: skip
    variables = {"JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
                 "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "DIFFKV_REPRO_ROOT": str(ROOT)}  # fmt: skip
    with serving(command, port, folder, **variables) as address:
        yield address


_CELLS = """
const widget = window.jupyterapp && window.jupyterapp.shell.currentWidget;
if (!widget || !widget.content || !widget.content.model || !widget.context.isReady) return null;
const kernel = widget.sessionContext.session && widget.sessionContext.session.kernel;
return {
  status: kernel ? kernel.status : "none",
  cells: [...widget.content.model.cells].filter(cell => cell.type === "code").map(cell => ({
    count: cell.executionCount,
    errors: cell.outputs.toJSON().filter(output => output.output_type === "error").map(o => o.ename + ": " + o.evalue)
  }))
};
"""


def run_in_lab(browser, address, name, seconds=PATIENCE):
    """Open a notebook, run all its cells, and wait for the last; fails with the text of a red cell."""
    browser.get(f"{address}/lab/tree/{name}?reset")
    until(lambda: (browser.execute_script(_CELLS) or {}).get("status") == "idle", f"{name} is open, its kernel idle")
    browser.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")

    def done():
        found = browser.execute_script(_CELLS)
        red = [text for cell in found["cells"] for text in cell["errors"]]
        assert not red, f"{name}: {red}"
        return all(cell["count"] for cell in found["cells"]) and found["status"] == "idle"

    until(done, f"all cells of {name} have run", seconds)


# The explorer that a slider belongs to is the nearest box around it that holds a plot.
_FIGURE = """
let box = arguments[0];
while (box && !box.querySelector(".js-plotly-plot")) box = box.parentElement;
const plot = box && box.querySelector(".js-plotly-plot");
if (!plot || !plot.layout || !plot.layout.title || !plot.querySelector(".main-svg")) return "";
const kept = ["title", "annotations", "shapes"].map(key => plot.layout[key]);
const text = JSON.stringify([kept, plot.data]);
let sum = 0;
for (let i = 0; i < text.length; i++) sum = (31 * sum + text.charCodeAt(i)) | 0;
return `${plot.layout.title.text} ${text.length} ${sum}`;
"""
SLIDERS = ("α high", "α low", "window", "moment", "layer", "Gbps", "SLO, ms", "quality ≥", "MB", "slow-down")


def move_every_slider(browser):
    """A key press on each slider; its figure must change each time. Returns the sliders' names in order."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def sliders():
        found = browser.find_elements(By.CSS_SELECTOR, ".widget-slider")
        return found if len(found) >= len(SLIDERS) else None

    moved = []
    for slider in until(sliders, "all sliders"):
        name = slider.find_element(By.CSS_SELECTOR, ".widget-label").text
        handle = slider.find_element(By.CSS_SELECTOR, ".noUi-handle")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", slider)
        before = until(lambda at=slider: browser.execute_script(_FIGURE, at), f"the figure of {name}")
        handle.send_keys(Keys.ARROW_LEFT if name == "SLO, ms" else Keys.ARROW_RIGHT)
        until(lambda at=slider, old=before: browser.execute_script(_FIGURE, at) not in ("", old), f"{name} draws anew")
        moved.append(name)
    return moved


def compare_another(browser):
    """Type another choice into the comparison, which has no slider; its figure must change each time."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    entries = browser.find_elements(By.CSS_SELECTOR, ".widget-text")
    boxes = {box.find_element(By.CSS_SELECTOR, ".widget-label").text: box for box in entries}
    for side, choice in (("left", "K8V4"), ("right", "wire: int4"), ("left", "FP16")):
        box = boxes[side]
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
        before = until(lambda at=box: browser.execute_script(_FIGURE, at), "the comparison's figure")
        entry = box.find_element(By.CSS_SELECTOR, "input")
        entry.send_keys(Keys.CONTROL, "a")
        entry.send_keys(choice + Keys.ENTER)
        until(lambda at=box, old=before: browser.execute_script(_FIGURE, at) not in ("", old), f"{side} draws anew")
