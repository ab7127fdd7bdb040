"""The pipeline as its users meet it: `gti run`, plain papermill, bad input, and a process that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pandas as pd
import papermill
import pytest
import yaml

from conftest import BIN, ROOT, real_catalogue
from gti_nb.core import UserError, read_json
from gti_nb.data import leave_one_out, load_dataset
from gti_nb.explore import open_run
from gti_nb.config import FLOORS, RunConfig, load_config, make_config, preflight
from gti_nb.stages import Run, run_stage

SMOKE = ROOT / "configs" / "smoke.yaml"
NOTEBOOK = ROOT / "nbs" / "pipelines" / "pipeline.ipynb"


@pytest.fixture(scope="module")
def smoke(gti, tmp_path_factory):
    "A finished smoke run made by `gti run`: its folder and the finished process."
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    began = time.monotonic()
    done = gti("run", SMOKE, "-p", "run_dir", run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done, time.monotonic() - began


def metrics(run_dir):
    return read_json(run_dir / "metrics.json")["metrics"]


def test_a_run_leaves_its_record(smoke):
    run_dir, done, _ = smoke
    assert str(run_dir / "report.html") in done.stdout and "webbrowser" in done.stdout
    run = open_run(run_dir)
    for stage in run.stages:
        assert {p.name for p in run.folder(stage).iterdir()} >= {"config.json", "metrics.json", "DONE.json"}
    executed = nbformat.read(run_dir / "pipeline.ipynb", 4)
    assert "injected-parameters" in str([c.metadata.get("tags") for c in executed.cells])
    kernel = Path(read_json(run_dir / "metrics.json")["provenance"]["executable"])
    assert kernel.parent == BIN  # the interpreter's own kernel, not another environment's
    for arm in ("mean", "gti", *FLOORS):
        assert arm in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_could_start(path):
    "With what is here, or, on data that has to be made first, with a catalogue in its place."
    config = load_config(path)
    if config.data.startswith("embedded:"):
        return preflight(config)
    with pytest.raises(UserError, match="is not a folder"):
        preflight(config)
    here = {"data": "embedded:movielens-100k", "encoder": "embedded:all-MiniLM-L6-v2", "language_model": "tiny:qwen3"}
    preflight(load_config(path, here))


def test_held_out_items_are_not_taught(tmp_path):
    pairs = {}
    for held_out in (False, True):
        values = {"run_dir": str(tmp_path / str(held_out)), "grounding_held_out": held_out, "grounding_probe_items": 20,
                  "grounding_steps": 2, "rqvae_steps": 5}
        run = Run(make_config(values))
        for stage in ("data", "encode", "rqvae", "semantic_ids", "init-gti", "ground-gti"):
            run_stage(run, stage)
        pairs[held_out] = run.metrics("ground-gti")["pairs"]
    assert pairs[True] == pairs[False] * 2 / 3  # every third of 60 items is probed


def test_the_report_needs_neither_kernel_nor_net(smoke):
    html = (smoke[0] / "report.html").read_text()
    assert html.count("Plotly.newPlot") >= 6 and "Comparison" in html
    assert '<script src="http' not in html and '<link rel="stylesheet" href="http' not in html


def test_progress_is_seen_in_the_log(smoke):
    out = smoke[1].stdout
    for stage in ("rqvae", "ground-gti", "sft-mean", "evaluate-gti"):
        assert f"{stage}: starts" in out and f"{stage}: done" in out
    assert "ground-gti: 10/10" in out
    assert len(out.splitlines()) < 200


def test_running_again_does_nothing_and_says_so(smoke, gti):
    before = {p: p.stat().st_mtime_ns for p in smoke[0].rglob("*")}
    again = gti("run", SMOKE, "-p", "run_dir", smoke[0])
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in smoke[0].rglob("*")} == before


def test_predictions_are_distinct_items_and_give_the_metrics(smoke):
    run = open_run(smoke[0])
    users, known = run.test_users(), set(run.dataset().items.item_id)
    for arm in ("mean", "gti"):
        predictions = pd.read_parquet(run.folder(f"evaluate-{arm}") / "predictions.parquet")
        lists = predictions.sort_values("rank").groupby("user_id").item_id.agg(list)
        assert set(lists.index) == set(users.user_id)
        assert all(len(set(items)) == len(items) == 20 and set(items) <= known for items in lists)
        hits = [target in lists[user][:10] for user, target in zip(users.user_id, users.target)]
        assert run.metrics(f"evaluate-{arm}")["recall@10"] == pytest.approx(sum(hits) / len(hits))


def test_plain_papermill_gives_the_same_metrics(smoke, tmp_path):
    command = [sys.executable, "-m", "papermill", NOTEBOOK, tmp_path / "out.ipynb", "-k", "python3", "-f", SMOKE,
               "-p", "run_dir", tmp_path / "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert metrics(tmp_path / "run") == metrics(smoke[0])


def test_plain_papermill_refuses_an_unknown_parameter(tmp_path):
    command = [sys.executable, "-m", "papermill", NOTEBOOK, tmp_path / "out.ipynb", "-k", "python3", "-p", "sead", "1",
               "-p", "run_dir", tmp_path / "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "did you mean 'seed'" in done.stderr and not (tmp_path / "run").exists()


def test_killed_and_resumed_ends_with_the_same_metrics(smoke, gti, tmp_path):
    command = [BIN / "gti", "run", SMOKE, "-p", "run_dir", tmp_path / "run"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    last = tmp_path / "run" / "init-gti" / "DONE.json"
    while not last.exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    kill_group(process)
    assert not (tmp_path / "run" / "comparison" / "DONE.json").exists()
    untouched = last.stat().st_mtime_ns
    again = gti("run", SMOKE, "-p", "run_dir", tmp_path / "run")
    assert again.returncode == 0, again.stderr
    assert "init-gti: nothing to do" in again.stdout and last.stat().st_mtime_ns == untouched
    assert metrics(tmp_path / "run") == metrics(smoke[0])


def kill_group(process):
    "Kill the process and all that it started, kernels (which lead groups of their own) included."
    import psutil

    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def test_a_changed_parameter_redoes_what_depends_on_it(smoke, gti):
    changed = gti("run", SMOKE, "-p", "run_dir", smoke[0], "-p", "n_bootstrap", 500)
    assert changed.returncode == 0, changed.stderr
    assert "comparison: done again, because of a change of n_bootstrap" in changed.stdout
    assert changed.stdout.count("done again") == 1
    assert gti("run", SMOKE, "-p", "run_dir", smoke[0]).returncode == 0  # back to where the other tests expect it


def test_parameters_cell_and_config_agree():
    cell = papermill.inspect_notebook(str(NOTEBOOK))
    assert list(cell) == list(RunConfig.model_fields)
    for name, field in RunConfig.model_fields.items():
        default = RunConfig().model_dump(mode="json")[name]
        assert eval(cell[name]["default"]) == default, name
        assert cell[name]["help"] == field.description, name
        assert cell[name]["inferred_type_name"] not in (None, "None"), name


def test_the_smoke_configuration_is_the_default():
    assert make_config(yaml.safe_load(SMOKE.read_text()), "smoke") == make_config({})


def a_catalogue(folder, items="item_id,title,description\n", rows=6):
    "A small valid data set on disk."
    folder.mkdir(exist_ok=True)
    names = [f"i{n}" for n in range(rows)]
    (folder / "items.csv").write_text(items + "".join(f"{n},Title {n},A thing\n" for n in names))
    events = [f"u{u},{n},{t}" for u in range(4) for t, n in enumerate(names)]
    (folder / "interactions.csv").write_text("user_id,item_id,timestamp\n" + "\n".join(events) + "\n")
    return folder


BAD = {
    "unknown parameter": (["-p", "sft_step", "5"], "did you mean 'sft_steps'"),
    "wrong type": (["-p", "seed", "three"], "seed is 'three'"),
    "no such data": (["-p", "data", "no/such/folder"], "is not a folder"),
    "no such model": (["-p", "language_model", "./no/such/model"], "embedded:SmolLM2-135M-Instruct"),
    "too many codes": (["-p", "codebook_size", "100"], "at most 60"),
    "too few beams": (["-p", "beams", "5"], "raise beams"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_stop_at_once(name, gti, tmp_path):
    arguments, said = BAD[name]
    refused(gti("run", SMOKE, "-p", "run_dir", tmp_path / "run", *arguments), said, tmp_path / "run")


def refused(done, said, run_dir):
    "One line that says what is wrong, an exit code that isn't 0, and nothing on disk."
    assert done.returncode == 1, done.stdout
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not run_dir.exists()


def test_bad_files_stop_at_once(gti, tmp_path):
    run_dir = tmp_path / "run"
    run = lambda folder: gti("run", SMOKE, "-p", "run_dir", run_dir, "-p", "data", folder, "-p", "min_rating", 0, "-p", "codebook_size", 4)
    folder = a_catalogue(tmp_path / "columns", items="item_id,name,description\n")
    refused(run(folder), "title", run_dir)
    folder = a_catalogue(tmp_path / "empty", rows=0)
    refused(run(folder), "items", run_dir)
    folder = a_catalogue(tmp_path / "unknown")
    with (folder / "interactions.csv").open("a") as file:
        file.write("u1,i99,7\n")
    refused(run(folder), "i99", run_dir)
    refused(gti("run", tmp_path / "no.yaml"), "no.yaml", run_dir)
    (tmp_path / "bad.yaml").write_text("seed: [1\n")
    refused(gti("run", tmp_path / "bad.yaml"), "not valid YAML", run_dir)


def test_a_real_catalogue_that_is_not_films():
    items, events = real_catalogue()
    assert len(items) == 3686
    from gti_nb.data import Dataset, validate

    validate(items, events, "amazon")
    splits = leave_one_out(Dataset("amazon", items, events))
    lives = events.sort_values("timestamp", kind="stable").groupby("user_id").item_id.agg(list)
    for row in splits.test.itertuples():
        assert [*row.history, row.target] == lives[row.user_id]
        assert splits.train[row.user_id] == lives[row.user_id][:-2]


def test_yaml_numbers_and_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_config({"sft_learning_rate": "1e-4"}).sft_learning_rate == 1e-4
    a_catalogue(tmp_path / "mine")
    config = make_config({"data": "mine", "run_dir": "here"})
    assert (config.data, config.run_dir) == (str(tmp_path / "mine"), str(tmp_path / "here"))
    before = Run(config).fingerprint("data")
    (tmp_path / "mine" / "items.csv").write_text((tmp_path / "mine" / "items.csv").read_text() + "i77,New,Thing\n")
    assert Run(config).fingerprint("data") != before
