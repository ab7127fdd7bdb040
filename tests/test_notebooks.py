"""Every notebook that is committed is valid, small, clean, and written the way nbdev and papermill need it.

Each check takes a `Page` and yields what is wrong. `test_notebook` runs all of them on all notebooks; `test_check_can_fail`
breaks a good notebook in one way a check, and the check must see it."""

import ast
import html
import json
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from markdown_it import MarkdownIt

NBS = Path(__file__).resolve().parent.parent / "nbs"
PATHS = sorted(path for path in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
KERNEL = {"display_name": "python3", "language": "python", "name": "python3"}
MOST_BYTES, MOST_LINES = 500 * 1024, 60
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")


@dataclass
class Page:
    "One notebook: where it is, its bytes as text, and what they say."

    path: Path
    raw: str

    def __post_init__(self):
        self.content = json.loads(self.raw)
        self.cells = self.content["cells"]
        self.for_papermill = self.path.parent.name == "pipelines"

    def sources(self, kind: str):
        "(position, source, tags) of each cell of that kind."
        for k, cell in enumerate(self.cells):
            if cell["cell_type"] == kind:
                yield k, "".join(cell["source"]), cell["metadata"].get("tags", [])

    def outputs(self):
        "(position, output) of each output."
        for k, cell in enumerate(self.cells):
            for output in cell.get("outputs", []):
                yield k, output

    def trees(self):
        "(position, syntax tree, tags) of each code cell, with magics as IPython reads them."
        for k, source, tags in self.sources("code"):
            yield k, ast.parse(TransformerManager().transform_cell(source)), tags


def is_valid(page):
    ids = [cell.get("id") for cell in page.cells]
    if len(set(ids)) < len(ids) or None in ids:
        yield "there are cells without an id of their own"
        return
    try:
        nbformat.validate(nbformat.from_dict(page.content))
    except nbformat.ValidationError as error:
        yield str(error).splitlines()[0]


def is_small(page):
    if len(page.raw.encode()) > MOST_BYTES:
        yield f"{len(page.raw.encode()) // 1024} KB; the most is {MOST_BYTES // 1024} KB"


def has_no_execution_counts(page):
    for k, cell in enumerate(page.cells):
        if cell.get("execution_count") is not None:
            yield f"cell {k}"
    for k, output in page.outputs():
        if output.get("execution_count") is not None:
            yield f"output of cell {k}"


def has_no_widget_state(page):
    if "widgets" in page.content["metadata"]:
        yield "metadata.widgets"
    for k, output in page.outputs():
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            yield f"cell {k} shows a widget, which nobody sees without a kernel"


def has_no_conflict_markers(page):
    if re.search(r"^(<<<<<<<|>>>>>>>)", page.raw, re.MULTILINE):
        yield "in the file itself"
    for k, cell in enumerate(page.cells):
        if re.search(r"^(`?<<<<<<<|`?>>>>>>>)", "".join(cell["source"]), re.MULTILINE):
            yield f"cell {k}"


def has_no_traces_of_a_run(page):
    if "papermill" in page.content["metadata"]:
        yield "metadata.papermill"
    for k, cell in enumerate(page.cells):
        if "papermill" in cell["metadata"] or "injected-parameters" in cell["metadata"].get("tags", []):
            yield f"cell {k} was written by papermill"
    for k, output in page.outputs():
        if output["output_type"] == "error":
            yield f"cell {k} ends in {output['ename']}"


def names_no_place_of_a_machine(page):
    for k, output in page.outputs():
        shown = ["".join(text) for kind, text in output.get("data", {}).items() if kind.startswith("text/")] + ["".join(output.get("text", ""))]
        for place in sorted(set(re.findall(r"(?<![\w.:/-])(?:/(?:home|root|Users|work|workspace|mnt)|[A-Z]:\\Users)[/\\][^\s<\"']+", "\n".join(shown)))):
            yield f"cell {k} shows {place}: write it as seen from the repository"


def has_no_private_metadata(page):
    if page.content["metadata"].get("kernelspec") != KERNEL:
        yield f"the kernelspec is {page.content['metadata'].get('kernelspec')}"
    for k, cell in enumerate(page.cells):
        if set(cell["metadata"]) - {"tags"}:
            yield f"cell {k} has metadata {sorted(cell['metadata'])}"


def keeps_imports_apart(page):
    for k, tree, tags in page.trees():
        imports = [isinstance(statement, (ast.Import, ast.ImportFrom)) for statement in tree.body]
        if any(imports) and not all(imports) and "parameters" not in tags:
            yield f"cell {k} imports and works; these are two cells"


def has_short_cells(page):
    for k, source, _ in page.sources("code"):
        if len(source.splitlines()) > MOST_LINES:
            yield f"cell {k} has {len(source.splitlines())} lines; the most is {MOST_LINES}"


def installs_nothing(page):
    for k, source, _ in page.sources("code"):
        if re.search(r"^\s*[!%].*\b(pip|conda) install", source, re.MULTILINE):
            yield f"cell {k}"


def anchors(cells) -> set[str]:
    "The anchors of the headings in a notebook's cells, as JupyterLab makes them: hyphens for spaces, without the marks of Markdown."
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return {re.sub("[*`\"]", "", heading).replace(" ", "-") for text in texts for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def has_links_that_resolve(page):
    shown = [(k, "".join(output["data"]["text/markdown"])) for k, output in page.outputs() if "text/markdown" in output.get("data", {})]
    for k, source in [(k, source) for k, source, _ in page.sources("markdown")] + shown:
        for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", re.sub(r"```.*?```|`[^`\n]*`", "", source, flags=re.DOTALL)):
            target = "".join(target)
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            path = page.path.parent / file if file else page.path
            if not path.exists():
                yield f"cell {k} links to {target}, which is not there"
            elif anchor and path.suffix == ".ipynb":
                cells = json.loads(path.read_text(encoding="utf-8")).get("cells", []) if file else page.cells
                if anchor not in anchors(cells):
                    yield f"cell {k} links to {target}, and there is no such heading"


def skips_forward(page):
    for k, source, _ in page.sources("markdown"):
        for line in re.findall(r"^\*\*Skip\?\*\*.*$", source, re.MULTILINE):
            targets = re.findall(r"\]\(#([^)\s]+)\)", line)
            if not targets or set(targets) - anchors(page.cells[k + 1:]):
                yield f"cell {k} says Skip? and doesn't link to a heading further down"


def has_formulas_that_markdown_leaves_alone(page):
    "Some sites read Markdown before formulas: `\\,` becomes a comma there, and two `}_` become italics."
    for k, source, _ in page.sources("markdown"):
        shown = " ".join(html.unescape(MARKDOWN.render(source)).split())
        without_code = re.sub(r"```.*?```|`[^`\n]*`", "", source, flags=re.DOTALL)
        for formula in re.findall(r"\$\$.+?\$\$|(?<![\w$])\$[^$\n]+\$", without_code, re.DOTALL):
            if " ".join(formula.split()) not in shown:
                yield f"cell {k}: {formula}"


def suits_papermill(page):
    if not page.for_papermill:
        return
    tagged = [k for k, _, tags in page.sources("code") if "parameters" in tags]
    if len(tagged) != 1:
        yield f"{len(tagged)} cells are tagged parameters"
    for k, tree, _ in page.trees():
        if any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)) for node in ast.walk(tree)):
            yield f"cell {k} defines something: that belongs into a lesson"
    for k, source, _ in page.sources("code"):
        if re.search(r"^#\|\s*eval:\s*false", source, re.MULTILINE):
            yield f"cell {k} is marked eval: false, which papermill ignores"


