"Arms, modes and protocols through the stages of small runs, in one process and in two."

import os
import subprocess

import numpy as np
import pandas as pd
import pytest
import yaml

from conftest import BIN, ROOT
from gti_nb.config import FLOORS, make_config
from gti_nb.core import read_json
from gti_nb.explore import open_run
from gti_nb.stages import Run, run_stage

SIZES = {"max_items": 30, "codebook_size": 6, "eval_users": 20, "rqvae_steps": 20, "grounding_steps": 4, "sft_steps": 3,
         "grounding_moments": 2, "grounding_probe_items": 5, "micro_batch_size": 8, "n_bootstrap": 100}
ARMS = {
    "mean": {}, "random_rows": {"initializer": "random"}, "lc_rec": {"tasks": "multitask"}, "gti": {"grounding": True},
    "gti_multitask": {"grounding": True, "tasks": "multitask"}, "gti_warm": {"initializer": "description_mean", "grounding": True},
    "equal_compute": {"equal_compute": True}, "shuffled": {"grounding": True, "shuffled_sids": True},
}


def finished(folder, **values):
    run = Run(make_config({**SIZES, "run_dir": str(folder), **values}))
    for name in run.stages:
        run_stage(run, name)
    return run


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    "A run with every arm of the paper and both controls, asked in all wordings."
    return finished(tmp_path_factory.mktemp("arms"), arms=ARMS, eval_prompts=3, sft_validate_every=2)


def test_every_arm_ends_in_one_table(arms):
    summary = pd.read_csv(arms.folder("comparison") / "summary.csv")
    assert summary.arm.unique().tolist() == [*ARMS, *FLOORS]
    assert (summary.runs[summary.arm.isin(ARMS)] == 3).all() and (summary.lowest <= summary.highest).all()
    assert {row["arm"] for row in arms.metrics("comparison")["paired_differences"]} == set(ARMS) - {"mean"}


def test_wordings_are_averaged_within_users(arms):
    predictions = pd.read_parquet(arms.folder("evaluate-gti") / "predictions.parquet")
    users, by_hand = arms.test_users(), []
    for prompt in range(3):
        lists = predictions[predictions.prompt == prompt].sort_values("rank").groupby("user_id").item_id.agg(list)
        by_hand.append(np.mean([target in lists[user][:10] for user, target in zip(users.user_id, users.target)]))
    assert arms.metrics("evaluate-gti")["recall@10"] == pytest.approx(np.mean(by_hand))
    assert not predictions[predictions.prompt == 0].drop(columns="prompt").reset_index(drop=True).equals(
        predictions[predictions.prompt == 1].drop(columns="prompt").reset_index(drop=True))


def test_mixtures_are_counted(arms):
    vanilla, many = arms.metrics("sft-mean"), arms.metrics("sft-lc_rec")
    assert set(vanilla["tasks"]) == {"next_item"} and len(many["tasks"]) == 9
    assert many["examples"] == sum(many["tasks"].values()) > vanilla["examples"] == vanilla["tasks"]["next_item"]
    events = sum(len(items) - 1 for items in arms.splits().train.values() if items)
    assert vanilla["examples"] == events


def test_equal_compute_adds_the_tokens_of_grounding(arms):
    from gti_nb.training import batch_indices

    tokenizer = arms.rows("gti", "init").apply(*arms.base()).tokenizer
    pairs, (examples, _) = arms.pairs("gti", tokenizer)[0], arms.examples("gti", tokenizer)
    tokens = sum(len(pairs[i]) for step in range(4) for i in batch_indices(len(pairs), step, 16, 0))
    per_step = 16 * np.mean([len(examples[i]) for i in range(len(examples))])
    extra = arms.metrics("sft-equal_compute")["extra_steps"]
    assert extra == arms.metrics("sft-equal_compute")["steps"] - 3 >= 1 and extra == pytest.approx(tokens / per_step, abs=0.6)
    assert arms.metrics("sft-gti")["extra_steps"] == 0


def test_shuffled_sids_deal_the_same_sids_to_other_items(arms):
    plain, shuffled = arms.sids("gti"), arms.sids("shuffled")
    assert sorted(map(tuple, plain.codes)) == sorted(map(tuple, shuffled.codes)) and plain.item_ids == shuffled.item_ids
    assert (plain.codes != shuffled.codes).any(1).mean() > 0.8


def test_items_are_read_without_the_interactions(arms, monkeypatch):
    run = Run(arms.config)
    monkeypatch.setattr("gti_nb.stages.load_dataset", None)
    assert run.items().equals(arms.dataset().items) and len(run.items()) == 30


def test_the_model_is_heard(arms):
    said = read_json(arms.folder("sft-gti") / "said.json")
    assert sorted({row["step"] for row in said}) == [0, 2, 3] and all(row["prompt"] and "answer" in row for row in said)


