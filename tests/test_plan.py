"""What `gti plan` and `gti check-env` say, and that configurations, the container and the Slurm script fit the rest."""

import json
import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT
from gti_nb.config import RunConfig, load_config, make_config
from gti_nb.core import UserError
from gti_nb.environment import check_environment
from gti_nb.plan import plan, readable, verdict
from gti_nb.stages import plan_stages

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SIZES = {"items": 20_000, "users": 3_000, "events": 900_000}


@pytest.fixture(scope="module")
def plans():
    "The plan of every configuration, of those without their data on a stand-in."
    made = {}
    for path in CONFIGS:
        config = load_config(path)
        there = config.data.startswith("embedded:")
        made[path.stem] = plan(config, "H100", 0, **({} if there else SIZES))
    return made


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_has_a_plan(plans, path):
    table, config = plans[path.stem], load_config(path)
    assert list(table.index) == [stage.name for stage in plan_stages(config)]
    numbers = table.select_dtypes("number")
    assert (numbers >= 0).all(axis=None) and numbers.notna().all(axis=None) and (table.seconds > 0).all()
    trained = table.index.str.startswith(("rqvae", "ground-", "sft-"))
    assert (table.trained[trained] > 0).all() and (table.steps[trained] > 0).all() and (table.flops[trained] > 0).all()
    assert len(readable(table)) == len(table) and f"{config.processes} x H100" in verdict(table)


def test_what_a_plan_answers(plans):
    paper, appendix = plans["vibrent-h100"], plans["vibrent-h100-appendix"]
    assert paper.trained["ground-gti"] == 4 * 256 * 1024
    assert paper.steps["ground-gti"] == 8000 and paper.steps["sft-gti"] == 8000 + 1600 and paper.steps["sft-mean"] == 1600
    assert appendix.steps["ground-gti"] == pytest.approx(10 * 6 * 20_000 / 16)
    assert paper.steps["sft-equal_compute"] > paper.steps["sft-mean"]
    assert plans["industrial-h100"].trained["ground-gti"] == 3 * 8192 * 1024


def test_more_gpus_more_memory_less_time():
    config = load_config(ROOT / "configs" / "vibrent-h100.yaml", {"arms": {"gti": {"grounding": True}}, "micro_batch_size": 64})
    sizes = SIZES | {"events": 60_000}
    one, four = (plan(config, "H100", gpus, **sizes) for gpus in (1, 4))
    assert four.seconds["sft-gti"] < one.seconds["sft-gti"]
    assert one.flops["sft-gti"] < four.flops["sft-gti"] < 1.25 * one.flops["sft-gti"]  # shares are padded each by itself
    huge = config.model_copy(update={"micro_batch_size": 512, "sft_mode": "full"})
    table = plan(huge, "L4", 1, **sizes)
    assert table.state_gb["sft-gti"] == pytest.approx(16 * (596_049_920 + 1024 * 1024) / 1e9) and "does NOT fit" in verdict(table)


def test_gpus_in_several_nodes():
    config = load_config(ROOT / "configs" / "vibrent-h100.yaml", {"arms": {"mean": {}}, "sft_mode": "full"})
    sizes = SIZES | {"events": 60_000}
    apart, together = plan(config, "L4", 16, **sizes), plan(config, "L4", 16, **sizes, per_node=16)
    assert (apart.attrs["nodes"], together.attrs["nodes"]) == (2, 1)
    assert apart.bound["sft-mean"] == "network" and "16 x L4, on 2 nodes of 8: about" in verdict(apart) and "bound by network" in verdict(apart)
    assert apart.seconds["sft-mean"] > 1.2 * together.seconds["sft-mean"] and apart.flops.equals(together.flops)
    assert "nodes" not in verdict(together) and (apart.memory_gb == together.memory_gb).all()
    with pytest.raises(UserError, match="16 GPUs on 3 nodes of at most 6"):
        plan(config, "L4", 16, per_node=6)


def test_a_plan_refuses_in_one_line():
    with pytest.raises(UserError, match="no GPU is called 'H1000'"):
        plan(RunConfig(), "H1000")
    with pytest.raises(UserError, match="multiple of 3"):
        plan(RunConfig(), "H100", 3)
    with pytest.raises(UserError, match="say how large they are"):
        plan(make_config({"data": "no/such/folder"}))
    with pytest.raises(UserError, match="at least 3 events a user"):
        plan(RunConfig(), items=10, users=10, events=5)


def test_this_environment_is_fine():
    table = check_environment()
    assert table.ok.all(), table.to_string()
    code = ("import gti_nb.environment as e, torch, sys; e.check_environment(); "
            "sys.exit(torch.cuda.is_initialized() or 'bitsandbytes' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_profiles_say_where_their_values_come_from():
    "Every value that one of the paper's or LC-Rec's could differ from has a comment, on its line or before the block it stands in."
    for name in ("movielens", "amazon", "industrial-h100", "vibrent-h100", "vibrent-h100-appendix"):
        text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
        assert "arXiv 2604.02324" in text and "gti " in text, name
        bare = [line for line in text.splitlines() if re.match(r"(grounding|sft|encoder|language_model|levels|codebook|beams)\w*:", line)
                and "#" not in line]
        assert bare == [], name


def test_slurm_script_takes_all_gpus_of_its_nodes(tmp_path):
    script = ROOT / "configs" / "slurm.sh"
    fake(tmp_path / ".venv" / "bin" / "gti", 'echo "$*"')
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NNODES": "1", "SLURM_GPUS_PER_NODE": "h100:4"}
    run = lambda *words, **more: subprocess.run([script, *words], env=os.environ | slurm | more, capture_output=True, text=True)
    done = run("my.yaml", "-p", "seed", "1")
    assert (done.returncode, done.stdout.strip()) == (0, "run my.yaml -p device cuda -p processes 4 -p seed 1"), done.stderr
    fake(tmp_path / "bin" / "scontrol", 'printf "%s\\n" gpu-07 gpu-08')
    fake(tmp_path / "bin" / "srun", 'echo "$@"; while [ "$1" != bash ]; do shift; done; SLURM_NODEID=1 "$@"')
    fake(tmp_path / ".venv" / "bin" / "gti", 'echo "$GTI_NODE_RANK of $GTI_NODES at $GTI_MAIN_ADDRESS:$GTI_MAIN_PORT: $*"')
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    step, done = run("my.yaml", SLURM_NNODES="2", SLURM_JOB_ID="1230042", SLURM_JOB_NODELIST="gpu-[07-08]", PATH=path).stdout.splitlines()
    assert step.startswith("--ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c")
    assert done == "1 of 2 at gpu-07:20042: run my.yaml -p device cuda -p processes 8"
    assert "Which configuration?" in run().stderr


def fake(path, body: str):
    "A command at `path` that does what `body` says."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_the_container_fits_the_project():
    docker = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    version, = re.findall(r"^FROM python:(3\.\d+)\.\d+-slim-\w+ AS system$", docker, re.MULTILINE)
    assert f"on Python {version}." in (ROOT / "constraints.txt").read_text().splitlines()[0]
    for line in re.findall(r"^COPY (?!\. )(.+) \S+$", docker, re.MULTILINE):
        assert [name for name in line.split() if not (ROOT / name).exists()] == []
    assert "latest" not in docker and re.search(r"^RUN .*make install$", docker, re.MULTILINE)
    torch_cuda, = re.findall(r"^cuda-toolkit==(\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"CUDA {torch_cuda} needs" in docker
    device = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    build = device["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile" and f"AS {build['target']}\n" in docker
