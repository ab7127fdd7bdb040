"""The claim of the demo, checked on the run that `make demo` made."""

import pytest

from conftest import ROOT
from gti_nb.core import read_json
from gti_nb.config import load_config
from gti_nb.stages import Run


@pytest.fixture(scope="module")
def demo():
    run = Run(load_config(ROOT / "configs" / "demo.yaml", {"run_dir": str(ROOT / "runs" / "demo")}))
    if not run.is_complete():
        pytest.skip("no finished run in runs/demo: make demo makes it")
    return run


def test_gti_beats_the_mean_beyond_noise(demo):
    rows = demo.metrics("comparison")["paired_differences"]
    row = next(r for r in rows if r["arm"] == "gti" and r["metric"] == "recall@20")
    assert row["against"] == "mean" and row["low"] > 0


def test_gti_keeps_the_higher_rank_after_fine_tuning(demo):
    geometry = demo.metrics("geometry")
    assert geometry["gti, sft"]["effective_rank"] > geometry["mean, sft"]["effective_rank"]


def test_memory(demo):
    stages = read_json(demo.path / "metrics.json")["stages"]
    assert max(stage["peak_memory_gb"] for stage in stages.values()) < 6
