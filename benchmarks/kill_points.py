"""Kill a run with -9, at every stage and at several points of each, start it again, and see whether it ends as though nothing had been.

    python benchmarks/kill_points.py [--quick]

The run is that of configs/smoke.yaml, shortened. A kill point is a stage and a moment in it:

    begun     its config.json is written, no work is done
    torn      its first artefact (in a training, a checkpoint) lies beside its place under a temporary name
    written   the first artefact is in its place
    late      the work is done, its metrics aren't written
    unsealed  its metrics are written, DONE.json isn't
    sealed    DONE.json is written, checkpoints aren't removed

and a victim: the process that works; a notebook's kernel; the runner, whose kernel lives on for a moment while the run is started again; or the
first or the second of two training processes. A kill point is survived if no DONE.json stands where work wasn't done, the next start goes on at
that stage and leaves the stages before it untouched, and in the end metrics, rows and predictions equal those of an undisturbed run, and nothing
half-written is left. One folder goes through all points of a victim, one after the other: each start goes as far as the next kill.

`--quick` kills the working process alone, at one point of each stage, another one for each. The last line is one JSON object; the exit code is 1
unless all points were survived."""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import nbformat
import yaml
from safetensors.numpy import load_file

from gti_nb import stages, vocabulary
from gti_nb.config import make_config
from gti_nb.core import UserError, content_hash, read_json
from gti_nb.pipeline import pipeline_notebook, run_pipeline
from gti_nb.stages import Run, run_stage

ROOT, HERE = Path(__file__).resolve().parent.parent, Path(__file__).resolve().parent
WARM = ("peft", "sentence_transformers", "transformers.models.qwen3.modeling_qwen3", "gti_nb.cli")  # imported before any fork
POINTS = ("begun", "torn", "written", "late", "unsealed", "sealed")
KINDS = ("data", "encode", "rqvae", "semantic_ids", "init", "ground", "sft", "evaluate", "geometry", "comparison")  # the notebook's order
SMALL = {"rqvae_steps": 30, "grounding_steps": 4, "sft_steps": 4, "checkpoint_every": 2, "grounding_moments": 2, "grounding_probe_items": 5,
         "grounding_batch_size": 4, "sft_batch_size": 4, "max_history": 4, "eval_users": 10, "n_bootstrap": 100}


def config_in(folder, **values):
    smoke = yaml.safe_load((ROOT / "configs" / "smoke.yaml").read_text())
    return make_config(smoke | SMALL | {"run_dir": str(folder)} | values)


# --- in the process that is killed ---------------------------------------------------------------------------------------

def arm(folder, point: str, victim: str = "self"):
    "From now on, kill when the work in a stage's `folder` reaches `point`."
    folder, put, state = Path(folder), os.replace, {"artefacts": 0}

    def die():
        os.kill(os.getppid() if victim == "runner" else os.getpid(), signal.SIGKILL)
        state["artefacts"] = -1  # a kernel whose runner was killed lives on, and kills no more
        os.replace = put

    def replace(source, target, **others):
        path = Path(target)
        kind = path.stem if path.parent == folder and path.name in ("config.json", "metrics.json", "DONE.json") else "artefact"
        inside = folder in path.parents
        state["artefacts"] += inside and kind == "artefact"
        first = inside and kind == "artefact" and state["artefacts"] == 1
        if point == "torn" and first or inside and (kind, point) in (("metrics", "late"), ("DONE", "unsealed")):
            die()
        put(source, target, **others)
        if point == "written" and first or inside and (kind, point) in (("config", "begun"), ("DONE", "sealed")):
            die()
    os.replace = replace