CHECKS = [is_valid, is_small, has_no_execution_counts, has_no_widget_state, has_no_conflict_markers, has_no_traces_of_a_run,
          names_no_place_of_a_machine, has_no_private_metadata, keeps_imports_apart, has_short_cells, installs_nothing, has_links_that_resolve,
          skips_forward, has_formulas_that_markdown_leaves_alone, suits_papermill]


def test_there_are_notebooks():
    assert NBS / "index.ipynb" in PATHS


@pytest.mark.parametrize("path", PATHS, ids=[path.relative_to(NBS).as_posix() for path in PATHS])
def test_notebook(path):
    page = Page(path, path.read_text(encoding="utf-8"))
    problems = [f"{check.__name__}: {problem}" for check in CHECKS for problem in check(page)]
    assert not problems, "\n".join(problems)


def good_notebook():
    "A notebook for papermill in which every check finds nothing."
    output = {"output_type": "execute_result", "data": {"text/plain": ["2"]}, "execution_count": None, "metadata": {}}
    code = lambda name, source, tags=(), outputs=(): {
        "cell_type": "code", "id": name, "execution_count": None, "metadata": {"tags": list(tags)} if tags else {},
        "outputs": list(outputs), "source": [source]}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": dict(KERNEL)}, "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Top\n\n[here](good.ipynb) and [there](https://example.com)\n\n",
                                                                        "**Skip?** Go on [further down](#Further-down)."]},
        code("b", "from typing import Any\nseed: int = 0  # random seed", ["parameters"]),
        code("c", "import math\nimport re"),
        code("d", "%time seed + 2", outputs=[output]),
        {"cell_type": "markdown", "id": "e", "metadata": {}, "source": ["## Further down\n\nIs $c_{l+1} > c_l$?"]}]}


