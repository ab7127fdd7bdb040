"""How fast fine-tuning is: LoRA and the new rows of the embedded language model, against transformers' Trainer.

    python benchmarks/sft.py [--quick]

The Trainer gets the model with the same 768 new tokens (3 levels of 256) in its matrix, with peft's LoRA of the same rank, scale,
dropout and projections; the new rows train by peft's `trainable_token_indices`. Both compute in the model's default dtype on this
machine, under autocast if that is bfloat16, and take whole optimizer steps (forward, backward, clip, AdamW) on the same batches in
the same order: `fit` and `Trainer.train` run side by side and take turns, a step each. A batch is computed in micro-batches: as
they come by the Trainer, sorted by length within the batch by `fit`. So there is a third: `unsorted`, our step on the Trainer's
micro-batches. A ratio is the median over the turns of what two took for the same batch; tokens are those of the examples, padding
excluded. Once with questions for the next item, once with these mixed with descriptions of items, which differ more in length.

Two more Trainers, on the first task, show what is due to the rows: `frozen` leaves the new rows as they are (so it does less than
asked), `to_save` trains both whole matrices, as in the paper. Peak memory is that of a process that does nothing else. `--quick`
takes fewer and smaller steps, of the first task and against the first Trainer only.

The last line is one JSON object."""

import argparse
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import numpy as np
import torch

from gti_nb.data import leave_one_out, load_dataset
from gti_nb.initializers import extend
from gti_nb.prompts import collate, grounding_examples
from gti_nb.semantic_ids import SemanticIds
from gti_nb.sft import PROJECTIONS, SFTSettings, prepare
from gti_nb.tasks import mixture
from gti_nb.training import TrainConfig, batch_indices, fit, trainable
from gti_nb.vocabulary import load_base

SETTINGS, ITEMS, USERS = SFTSettings(), 300, 100
WAYS = {"trainer": {"trainable_token_indices": True}, "frozen": {}, "to_save": {"modules_to_save": ["embed_tokens", "lm_head"]}}


def world():
    "The model with its new tokens, questions for the next item, and these with as many other examples; codes are random."
    films = load_dataset("embedded:movielens-100k").filter(min_rating=3, max_items=ITEMS)
    codes = np.random.default_rng(0).integers(0, 256, (ITEMS, 3))
    sids = SemanticIds(films.items.item_id.tolist(), codes, 256)
    lm = extend(*load_base(device="cpu"), sids)
    asked = mixture(lm.tokenizer, films.items, sids, dict(list(leave_one_out(films).train.items())[:USERS])).examples
    asked = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))[:2 * ITEMS]]
    return lm, {"": asked, "_mixed": asked + grounding_examples(lm.tokenizer, films.items, sids, templates=["both"])}


def peft_model(lm, way: str):
    "peft's LoRA around the model with the new tokens; how the rows train is said in `WAYS`."
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, get_peft_model
    rows = {k: {"embed_tokens": lm.new_ids} if v is True else v for k, v in WAYS[way].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(lm.merge(), LoraConfig(r=SETTINGS.r, lora_alpha=SETTINGS.alpha, lora_dropout=SETTINGS.dropout,
                                                     target_modules=list(PROJECTIONS), task_type="CAUSAL_LM", **rows))


def trainer(model, lm, examples, config: TrainConfig, callbacks=()):
    "transformers' Trainer, with the batches of `fit`."
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    drawn = [examples[i] for s in range(config.steps) for i in batch_indices(len(examples), s, config.batch_size, config.seed)]
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=config.steps, per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.batch_size // config.micro_batch_size, learning_rate=config.learning_rate,
        max_grad_norm=config.clip, bf16=lm.dtype == torch.bfloat16, use_cpu=True, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False)
    return InOrder(model, arguments, data_collator=lambda part: collate(part, lm.tokenizer.pad_token_id), train_dataset=drawn,
                   callbacks=list(callbacks))


