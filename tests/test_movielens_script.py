"data_scripts/movielens.py: what it writes, that it writes the same twice, and what it says when it can't."

import hashlib
import subprocess
import sys
from pathlib import Path

from gti_nb.core import read_json
from gti_nb.data import load_dataset

SCRIPT = Path(__file__).parent.parent / "data_scripts" / "movielens.py"


def run(*arguments, prelude=""):
    code = f"{prelude}\nimport runpy, sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nsys.argv = {[str(SCRIPT), *map(str, arguments)]!r}\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_writes_the_same_bytes_twice(tmp_path):
    files = ("items.csv", "interactions.csv", "card.json")
    seen = []
    for _ in range(2):
        done = run(tmp_path / "films")
        assert done.returncode == 0, done.stderr
        seen.append([(tmp_path / "films" / name).read_bytes() for name in files])
    assert seen[0] == seen[1]
    assert sorted(p.name for p in (tmp_path / "films").iterdir()) == sorted(files)
    card = read_json(tmp_path / "films" / "card.json")
    assert card["sha256"]["items.csv"] == hashlib.sha256(seen[0][0]).hexdigest()
    assert card["statistics"]["items"] == 1682 and "GroupLens" in card["licence"]


def test_loads_as_the_embedded_one(tmp_path):
    assert run(tmp_path).returncode == 0
    written, embedded = load_dataset(tmp_path), load_dataset("embedded:movielens-100k")
    assert written.name == embedded.name
    assert written.items.equals(embedded.items) and written.interactions.equals(embedded.interactions)


def test_says_what_is_missing(tmp_path):
    absent = "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda name, *a: None if name == 'recbole' else find(name, *a)"
    done = run(tmp_path / "films", prelude=absent)
    assert done.returncode == 1 and not (tmp_path / "films").exists()
    assert done.stderr.count("\n") == 1 and "'recbole'" in done.stderr and "make install" in done.stderr


def test_says_when_the_folder_is_a_file(tmp_path):
    (tmp_path / "films").write_text("not a folder")
    done = run(tmp_path / "films")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "give another folder" in done.stderr
