"""The pages beside the lessons: what they name exists, and what they show is what the scripts give."""

import functools
import json
import re
import shlex
import subprocess
import sys

import nbformat
import pandas as pd
import pytest
import yaml

from conftest import ROOT
from gti_nb import cli
from gti_nb.config import RunConfig, load_config
from gti_nb.stages import Run, run_stage

sys.path.append(str(ROOT / "tools"))
import docs  # noqa: E402
import picture  # noqa: E402
import readme  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line, comments=True) for block in re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
            for line in block.splitlines()]
WORD = re.compile(r"^\| ([^|]+?) \| [^|]+ \| \[\w+\]\((\w+\.ipynb)\) \|$", re.MULTILINE)


@functools.cache
def prose(name: str) -> str:
    "The Markdown of a notebook as one line in lower case, without stars."
    cells = nbformat.read(ROOT / "nbs" / name, as_version=4).cells
    return " ".join(" ".join(cell.source for cell in cells if cell.cell_type == "markdown").replace("*", "").lower().split())


def words() -> list[tuple[str, str]]:
    "(word, lesson) of each row of the glossary but the notation's."
    cells = nbformat.read(ROOT / "nbs" / "glossary.ipynb", as_version=4).cells
    return [found for cell in cells for found in WORD.findall(cell.source)]


def test_words_of_the_glossary_are_in_the_lessons_it_names():
    names = [word for word, _ in words()]
    assert len(names) > 40 and len(set(names)) == len(names)
    assert [(word, lesson) for word, lesson in words() if word.lower() not in prose(lesson)] == []


def test_every_lesson_links_the_glossary():
    lacking = [path.name for path in docs.modules().values() if "](glossary.ipynb" not in prose(path.name)]
    assert lacking == [], "add a link to glossary.ipynb to the first cell"


def test_the_site_has_every_notebook_once():
    pages = [page for part in docs.navigation().values() for page in part]
    notebooks = [path.relative_to(ROOT / "nbs").with_suffix("").as_posix() for path in (ROOT / "nbs").rglob("*.ipynb")
                 if not {".ipynb_checkpoints", "runs"} & set(path.parts)]
    assert sorted(page for page in pages if not page.startswith("api/")) == sorted(set(notebooks) - {"index"})
    assert [page for page in pages if page.startswith("api/")] == [f"api/{module}" for module in docs.modules()]


@pytest.mark.parametrize("page, found", [
    ('<script src="https://example.com/x.js">', 1), ("@import '//example.com/x.css'", 1), ("a { background: url(https://x.org/y) }", 1),
    ('<img alt="" src="http://example.com/x.png">', 1), ('<a href="https://example.com">there</a> <img src="_images/x.png">', 0)])
def test_what_comes_from_another_server_is_seen(page, found):
    assert len(docs.foreign(page)) == found


def test_the_site_shows_no_directives(tmp_path):
    path = tmp_path / "lesson.ipynb"
    sources = ["#| default_exp data", "#| export\nx = '#| y'", "#| hide\nimport os", "# a comment"]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("#| text"), *map(nbformat.v4.new_code_cell, sources)]), path)
    docs.readable(path)
    assert [cell.source for cell in nbformat.read(path, as_version=4).cells] == ["#| text", "x = '#| y'", "# a comment"]


def test_docstrings_become_restructured_text():
    assert docs.escaped("`x` [n, d], **kwargs and a_ or |b|") == "``x``\\  [n, d], \\*\\*kwargs and a\\_ or \\|b\\|"


def test_the_picture_is_what_its_script_draws():
    assert picture.OUT.read_text(encoding="utf-8") == picture.picture(), "python tools/picture.py"