def test_the_best_state_by_validation_is_kept(arms):
    history = arms.history("sft-gti")
    assert history.validation.notna().tolist() == [False, True, True]


def test_a_finished_stage_leaves_no_checkpoint(arms):
    assert not [path for path in arms.path.rglob("*.safetensors") if path.name.startswith(("checkpoint", "best"))]


# --- several processes ---------------------------------------------------------------------------------------------------

SRUN = """#!/usr/bin/env bash
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@" && wait $!
"""


def on_two_nodes(folder, values) -> subprocess.CompletedProcess:
    "The run that the Slurm script makes, with this machine taken for two nodes of one process."
    (folder / "bin").mkdir(parents=True)
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(BIN)
    (folder / "two.yaml").write_text(yaml.safe_dump(SIZES | values))
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "1", "SLURM_JOB_ID": str(os.getpid()),
             "SLURM_JOB_NODELIST": "a,b", "GTI_PROGRESS": "lines", "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([ROOT / "configs" / "slurm.sh", "two.yaml", "-p", "device", "cpu", "-p", "run_dir", "run"],
                          env=os.environ | slurm, capture_output=True, text=True, timeout=300)


def test_two_nodes_and_two_processes_end_like_one(tmp_path):
    values = {"arms": {"gti": {"grounding": True}}, "lora_dropout": 0.0, "dtype": "float32", "eval_users": 11}
    one, done = finished(tmp_path / "one", **values), on_two_nodes(tmp_path / "nodes", values)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes = open_run(tmp_path / "nodes" / "run")
    for stage in nodes.stages:
        assert done.stdout.count(f"node 1 takes part in {stage}\n") == nodes.stages[stage].shared, stage
    assert done.stdout.count("report: ") == 1  # said by node 0 alone
    for stage in ("ground-gti", "sft-gti"):
        pd.testing.assert_frame_equal(one.history(stage), nodes.history(stage), rtol=1e-4, atol=1e-5)
    # And the two processes of the last stage once more, on one node.
    predicted = lambda run: pd.read_parquet(run.folder("evaluate-gti") / "predictions.parquet")
    found = [predicted(one), predicted(nodes)]
    (nodes.folder("evaluate-gti") / "DONE.json").unlink()
    run_stage(nodes, "evaluate-gti")
    assert nodes.config.processes == len(list(nodes.path.rglob("part-*.parquet"))) == 2
    for other in (found[1], predicted(nodes)):
        assert other.user_id.tolist() == found[0].user_id.tolist() and set(other.user_id) == set(one.test_users().user_id)
        assert (other.item_id == found[0].item_id).mean() > 0.95  # the same but for near ties


# --- modes ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("values", [
    {"sft_mode": "full", "sft_base_rows": True, "gradient_checkpointing": True}, {"align_steps": 2}, {"sft_mode": "qlora", "dtype": "bfloat16"}],
    ids=lambda values: ", ".join(f"{k}={v}" for k, v in values.items()))
def test_modes(tmp_path, values):
    run = Run(make_config({**SIZES, "run_dir": str(tmp_path), "arms": {"gti": {"grounding": True}}, **values}))
    for name in ("data", "encode", "rqvae", "semantic_ids", "init-gti", "ground-gti", "sft-gti", "evaluate-gti"):
        run_stage(run, name)
    assert len(run.history("sft-gti")) == 3 and (run.folder("sft-gti") / "align").exists() == ("align_steps" in values)
    assert np.isfinite(run.metrics("evaluate-gti")["recall@10"])


# --- the graded protocol -------------------------------------------------------------------------------------------------

def test_graded_retrieval(tmp_path):
    values = {"protocol": "graded", "graded_pool": 20, "min_rating": 0, "max_items": 200, "eval_users": 6, "ks": [5, 10, 20],
              "arms": {"mean": {}, "gti": {"grounding": True}}}
    run = finished(tmp_path, **values)
    task = run.graded()
    assert len(task.queries) == 6 == run.metrics("evaluate-gti")["users"]
    pools = task.pools.groupby("query_id").item_id.agg(set)
    for arm in ("mean", "gti"):
        predictions = pd.read_parquet(run.folder(f"evaluate-{arm}") / "predictions.parquet")
        assert predictions.groupby("user_id").item_id.agg(set).to_dict() == pools.to_dict()  # every candidate has its place
        for criterion in ("precision_good", "precision_good_maybe"):
            shares = [run.metrics(f"evaluate-{name}")[f"{criterion}@20"] for name in (arm, *FLOORS)]
            assert np.ptp(shares) == pytest.approx(0)  # with the whole pool taken, all agree
    assert run.metrics("sft-gti")["tasks"]["query"] == len(task.asked) > 0
    trained = {(user, item) for user, items in run.splits().train.items() for item in items}
    assert not trained & set(task.pools[["query_id", "item_id"]].itertuples(index=False, name=None))
