"""Shared by the tests: where things are, and how the command line is run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def gti():
    "Runs `gti` with arguments; returns the finished process, its output as text."
    def call(*arguments, cwd=ROOT, timeout=600):
        return subprocess.run([BIN / "gti", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=timeout,
                              env={**os.environ, "GTI_PROGRESS": "lines"})
    return call
