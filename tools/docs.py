"""Build the site into _docs/html, from the notebooks as they are and from docstrings: `python tools/docs.py`.

Sphinx and myst-nb do it. Nothing is executed, nothing is fetched while building or reading: search, styles and formulas
work from the files. It ends with an error if a link leads nowhere, a public name has no entry, or a page would ask another
server for something."""

import importlib
import re
import shutil
import sys
from pathlib import Path
from types import FunctionType

import nbformat

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ["LICENSE", "configs", "data_scripts"]  # what pages link to with ../
INDEX = """```{{toctree}}
:hidden:
:caption: {caption}

{pages}
```"""
API = """{title}
{line}

Exported from :doc:`/{lesson}`, which explains it.

.. automodule:: gti_nb.{module}
   :members:
   :member-order: bysource

{constants}"""
CONSTANT = """.. py:data:: {name}

   {words}

"""
STYLE = """.main { min-width: 0; }
.content { width: min(68em, 100%); min-width: 0; box-sizing: border-box; }  /* lines of code have up to 120 characters */
table.dataframe { border: none; border-collapse: collapse; }
table.dataframe td, table.dataframe th { border: none; border-bottom: 1px solid var(--color-background-border); padding: 0.2em 0.7em; text-align: right; }
"""


def modules(nbs: Path = ROOT / "nbs") -> dict[str, Path]:
    "Module name -> its notebook, in reading order."
    found = {}
    for path in sorted(nbs.glob("*.ipynb"), key=lambda path: (path.stem != "core", path.stem)):
        for cell in nbformat.read(path, as_version=4).cells:
            if name := re.search(r"^#\|\s*default_exp\s+(\S+)", cell.source, re.MULTILINE):
                found[name[1]] = path
    return found


def navigation() -> dict[str, list[str]]:
    "Caption -> pages, as paths in the site without an ending. Every notebook but the index is in it, once."
    lessons = [path.stem for path in modules().values()]
    nbs = ROOT / "nbs"
    others = sorted(path.relative_to(nbs).with_suffix("").as_posix() for path in nbs.rglob("*.ipynb")
                    if not {".ipynb_checkpoints", "runs"} & set(path.parts))
    return {"Lessons": lessons, "Beside the lessons": [name for name in others if name not in lessons and name != "index"],
            "Library": [f"api/{name}" for name in modules()]}


def escaped(text: str) -> str:
    "A line of ours, plain words with `code`, as reStructuredText."
    parts = re.split(r"(`+[^`]+`+)", text)
    return "".join(f"``{part.strip('`')}``\\ " if k % 2 else re.sub(r"([\\*|_])", r"\\\1", part)
                   for k, part in enumerate(parts))


def as_rst(app, what, name, obj, options, lines):
    "Turn the lines of a docstring into reStructuredText, in place. Sphinx calls this."
    lines[:] = [escaped(line.lstrip()) for line in lines]


def _math(display: bool):
    "A visitor that writes formulas as MathML, which browsers draw without a script."
    def visit(self, node):
        from docutils import nodes
        from docutils.utils.math import MathError, latex2mathml
        from sphinx.util import logging

        try:
            self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=display))
        except MathError as error:
            logging.getLogger(__name__).warning("%s: %s", node.astext(), error, location=node)
        raise nodes.SkipNode
    return visit


def setup(app):
    "This file is one of the extensions; Sphinx calls this."
    app.connect("autodoc-process-docstring", as_rst)
    app.add_html_math_renderer("mathml", inline_renderers=(_math(False), None), block_renderers=(_math(True), None))


def slug(heading: str) -> str:
    "The anchor of a heading as JupyterLab makes it, so that one link works in both."
    return heading.replace(" ", "-")


SETTINGS = {
    "project": "gti_nb", "author": "The gti_nb authors", "html_title": "gti_nb", "html_theme": "furo",
    "extensions": ["myst_nb", "sphinx.ext.autodoc", "docs"], "root_doc": "index", "nb_execution_mode": "off",
    "myst_enable_extensions": ["dollarmath"], "myst_heading_anchors": 4, "myst_heading_slug_func": slug,
    "html_math_renderer": "mathml", "html_copy_source": False, "html_show_sphinx": False, "default_role": "literal",
    "html_show_search_summary": False,  # the summaries are fetched, which browsers forbid to pages opened from files
    "autodoc_typehints": "signature", "python_maximum_signature_line_length": 100, "html_static_path": ["site.css"],
    "html_css_files": ["site.css"], "nb_render_markdown_format": "myst",
    # a function among these settings can't be remembered; of a plotly figure the site shows the PNG
    "suppress_warnings": ["config.cache", "mystnb.unknown_mime_type"],
}