def test_the_demo_that_is_shown_is_the_one_that_is_configured():
    shown = json.loads((ROOT / "nbs" / "measured" / "demo.json").read_text(encoding="utf-8"))["config"]
    asked = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    arms, _ = asked.pop("arms"), asked.pop("run_dir")
    assert {arm: {name: shown["arms"][arm][name] for name in settings} for arm, settings in arms.items()} == arms
    assert {name: shown[name] for name in asked} == asked, "make demo; python tools/measure.py demo runs/demo; make sync"


def test_a_lesson_is_described_by_its_first_cell(tmp_path):
    cell = "# 07 · Prompts\n\n> One way\n> to write.\n\n**You need** [lesson 04](04_vocabulary.ipynb) and 03. **Time**: 10 s on 02 cores."
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(cell)]), tmp_path / "07_prompts.ipynb")
    facts = readme.lesson_facts("07_prompts", tmp_path / "07_prompts.ipynb", {"07_prompts": 4.4}, ["03_x", "04_vocabulary", "07_prompts"])
    assert facts == {"page": "07_prompts", "title": "07 · Prompts", "idea": "One way to write.", "needs": ["04_vocabulary", "03_x"],
                     "minutes": 5, "seconds": 4}
    assert readme.lesson_facts("07_prompts", tmp_path / "07_prompts.ipynb", {}, ["07_prompts"])["seconds"] is None


def test_a_lesson_promises_the_minutes_that_are_counted():
    promised = {path.stem: re.search(r"(\d+) minutes to read", prose(path.name)) for path in docs.modules().values()}
    counted = {fact["page"]: fact["minutes"] for fact in json.loads((ROOT / "nbs" / "measured" / "lessons.json").read_text("utf-8"))}
    assert sum(map(bool, promised.values())) > 15
    assert {page: found[1] for page, found in promised.items() if found and abs(int(found[1]) - counted[page]) > 5} == {}


def test_commands_of_the_readme_exist():
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for command, first, *rest in COMMANDS:
        if command == "make":
            assert first in targets
            overrides = [shlex.split(argument.removeprefix("ARGS=")) for argument in rest if argument.startswith("ARGS=")]
            rest = [argument.removeprefix("CONFIG=") for argument in rest if argument.startswith("CONFIG=")] + sum(overrides, [])
            command, first = (".venv/bin/gti", first) if first == "run" else ("", first)
        if command == ".venv/bin/gti":
            options = cli._parser().parse_args([first, *rest])
            if first == "run":
                assert (ROOT / options.config).exists() and {name for name, _ in options.overrides} <= set(RunConfig.model_fields)
        elif command == "sbatch":
            assert all((ROOT / word).exists() for word in [first, *rest] if not word.startswith("--"))
        elif command:
            assert command == ".venv/bin/python" and (ROOT / first).exists()
    assert len(COMMANDS) >= 10


def test_your_own_catalogue_as_the_readme_says(tmp_path):
    "The README's commands on tables of somebody's own, up to the first stage of the run."
    convert = next(command for command in COMMANDS if "data_scripts/from_csv.py" in command)
    run = next(command for command in COMMANDS if "configs/demo.yaml" in command)
    pd.DataFrame({"sku": range(20), "name": [f"Lamp {k}" for k in range(20)], "desc": "A lamp."}).to_csv(tmp_path / "my_items.csv")
    pd.DataFrame({"customer": [k % 7 for k in range(60)], "sku": [k % 20 for k in range(60)],
                  "date": [f"2024-01-{1 + k % 28:02}" for k in range(60)]}).to_csv(tmp_path / "my_events.csv")
    subprocess.run([sys.executable, ROOT / convert[1], *convert[2:]], cwd=tmp_path, check=True, capture_output=True)
    options = cli._parser().parse_args(run[1:])
    overrides = {name: str(tmp_path / value) if name in ("data", "run_dir") else value for name, value in options.overrides}
    own = Run(load_config(ROOT / options.config, overrides))
    assert run_stage(own, "data")["items"] == 20 and own.dataset().items["title"].iloc[3] == "Lamp 3"
