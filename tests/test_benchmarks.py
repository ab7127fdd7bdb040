"""Every benchmark runs, and ends with one line of JSON. How fast it is isn't tested here: that depends on the machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "benchmarks").glob("[!_]*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_benchmark_runs(script):
    done = subprocess.run([sys.executable, str(script), "--quick"], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["benchmark"] == script.stem and result["quick"] is True
    numbers = {name: value for name, value in result.items() if isinstance(value, float)}
    assert len(numbers) >= 3 and all(value == value for value in numbers.values()), result
    print(done.stdout)
