"""The explorer as a widget: driven through its controls and its click, without a browser."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gti_nb.core import UserError
from gti_nb.explore import MOMENTS, Explorer, explore, open_run, similarity_figure
from gti_nb.geometry import cosine_matrix
from gti_nb.pipeline import Run, finish_run, make_config, run_stage


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "The smallest finished run."
    sizes = {"max_items": 20, "codebook_size": 4, "eval_users": 5}
    sizes |= {"rqvae_steps": 5, "grounding_steps": 2, "sft_steps": 2}
    made = Run(make_config({"run_dir": str(tmp_path_factory.mktemp("run")), **sizes}))
    for name in made.stages:
        run_stage(made, name)
    finish_run(made)
    return made


def parts(view):
    "The two menus, the figure and the details of the explorer."
    menus, figure, details = view.children
    return *menus.children, figure, details


def click(figure, row, column):
    "What plotly does when a person clicks a cell of the heatmap."
    from plotly.callbacks import InputDeviceState, Points

    points = Points(point_inds=[[row, column]], xs=[column], ys=[row], trace_name=None, trace_index=0)
    figure.data[0]._dispatch_on_click(points, InputDeviceState())


def test_menus_offer_what_the_run_has(run):
    arms, moments, figure, details = parts(explore(run.path))
    assert arms.options == ("mean", "gti") and (arms.value, moments.value) == ("gti", "sft")
    assert [moment for _, moment in moments.options] == list(MOMENTS)
    arms.value = "mean"
    assert [moment for _, moment in moments.options] == ["init", "sft"] and moments.value == "sft"


def test_a_choice_redraws_in_place(run):
    arms, moments, figure, details = parts(explore(run.path))
    traces = [trace.uid for trace in figure.data]
    for arm, moment in (("gti", "ground"), ("mean", "init"), ("gti", "init"), ("gti", "sft")):
        arms.value = arm
        moments.value = moment
        wanted = similarity_figure(run, [(arm, moment)]).data[0].z
        assert (figure.data[0].z == wanted).all()
        assert figure.layout.annotations[0].text.startswith(f"{arm}, {MOMENTS[moment]}: ")
    assert [trace.uid for trace in figure.data] == traces


def test_an_arm_without_the_moment_falls_back_to_its_last(run):
    arms, moments, figure, details = parts(explore(run.path))
    moments.value = "ground"
    arms.value = "mean"
    assert moments.value == "sft" and (figure.data[0].z == similarity_figure(run, [("mean", "sft")]).data[0].z).all()


def test_a_click_shows_both_tokens_and_follows_the_choice(run):
    arms, moments, figure, details = parts(explore(run.path))
    click(figure, 1, 6)
    assert "&lt;a_1&gt;" in details.value and "&lt;b_2&gt;" in details.value
    first = details.value
    arms.value = "mean"
    assert "&lt;a_1&gt;" in details.value and details.value != first


def test_many_choices_make_no_new_widgets(run):
    from ipywidgets.widgets import widget

    arms, moments, figure, details = parts(explore(run.path))
    click(figure, 0, 5)
    before = len(widget._instances)
    for k in range(30):
        moments.value = ("init", "ground", "sft")[k % 3]
    assert len(widget._instances) == before


def test_a_moved_run_opens(run, tmp_path):
    import shutil

    moved = shutil.copytree(run.path, tmp_path / "elsewhere")
    assert open_run(moved).path == moved.resolve()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no finished run"):
        explore(tmp_path)
    (tmp_path / "metrics.json").write_text("[1]")
    with pytest.raises(UserError, match="no configuration"):
        explore(tmp_path)


def large_run(rows, codebook_size):
    "As much of a run as the heatmap needs, with these rows."
    names = [f"<{'abcd'[k // codebook_size]}_{k % codebook_size}>" for k in range(len(rows))]
    return SimpleNamespace(
        path=Path("large"), config=SimpleNamespace(codebook_size=codebook_size, arms={"gti": None}),
        moments=lambda: [("gti", "sft")], folder=Path, is_done=lambda stage: True,
        rows=lambda arm, moment: SimpleNamespace(rows=torch.from_numpy(rows)),
        sids=lambda: SimpleNamespace(token_names=names, codebook_size=codebook_size))


def test_many_tokens_are_drawn_as_blocks_that_say_so():
    rows = np.random.default_rng(0).normal(size=(4 * 256, 16)).astype("float32")
    figure = similarity_figure(large_run(rows, 256), [("gti", "sft")])
    cells = figure.data[0].z
    assert cells.shape == (344, 344) and len(figure.to_json()) < 1_500_000
    assert figure.layout.yaxis.title.text == "blocks of 3 tokens, by level and code"
    assert figure.data[0].x[:2] == ("<a_0> to <a_2>", "<a_3> to <a_5>")
    assert figure.data[0].x[85:87] == ("<a_255>", "<b_0> to <b_2>")
    assert cells[85, 86] == pytest.approx(cosine_matrix(rows)[255:256, 256:259].mean(), abs=1e-3)


def test_many_panels_of_many_tokens_stay_small():
    rows = np.random.default_rng(0).normal(size=(4 * 256, 16)).astype("float32")
    assert len(similarity_figure(large_run(rows, 256), [("gti", "sft")] * 5).to_json()) < 1_500_000


def test_a_click_on_a_block_finds_its_most_similar_pair():
    rows = np.random.default_rng(0).normal(size=(4 * 256, 16))
    rows[300] = rows[301] = rows[7]
    explorer = Explorer.__new__(Explorer)
    explorer.rows, explorer.sids = rows, SimpleNamespace(codebook_size=256)
    block = 86 + (300 - 256) // 3
    assert (300 - 256) // 3 != (301 - 256) // 3
    assert explorer.pair_at(7 // 3, block) == (7, 300)
    assert explorer.pair_at(block, block)[0] != explorer.pair_at(block, block)[1]