def work_and_die(config: dict, stage: str, rank: int):
    "`stages.work` for launched processes, of which one dies: the first at its first artefact, the other at its second forward pass."
    if int(os.environ["RANK"]) == rank == 0:
        arm(Path(config["run_dir"]) / stage, "torn")
    elif int(os.environ["RANK"]) == rank:
        calls, hidden = [], vocabulary.ExtendedLM.hidden

        def deadly(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return hidden(self, *args, **kwargs)
        vocabulary.ExtendedLM.hidden = deadly
    return stages.work(config, stage)


# --- starts --------------------------------------------------------------------------------------------------------------

def forked(config, last: str, log: Path, before=lambda: None) -> int:
    "Do the stages up to `last` in a forked process, which calls `before()` first and prints to `log`; returns how it ended, as Popen does."
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with open(log, "w") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            before()
            run = Run(config)
            for name in list(run.stages)[:list(run.stages).index(last) + 1]:
                run_stage(run, name)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def with_notebook(config, stage: str, log: Path, victim: str) -> int:
    "Run the pipeline notebook in another process; its kernel kills itself or its runner when `stage` begins its work."
    pages = nbformat.read(pipeline_notebook(), 4)
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport kill_points\nkill_points.arm({str(Path(config.run_dir) / stage)!r}, "
    code += f"{'begun' if victim == 'runner' else 'late'!r}, {victim!r})"
    pages.cells.insert(1, nbformat.v4.new_code_cell(code))
    with tempfile.NamedTemporaryFile("w", suffix=".ipynb") as notebook, open(log, "w") as file:
        nbformat.write(pages, notebook.name)
        words = [sys.executable, __file__, "--run", json.dumps(config.model_dump(mode="json")), notebook.name]
        return subprocess.run(words, stdout=file, stderr=file).returncode


# --- looking -------------------------------------------------------------------------------------------------------------

def seals(run: Run) -> dict:
    return {name: (run.folder(name) / "DONE.json").stat().st_mtime_ns for name in run.stages if (run.folder(name) / "DONE.json").exists()}


def results(run: Run) -> dict:
    "What must not depend on kills: metrics, and the bytes of rows and predictions."
    tensors = lambda path: sorted((name, content_hash(value)) for name, value in load_file(path).items())
    kept = {str(path.relative_to(run.path)): tensors(path) for path in run.path.rglob("*.safetensors")}
    kept |= {str(path.relative_to(run.path)): content_hash(path) for path in run.path.rglob("*.parquet")}
    return {name: run.metrics(name) for name in run.stages} | kept


def left_over(run: Run) -> list:
    return [str(path) for path in run.path.rglob("*") if path.name.startswith((".", "checkpoint", "best")) and path.name != ".lock"]


def complaints(run: Run, stage: str, point: str, before: dict, code: int, expected: int, log: Path) -> list:
    "What is wrong right after a kill in `stage`."
    sealed, after = point == "sealed", seals(run)
    wrong = [] if code == expected else [f"ended with {code}, not {expected}: {log.read_text()[-500:]}"]
    if (stage in after) != sealed and point != "runner":
        wrong.append("DONE where the work wasn't done" if stage in after else "no DONE where it was")
    if any(after.get(name) != when for name, when in before.items()):
        wrong.append("an earlier stage was done again")
    return wrong + [f"{name} isn't done" for name in run.stages[stage].uses if not run.is_done(name)]


# --- a victim's points ---------------------------------------------------------------------------------------------------

def go_through(label: str, config, plan: list, start, undisturbed: dict, folder: Path, expected: int) -> list:
    """Kill at every (stage, point) of `plan`, in order, in one folder; `start(config, stage, point, log)` starts it and returns the exit code.
    Returns (victim, stage, point, what is wrong) of each."""
    run, found, log = Run(config), [], folder / "log.txt"
    for stage, point in plan:
        while True:
            before, said = seals(run), time.monotonic()
            code = start(config, stage, point, log)
            if label != "runner" or f"{stage}: nothing to do" not in log.read_text():
                break
            for name in list(run.stages)[list(run.stages).index(stage):]:  # a kernel that outlived its runner had done it: once more
                shutil.rmtree(run.folder(name), ignore_errors=True)
        wrong = complaints(run, stage, point, before, code, expected, log)
        interrupted = any(stage == other for _, other, *_ in found)
        if interrupted and f"{stage}: goes on" not in log.read_text():
            wrong.append("it didn't go on at this stage")
        found.append((label, stage, point, wrong))
        print(f"{label:12} {stage:22} {point:9} {'survived' if not wrong else wrong}  {time.monotonic() - said:.1f} s", flush=True)
    if forked(config, list(run.stages)[-1], log) != 0:
        return [(*where, [*wrong, f"it can't be finished: {log.read_text()[-500:]}"]) for *where, wrong in found]
    now = results(run)
    differ = [name for name in undisturbed if now.get(name) != undisturbed[name]]
    rest = left_over(run)
    return [(*where, [*wrong, *(f"{name} differs in the end" for name in differ), *(f"{path} is left over" for path in rest)])
            for *where, wrong in found]


def measure(folder: Path, quick: bool) -> tuple:
    for name in WARM:
        importlib.import_module(name)
    began, whole = time.monotonic(), config_in(folder / "undisturbed")
    last = list(Run(whole).stages)[-1]
    noted = folder / "noted.json"

    def note():  # at every file put into place: which, and what has been imported by then
        written, put = [], os.replace

        def replace(source, target, **others):
            put(source, target, **others)
            written.append(str(Path(target).relative_to(whole.run_dir)))
            noted.write_text(json.dumps([written, sorted(sys.modules)]))
        os.replace = replace
    assert forked(whole, last, folder / "log.txt", note) == 0, (folder / "log.txt").read_text()
    written, modules = json.loads(noted.read_text())
    for name in modules:  # once, instead of in each forked process
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    undisturbed, alone = results(Run(whole)), time.monotonic() - began
    own = ("config.json", "metrics.json", "DONE.json")
    with_artefacts = {path.split("/")[0] for path in written if path.split("/", 1)[-1] not in own}
    points = {stage: [p for p in POINTS if p not in ("torn", "written") or stage in with_artefacts] for stage in Run(whole).stages}
    plan = [(stage, point) for k, (stage, known) in enumerate(points.items())
            for point in ([known[k % len(known)]] if quick else known)]

    def process(config, stage, point, log):
        return forked(config, stage, log, lambda: arm(Path(config.run_dir) / stage, point))
    found = go_through("process", config_in(folder / "process"), plan, process, undisturbed, folder, -signal.SIGKILL)
    if quick:
        return found, alone
    in_notebook = sorted(points, key=lambda stage: KINDS.index(stage.partition("-")[0]))
    for victim, expected in (("kernel", 1), ("runner", -signal.SIGKILL)):
        start = lambda config, stage, point, log: with_notebook(config, stage, log, victim)
        found += go_through(victim, config_in(folder / victim), [(stage, victim) for stage in in_notebook], start, undisturbed, folder, expected)
    two = config_in(folder / "two", processes=2)
    assert forked(two, last, folder / "log.txt") == 0, (folder / "log.txt").read_text()
    shared = [stage for stage in points if Run(two).stages[stage].shared]
    for rank in (0, 1):
        def start(config, stage, point, log):
            def before():
                from gti_nb import processes

                launch = processes.launch
                processes.launch = lambda function, arguments, *others: launch(
                    "kill_points:work_and_die" if arguments["stage"] == stage else function,
                    arguments | ({"rank": rank} if arguments["stage"] == stage else {}), *others)
            return forked(config, stage, log, before)
        config = config_in(folder / f"rank{rank}", processes=2)
        found += go_through(f"process {rank} of 2", config, [(stage, "work") for stage in shared], start, results(Run(two)), folder, 1)
    return found, alone


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # a runner that is killed: configuration, notebook
    options = parser.parse_args()
    if options.run:
        try:
            run_pipeline(make_config(json.loads(options.run[0])), options.run[1])
        except UserError as error:
            print(error)
            return 1
        return 0
    os.environ["GTI_PROGRESS"] = "lines"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found, alone = measure(Path(folder), options.quick)
    failed = [row for row in found if row[-1]]
    for *where, wrong in failed:
        print(*where, "; ".join(wrong[:3]))
    victims = {label: f"{sum(not wrong for who, *_, wrong in found if who == label)} of {sum(who == label for who, *_ in found)}"
               for label in dict.fromkeys(row[0] for row in found)}
    print(f"{len(found) - len(failed)} of {len(found)} kill points survived")
    print(json.dumps({"benchmark": "kill_points", "quick": options.quick, "survived": len(found) - len(failed), "kill_points": len(found),
                      "share": 1 - len(failed) / len(found), "victims": victims, "undisturbed_s": round(alone, 2),
                      "seconds": round(time.monotonic() - began, 2)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
