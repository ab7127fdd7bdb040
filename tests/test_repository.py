"""The files around the notebooks agree with them and with each other."""

import ast
import configparser
import filecmp
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sysconfig.get_path("scripts"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- settings.ini and pyproject.toml -------------------------------------------------------------------------------------

def disagreements(settings: str, pyproject: str, init: str) -> list[str]:
    "What settings.ini (nbdev 2) and pyproject.toml (nbdev 3), given as text, say differently."
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(settings)
    ini, toml = parser["DEFAULT"], tomllib.loads(pyproject)
    project, nbdev = toml["project"], toml["tool"]["nbdev"]
    version = ast.literal_eval(re.search(r"^__version__ = (.+)$", init, re.MULTILINE)[1])

    def plain(value):
        if isinstance(value, list):
            return " ".join(map(plain, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    def requirements(lines):
        return sorted(str(Requirement(line)) for line in lines)

    pairs = {
        "version": (ini["version"], version),
        "lib_name": (ini["lib_name"], project["name"]),
        "repo": (ini["repo"], project["name"]),
        "title": (ini["title"], project["name"]),
        "description": (ini["description"], project["description"]),
        "author": (ini["author"], project["authors"][0]["name"]),
        "keywords": (shlex.split(ini["keywords"]), project["keywords"]),
        "license": (ini["license"], {"Apache-2.0": "apache2"}[project["license"]]),
        "min_python": (">=" + ini["min_python"], project["requires-python"]),
        "audience": (True, f"Intended Audience :: {ini['audience']}" in project["classifiers"]),
        "status": (1, sum(c.startswith(f"Development Status :: {ini['status']} ") for c in project["classifiers"])),
        "console_scripts": (ini["console_scripts"].split(), [f"{k}={v}" for k, v in project["scripts"].items()]),
        "requirements": (requirements(shlex.split(ini["requirements"])), requirements(project["dependencies"])),
        "dev_requirements": (requirements(shlex.split(ini["dev_requirements"])),
                             requirements(project["optional-dependencies"]["dev"])),
        "update_pyproject": (ini["update_pyproject"], "False"),  # nbdev 2 must not rewrite pyproject.toml
        "doc_host": (ini["doc_host"], project.get("urls", {}).get("Documentation", "")),
        "entry point": ({"gti_nb": f"{ini['lib_path']}._modidx:d"}, project["entry-points"]["nbdev"]),
    }
    for key, value in nbdev.items():
        if key != "exec_profile":  # nbdev 2 has no such setting
            pairs[key] = (plain(ini.get(key)).lower(), plain(value).lower())
    return [f"{key}: {a!r} is not {b!r}" for key, (a, b) in pairs.items() if a != b]


def test_settings_agree():
    assert disagreements(text_of("settings.ini"), text_of("pyproject.toml"), text_of("gti_nb/__init__.py")) == []


@pytest.mark.parametrize("old, new", [
    ("version = 0.1.0", "version = 9.9.9"), ("numpy>=2", "numpy>=1"), ("    gguf>=0.19\n", ""), ("pytest>=9", "pytest>=8"),
    ("tst_flags = notest slow gpu", "tst_flags = notest"), ("= tags", "= tags hide"), ("min_python = 3.11", "min_python = 3.10"),
    ("gti=gti_nb.cli:main", "gti=gti_nb.cli:run"), ("update_pyproject = False", "update_pyproject = True"),
    ("clear_all = False", "clear_all = True"), ("status = 3", "status = 4"), ("embeddings\n", "vectors\n"),
])
def test_a_difference_in_settings_is_seen(old, new):
    settings = text_of("settings.ini")
    assert old in settings
    assert disagreements(settings.replace(old, new), text_of("pyproject.toml"), text_of("gti_nb/__init__.py"))


# --- the library and the README are what the notebooks say ---------------------------------------------------------------

@pytest.fixture(scope="session")
def regenerated(tmp_path_factory):
    "A copy of the repository in which library and README were deleted and then written anew from the notebooks."
    copy = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for folder in ("nbs", "gti_nb", "tools"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for module in (copy / "gti_nb").rglob("*.py"):
        if module.name != "__init__.py":
            module.unlink()
    environment = {**os.environ, "XDG_CONFIG_HOME": str(copy / "no-config"), "PYTHONDONTWRITEBYTECODE": "1"}
    for command in ([SCRIPTS / "nbdev-export"], [SCRIPTS / "nbdev-clean"], [sys.executable, "tools/readme.py"]):
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return copy


def differing(one: Path, other: Path) -> list[str]:
    "Files that are in only one of two folders, or differ."
    names = {path.relative_to(folder).as_posix() for folder in (one, other) for path in folder.rglob("*") if path.is_file()}
    names = {name for name in names if not {"__pycache__", ".ipynb_checkpoints"} & set(Path(name).parts)}
    same = lambda a, b: a.exists() and b.exists() and filecmp.cmp(a, b, shallow=False)
    return sorted(name for name in names if not same(one / name, other / name))


@pytest.mark.parametrize("folder", ["gti_nb", "nbs"])
def test_export_and_clean_change_nothing(regenerated, folder):
    "Edited modules, modules without a notebook, files nobody added, notebooks not cleaned: all would differ."
    assert differing(ROOT / folder, regenerated / folder) == [], "run `make sync`"


def test_a_difference_in_folders_is_seen(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "core.py").write_text("x = 1")
    assert differing(one, other) == []
    (other / "core.py").write_text("x = 2")
    (one / "orphan.py").write_text("")
    assert differing(one, other) == ["core.py", "orphan.py"]


def test_readme_is_what_the_index_says(regenerated):
    assert text_of("README.md") == (regenerated / "README.md").read_text(encoding="utf-8"), "run `make readme`"


def test_readme_is_the_same_each_time(regenerated):
    before = (regenerated / "README.md").read_bytes()
    subprocess.run([sys.executable, "tools/readme.py"], cwd=regenerated, check=True, capture_output=True)
    assert (regenerated / "README.md").read_bytes() == before


@pytest.mark.parametrize("change, complaint", [
    (lambda nb: nb.cells[0].update(source=nb.cells[0].source + "\n\nMore."), "nbdev drops the rest"),
    (lambda nb: nb.cells.append(nbformat.v4.new_code_cell("fig", outputs=[nbformat.v4.new_output(
        "display_data", {"image/png": "iVBORw0KGgo="})])), "picture"),
])
def test_readme_refuses_what_it_would_lose(regenerated, tmp_path, change, complaint):
    copy = shutil.copytree(regenerated, tmp_path / "copy")
    index = nbformat.read(copy / "nbs" / "index.ipynb", as_version=4)
    change(index)
    nbformat.write(index, copy / "nbs" / "index.ipynb")
    done = subprocess.run([sys.executable, "tools/readme.py"], cwd=copy, capture_output=True, text=True)
    assert done.returncode != 0 and complaint in done.stderr
    assert (copy / "README.md").read_bytes() == (regenerated / "README.md").read_bytes()


def test_links_of_the_readme_resolve():
    targets = re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", text_of("README.md"))
    assert targets and [target for target in targets if not (ROOT / target).exists()] == []


# --- modules -------------------------------------------------------------------------------------------------------------

def reading_order() -> list[str]:
    "The modules in the order of their notebooks: core, then by number."
    names = []
    for path in sorted((ROOT / "nbs").glob("*.ipynb"), key=lambda path: (path.stem != "core", path.stem)):
        sources = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
        names += re.findall(r"^#\|\s*default_exp\s+(\S+)", sources, re.MULTILINE)
    return names


def imported_modules(source: str) -> set[str]:
    "The modules of gti_nb that a module of gti_nb imports, at its top or inside its functions."
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gti_nb.")}
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if not node.level and parts[:1] != ["gti_nb"]:
                continue
            parts = parts if node.level else parts[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("source, expected", [
    ("from .core import UserError", {"core"}), ("from gti_nb.core import UserError", {"core"}), ("import torch", set()),
    ("from . import core, data", {"core", "data"}), ("import gti_nb.rqvae as r", {"rqvae"}), ("from gti_nb import sft", {"sft"}),
    ("def f():\n    from gti_nb.sft import arms", {"sft"}), ("from torch.core import x", set()),
])
def test_imports_are_found(source, expected):
    assert imported_modules(source) == expected


def test_modules_import_only_modules_above_them():
    order = reading_order()
    assert order[0] == "core" and len(set(order)) == len(order)
    wrong = []
    for position, name in enumerate(order):
        above = set(order[:position])
        wrong += [f"{name} imports {other}" for other in imported_modules(text_of(f"gti_nb/{name}.py")) - above]
    assert wrong == []


def defined_twice(source: str) -> list[str]:
    "Functions and classes that a module defines more than once at its top: the later one wins, silently. Patches don't count."
    names = [node.name for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
             and not any(ast.unparse(decorator).startswith("patch") for decorator in node.decorator_list)]
    return sorted({name for name in names if names.count(name) > 1})


def test_no_module_defines_a_name_twice():
    assert defined_twice("def f(): 1\nclass g: pass\ndef f(): 2\n@patch\ndef g(self): 3") == ["f"]
    assert {name: twice for name in reading_order() if (twice := defined_twice(text_of(f"gti_nb/{name}.py")))} == {}


def test_import_is_light():
    "Importing all of gti_nb loads no bitsandbytes and leaves the GPU alone, so that processes can be started afterwards."
    code = ("import importlib, pkgutil, sys, gti_nb\n"
            "for m in pkgutil.iter_modules(gti_nb.__path__): importlib.import_module(f'gti_nb.{m.name}')\n"
            "print('bitsandbytes' in sys.modules, 'torch' in sys.modules and sys.modules['torch'].cuda.is_initialized())")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False"]


# --- what make installs --------------------------------------------------------------------------------------------------

def pins(text: str) -> dict[str, str]:
    "Package to version, of a file in which every line pins one."
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line).groups()
            found[canonicalize_name(name)] = version
    return found


def required(requirements: list[str]) -> dict[str, str]:
    "Package to installed version: everything the requirements need, directly or in turn. Extras are followed."
    found, seen, todo = {}, set(), [Requirement(line) for line in requirements]
    while todo:
        requirement = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution.version.partition("+")[0]
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in distribution.requires or []:
                below = Requirement(line)
                if below.marker is None or below.marker.evaluate({"extra": extra}):
                    below.marker = None
                    todo.append(below)
    return found


def test_constraints_pin_everything_required():
    installed = required(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
    pinned = pins(text_of("constraints.txt"))
    assert len(installed) > len(PROJECT["dependencies"])
    assert {name: version for name, version in installed.items() if pinned.get(name) != version} == {}


def test_constraints_satisfy_the_project():
    pinned = pins(text_of("constraints.txt"))
    for requirement in map(Requirement, PROJECT["dependencies"] + sum(PROJECT["optional-dependencies"].values(), [])):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier


def test_assets_are_installed_as_pinned():
    for name, version in pins(text_of("requirements-assets.txt")).items():
        assert importlib.metadata.version(name) == version


def test_licence_is_the_text_of_apache_2():
    assert hashlib.sha256(text_of("LICENSE").encode()).hexdigest().startswith("cfc7749b96f63bd3")


# --- make and CI ---------------------------------------------------------------------------------------------------------

def make(*arguments, cwd=ROOT):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_make_help_lists_every_target():
    targets = re.search(r"^\.PHONY: (.+)$", text_of("Makefile"), re.MULTILINE)[1].split()
    listed = re.findall(r"^  make (\w+) ", make().stdout, re.MULTILINE)
    assert sorted(listed) == sorted(targets)


def test_make_refuses_an_old_python(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements-assets.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\nexit 1\n')
    old.chmod(0o755)
    done = make("demo", "PYTHON=./old-python", cwd=tmp_path)
    assert done.returncode != 0 and "needs Python 3.11 or newer; './old-python' says: Python 3.9.2" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_script_can_run():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
