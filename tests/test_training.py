"""The training loop: exact however it is cut, and after a kill at any moment; the best state; what trackers and readers see."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import ROOT
from gti_nb import training
from gti_nb.core import UserError, steps_of
from gti_nb.grounding import SplitEngine
from gti_nb.prompts import render
from gti_nb.sft import SFTSettings, prepare
from gti_nb.training import (TrainConfig, batch_indices, buckets, decay_groups, effective_batch, fit, learning_rate_at, micro_batches, spread_steps,
                             say, step_loss, trainable)
from gti_nb.vocabulary import ExtendedLM, tiny_model

NAMES = [f"<a_{i}>" for i in range(8)]
SMALL = TrainConfig(steps=8, batch_size=8, micro_batch_size=8, learning_rate=1e-2, checkpoint_every=3, validate_every=2)


def model_of(lora: float | None = None, tied: bool = True, dtype=torch.float32):
    "A tiny extended model; `lora` is the dropout of its adapters, None for no adapters."
    model, tokenizer = tiny_model(["Which film comes next? A comedy, a drama."], tied=tied)
    lm = ExtendedLM(model.to(dtype), tokenizer, NAMES, torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * 0.02)
    if lora is not None:
        prepare(lm, SFTSettings(r=4, alpha=8, dropout=lora))
        for name, p in trainable(lm).items():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    return lm


def examples_of(lm, n: int = 20):
    "Examples of two kinds, in which old and new tokens are asked about and answered."
    return [render(lm.tokenizer, f"Which film comes after <a_{i % 8}>{' and <a_3>' * (i % 5)}?", f"<a_{(3 * i) % 8}>" if i % 2 else "A comedy" * (1 + i % 3),
                   kind="sid" if i % 2 else "text") for i in range(n)]


def gradients(lm, examples, size, **kwargs):
    "The loss, and the gradient of what trains."
    lm.zero_grad()
    losses = step_loss(lm, examples, size, torch.Tensor.backward, **kwargs)
    return losses, torch.cat([p.grad.flatten() for p in trainable(lm).values()])


def values_of(lm):
    return torch.cat([p.detach().flatten() for p in trainable(lm).values()])


# --- one step ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("lora", [None, 0.0])
def test_a_step_is_the_same_however_it_is_cut(lora):
    lm = model_of(lora)
    examples = examples_of(lm)
    losses, gradient = gradients(lm, examples, 20)
    assert set(losses) == {"loss", "sid", "text"} and gradient.abs().max() > 1e-3
    for size in (1, 3, 7):
        others, other = gradients(lm, examples, size)
        assert others == pytest.approx(losses, abs=1e-6) and (gradient - other).abs().max() < 1e-6
    shares = [gradients(lm, examples, 7, share=(i, 4)) for i in range(4)]
    assert sum(s["loss"] for s, _ in shares) == pytest.approx(losses["loss"], abs=1e-6)
    assert (sum(g for _, g in shares) - gradient).abs().max() < 1e-6


def test_a_step_is_that_of_the_plain_model():
    "transformers' own loss, on the merged model, over the whole batch at once."
    from gti_nb.prompts import collate
    lm = model_of(0.0)
    examples = examples_of(lm)
    assert lm.merge()(**collate(examples, lm.tokenizer.pad_token_id)).loss.item() == pytest.approx(step_loss(lm, examples, 3)["loss"], abs=1e-6)


def test_buckets():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 200, rng.integers(1, 40)).tolist()
        for most, price in ((4, 128), (4, math.inf), (1, 128), (40, 0)):
            groups = buckets(lengths, most, price)
            assert sorted(sum(groups, [])) == list(range(len(lengths))) and max(map(len, groups)) <= most
            if price == math.inf:
                assert [len(g) for g in groups[:-1]] == [most] * (len(groups) - 1)
            if price == 0:
                assert all(len({lengths[i] for i in group}) == 1 for group in groups)


def test_micro_batches_waste_little():
    lm = model_of()
    examples = examples_of(lm)
    padding = lambda parts: sum(len(part) * max(map(len, part)) for part in parts) / sum(map(len, examples)) - 1
    assert padding(micro_batches(lm, examples, 5)) < padding([examples[i::4] for i in range(4)]) / 2
    kinds = [[e.kind for e in part] for part in micro_batches(SplitEngine(lm), examples, 5)]
    assert all(len(set(part)) == 1 for part in kinds)


def test_learning_rate_is_that_of_transformers():
    from transformers import get_cosine_schedule_with_warmup
    config = TrainConfig(steps=50, warmup=0.2, learning_rate=0.3)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 10, 50)
    for step in range(50):
        ours, theirs = learning_rate_at(step, config), schedule.get_last_lr()[0]
        assert ours == pytest.approx(theirs if step >= 10 else theirs + 0.03)  # theirs begins with a step of length 0
        optimizer.step()
        schedule.step()


def test_fit_is_a_plain_loop(tmp_path):
    config = TrainConfig(**SMALL.model_dump() | {"micro_batch_size": 3, "weight_decay": 0.1, "clip": 0.1})
    lm, plain = model_of(0.0), model_of(0.0)
    examples = examples_of(lm)
    history = fit(lm, examples, config, tmp_path)
    optimizer = torch.optim.AdamW([{"params": [p], "weight_decay": 0.0 if n == "new_rows" else 0.1} for n, p in trainable(plain).items()])
    for step in range(config.steps):
        batch = [examples[i] for i in batch_indices(20, step, 8, 0)]
        loss, _ = gradients(plain, batch, 8)
        assert history.loss[step] == pytest.approx(loss["loss"], abs=1e-5)
        assert torch.nn.utils.clip_grad_norm_(trainable(plain).values(), 0.1) > 0.1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config)
        optimizer.step()
    assert (values_of(lm) - values_of(plain)).abs().max() < 1e-4 < 0.01 < (values_of(lm) - values_of(model_of(0.0))).abs().max()


def test_only_matrices_decay(tmp_path):
    lm = model_of(0.0, tied=False).requires_grad_(True)
    decayed = {id(p) for p in decay_groups(lm, 0.1)[0]["params"]}
    names = {name for name, p in trainable(lm).items() if id(p) in decayed}
    assert names == {name for name in trainable(lm) if "proj" in name and "norm" not in name} and any("lora_A" in name for name in names)
    assert [group["weight_decay"] for group in decay_groups(lm, 0.1)] == [0.1, 0.0]
    assert [group["weight_decay"] for group in decay_groups(SplitEngine(model_of()), 0.1)] == [0.0]
    ends = []
    for decay in (0.0, 0.9):
        rows = model_of()
        fit(rows, examples_of(rows), TrainConfig(**SMALL.model_dump() | {"weight_decay": decay}), tmp_path / str(decay))
        ends.append(rows.new_rows)
    assert torch.equal(*ends)


@pytest.mark.parametrize("processes, batch, micro, said", [
    (1, 16, 16, "16 examples a step = 16 at a time x 1 x 1 process"), (1, 16, 64, "16 examples a step = 16 at a time x 1 x 1 process"),
    (2, 32, 8, "32 examples a step = 8 at a time x 2 x 2 processes"), (1, 11, 8, "11 examples a step = at most 6 at a time x 2 x 1 process")])
def test_effective_batch(processes, batch, micro, said):
    assert effective_batch(TrainConfig(batch_size=batch, micro_batch_size=micro), processes) == said


@pytest.mark.parametrize("batch, advice", [(10, "8 or 12"), (3, "4 or 4")])
def test_a_batch_that_cannot_be_shared_is_refused(batch, advice):
    with pytest.raises(UserError, match=f"set the batch size to {advice.replace('4 or 4', '4')}"):
        effective_batch(TrainConfig(batch_size=batch), 4)


def test_lengths_of_trainings():
    assert [steps_of(length, 100, 16) for length in (5, "5", "5 steps", "1 epoch", "2.5 epochs")] == [5, 5, 5, 7, 16]
    for wrong in ("5.5", "many", "-3", "0", 0, "3 weeks", 2.5, None):
        with pytest.raises(UserError, match="a training can't take"):
            steps_of(wrong, 100, 16)
    assert spread_steps(10, 3) == {0, 3, 7, 10} and spread_steps(2, 10) == {0, 1, 2}


def test_bfloat16(tmp_path):
    lm, exact = model_of(0.0, dtype=torch.bfloat16), model_of(0.0)
    histories = [fit(m, examples_of(m), SMALL, tmp_path / str(m.model.dtype)) for m in (lm, exact)]
    assert {p.dtype for p in trainable(lm).values()} == {torch.float32}
    assert np.abs(histories[0].loss - histories[1].loss).max() < 0.05 and histories[0].loss.iloc[-1] < histories[0].loss[0] - 0.1


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path):
    lm = model_of()
    before = lm.new_rows.detach().clone()
    with pytest.raises(UserError, match="the loss at step 0 is nan: lower the learning rate"):
        fit(lm, examples_of(lm), SMALL, tmp_path, token_losses=lambda lm, **batch: lm.token_losses(**batch) * math.nan)
    assert torch.equal(lm.new_rows, before)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_models_in_pieces_are_refused(tmp_path, monkeypatch, kind):
    from accelerate import Accelerator, DistributedType
    monkeypatch.setattr(Accelerator, "distributed_type", getattr(DistributedType, kind))
    lm = model_of()
    with pytest.raises(UserError, match=f"{kind} is not supported, since it would cut the new rows"):
        fit(lm, examples_of(lm), SMALL, tmp_path)


# --- gradient checkpointing ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("setting", ["rows", "lora with dropout", "everything"])
def test_gradient_checkpointing_changes_no_number(tmp_path, setting):
    ends = []
    for checkpointed in (False, True):
        lm = model_of(0.3 if setting == "lora with dropout" else None)
        if setting == "everything":
            lm.requires_grad_(True)
        runs = []
        lm.model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
        config = TrainConfig(**SMALL.model_dump() | {"gradient_checkpointing": checkpointed})
        history = fit(lm, examples_of(lm), config, tmp_path / str(checkpointed))
        ends.append((history, values_of(lm), len(runs)))
        assert not any(getattr(module, "gradient_checkpointing", False) for module in lm.modules())  # switched off again
        assert lm.model.get_input_embeddings()(torch.tensor([1])).requires_grad == (setting == "everything")
    (history, values, runs), (other, others, more) = ends
    pd.testing.assert_frame_equal(history, other)
    assert torch.equal(values, others) and more == 2 * runs


def test_gradient_checkpointing_is_not_for_grounding(tmp_path):
    engine = SplitEngine(model_of())
    with pytest.raises(UserError, match="gradient checkpointing is for fine-tuning"):
        fit(engine, examples_of(engine.lm), TrainConfig(gradient_checkpointing=True), tmp_path, token_losses=SplitEngine.token_losses)


# --- checkpoints ---------------------------------------------------------------------------------------------------------

class PowerCut(Exception):
    pass


def cut_at(step):
    def observe(done):
        if done == step:
            raise PowerCut
    return observe


class Written(Sequence):
    "Examples that are written when they are taken, and how often that was."

    def __init__(self, examples):
        self.examples, self.times = examples, 0

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, i):
        self.times += 1
        return self.examples[i]


def trained(folder, config=SMALL, observe=None, kind=list):
    "What a training ends with: its history, its values, its best state's file. The examples are a `kind` of sequence."
    lm = model_of(0.3)
    examples = examples_of(lm)
    history = fit(lm, kind(examples[:16]), config, folder, observe=observe, validation=examples[16:])
    return history, values_of(lm), load_file(folder / "best.safetensors")


def assert_same(one, other):
    pd.testing.assert_frame_equal(one[0], other[0], check_exact=True)
    assert torch.equal(one[1], other[1]) and one[2].keys() == other[2].keys() and all(torch.equal(one[2][k], other[2][k]) for k in one[2])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("step", range(9))
def test_interrupted_after_any_step(tmp_path, undisturbed, step):
    with pytest.raises(PowerCut):
        trained(tmp_path, observe=cut_at(step))
    assert_same(trained(tmp_path), undisturbed)
    assert_same(trained(tmp_path), undisturbed)  # and again, when all is done


def test_the_last_checkpoints_are_kept(tmp_path):
    names = lambda: [path.name for path in sorted(tmp_path.glob("checkpoint-*"))]
    trained(tmp_path, SMALL)
    assert names() == ["checkpoint-0000006.safetensors", "checkpoint-0000008.safetensors"]
    for path in tmp_path.glob("checkpoint-*"):
        path.unlink()
    trained(tmp_path, SMALL.model_copy(update={"keep_checkpoints": 3, "checkpoint_every": 2}))
    assert len(names()) == 3


def test_checkpoints_by_time(tmp_path, monkeypatch):
    "A clock that goes on by half a minute each time it's asked: with a minute between checkpoints, most steps have one, with an hour none."
    for minutes, most in ((0.0, 1), (1.0, 8), (60.0, 1)):
        written, clock = [], iter(range(0, 10**6, 30))
        with monkeypatch.context() as patch:
            patch.setattr(training.time, "monotonic", lambda: float(next(clock)))
            patch.setattr(training, "save_checkpoint", lambda path, *rest: written.append(path.name))
            lm = model_of()
            fit(lm, examples_of(lm), TrainConfig(steps=8, batch_size=4, checkpoint_every=1000, checkpoint_minutes=minutes), tmp_path)
        assert written[-1] == "checkpoint-0000008.safetensors" and (len(written) > 2) == (most > 1)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-50]), lambda path: path.write_bytes(b""),
                                    lambda path: path.write_bytes(b"\0" * 5000), lambda path: save_file({"x": torch.zeros(1)}, path)])
def test_a_damaged_checkpoint_is_left_out(tmp_path, undisturbed, damage, capsys):
    trained(tmp_path)
    damage(tmp_path / "checkpoint-0000008.safetensors")
    assert_same(trained(tmp_path), undisturbed)
    assert "checkpoint-0000008.safetensors is damaged" in (said := capsys.readouterr().out) and "resumed at step 6 of 8" in said
    for path in tmp_path.glob("checkpoint-*"):
        damage(path)
    assert_same(trained(tmp_path), undisturbed)
    assert "resumed" not in capsys.readouterr().out


def test_other_settings_are_refused(tmp_path):
    trained(tmp_path)
    for change, what in (({"steps": 9}, "steps was 8 and is 9"), ({"seed": 1}, "seed was 0 and is 1"), ({"learning_rate": 0.5}, "learning_rate")):
        with pytest.raises(UserError, match=what):
            trained(tmp_path, SMALL.model_copy(update=change))
    trained(tmp_path, SMALL.model_copy(update={"micro_batch_size": 4, "checkpoint_every": 1, "gradient_checkpointing": True}))
    with pytest.raises(UserError, match="other parameters train"):
        lm = model_of()
        fit(lm, examples_of(lm)[:16], SMALL, tmp_path)
    with pytest.raises(UserError, match="examples was 16 and is 20"):
        lm = model_of(0.3)
        fit(lm, examples_of(lm), SMALL, tmp_path)


# --- validation ----------------------------------------------------------------------------------------------------------

def test_the_best_state_is_put_back(tmp_path, capsys):
    lm, seen = model_of(), {}
    values = iter([3.0, 1.0, 2.0, 2.5])

    def validation():
        assert not lm.training
        seen[len(seen)] = lm.new_rows.detach().clone()
        return next(values)
    history = fit(lm, examples_of(lm), SMALL, tmp_path, validation=validation)
    assert history.validation.dropna().to_dict() == {1: 3.0, 3: 1.0, 5: 2.0, 7: 2.5}
    assert torch.equal(lm.new_rows, seen[1]) and not torch.equal(lm.new_rows, seen[3])
    assert "the state after step 4 is the best (validation 1)" in capsys.readouterr().out


@pytest.mark.parametrize("step", [3, 5, 8])
def test_the_best_state_survives_an_interruption(tmp_path, step):
    "A validation that likes the rows as they were after two steps; what it liked is remembered over an interruption."
    def judged(folder, observe=None):
        lm = model_of()
        history = fit(lm, examples_of(lm), SMALL, folder, observe=observe, validation=lambda: lm.new_rows.norm().item())
        return history, values_of(lm), load_file(folder / "best.safetensors")
    whole = judged(tmp_path / "whole")
    assert whole[0].validation.dropna().is_monotonic_increasing and torch.equal(whole[2]["parameter/new_rows"].flatten(), whole[1])
    with pytest.raises(PowerCut):
        judged(tmp_path / "cut", cut_at(step))
    assert_same(judged(tmp_path / "cut"), whole)


def test_validation_on_examples_is_their_loss(tmp_path):
    lm = model_of()
    examples = examples_of(lm)
    history = fit(lm, examples[:12], SMALL.model_copy(update={"validate_every": 0}), tmp_path, validation=examples[12:])
    assert history.validation.notna().sum() == 1
    assert history.validation.iloc[-1] == step_loss(lm, examples[12:], 8)["loss"]


def test_validation_changes_nothing_else(tmp_path, undisturbed):
    lm = model_of(0.3)
    history = fit(lm, examples_of(lm)[:16], SMALL, tmp_path)
    assert history.loss.tolist() == undisturbed[0].loss.tolist() and "validation" not in history


def test_validation_must_be_a_number(tmp_path):
    lm = model_of()
    with pytest.raises(UserError, match="the validation after 2 steps is nan"):
        fit(lm, examples_of(lm), SMALL, tmp_path, validation=lambda: math.nan)


# --- trackers ------------------------------------------------------------------------------------------------------------

def test_trackers(tmp_path, monkeypatch):
    from accelerate import tracking

    class Recorder(tracking.GeneralTracker):
        name, requires_logging_directory, main_process_only, calls = "recorder", False, True, []

        def __init__(self, project):
            super().__init__()
            self.calls.append(("start", project))

        tracker = None

        def store_init_configuration(self, values):
            self.calls.append(("settings", values))

        def log(self, values, step, **kwargs):
            self.calls.append((step, values))

        def finish(self):
            self.calls.append(("finish",))

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    lm = model_of()
    history = fit(lm, examples_of(lm), TrainConfig(**SMALL.model_dump() | {"trackers": ("recorder",)}), tmp_path, "mine")
    assert Recorder.calls[0] == ("start", "mine") and Recorder.calls[1][1]["learning_rate"] == 1e-2 and Recorder.calls[-1] == ("finish",)
    logged = [call for call in Recorder.calls if isinstance(call[0], int)]
    assert [step for step, _ in logged] == list(range(1, 9)) and [values["loss"] for _, values in logged] == history.loss.tolist()
    assert set(logged[0][1]) >= {"loss", "sid", "text", "learning_rate"}


def test_tensorboard_has_the_history(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    lm = model_of()
    history = fit(lm, examples_of(lm), TrainConfig(**SMALL.model_dump() | {"trackers": ("tensorboard",)}), tmp_path, "mine")
    events = EventAccumulator(str(tmp_path / "mine")).Reload()
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 9))
    assert [event.value for event in losses] == pytest.approx(history.loss.tolist(), rel=1e-6)
    assert "learning_rate" in events.Tags()["scalars"]


def test_missing_trackers_are_named(tmp_path, monkeypatch):
    from accelerate import tracking
    monkeypatch.setattr(tracking, "_available_trackers", [])
    lm = model_of()
    for name, complaint in (("tensorboard", "pip install tensorboard"), ("paper", "no tracker is called 'paper'")):
        with pytest.raises(UserError, match=complaint):
            fit(lm, examples_of(lm), TrainConfig(trackers=(name,)), tmp_path)


# --- what the model says -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("lora, tied", [(None, True), (0.0, True), (0.0, False)])
def test_say_is_transformers_generate(tmp_path, lora, tied):
    lm = model_of(lora, tied).requires_grad_(True)
    examples = examples_of(lm, 4)
    fit(lm, examples, TrainConfig(steps=40, batch_size=4, learning_rate=5e-3), tmp_path)  # so that it has something to say
    prompts = [list(e.prompt_ids) for e in examples]
    lm.train()
    said = say(lm, prompts, 10)
    assert lm.training and len(set(said)) > 1 and any("<a_" in text for text in said)
    merged = lm.merge()
    for prompt, text in zip(prompts, said):
        ids = merged.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10, eos_token_id=lm.tokenizer.eos_token_id)
        assert text == lm.tokenizer.decode(ids[0, len(prompt):], skip_special_tokens=True)


# --- killed, really ------------------------------------------------------------------------------------------------------

NURSERY = """
import json, os, random, signal, socket, sys, time, traceback
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
import test_training as t
from gti_nb import training
import accelerate.utils
t.examples_of(t.model_of(0.3))  # all that is imported late is there before the first child is born
CONFIG = t.TrainConfig(steps=24, batch_size=8, micro_batch_size=4, learning_rate=1e-2, checkpoint_every=2, validate_every=5)

