"""The explorer without a browser: its logic, its widgets driven through their controls, and its size on a large run."""

import asyncio
import atexit
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path

import comm
import numpy as np
import pandas as pd
import pytest
import torch
from ipywidgets.widgets import widget

from conftest import ROOT
from gti_nb.app import App, explore
from gti_nb.core import UserError, read_json, write_json
from gti_nb.data import Dataset
from gti_nb.explore import _arm_color, _arm_symbol, block_cosines, block_edges, open_run, unit_rows
from gti_nb.explorer import SIDE, Explorer
from gti_nb.geometry import cosine_matrix
from gti_nb.config import FLOORS, load_config, make_config
from gti_nb.pipeline import finish_run
from gti_nb.stages import Run, _stage_config, run_stage
from gti_nb.screen import draw, empty_screen, figure, first_choice, joined, unpacked
from gti_nb.semantic_ids import SemanticIds
from gti_nb.vocabulary import NewRows


@cache
def smallest_run() -> Run:
    "The smallest finished run; the tests with a browser take it too."
    sizes = {"max_items": 20, "codebook_size": 4, "eval_users": 5, "grounding_moments": 4}
    sizes |= {"rqvae_steps": 5, "grounding_steps": 4, "sft_steps": 2}
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Run(make_config({"run_dir": folder, **sizes}))
    for name in made.stages:
        run_stage(made, name)
    finish_run(made)
    return made


@pytest.fixture(scope="module")
def run():
    return smallest_run()


@pytest.fixture
def app(run):
    return explore(run.path)


