"""What pages say about time and results comes from here, never from a keyboard: nbs/measured/ and nbs/images/demo.png.

    python tools/measure.py lessons [NAME ...]   # run all lessons, or those named, and note the seconds
    python tools/measure.py demo runs/demo       # take the demo's results, and draw its figure

Then `make sync` writes them into the pages. Seconds are those of a CPU core, so other work on the machine matters little."""

import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "nbs" / "measured"


def lessons(names: list[str]):
    "Seconds of a CPU core that each lesson takes, with the start of Python, its imports, and processes it starts."
    from docs import modules

    from gti_nb.core import read_json, write_json

    path = MEASURED / "seconds.json"
    pages = [page.stem for page in modules().values()]
    if unknown := [name for name in names if name not in pages]:
        raise SystemExit(f"there is no lesson {unknown[0]!r}: take some of {', '.join(pages)}")
    known = read_json(path)["seconds"] if path.exists() else {}
    for name in names or pages:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([Path(sys.executable).parent / "nbdev-test", f"nbs/{name}.ipynb"], cwd=ROOT,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(f"{name} fails: mend it first")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        known[name] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
        print(f"{name}: {known[name]} s", flush=True)
        write_json(path, {"seconds": {page: known[page] for page in pages if page in known}})


def demo(folder: str):
    "The results of a finished run of configs/demo.yaml, without anything that names this machine, and their figure."
    from gti_nb.core import read_json, style, write_json
    from gti_nb.explore import open_run, similarity_figure

    run, record = open_run(folder), read_json(Path(folder) / "metrics.json")
    metrics, where = record["metrics"], record["provenance"]
    write_json(MEASURED / "demo.json", {
        "config": {key: value for key, value in record["config"].items() if key != "run_dir"},
        "comparison": metrics["comparison"], "geometry": metrics["geometry"], "semantic_ids": metrics["semantic_ids"]["after"],
        "grounding": {moment: metrics["ground-gti"][moment] for moment in ("before", "after")},
        "seconds": {name: stage["seconds"] for name, stage in record["stages"].items()},
        "where": {key: where[key] for key in ("python", "cpu_count", "gpu", "packages")}})
    figure = style(similarity_figure(run, [("mean", "sft"), ("gti", "ground"), ("gti", "sft")]), width=900, height=330)
    figure.update_layout(margin=dict(l=50, r=10, t=30, b=35)).write_image(ROOT / "nbs" / "images" / "demo.png")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    if sys.argv[1:2] == ["lessons"]:
        lessons(sys.argv[2:])
    elif sys.argv[1:2] == ["demo"] and len(sys.argv) == 3:
        demo(sys.argv[2])
    else:
        raise SystemExit(__doc__)
