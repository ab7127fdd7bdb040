"""The pipeline as its users meet it: `gti run`, plain papermill, bad input, and a process that is killed."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, get_args, get_origin

import nbformat
import pandas as pd
import papermill
import pytest
import yaml

from conftest import BIN, ROOT, real_catalogue
from gti_nb.cli import main
from gti_nb.core import UserError, read_json
from gti_nb.data import leave_one_out, load_dataset
from gti_nb.explore import open_run
from gti_nb.config import FLOORS, RunConfig, described, find_initializer, load_config, make_config, preflight
from gti_nb.pipeline import run_pipeline, write_report
from gti_nb.stages import Run, run_stage

SMOKE = ROOT / "configs" / "smoke.yaml"
NOTEBOOK = ROOT / "nbs" / "pipelines" / "pipeline.ipynb"


@pytest.fixture(scope="module")
def smoke(gti, tmp_path_factory):
    "A finished smoke run made by `gti run`: its folder and the finished process."
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    process = subprocess.Popen([BIN / "gti", "run", SMOKE, "-p", "run_dir", run_dir], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env={**os.environ, "GTI_PROGRESS": "lines"})
    while not (run_dir / "config.json").exists() and process.poll() is None:
        time.sleep(0.05)
    with pytest.raises(UserError) as refused_at_once:
        run_pipeline(load_config(SMOKE, {"run_dir": str(run_dir)}))
    second = str(refused_at_once.value), process.pid, process.poll()
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    return run_dir, subprocess.CompletedProcess(process.args, 0, out, err), second


def test_a_second_run_in_the_folder_is_refused_at_once(smoke):
    said, pid, ended = smoke[2]
    assert ended is None and re.match(rf"process {pid} on {socket.gethostname()} since 20[-\d]+ [:\d]+ works in {smoke[0]}: wait", said)


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
    here = {"data": "embedded:movielens-100k", "encoder": "embedded:all-MiniLM-L6-v2", "language_model": "tiny:qwen3",
            "codebook_size": min(config.codebook_size, 256)}  # of MovieLens' 1,682 films, 8,192 codes can't be made
    preflight(load_config(path, here))


def test_held_out_items_are_not_taught(tmp_path):
    pairs = {}
    for held_out in (False, True):
        values = {"run_dir": str(tmp_path / str(held_out)), "grounding_held_out": held_out, "grounding_probe_items": 10, "max_items": 30,
                  "levels": 2, "codebook_size": 6, "grounding_steps": 2, "grounding_moments": 1, "rqvae_steps": 5}
        run = Run(make_config(values))
        for stage in ("data", "encode", "rqvae", "semantic_ids", "init-gti", "ground-gti"):
            run_stage(run, stage)
        pairs[held_out] = run.metrics("ground-gti")["pairs"]
    assert pairs[True] == pairs[False] * 2 / 3  # every third of 30 items is probed


def test_the_report_needs_neither_kernel_nor_net(smoke):
    html = (smoke[0] / "report.html").read_text()
    assert html.count("Plotly.newPlot") >= 6 and "Comparison" in html
    assert '<script src="http' not in html and '<link rel="stylesheet" href="http' not in html
    places = [html.index(f'<h2 id="{section}"') for section in ("Comparison", "What-was-asked", "Provenance")]
    assert places == sorted(places) < [html.index("packages torch")]
    assert "run_stage(" not in html and "rqvae: starts" not in html


def test_a_tag_says_what_a_report_begins_with(tmp_path):
    "Whatever the section is called; and the report of an old notebook, which has no such tag, is in the notebook's order."
    pages, headings = nbformat.read(NOTEBOOK, 4), {}
    [first] = [cell for cell in pages.cells if "first" in cell.metadata.get("tags", [])]
    assert first.source.startswith("## Comparison\n")
    first.source = "## What came out"
    for tags in (["first"], []):
        first.metadata.tags = tags
        nbformat.write(nbformat.v4.new_notebook(cells=[cell for cell in pages.cells if cell.cell_type == "markdown"]), tmp_path / "it.ipynb")
        write_report(tmp_path / "it.ipynb", tmp_path / "report.html")
        headings[len(tags)] = re.findall(r'<h2 id="([^"]+)"', (tmp_path / "report.html").read_text())
    assert headings[1] == ["What-came-out", *(heading for heading in headings[0] if heading != "What-came-out")]
    assert len(headings[0]) == 9 and headings[0].index("What-came-out") == 7


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


def test_plain_papermill_refuses_an_unknown_parameter(tmp_path):
    command = [sys.executable, "-m", "papermill", NOTEBOOK, tmp_path / "out.ipynb", "-k", "python3", "-p", "sead", "1",
               "-p", "run_dir", tmp_path / "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "did you mean 'seed'" in done.stderr and not (tmp_path / "run").exists()


def test_a_killed_runner_and_plain_papermill_end_with_the_same_metrics(smoke, tmp_path):
    "The runner is killed with -9 and its kernel lives on; papermill, started at once, waits for it, and goes on where it was."
    command = [BIN / "gti", "run", SMOKE, "-p", "run_dir", tmp_path / "run"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    begun, last = (tmp_path / "run" / name for name in ("ground-gti/config.json", "init-gti/DONE.json"))
    while not begun.exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    process.kill()
    process.wait()
    untouched = last.stat().st_mtime_ns
    command = [sys.executable, "-m", "papermill", NOTEBOOK, tmp_path / "out.ipynb", "-k", "python3", "-f", SMOKE, "--log-output",
               "-p", "run_dir", tmp_path / "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "init-gti: nothing to do" in done.stderr and last.stat().st_mtime_ns == untouched
    assert metrics(tmp_path / "run") == metrics(smoke[0])


def test_a_changed_parameter_redoes_what_depends_on_it(smoke, gti, tmp_path):
    shutil.copytree(smoke[0], tmp_path / "run")
    changed = gti("run", SMOKE, "-p", "run_dir", tmp_path / "run", "-p", "n_bootstrap", 500)
    assert changed.returncode == 0, changed.stderr
    assert "comparison: done again, because of a change of n_bootstrap" in changed.stdout
    assert changed.stdout.count("done again") == 1


def test_parameters_cell_and_config_agree():
    cell = papermill.inspect_notebook(str(NOTEBOOK))
    assert list(cell) == list(RunConfig.model_fields)
    for name, field in RunConfig.model_fields.items():
        default = RunConfig().model_dump(mode="json")[name]
        assert eval(cell[name]["default"]) == default, name
        assert cell[name]["help"] == described(field), name
        assert cell[name]["inferred_type_name"] not in (None, "None"), name


def choices(kind) -> list:
    "The words of all fixed choices in a type."
    return list(get_args(kind)) if get_origin(kind) is Literal else [word for part in get_args(kind) for word in choices(part)]


def test_fixed_choices_are_all_told(capsys):
    "A parameter with fixed choices has them in its type, and they are listed in the notebook's comments and in the help."
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if re.match(r"  [a-z_]+ ", line)}
    fixed = {name: (described(field), words) for name, field in RunConfig.model_fields.items() if (words := choices(field.annotation))}
    assert len(fixed) == 7 and "pattern" not in str([field.metadata for field in RunConfig.model_fields.values()])
    for name, (says, words) in fixed.items():
        assert len(words) > 1 and all(re.search(rf"\b{word}\b", text) for word in words for text in (says, told[name])), name
        with pytest.raises(UserError, match=f"{words[0]}.*{words[-1]}"):
            make_config({name: ["no such word"] if isinstance(RunConfig.model_fields[name].default, list) else "no such word"})


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

# An initializer of the user's own -> what is said of it.
MINE = """from gti_nb.initializers import mean_rows, random_rows
def noisy(*given): return mean_rows(*given) + random_rows(*given)
def short(*given): return noisy(*given)[1:]
def nothing(*given): pass
def few(rows): return rows
word = "noisy"
"""
OWN = {
    "theirs:noisy": "the module 'theirs' can't be imported (ModuleNotFoundError: No module named 'theirs')",
    "wrong:noisy": "the module 'wrong' can't be imported (SyntaxError", "mine:loud": "loud isn't there", "mine:": " isn't there",
    "mine:word": "word is a str, not a function", "median": "choose one of random, mean,", ":noisy": "can't be imported",
}
TRIED = {"mine:short": "gave (23, 64) rows", "mine:few": "few() takes 1 positional argument",
         "mine:nothing": "mine:nothing can't start rows, as a trial shows: "}


@pytest.fixture
def refused(tmp_path, capfd):
    "Runs the smoke configuration with other parameters, which must be refused: one line, an exit code that isn't 0, nothing on disk."
    def call(said, *pairs, config=SMOKE):
        words = [word for pair in [("run_dir", tmp_path / "run"), *pairs] for word in ("-p", *map(str, pair))]
        assert main(["run", str(config), *words]) == 1
        out, err = capfd.readouterr()
        assert not out and said in err and len(err.strip().splitlines()) == 1, err
        assert not (tmp_path / "run").exists()
    return call


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_stop_at_once(name, refused):
    (_, *pair), said = BAD[name]
    refused(said, pair)


@pytest.fixture
def own(tmp_path, monkeypatch):
    "A folder with a module of initializers, the current one during the test; what Python learns of it is forgotten afterwards."
    from gti_nb import initializers

    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "wrong.py").write_text("def noisy(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(initializers, "INITIALIZERS", dict(initializers.INITIALIZERS))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_wrong_initializer_stops_at_once(own, refused):
    for name, said in OWN.items():
        with pytest.raises(UserError, match=re.escape(said)):
            find_initializer(name)
    for name, said in {"mine:loud": "arm own: mine:loud: loud isn't there", **TRIED}.items():
        refused(said, ("arms", f"{{own: {{initializer: '{name}'}}}}"))


def test_an_initializer_that_is_edited_is_read_again(own):
    assert find_initializer("mine:noisy").__name__ == "noisy"
    (own / "mine.py").write_text("def quiet(*given): return 0\nnoisy = quiet\n")
    assert find_initializer("mine:noisy").__name__ == "quiet"
    assert find_initializer("gti_nb.initializers:mean_rows") is find_initializer("mean")
    elsewhere = subprocess.run([sys.executable, "-c", "import mine"], cwd="/")  # a process that a run starts
    assert elsewhere.returncode == 0


def test_a_run_with_an_initializer_of_ones_own(own, capsys):
    "The notebook's kernel, which works in another folder, finds it; a change of it does the arm again; without it a run can be read."
    config = make_config({"run_dir": "run", "max_items": 30, "levels": 2, "codebook_size": 6, "rqvae_steps": 5,
                          "arms": {"own": {"initializer": "mine:noisy"}}})
    stages = ["data", "encode", "rqvae", "semantic_ids", "init-own"]
    cells = ["from gti_nb.config import parameters_of\nfrom gti_nb.stages import Run, run_stage", "run = Run(parameters_of(globals()))",
             f"for name in {stages}: run_stage(run, name)"]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel})
    nbformat.write(notebook, own / "short.ipynb")
    with pytest.raises(UserError, match="the run ended early: sft-own, "):
        run_pipeline(config, own / "short.ipynb")
    states = lambda: [Run(config).is_done(name) for name in stages]
    assert states() == [True] * 5 and Run(config).metrics("init-own")["rms_to_mean"] > 0
    before = Run(config).rows("own", "init").rows
    (own / "mine.py").write_text(MINE.replace("+ random", "- 2 * random"))
    assert states() == [True] * 4 + [False]
    run_stage(Run(config), "init-own")
    assert "init-own: done again, because of a change of the initializer's module" in capsys.readouterr().out
    assert states() == [True] * 5 and not Run(config).rows("own", "init").rows.equal(before)
    (own / "mine.py").unlink()
    assert states() == [True] * 5


def test_a_refusal_as_a_shell_sees_it(gti, tmp_path):
    done = gti("run", SMOKE, "-p", "run_dir", tmp_path / "run", "-p", "sft_step", 5)
    assert done.returncode == 1 and not done.stdout and len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "run").exists()


def test_bad_files_stop_at_once(refused, tmp_path):
    in_folder = lambda folder: [("data", folder), ("min_rating", 0), ("codebook_size", 4)]
    refused("title", *in_folder(a_catalogue(tmp_path / "columns", items="item_id,name,description\n")))
    refused("items", *in_folder(a_catalogue(tmp_path / "empty", rows=0)))
    folder = a_catalogue(tmp_path / "unknown")
    with (folder / "interactions.csv").open("a") as file:
        file.write("u1,i99,7\n")
    refused("i99", *in_folder(folder))
    refused("no.yaml", config=tmp_path / "no.yaml")
    (tmp_path / "bad.yaml").write_text("seed: [1\n")
    refused("not valid YAML", config=tmp_path / "bad.yaml")


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