def born(folder, rank, world, port, config, dies_in_write):
    "A process that trains, and writes what it ends with."
    child = os.fork()
    if child:
        return child
    try:
        sys.stdout = sys.stderr = open(f"{{folder}}-{{rank}}.txt", "a")
        if world > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        writes = []
        def torn(tensors, path, metadata=None):
            save_file(tensors, path, metadata=metadata)
            writes.append(path)
            if len(writes) == dies_in_write:
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        training.save_file = torn
        made = []
        history, values, best = t.trained(folder, config, observe=lambda done: open(f"{{folder}}.steps", "a").write("."),
                                          kind=lambda examples: made.append(t.Written(examples)) or made[0])
        Path(f"{{folder}}-{{rank}}.written").write_text(str(made[0].times))
        if rank == 0:
            history.to_json(f"{{folder}}.json", double_precision=15)
            save_file({{"values": values}} | best, f"{{folder}}.safetensors")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(7)

def life(name, world=1, steps=None, signals=signal.SIGKILL, to=None, config=CONFIG, dies_in_write=0):
    "A training in the folder `name`; after so many steps, and a moment, all processes (or `to` one) get a signal. Returns how each ended."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(sys.argv[1]) / name
    Path(f"{{folder}}.steps").write_text("")
    children = [born(folder, rank, world, port, config, dies_in_write if rank == 0 else 0) for rank in range(world)]
    if steps is not None:
        while os.path.getsize(f"{{folder}}.steps") < steps:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        for rank, child in enumerate(children):
            if to is None or rank == to:
                os.kill(child, signals)
    if dies_in_write:
        os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOWAIT)
        for child in children[1:]:
            os.kill(child, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

ends, rng = {{}}, random.Random(int(sys.argv[2]))
for world in (1, 2):
    ends[f"whole {{world}}"] = [life(f"whole-{{world}}", world)]
    ends[f"killed {{world}}"] = [life(f"killed-{{world}}", world, steps=rng.randint(2, 6)) for _ in range(3)] + [life(f"killed-{{world}}", world)]
    ends[f"torn {{world}}"] = [life(f"torn-{{world}}", world, dies_in_write=n) for n in (1, 3)] + [life(f"torn-{{world}}", world)]
    rare = CONFIG.model_copy(update={{"checkpoint_every": 1000}})
    ends[f"asked {{world}}"] = [life(f"asked-{{world}}", world, steps=8, signals=signal.SIGTERM, to=world - 1, config=rare)]
    ends[f"asked {{world}}"] += [[sorted(p.name for p in (Path(sys.argv[1]) / f"asked-{{world}}").glob("checkpoint-*"))], life(f"asked-{{world}}", world)]
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    "Trainings in processes of their own, killed in several ways; how each process ended, and the folder."
    folder = tmp_path_factory.mktemp("nursery")
    (folder / "nursery.py").write_text(NURSERY.format(tests=str(ROOT / "tests"), root=str(ROOT)))
    done = subprocess.run([sys.executable, folder / "nursery.py", folder, "0"], capture_output=True, text=True, timeout=400,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "GTI_PROGRESS": "lines", "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), folder


def assert_ended_alike(folder, name, world):
    one, other = (folder / f"{kind}-{world}" for kind in ("whole", name))
    assert one.with_suffix(".json").read_text() == other.with_suffix(".json").read_text()
    a, b = (load_file(path.with_suffix(".safetensors")) for path in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not list(other.glob(".*"))  # nothing torn is left


@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_random_moments(nursery, world):
    ends, folder = nursery
    assert ends[f"whole {world}"] == [[0] * world] and ends[f"killed {world}"][-1] == [0] * world
    assert [codes == [-9] * world for codes in ends[f"killed {world}"]] == [True, True, True, False]
    assert_ended_alike(folder, "killed", world)
    assert (folder / f"killed-{world}-0.txt").read_text().count("resumed at step") >= 2


@pytest.mark.parametrize("world", [1, 2])
def test_each_process_writes_its_part_of_the_examples(nursery, world):
    "24 steps of 8 examples; that the numbers stay those of one process is tested in test_processes."
    written = [int((nursery[1] / f"whole-{world}-{rank}.written").read_text()) for rank in range(world)]
    assert written == [24 * 8 // world] * world


@pytest.mark.parametrize("world", [1, 2])
def test_killed_while_writing(nursery, world):
    "Once in a checkpoint and once in the best state; what was being written is never taken for a file."
    ends, folder = nursery
    assert [codes[0] for codes in ends[f"torn {world}"]] == [-9, -9, 0]
    assert_ended_alike(folder, "torn", world)


@pytest.mark.parametrize("world", [1, 2])
def test_asked_to_stop(nursery, world):
    "On SIGTERM, to one process of two, a checkpoint is written before all end as SIGTERM would have them end."
    ends, folder = nursery
    codes, written, again = ends[f"asked {world}"]
    assert codes == [-15] * world and len(written[0]) == 1 and again == [0] * world
    assert "resumed at step" in (folder / f"asked-{world}-0.txt").read_text()
    one, other = ((folder / f"{kind}-{world}.json").read_text() for kind in ("whole", "asked"))
    assert one == other