class Turns:
    "A Trainer in a thread of its own that waits after each of its steps until `step` asks for the next one."

    def __init__(self, model, lm, examples, config):
        from transformers import TrainerCallback
        self.go, self.done, self.seconds, turns = threading.Semaphore(0), threading.Semaphore(0), [], self

        class Wait(TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                turns.go.acquire()

            def on_step_end(self, *args, **kwargs):
                turns.done.release()
                turns.go.acquire()

        run = trainer(model, lm, examples, config, [Wait()])
        self.thread = threading.Thread(target=run.train, daemon=True)
        self.thread.start()

    def step(self):
        began = time.perf_counter()
        self.go.release()
        self.done.acquire()
        self.seconds.append(time.perf_counter() - began)

    def finish(self):
        "Let the Trainer, which has taken its last step, return, so that its memory is free."
        self.go.release()
        self.thread.join()


class Unsorted:
    "Our step on the micro-batches of the Trainer."

    def __init__(self, lm, examples, config):
        self.lm, self.examples, self.config, self.seconds = lm, examples, config, []
        self.optimizer = torch.optim.AdamW(trainable(lm).values(), lr=1e-9)

    def step(self):
        began, size = time.perf_counter(), self.config.micro_batch_size
        batch = [self.examples[i] for i in batch_indices(len(self.examples), len(self.seconds), self.config.batch_size, self.config.seed)]
        supervised = sum(len(e.answer_ids) for e in batch)
        for start in range(0, len(batch), size):
            part = collate(batch[start:start + size], self.lm.tokenizer.pad_token_id)
            (self.lm.token_losses(**part).sum() / supervised).backward()
        torch.nn.utils.clip_grad_norm_(trainable(self.lm).values(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)


def race(lm, examples, config: TrainConfig, way: str) -> dict:
    "Seconds of each step: of `fit`, of our step on unsorted micro-batches, and of the Trainer of `way`."
    others = {way: Turns(peft_model(lm, way), lm, examples, config)}
    prepare(lm, SETTINGS)
    others["unsorted"], seconds, since = Unsorted(lm, examples, config), [], [0.0]

    def observe(done):
        if done:
            seconds.append(time.perf_counter() - since[0])
        if done < config.steps:
            for other in others.values():
                other.step()
        since[0] = time.perf_counter()

    fit(lm, examples, config, tempfile.mkdtemp(), way, observe=observe)
    others[way].finish()
    return {"fit": seconds} | {name: other.seconds for name, other in others.items()}


def padding(examples, config: TrainConfig, order=None) -> float:
    "The share of padding among all positions computed, with the batch in the order drawn or sorted by `order`."
    tokens = positions = 0
    for step in range(50):
        batch = [examples[i] for i in batch_indices(len(examples), step, config.batch_size, config.seed)]
        batch = sorted(batch, key=order, reverse=True) if order else batch
        for start in range(0, len(batch), config.micro_batch_size):
            part = [len(e) for e in batch[start:start + config.micro_batch_size]]
            tokens, positions = tokens + sum(part), positions + max(part) * len(part)
    return round(1 - tokens / positions, 3)


def ratio(slow, fast) -> float:
    "The median over the turns; the first, which allocates, doesn't count."
    return round(statistics.median(a / b for a, b in zip(slow[1:], fast[1:])), 2)


def report(seconds, examples, config: TrainConfig) -> dict:
    "Medians, tokens a second, and ratios against the Trainer."
    tokens = [sum(len(examples[i]) for i in batch_indices(len(examples), s, config.batch_size, config.seed)) for s in range(config.steps)]
    found = {f"{name}_seconds": round(statistics.median(taken[1:]), 2) for name, taken in seconds.items()}
    found |= {f"{name}_tokens_per_second": round(statistics.median(n / t for n, t in list(zip(tokens, seconds[name]))[1:]), 1)
              for name in ("fit", "trainer")}
    found |= {"speedup_vs_trainer": ratio(seconds["trainer"], seconds["fit"]),
              "speedup_on_its_micro_batches": ratio(seconds["trainer"], seconds["unsorted"]),
              "bucketing_gain": ratio(seconds["unsorted"], seconds["fit"])}
    return found | {"padding_unsorted": padding(examples, config), "padding_sorted": padding(examples, config, lambda e: (e.kind, len(e)))}


def memory(side: str, steps: int, size: int) -> float:
    "Peak memory in MB of a process that fine-tunes: this one."
    lm, tasks = world()
    config = TrainConfig(steps=steps, batch_size=size, micro_batch_size=size, checkpoint_every=steps + 1)
    if side == "fit":
        prepare(lm, SETTINGS)
        fit(lm, tasks[""], config, tempfile.mkdtemp(), "fit")
    else:
        trainer(peft_model(lm, side), lm, tasks[""], config).train()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peaks(steps: int, size: int) -> dict:
    "Peak memory of both sides, each in a process of its own."
    found = {}
    for side in ("fit", "trainer"):
        run = subprocess.run([sys.executable, __file__, "--memory", side, str(steps), str(size)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr[-2000:])
        found[f"{side}_peak_mb"] = round(float(run.stdout.split()[-1]))
    return found | {"peak_memory_ratio": round(found["fit_peak_mb"] / found["trainer_peak_mb"], 3), "memory_micro_batch": size}


def loss_difference(lm, examples) -> float:
    "Of the mean loss on a batch, between the two models in evaluation mode."
    batch, theirs = collate(examples[:4], lm.tokenizer.pad_token_id), peft_model(lm, "trainer").eval()
    with torch.no_grad():
        return abs(theirs(**batch).loss.item() - lm.token_losses(**batch).mean().item())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory(arguments.memory[0], *map(int, arguments.memory[1:])))
        return
    quick = arguments.quick
    result = {"benchmark": "sft", "quick": quick, "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}
    result |= peaks(1, 2) if quick else peaks(2, 16)
    print(result, flush=True)
    steps, batch, micro = (3, 4, 2) if quick else (6, 16, 4)
    config = TrainConfig(steps=steps, batch_size=batch, micro_batch_size=micro, checkpoint_every=steps + 1)
    for suffix, way in [("", "trainer")] if quick else [("", "trainer"), ("_mixed", "trainer"), ("", "frozen"), ("", "to_save")]:
        lm, tasks = world()
        if way == "trainer":
            result |= {"dtype": str(lm.dtype).removeprefix("torch."), "loss_difference" + suffix: loss_difference(lm, tasks[suffix])}
        seconds = race(lm, tasks[suffix], config, way)
        part = report(seconds, tasks[suffix], config) if way == "trainer" else {f"speedup_vs_{way}": ratio(seconds[way], seconds["fit"])}
        print(way, suffix or "_next", part, flush=True)
        result |= {name + suffix: value for name, value in part.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