def broken(place, value):
    "Breaks a notebook at `place`, a path of keys, by putting `value` there."
    def change(notebook):
        for key in place[:-1]:
            notebook = notebook[key]
        notebook[place[-1]] = value
    return change


WAYS_TO_BREAK = [
    (is_valid, broken(("cells", 2, "cell_type"), "picture")),
    (is_valid, broken(("cells", 2, "id"), "b")),
    (is_small, broken(("cells", 0, "source"), ["x" * (MOST_BYTES + 1)])),
    (has_no_execution_counts, broken(("cells", 2, "execution_count"), 1)),
    (has_no_execution_counts, broken(("cells", 3, "outputs", 0, "execution_count"), 1)),
    (has_no_widget_state, broken(("metadata", "widgets"), {})),
    (has_no_widget_state, broken(("cells", 3, "outputs", 0, "data"), {"application/vnd.jupyter.widget-view+json": {}})),
    (has_no_conflict_markers, broken(("cells", 0, "source"), ["text\n", "<<<<<<< HEAD\n"])),
    (has_no_conflict_markers, broken(("cells", 0, "source"), ["`<<<<<<< HEAD`"])),
    (has_no_traces_of_a_run, broken(("metadata", "papermill"), {})),
    (has_no_traces_of_a_run, broken(("cells", 2, "metadata", "tags"), ["injected-parameters"])),
    (has_no_traces_of_a_run, broken(("cells", 3, "outputs", 0), {"output_type": "error", "ename": "KeyError"})),
    (names_no_place_of_a_machine, broken(("cells", 3, "outputs", 0, "data"), {"text/html": ["<td>/home/ada/gti_nb/runs/demo</td>"]})),
    (names_no_place_of_a_machine, broken(("cells", 3, "outputs", 0), {"output_type": "stream", "text": ["in C:\\Users\\ada\\run"]})),
    (has_no_private_metadata, broken(("metadata", "kernelspec", "name"), "my-kernel")),
    (has_no_private_metadata, broken(("cells", 0, "metadata", "scrolled"), True)),
    (keeps_imports_apart, broken(("cells", 2, "source"), ["import math\n", "x = math.pi"])),
    (keeps_imports_apart, broken(("cells", 2, "source"), ["import math\n", "def f(): return 1"])),
    (has_short_cells, broken(("cells", 3, "source"), ["x = 1\n"] * (MOST_LINES + 1))),
    (installs_nothing, broken(("cells", 3, "source"), ["!pip install torch"])),
    (has_links_that_resolve, broken(("cells", 0, "source"), ["[next](99_nowhere.ipynb)"])),
    (has_links_that_resolve, broken(("cells", 0, "source"), ["[next](good.ipynb#Nowhere)"])),
    (has_links_that_resolve, broken(("cells", 3, "outputs", 0, "data"), {"text/markdown": ["[next](99_nowhere.ipynb)"]})),
    (skips_forward, broken(("cells", 0, "source"), ["**Skip?** Go on further down."])),
    (skips_forward, broken(("cells", 0, "source"), ["# Top\n\n**Skip?** Go on [above](#Top)."])),
    (has_formulas_that_markdown_leaves_alone, broken(("cells", 4, "source"), ["Half of $a\\,b$ is lost."])),
    (has_formulas_that_markdown_leaves_alone, broken(("cells", 4, "source"), ["$$\\mathcal{L}_\\mathrm{a} = \\mathcal{L}_\\mathrm{b}$$"])),
    (suits_papermill, broken(("cells", 1, "metadata", "tags"), [])),
    (suits_papermill, broken(("cells", 3, "source"), ["double = lambda x: 2 * x"])),
    (suits_papermill, broken(("cells", 3, "source"), ["#| eval: false\n", "1"])),
]


@pytest.fixture
def place(tmp_path):
    "Where the good notebook and its broken copies are said to lie."
    path = tmp_path / "pipelines" / "good.ipynb"
    path.parent.mkdir()
    path.write_text("{}")
    return path


def test_good_notebook_passes(place):
    page = Page(place, json.dumps(good_notebook()))
    assert [problem for check in CHECKS for problem in check(page)] == []


@pytest.mark.parametrize("check, change", WAYS_TO_BREAK, ids=[f"{c.__name__}-{k}" for k, (c, _) in enumerate(WAYS_TO_BREAK)])
def test_check_can_fail(check, change, place):
    notebook = good_notebook()
    change(notebook)
    assert list(check(Page(place, json.dumps(notebook))))


def test_every_check_is_broken_once():
    assert {check for check, _ in WAYS_TO_BREAK} == set(CHECKS)
