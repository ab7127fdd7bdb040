"""The explorer in a real JupyterLab, driven by a headless Chromium as a person would.

One JupyterLab and one page serve all tests, which run in this order. Needs Chromium on the machine; skipped without it.
A screenshot is left in tests/screenshots (not committed)."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from gti_nb.explore import open_run
from test_explore import smallest_run

BROWSER = os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "chrome"))), None)
HOW = "install it (apt-get install chromium), then run: .venv/bin/python -m pytest tests/test_explore_browser.py"
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no Chromium here: {HOW}")
PATIENCE = 120_000  # ms; a machine may be busy
FILLED = ("[...f.querySelectorAll('.heatmaplayer image')].every("  # the cells of both heatmaps fill their panels
          "i => Math.abs(i.getBoundingClientRect().width - f._fullLayout.xaxis._length) < 2)")
FIGURES = "document.querySelectorAll('.gti-live .js-plotly-plot')"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A copy of the smallest run, for this file alone."
    return open_run(shutil.copytree(smallest_run().path, tmp_path_factory.mktemp("explored") / "run",
                                    ignore=shutil.ignore_patterns("figures", "explore.ipynb")))


@pytest.fixture(scope="module")
def address(run, tmp_path_factory):
    "The address, with its token, of a JupyterLab that `open_lab` opened on the run."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("jupyter")
    news = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}')  # or JupyterLab asks whether it may
    env = {**os.environ, "JUPYTER_TOKEN": "secret", "JUPYTER_PORT": str(port), "PYTHONPATH": str(ROOT),
           "JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
           "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "JUPYTER_RUNTIME_DIR": str(home / "runtime")}
    code = f"import sys; from gti_nb.app import open_lab; sys.exit(open_lab({str(run.path)!r}, browser=False))"
    with open(home / "log", "w") as log:
        lab = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE / 1000
        while not answers(port):
            assert lab.poll() is None and time.monotonic() < end, (home / "log").read_text()
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/lab/tree/explore.ipynb?token=secret"
    finally:
        os.killpg(lab.pid, 15)
        lab.wait(30)


def answers(port) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


class Screen:
    "The page, and what it said and asked for."

    def __init__(self, page):
        self.page, self.complaints, self.requests, self.frames = page, [], [], []
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: self.frames.append(len(frame))))

    def figure(self, what: str):
        "Something of the heatmaps' `_fullLayout` or `_fullData`, as plotly in the browser has it."
        return self.page.evaluate(f"{FIGURES}[0].{what}")

    def wait(self, condition: str, patience: int = PATIENCE):
        "Until a JavaScript `condition` on the heatmaps `f` and the figure `below` holds."
        self.page.wait_for_function(f"() => {{ const [f, below] = {FIGURES}; return {condition} }}", timeout=patience)

    def spot(self, panel: int, across: float, down: float):
        "The point of the screen that lies so far across and down a panel."
        box = self.page.locator(".gti-live .nsewdrag").nth(panel).bounding_box()
        return box["x"] + across * box["width"], box["y"] + down * box["height"]

    def tab(self, name: str):
        self.page.locator(".gti-live").get_by_role("tab", name=name).click()


@pytest.fixture(scope="module")
def screen(address):
    "The notebook, opened and run: the app is there."
    playwright = pytest.importorskip("playwright.sync_api", reason=f"playwright isn't installed: make install, {HOW}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        screen = Screen(browser.new_page(viewport={"width": 1600, "height": 1300}))
        screen.page.goto(address)
        screen.page.locator(".jp-CodeCell .cm-content").first.click(timeout=PATIENCE)
        screen.page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=PATIENCE)
        screen.page.keyboard.press("Shift+Enter")
        try:
            screen.page.locator(".gti-live .heatmaplayer image").first.wait_for(timeout=PATIENCE)
        except playwright.TimeoutError:
            raise AssertionError(f"no figure; the notebook shows: {screen.page.locator('.jp-Notebook').inner_text()}; "
                                 f"complaints: {screen.complaints}") from None
        screen.wait("below._fullData && below._fullData[7].y && below._fullData[7].y.length > 0")  # the last panel is drawn
        yield screen
        browser.close()


def test_it_is_drawn(screen):
    assert screen.page.locator(".gti-live .heatmaplayer image").count() == 2
    titles = [a["text"] for a in screen.figure("_fullLayout.annotations.map(a => ({text: a.text}))")]
    assert "12 tokens, all levels, by code; each cell is one cosine" in titles
    screen.wait(FILLED)


def test_hovering_names_both_tokens(screen):
    screen.page.mouse.move(*screen.spot(1, 1.5 / 12, 5.5 / 12))
    hover = screen.page.locator(".gti-live .hovertext").first
    hover.wait_for(timeout=PATIENCE)
    text = hover.text_content()
    assert "<a_1>, level a" in text and "<b_1>, level b" in text and re.search(r"cosine -?\d\.\d{3}", text)


def test_a_click_tells_about_both_tokens(screen):
    screen.page.mouse.click(*screen.spot(1, 1.5 / 12, 5.5 / 12))
    pane = screen.page.locator(".gti-live .lm-TabPanel, .gti-live .jupyter-widget-tab").first
    pane.get_by_text("nearest text tokens").first.wait_for(timeout=PATIENCE)
    pane.get_by_text("reading the base model").first.wait_for(state="detached", timeout=PATIENCE)
    text = pane.inner_text()
    assert "<a_1>" in text and "<b_1>" in text and text.count("nearest new tokens") == 2 and "cosine" in text
    screen.wait("f._fullLayout.shapes.some(s => s.type == 'rect')")


def drag(screen, panel):
    mouse = screen.page.mouse
    mouse.move(*screen.spot(panel, 0.4, 0.4))
    mouse.down()
    mouse.move(*screen.spot(panel, 0.6, 0.6), steps=6)
    mouse.up()


def double_click(screen, panel, condition):
    "Until `condition` holds; a browser that is kept waiting can take a double click for two single ones."
    for tries in range(1, 6):
        screen.page.mouse.dblclick(*screen.spot(panel, 0.5, 0.5))
        with contextlib.suppress(Exception if tries < 5 else ()):
            return screen.wait(condition, PATIENCE // 6)


def test_a_box_zooms_both_panels_and_a_double_click_shows_all(screen):
    for panel in (0, 1):  # twice, since the second double click must count like the first
        drag(screen, panel)
        screen.wait("f._fullData[0].x.length < 6 && f._fullData[1].x.length == f._fullData[0].x.length")
        screen.wait(FILLED)
        shown = screen.figure("_fullData[1].x.length")
        assert screen.figure("_fullLayout.xaxis2.range") == screen.figure("_fullLayout.xaxis.range") == [-0.5, shown - 0.5]
        double_click(screen, panel, "f._fullData[0].x.length == 12 && f._fullData[1].x.length == 12")
        screen.wait(FILLED)
        assert screen.figure("_fullLayout.yaxis2.range") == [11.5, -0.5]


def test_tokens_can_be_named_instead_of_clicked(screen):
    screen.page.get_by_placeholder("such as a_3 b_12").fill("a_2 c_1")
    screen.page.keyboard.press("Enter")
    screen.wait("f._fullLayout.shapes.filter(s => s.type == 'rect').some(s => s.x0 == 8.5 && s.y0 == 1.5)")


def test_the_slider_answers_to_the_keyboard(screen):
    screen.page.locator(".gti-live .noUi-handle").focus()
    for _ in range(2):
        screen.page.keyboard.press("ArrowLeft")
    screen.wait("f._fullLayout.annotations.some(a => a.text.includes('grounding, step 3'))")
    assert "stands still" in screen.page.locator(".gti-live .infolayer").first.text_content()


def test_a_search_lights_up_tokens(screen):
    screen.tab("Items")
    screen.page.get_by_placeholder("words of a title").fill("star")
    screen.wait("below._fullData[2].x && below._fullData[2].x.length >= 3")
    screen.wait("f._fullLayout.shapes.filter(s => s.line.dash == 'dot').length == 12")


def test_the_model_answers(screen):
    screen.tab("Ask")
    screen.page.get_by_placeholder("a description").fill("A film from 1980.")
    screen.page.get_by_role("button", name="Ask the model").click()
    screen.page.get_by_text("Level by level").wait_for(timeout=PATIENCE)


def test_a_picture_is_saved(screen, run):
    screen.page.get_by_role("button", name="Save PNG").click()
    screen.page.get_by_text("explore-1.png").wait_for(timeout=PATIENCE)
    assert (run.path / "figures" / "explore-1.png").read_bytes().startswith(b"\x89PNG")


def test_it_leaves_a_screenshot(screen):
    screen.tab("Tokens")
    path = ROOT / "tests" / "screenshots" / "explore.png"
    path.parent.mkdir(exist_ok=True)
    screen.page.screenshot(path=path)
    assert path.stat().st_size > 50_000


def test_no_message_is_large(screen):
    assert 500_000 < max(screen.frames) < 1_500_000  # the largest are plotly's code, in parts


def test_nothing_was_complained_about_or_asked_of_others(screen):
    assert screen.complaints == []
    assert [url for url in screen.requests if not re.match(r"https?://127\.0\.0\.1:|wss?://127\.0\.0\.1:|data:|blob:", url)] == []
    assert len(screen.requests) > 10


def test_the_saved_notebook_holds_no_widget_state(screen, run):
    screen.page.locator(".jp-CodeCell .cm-content").first.click()
    screen.page.keyboard.press("Control+s")
    end = time.monotonic() + PATIENCE / 1000
    while not (outputs := saved_outputs(run)) and time.monotonic() < end:
        time.sleep(0.3)
    assert any("application/vnd.plotly.v1+json" in output for output in outputs)


def saved_outputs(run) -> list:
    try:
        notebook = json.loads((run.path / "explore.ipynb").read_text(encoding="utf-8"))
    except json.JSONDecodeError:  # being written
        return []
    assert "widgets" not in notebook["metadata"]
    return [output["data"] for cell in notebook["cells"] for output in cell.get("outputs", []) if "data" in output]


def test_a_page_that_is_loaded_anew_shows_the_same(screen, address):
    "The kernel goes on, and the saved notebook is opened once more; again no message is large."
    before = screen.figure("_fullLayout.annotations.map(a => a.text)")
    screen.frames.clear()
    screen.page.goto(address)
    screen.page.locator(".gti-live .heatmaplayer image").first.wait_for(timeout=PATIENCE)
    screen.wait(FILLED)
    assert screen.figure("_fullLayout.annotations.map(a => a.text)") == before
    assert 500_000 < max(screen.frames) < 1_500_000
    screen.page.get_by_role("button", name="Whole matrix").click()  # it is alive
    screen.page.get_by_placeholder("such as a_3 b_12").fill("a_0 b_0")
    screen.page.keyboard.press("Enter")
    screen.wait("f._fullLayout.shapes.filter(s => s.type == 'rect').some(s => s.x0 == 3.5 && s.y0 == -0.5)")


def test_without_a_kernel_the_figure_stays(screen, address):
    "The saved notebook, opened anew: its kernel is gone."
    page = screen.page
    page.evaluate("""async () => { const ask = (path, method) => fetch(path + '?token=secret', {method});
        for (const s of await (await ask('/api/sessions', 'GET')).json()) await ask('/api/sessions/' + s.id, 'DELETE') }""")
    page.goto(address + "&reset")
    page.locator(".jp-OutputArea .jp-RenderedPlotly .heatmaplayer image").first.wait_for(timeout=PATIENCE)
    assert page.locator(".gti-live").count() == 0
    assert not page.get_by_text("model not found").is_visible()
