"""Shared by the tests: where things are, and how the command line is run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SHARED = ROOT.parent / "shared" / "data"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background; every child would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def real_catalogue():
    "Items and events of a real catalogue that isn't films; skips the test where it isn't there."
    folder = SHARED / "amazon_industrial"
    if not folder.is_dir():
        pytest.skip(f"no real catalogue at {folder}")
    items = pd.read_csv(folder / "items.csv", dtype=str, keep_default_na=False)
    events = pd.read_csv(folder / "interactions.csv", dtype={"user_id": str, "item_id": str})
    return items, events.rename(columns={"position": "timestamp"})


@pytest.fixture(scope="session")
def gti():
    "Runs `gti` with arguments; returns the finished process, its output as text."
    def call(*arguments, cwd=ROOT, timeout=600):
        return subprocess.run([BIN / "gti", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=timeout,
                              env={**os.environ, "GTI_PROGRESS": "lines"})
    return call
