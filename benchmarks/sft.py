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
asked), `to_save` trains both whole matrices, as in the paper. Peak memory is that of a fork of this process, which has loaded the
model and nothing else. `--quick` takes fewer and smaller steps, of the first task, and only of `fit` and the first Trainer.

The last line is one JSON object."""

import argparse
import json
import logging
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
import warnings

import greenlet
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
    "A Trainer that stops after each of its steps until `step` asks for the next one. In the same thread: another one's OpenMP slows both."

    def __init__(self, model, lm, examples, config):
        from transformers import TrainerCallback
        here, self.seconds = greenlet.getcurrent(), []

        class Wait(TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                here.switch()

            def on_step_end(self, *args, **kwargs):
                here.switch()

        self.training = greenlet.greenlet(trainer(model, lm, examples, config, [Wait()]).train)
        self.training.switch()

    def step(self):
        began = time.perf_counter()
        self.training.switch()
        self.seconds.append(time.perf_counter() - began)

    def finish(self):
        "Let the Trainer, which has taken its last step, return, so that its memory is free."
        self.training.switch()


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


def race(lm, examples, config: TrainConfig, way: str, unsorted: bool) -> dict:
    "Seconds of each step: of `fit`, of the Trainer of `way`, and (if asked for) of our step on unsorted micro-batches."
    others, seconds, since = {way: Turns(peft_model(lm, way), lm, examples, config)}, [], [0.0]
    prepare(lm, SETTINGS)
    if unsorted:
        others["unsorted"] = Unsorted(lm, examples, config)

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
    found |= {"speedup_vs_trainer": ratio(seconds["trainer"], seconds["fit"])}
    if "unsorted" in seconds:
        found |= {"speedup_on_its_micro_batches": ratio(seconds["trainer"], seconds["unsorted"]),
                  "bucketing_gain": ratio(seconds["unsorted"], seconds["fit"])}
    return found | {"padding_unsorted": padding(examples, config), "padding_sorted": padding(examples, config, lambda e: (e.kind, len(e)))}


def memory(lm, examples, side: str, steps: int, size: int) -> float:
    "Peak memory in MB of this process, which fine-tunes."
    config = TrainConfig(steps=steps, batch_size=size, micro_batch_size=size, checkpoint_every=steps + 1)
    if side == "fit":
        prepare(lm, SETTINGS)
        fit(lm, examples, config, tempfile.mkdtemp(), "fit")
    else:
        trainer(peft_model(lm, side), lm, examples, config).train()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peaks(lm, examples, steps: int, size: int, threads: int) -> dict:
    "Peak memory of both sides, each in a fork. This process must not have started threads of its own: a fork wouldn't have them."
    found, forks = {}, multiprocessing.get_context("fork")

    def work(side, pipe):
        torch.set_num_threads(threads)
        pipe.send(memory(lm, examples, side, steps, size))

    for side in ("fit", "trainer"):
        receiver, sender = forks.Pipe(duplex=False)
        fork = forks.Process(target=work, args=(side, sender))
        fork.start()
        sender.close()
        found[f"{side}_peak_mb"] = round(receiver.recv())  # EOFError if it died
        fork.join()
    return found | {"peak_memory_ratio": round(found["fit_peak_mb"] / found["trainer_peak_mb"], 3), "memory_micro_batch": size}


def loss_difference(lm, examples) -> float:
    "Of the mean loss on a batch, between the two models in evaluation mode."
    batch, theirs = collate(examples[:4], lm.tokenizer.pad_token_id), peft_model(lm, "trainer").eval()
    with torch.no_grad():
        return abs(theirs(**batch).loss.item() - lm.token_losses(**batch).mean().item())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in less than 50 seconds")
    quick, threads = parser.parse_args().quick, torch.get_num_threads()
    result = {"benchmark": "sft", "quick": quick, "threads": threads, "load": round(os.getloadavg()[0], 1)}
    torch.set_num_threads(1)  # until the forks are made
    lm, tasks = world()
    result |= peaks(lm, tasks[""], *(1, 2) if quick else (2, 16), threads)
    print(result, flush=True)
    torch.set_num_threads(threads)
    steps, batch, micro = (3, 2, 2) if quick else (6, 16, 4)
    config = TrainConfig(steps=steps, batch_size=batch, micro_batch_size=micro, checkpoint_every=steps + 1)
    for suffix, way in [("", "trainer")] if quick else [("", "trainer"), ("_mixed", "trainer"), ("", "frozen"), ("", "to_save")]:
        lm = lm or world()[0]
        if way == "trainer":
            result |= {"dtype": str(lm.dtype).removeprefix("torch."), "loss_difference" + suffix: loss_difference(lm, tasks[suffix])}
        seconds = race(lm, tasks[suffix], config, way, unsorted=not quick)
        part = report(seconds, tasks[suffix], config) if way == "trainer" else {f"speedup_vs_{way}": ratio(seconds[way], seconds["fit"])}
        print(way, suffix or "_next", part, flush=True)
        result |= {name + suffix: value for name, value in part.items()}
        lm = None  # it has adapters now
    print(json.dumps(result))


if __name__ == "__main__":
    main()