def readable(path: Path):
    "Take nbdev's directives out of a notebook for readers, in place, and the cells that hold nothing else or are hidden."
    notebook, cells = nbformat.read(path, as_version=4), []
    for cell in notebook.cells:
        directives = re.findall(r"^#\|\s*(\w+)", cell.source, re.MULTILINE) if cell.cell_type == "code" else []
        if directives:
            cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.MULTILINE)
        if cell.source.strip() and "hide" not in directives:
            cells.append(cell)
    notebook.cells = cells
    nbformat.write(notebook, path)


def write_sources(folder: Path):
    "What Sphinx reads: the notebooks, what they link to beside them, and a page a module."
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(ROOT / "nbs", folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "runs", "__pycache__"))
    for name in BESIDE:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder.parent / name)
    for path in folder.rglob("*.ipynb"):
        readable(path)
    index = nbformat.read(folder / "index.ipynb", as_version=4)
    for caption, pages in navigation().items():
        index.cells.append(nbformat.v4.new_markdown_cell(INDEX.format(caption=caption, pages="\n".join(pages))))
    nbformat.write(index, folder / "index.ipynb")
    (folder / "site.css").write_text(STYLE, encoding="utf-8")
    (folder / "api").mkdir()
    for name, path in modules().items():
        text = API.format(title=name.replace("_", "\\_"), line="=" * (len(name) + 4), lesson=path.stem, module=name,
                          constants=constants(name))
        (folder / "api" / f"{name}.rst").write_text(text, encoding="utf-8")


def constants(module: str) -> str:
    "Entries for a module's public values, with the comments that stand beside them in its source."
    found, text = importlib.import_module(f"gti_nb.{module}"), ""
    source = (ROOT / "gti_nb" / f"{module}.py").read_text(encoding="utf-8")
    for name in found.__all__:
        value = getattr(found, name)
        if not isinstance(value, (type, FunctionType)):
            line = re.search(rf"^{name} = .*?(?:  # (.*))?$", source, re.MULTILINE)
            words = line and line[1] or f"A {type(value).__name__}: see the lesson."
            text += CONSTANT.format(name=name, words=escaped(words))
    return text


def undocumented(folder: Path) -> list[str]:
    "Public names of the library that have no entry in the built site."
    from sphinx.util.inventory import InventoryFile

    with (folder / "objects.inv").open("rb") as file:
        entries = InventoryFile.load(file, "", lambda base, target: target)
    known = {name for kind, names in entries.items() if kind.startswith("py:") for name in names}
    public = {f"gti_nb.{module}.{name}" for module in modules()
              for name in importlib.import_module(f"gti_nb.{module}").__all__}
    return sorted(public - known)


def foreign(text: str) -> list[str]:
    "What a page or style sheet would load from another server."
    tags = re.findall(r"<(?:script|img|iframe|source|video|link)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)\"", text)
    return tags + re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^)\"']+)", text)


def main():
    from sphinx.application import Sphinx

    source, out = ROOT / "_docs" / "source" / "nbs", ROOT / "_docs" / "html"
    write_sources(source)
    sys.path.insert(0, str(ROOT))
    app = Sphinx(source, None, out, ROOT / "_docs" / "doctrees", "html", SETTINGS, freshenv=True, warningiserror=True,
                 status=None)
    app.build(force_all=True)
    problems = [f"{name} has no entry: give it a docstring" for name in undocumented(out)]
    for path in [*out.rglob("*.html"), *out.rglob("*.css")]:
        problems += [f"{path.name} would load {url}" for url in foreign(path.read_text(encoding="utf-8"))]
    if app.statuscode:
        problems.append("the warnings above")
    if problems:
        raise SystemExit("\n".join(["The site is not good:", *problems]))
    print(f"{len(list(out.rglob('*.html')))} pages; open {out / 'index.html'}")


if __name__ == "__main__":
    main()