@pytest.mark.parametrize("profile", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_two_arms_look_alike(profile, tmp_path):
    "Not in grey either: then symbols remain, and for lines dashes of moments."
    run = Run(load_config(profile, {"run_dir": str(tmp_path)}))
    arms, floors = list(run.config.arms), list(FLOORS)
    assert len({_arm_color(run, arm) for arm in arms + floors}) == len({_arm_symbol(run, arm) for arm in arms + floors}) == len(arms + floors)


def undone(run, folder, *stages):
    "A copy of the run in which these stages and its end aren't done."
    copy = shutil.copytree(run.path, folder)
    for file in [copy / "metrics.json", *(copy / stage / "DONE.json" for stage in stages)]:
        file.unlink()
    return copy


# --- opening -------------------------------------------------------------------------------------------------------------

def test_a_moved_run_opens(run, tmp_path):
    moved = shutil.copytree(run.path, tmp_path / "elsewhere")
    assert open_run(moved).path == moved.resolve()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for opened in (open_run, explore):
        with pytest.raises(UserError, match="no (finished )?run in"):
            opened(tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        explore(tmp_path / "nowhere")
    write_json(tmp_path / "other" / "config.json", {"a": 1})  # some other program's
    with pytest.raises(UserError, match="no stage has begun there"):
        explore(tmp_path)
    (tmp_path / "metrics.json").write_text("[1]")
    with pytest.raises(UserError, match="no configuration"):
        explore(tmp_path)


def test_a_run_that_goes_on_shows_what_it_has(run, tmp_path):
    part = undone(run, tmp_path / "part", "ground-gti", "sft-gti", "evaluate-gti", "geometry", "comparison")
    with pytest.raises(UserError, match="no finished run"):
        open_run(part)
    assert Explorer(part).timeline == ["init", "step 1", "step 2", "step 3", "step 4", "sft"]
    assert list(Explorer(part).kept["gti"]) == ["init", "step 1", "step 2", "step 3", "step 4"]
    shutil.copy(run.path / "ground-gti" / "DONE.json", part / "ground-gti")
    assert list(Explorer(part).kept["gti"]) == ["init", "step 1", "step 2", "step 3", "ground"]


def test_stages_of_an_older_configuration_are_left_out(run, tmp_path):
    part = undone(run, tmp_path / "part", "ground-gti")
    config = read_json(part / "ground-gti" / "config.json")
    write_json(part / "ground-gti" / "config.json", config | {"fingerprint": "older"})
    assert list(Explorer(part).kept["gti"]) == ["init", "sft"]


def test_refresh_finds_what_is_new(run, tmp_path):
    part = undone(run, tmp_path / "part", "sft-mean", "sft-gti")
    shown = explore(part)
    assert shown.explorer.timeline[-1] == "ground" and shown.slider.value == "ground"
    for arm in ("mean", "gti"):
        shutil.copy(run.path / f"sft-{arm}" / "DONE.json", part / f"sft-{arm}")
    shown.fresh.click()
    assert shown.explorer.timeline[-1] == "sft" and shown.play.max == 5
    shown.slider.value = "sft"
    assert titles(shown)[1].endswith("after fine-tuning")


def test_a_run_without_rows_says_what_to_wait_for(run, tmp_path):
    part = undone(run, tmp_path / "part", "init-mean", "init-gti", "ground-gti", "sft-mean", "sft-gti")
    shutil.rmtree(part / "ground-gti")
    with pytest.raises(UserError, match="wait for stage init-ARM"):
        explore(part)
    (part / "semantic_ids" / "DONE.json").unlink()
    with pytest.raises(UserError, match="stage semantic_ids of .* isn't finished"):
        explore(part)


def test_a_run_at_its_very_start_and_one_without_snapshots_are_shown(run, tmp_path):
    part = undone(run, tmp_path / "part", "init-gti", "ground-gti", "sft-mean", "sft-gti")
    shutil.rmtree(part / "ground-gti" / "snapshots")
    shown = explore(part)
    assert shown.choice.panels == [("mean", "init")] * 2 and shown.play.max == 0
    for stage in ("init-gti", "ground-gti"):
        shutil.copy(run.path / stage / "DONE.json", part / stage)
    shown.fresh.click()
    assert shown.explorer.timeline == ["init", "ground"] and shown.arms["right"].options == ("mean", "gti")


def test_one_arm_stands_beside_its_own_start(run, tmp_path):
    part = undone(run, tmp_path / "part")
    for stage in ("init-mean", "sft-mean"):
        shutil.rmtree(part / stage)
    choice = first_choice(Explorer(part))
    assert choice.panels == [("gti", "init"), ("gti", "sft")]


# --- the widgets, through their controls ---------------------------------------------------------------------------------

def titles(app):
    "The caption and the titles of the two heatmaps."
    return [annotation.text for annotation in app.screen.heatmaps.layout.annotations][:3]


def cells(app, side):
    return unpacked(app.screen.heatmaps.data[side].z)


def test_the_slider_plays_the_path(app, run):
    traces = [trace.uid for trace in app.screen.heatmaps.data]
    for moment in app.explorer.timeline:
        app.slider.value = moment
        stands = "init" if moment != "sft" else "sft"
        for side, (arm, kept) in enumerate((("mean", stands), ("gti", moment))):
            assert np.allclose(cells(app, side), cosine_matrix(app.explorer.rows(arm, kept)), atol=1e-6)
        assert ("stands still" in titles(app)[1]) == (moment not in ("init", "sft"))
    assert [trace.uid for trace in app.screen.heatmaps.data] == traces


def test_each_panel_can_keep_a_moment_of_its_own(app):
    app.arms["left"].value, app.whens["left"].value = "gti", "init"
    app.slider.value = "step 2"
    assert app.choice.panels == [("gti", "init"), ("gti", "step 2")]
    assert "at the start" in titles(app)[1] and "step 2" in titles(app)[2]


def test_level_order_and_block_follow_the_menus(app):
    app.level.value = "b"
    assert cells(app, 1).shape == (4, 4) and titles(app)[0].startswith("4 tokens, level b, by code")
    app.order.value = "clustering"
    tokens = app.edges()[0].tokens
    assert np.allclose(cells(app, 1), cosine_matrix(app.explorer.rows("gti", "sft"))[np.ix_(tokens, tokens)], atol=1e-6)
    app.level.value, app.reduce.value = "all", "max"
    assert cells(app, 1).shape == (12, 12)


def test_a_zoom_shows_the_window_and_back_leaves_it(app):
    app.screen.heatmaps.layout.update(xaxis_range=[3.6, 7.2], yaxis_range=[2.3, -0.4])  # as a drawn box does
    assert app.choice.window == (0, 3, 4, 8)
    assert np.allclose(cells(app, 1), cosine_matrix(app.explorer.rows("gti", "sft"))[:3, 4:8], atol=1e-6)
    assert app.screen.heatmaps.layout.xaxis.range == app.screen.heatmaps.layout.xaxis2.range == (-0.5, 3.5)
    app.slider.value = "init"
    assert cells(app, 0).shape == (3, 4)
    app.whole.click()
    assert app.choice.window is None and cells(app, 0).shape == (12, 12)
    app.back.click()
    assert app.choice.window == (0, 3, 4, 8)


def click(fig, trace, at):
    "What plotly does when a person clicks."
    from plotly.callbacks import InputDeviceState, Points

    points = Points(point_inds=[at], xs=[0], ys=[0], trace_name=None, trace_index=trace)
    fig.data[trace]._dispatch_on_click(points, InputDeviceState())


def test_a_click_tells_about_both_tokens_and_follows_the_slider(app):
    click(app.screen.heatmaps, 0, [1, 6])
    assert app.choice.pair == (1, 6) and "nearest text tokens" in app.details.value and "reading" not in app.details.value
    assert all(f"&lt;{name}&gt;" in app.details.value for name in ("a_1", "b_2"))
    first = app.details.value
    app.slider.value = "init"
    assert app.details.value != first and "at the start" in app.details.value
    click(app.screen.below, 1, 5)
    assert app.choice.pair == (5, 5)
    assert list(app.screen.below.data[3].text) == ["&lt;b_1&gt;"]


def test_a_click_in_a_window_means_what_is_seen(app):
    app.zoom((2, 6, 6, 12))
    click(app.screen.heatmaps, 1, [1, 2])
    assert app.choice.pair == (3, 8)


def test_tokens_can_be_named(app):
    app.names.value = "a_1, <c_3>"
    assert app.choice.pair == (1, 11) and app.status.value == ""
    app.names.value = "nonsense"
    assert "no token &lt;nonsense&gt;" in app.status.value and app.choice.pair == (1, 11)
    app.level.value = "b"
    app.names.value = "a_1"
    assert "choose all levels" in app.status.value


def test_a_search_lights_up_the_tokens_of_the_first_hit(app, run):
    title = app.explorer.titles[3]
    app.words.value = title.lower()
    assert app.hits.value == 3 and app.choice.lit == tuple(app.explorer.tokens_of(3))
    names = [name.replace("<", "&lt;").replace(">", "&gt;") for name in run.sids().tokens(run.sids().item_ids[3])]
    assert sorted(" ".join(app.screen.below.data[3].text).split()) == sorted(names)  # those on one point share a label
    assert sum(shape.line.dash == "dot" for shape in app.screen.heatmaps.layout.shapes) == 4 * 3
    app.words.value = "no such title"
    assert app.choice.lit == () and app.found.value == "No title has these words."


def test_the_model_answers_with_items(app):
    app.asks.click()
    assert app.answer.value.startswith("nothing to ask about")
    app.title.value = "Star Wars"
    app.asks.click()
    best = app.explorer.ask("gti", "sft", title="Star Wars")
    assert best.beams.sid[0].replace("<", "&lt;").replace(">", "&gt;") in app.answer.value
    assert app.choice.lit == tuple(best.best)


def test_an_answer_depends_on_the_moment(run):
    explorer = Explorer(run.path)
    assert explorer.ask("gti", "ground", "Alien").beams.probability[0] == pytest.approx(
        asked_by_hand(run, "ground", explorer.ask("gti", "ground", "Alien").prompt), rel=1e-4)
    assert explorer.ask("gti", "init", "Alien").beams.probability[0] != explorer.ask("gti", "ground", "Alien").beams.probability[0]


def asked_by_hand(run, moment, question):
    from gti_nb.decoding import beam_search
    from gti_nb.prompts import render

    lm = run.rows("gti", moment).apply(*run.base())
    prompt = list(render(lm.tokenizer, question).prompt_ids)
    return float(np.exp(beam_search(lm, [prompt], run.sids(), 5).scores[0, 0]))


def test_many_moves_make_no_new_widgets(app):
    async def play():  # as in a kernel, where a move leaves the rest of the drawing before it undone
        for k in range(200):
            app.slider.value = app.explorer.timeline[k % len(app.explorer.timeline)]
            await asyncio.sleep(0)

    click(app.screen.heatmaps, 0, [0, 5])
    before = len(widget._instances)
    asyncio.run(play())
    assert len(widget._instances) == before and [len(fig.data) for fig in app.screen] == [2, 10]


def test_the_browser_gets_plotly_in_parts_and_the_figure_when_it_asks(app, monkeypatch):
    import plotly

    said = []
    monkeypatch.setattr(type(app.screen.heatmaps), "send", lambda self, content, buffers=(): said.append((content, buffers)))
    app.screen.heatmaps._handle_custom_msg({"question": "code"}, [])
    assert [answer for answer, _ in said] == [{"to": "code", "more": 1}, {"to": "code", "more": 0}]
    whole = gzip.decompress(b"".join(part for _, (part,) in said))
    assert whole == (Path(plotly.__file__).parent / "package_data" / "widgetbundle.js").read_bytes()
    assert len(app.screen.heatmaps.get_state()["_esm"]) < 3000
    app.slider.value = "ground"
    app.screen.heatmaps._handle_custom_msg({"question": "figure"}, [])
    now = said[-1][0]["figure"]
    assert said[-1][0]["to"] == "figure" and len(now["_widget_data"]) == 2
    assert np.array_equal(unpacked(now["_widget_data"][1]["z"]), cells(app, 1))
    assert [a["text"] for a in now["_widget_layout"]["annotations"]][:3] == titles(app)


def test_saving_writes_a_page_that_needs_nothing(app):
    app.page.click()
    page, = (app.explorer.run.path / "figures").glob("*.html")
    text = page.read_text(encoding="utf-8")
    assert str(page) in app.status.value and "plotly.js v" in text and "<script src" not in text and 'src="http' not in text


def test_without_a_browser_saving_a_picture_says_so(app, monkeypatch):
    import plotly.graph_objects as go

    def none(*_, **__):
        raise RuntimeError("no browser")

    monkeypatch.setattr(go.Figure, "to_image", none)
    app.png.click()
    assert "save as HTML" in app.status.value


def test_what_comes_in_another_thread_is_done_at_home_and_not_lost(app, monkeypatch):
    "JupyterLab lets messages of widgets come in a thread of their own, also while a step is drawn."
    threads = []
    change = {"relayout_data": {"xaxis.range": [3.6, 7.2], "yaxis.range": [2.3, -0.4]}, "source_view_id": None}
    moved = {"buffers": [], "content": {"data": {"method": "update", "buffer_paths": [], "state": {"_js2py_relayout": change}}}}

    def from_a_thread(work):
        one = threading.Thread(target=work)
        one.start()
        one.join()

    def drawn(*given):
        for _ in draw(*given):
            threads.append(threading.get_ident())
            if len(threads) == 2:  # a box is drawn, and a menu changed, in the middle of a step
                assert app.drawing
                from_a_thread(lambda: app.screen.heatmaps._handle_msg(moved))
                from_a_thread(lambda: setattr(app.reduce, "value", "max"))
            yield

    async def live():
        app.home = app.screen.heatmaps.home = app.screen.below.home = type(app.home)(app._warn)
        from_a_thread(lambda: setattr(app.slider, "value", "ground"))
        await asyncio.sleep(1)
        from_a_thread(lambda: app.home(lambda: 1 / 0))
        await asyncio.sleep(0.05)

    monkeypatch.setattr("gti_nb.app.draw", drawn)
    asyncio.run(live())
    assert {*threads} == {threading.get_ident()} and len(threads) > 4
    assert app.choice.moment == "ground" and app.choice.reduce == "max" and app.choice.window == (0, 3, 4, 8)
    assert "division by zero" in app.status.value


class Place:
    "What `display` returns, with what was put there."

    def update(self, bundle, raw):
        self.now = bundle


def test_what_a_cell_leaves_is_a_figure(app, monkeypatch):
    import IPython.display

    shown, place = [], Place()
    monkeypatch.setattr(IPython.display, "display", lambda what, **_: shown.append(what) or place)
    app._ipython_display_()
    style, box, _ = shown
    assert "gti-live" in style["text/html"] and "gti-live" in box._dom_classes
    kept = place.now["application/vnd.plotly.v1+json"]
    assert len(kept["data"]) == 12 and len(json.dumps(kept)) < 500_000


def test_a_figure_is_left_when_it_is_complete_and_the_browser_has_it(run, monkeypatch):
    import IPython.display

    async def shown():
        app, place = explore(run.path), Place()
        monkeypatch.setattr(IPython.display, "display", lambda what, **_: place)
        app._ipython_display_()
        await asyncio.sleep(0.1)
        waits = app.screen.below.data[7].y is None and not hasattr(place, "now")
        for fig in app.screen:
            fig._handle_custom_msg({"question": "figure"}, [])
        while app.tasks:
            await asyncio.sleep(0.01)
        return waits, place.now["application/vnd.plotly.v1+json"]["data"]

    waits, kept = asyncio.run(shown())
    assert waits and all(trace.get("x") is not None or trace["type"] == "heatmap" for trace in kept)
    assert kept[9]["y"]


def test_a_newer_choice_stops_an_older_drawing(app):
    "With an event loop, steps of a drawing that isn't wanted any more are left out."
    async def twice():
        app.slider.value = "init"
        old = app.job
        app.slider.value = "ground"
        await asyncio.sleep(0.3)
        return old

    old = asyncio.run(twice())
    assert next(old, "ended") != "ended"  # it was left where it was
    assert next(app.job, "ended") == "ended"
    assert np.allclose(cells(app, 1), cosine_matrix(app.explorer.rows("gti", "ground")), atol=1e-6)


def test_a_drawing_in_place_equals_a_new_one(run):
    explorer = Explorer(run.path)
    choice = first_choice(explorer)
    screen = empty_screen()
    for other in (choice, replace(choice, level="c", lit=(8, 9)), replace(choice, window=(0, 4, 5, 9), reduce="max"), choice):
        for _ in draw(explorer, screen, other):
            pass
        assert joined(screen).to_json() == figure(explorer, other).to_json()


# --- blocks --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("window", [(0, 90, 0, 90), (7, 61, 7, 61), (0, 40, 20, 90), (5, 9, 50, 80), (3, 4, 3, 4)])
@pytest.mark.parametrize("side", [4, 9, 1000])
def test_blocks_are_means_and_maxima_of_all_pairs_but_a_token_with_itself(window, side):
    from gti_nb.explorer import _block_maxima

    rows = np.random.default_rng(0).normal(size=(90, 8))
    rows[13] = 0
    tokens = np.random.default_rng(1).permutation(90)
    (a, _), (b, _) = (block_edges(*ends, (0, 30, 60), side) for ends in (window[:2], window[2:]))
    cosines = cosine_matrix(rows)[np.ix_(tokens, tokens)]
    plain = {"mean": np.zeros((len(a) - 1, len(b) - 1)), "max": np.zeros((len(a) - 1, len(b) - 1))}
    for i in range(len(a) - 1):
        for j in range(len(b) - 1):
            pairs = [cosines[p, q] for p in range(a[i], a[i + 1]) for q in range(b[j], b[j + 1])
                     if p != q or (a[i + 1] - a[i]) * (b[j + 1] - b[j]) == 1]
            plain["mean"][i, j], plain["max"][i, j] = np.mean(pairs), np.max(pairs)
    unit = unit_rows(rows)
    assert np.allclose(block_cosines(unit, tokens, a, b), plain["mean"], atol=1e-6)
    *_, (largest, done) = _block_maxima(unit, tokens, a, b)
    assert done == 1 and np.allclose(largest, plain["max"], atol=1e-6)


# --- 24,576 tokens -------------------------------------------------------------------------------------------------------

SIZE, WIDTH = 8192, 1024


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    "As much of a run as the explorer reads: 3 levels of 8,192 tokens, 1,024 numbers each, two of them equal."
    folder = tmp_path_factory.mktemp("large")
    made = Run(make_config({"run_dir": str(folder), "levels": 3, "codebook_size": SIZE, "arms": {"gti": {}}}))
    draws, items = np.random.default_rng(0), [str(k) for k in range(10_000)]
    frame = pd.DataFrame({"item_id": items, "title": [f"The item with the number {k}" for k in items], "description": ""})
    events = pd.DataFrame({"user_id": ["u"] * 3, "item_id": items[:3], "timestamp": [1, 2, 3]})
    Dataset(name="large", items=frame, interactions=events).save(made.folder("data") / "dataset")
    sids = SemanticIds(items, draws.integers(SIZE, size=(len(items), 3)), SIZE)
    sids.save(made.folder("semantic_ids"))
    for moment, file in (("init", "rows.safetensors"), ("sft", "model/rows.safetensors")):
        rows = draws.standard_normal((3 * SIZE, WIDTH), dtype=np.float32) + 0.5
        rows[20_000] = rows[77]
        NewRows(torch.from_numpy(rows), sids.token_names, [*range(9, 9 + len(rows))], "none", "none").save(
            made.folder(f"{moment}-gti") / file)
    for stage in ("data", "encode", "rqvae", "semantic_ids", "init-gti", "sft-gti"):
        write_json(made.folder(stage) / "config.json", _stage_config(made, made.stages[stage]))
        write_json(made.folder(stage) / "DONE.json", {"fingerprint": made.fingerprint(stage)})
    yield made.path
    shutil.rmtree(folder)


@pytest.fixture
def sent(monkeypatch):
    "The bytes of every message that a widget sends, the one that opens it included."
    class Counted(comm.DummyComm):
        def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
            sizes.append(len(json.dumps(data)) + sum(memoryview(part).nbytes for part in buffers or []))

    sizes = []
    monkeypatch.setattr(comm, "create_comm", lambda *given, **more: Counted(*given, **more))
    return sizes


def cpu(work) -> float:
    "Seconds of this process that `work` takes: of its own, however busy the machine is."
    began = time.process_time()
    work()
    return time.process_time() - began


def test_a_large_run_is_fast_and_small(large, sent, monkeypatch):
    later, made, others = [], [], {*widget._instances}
    monkeypatch.setattr(App, "_later", lambda self, work: later.append(work))  # what waits until the first view is there
    assert cpu(lambda: (made.append(App(large)), made[0].redraw())) < 2
    shown, = made
    for fig, question in ((shown.screen.heatmaps, "code"), (shown.screen.heatmaps, "figure"), (shown.screen.below, "figure")):
        fig._handle_custom_msg({"question": question}, [])
    assert max(sent) < 1_500_000 < sum(sent)  # plotly's own code, in parts
    monkeypatch.setattr(widget, "_instances", {name: one for name, one in widget._instances.items() if name not in others})
    assert loaded_anew(sent) < 200_000
    assert cells(shown, 1).shape[0] <= SIDE + 3 and "3,025" not in titles(shown)[0]
    sent.clear()
    windows = [(0, SIZE, 0, SIZE), (500, 1500, 9000, 10_000), (0, 200, 100, 300), None, (3000, 20_000, 0, 3 * SIZE)]
    for window in windows:
        assert cpu(lambda: shown.zoom(window)) < 1
    assert cpu(lambda: shown.choose(moment="init")) < 1
    assert 0 < max(sent) < 1_500_000
    assert cpu(lambda: shown.choose(reduce="max", window=None)) < 1  # its first tiles; the others come one by one
    assert "% computed" in titles(shown)[0]
    for work in later:
        work.close()


def loaded_anew(sent) -> int:
    "The bytes of the message that tells a page that is loaded anew about all widgets."
    sent.clear()
    widget.Widget.handle_control_comm_opened(comm.create_comm(), {"metadata": {"version": "1.0.0"}})
    widget.Widget._handle_control_comm_msg({"content": {"data": {"method": "request_states"}}})
    return max(sent)


def test_the_first_view_needs_no_torch(run):
    code = ("import sys; from gti_nb.app import App; App._later = lambda self, work: work.close(); "
            f"shown = App({str(run.path)!r}); shown.redraw(); print(shown.screen.heatmaps.data[1].z is not None, "
            "*{'torch', 'sklearn', 'scipy'} & {*sys.modules})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stdout + done.stderr


def test_a_large_run_never_makes_the_matrix(large):
    "600 million cosines would be 2.4 GB; all of a mean view, and any step of a maximum, stay far below."
    explorer = Explorer(large)
    explorer.unit("gti", "sft")  # 100 MB, kept
    order = explorer.order("code")
    tracemalloc.start()
    *_, view = explorer.views("gti", "sft", order)
    steps = explorer.views("gti", "sft", order, None, "max")
    for _ in range(3):
        next(steps)
    *_, = explorer.spectrum_steps("gti", "sft", "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400e6
    assert view.sizes == (110, 110)


def test_a_large_run_is_exact_when_zoomed_and_finds_equal_tokens(large):
    explorer = Explorer(large)
    order, rows = explorer.order("code"), explorer.rows("gti", "sft")
    *_, view = explorer.views("gti", "sft", order, (60, 160, 19_950, 20_050))
    assert view.sizes == (1, 1)
    assert np.allclose(view.values, cosine_matrix(np.concatenate([rows[60:160], rows[19_950:20_050]]))[:100, 100:], atol=1e-6)
    *_, view = explorer.views("gti", "sft", order, (0, 2000, 19_000, 21_000), "max")
    best = np.unravel_index(view.values.argmax(), view.values.shape)
    assert view.values.max() > 0.999999 and 77 in view.rows[best[0]] and 20_000 in view.columns[best[1]]
    assert explorer.closest("gti", "sft", view.rows[best[0]], view.columns[best[1]]) == (77, 20_000)


@pytest.mark.parametrize("kind", ["hierarchy", "clustering"])
def test_a_large_run_can_be_ordered(large, kind):
    found = Explorer(large).order(kind)
    assert sorted(found.tokens) == list(range(3 * SIZE))
    assert all((found.tokens[stop:stop + SIZE] // SIZE == level).all() for level, stop in enumerate(found.stops))
