"""How fast the grounding engine is: a whole training step (forward, backward, clip, AdamW) on the embedded language model.

    python benchmarks/grounding.py [--quick]

Text to SID, 16 examples a step, 768 new tokens (3 levels of 256), films from the embedded catalogue, in the model's default dtype
on this machine. Against `SplitEngine` without kept prefixes and with them:

1. `masked`: Algorithm 1 of the paper, a dense masked gradient and an optimizer over the whole matrix;
2. `peft`: TrainableTokens on the model with the same tokens, by the model's own loss.

These two have the attention of transformers that is the faster one to train with on a CPU, "eager"; the split engine has
the one that `load_base` chooses, and runs within `packed`, as training does.

All get the same batches, padded alike, in the same dtype, and take turns in one process; a ratio is the median over the
turns of what two took for the same batch. Prompts have about 60 tokens, then about 120, then both directions are mixed, then there
are about 50: the films' own descriptions; longer ones go on with those of other films. New rows start at the mean, as in the paper. Besides: the largest difference of a gradient in float32; bytes of training state;
the time to add 24,576 tokens; and the floor, the multiplications that a step can't do without over the rate that this
machine reaches for a product of the model's shape (attention's own products, norms and memory traffic are left out).

The last line is one JSON object. `--quick` takes fewer turns and leaves out the last."""

import argparse
import copy
import json
import logging
import os
import statistics
import time
import warnings
from contextlib import ExitStack

import numpy as np
import torch

from _rate import matmul_rate
from gti_nb.data import load_dataset
from gti_nb.grounding import MaskedEngine, SplitEngine, cut
from gti_nb.initializers import extend
from gti_nb.prompts import collate, grounding_examples
from gti_nb.semantic_ids import SemanticIds
from gti_nb.training import trainable
from gti_nb.vocabulary import load_base, packed

LEVELS, CODES, BATCH = 3, 256, 16


def catalogue(size: int, longer: float):
    "Films; each description goes on with those of `longer` others on average, about 16 tokens each."
    films = load_dataset("embedded:movielens-100k").filter(min_rating=3, max_items=size).items.copy()
    texts, more = films.description.tolist(), [int((i + 1) * longer) - int(i * longer) for i in range(size)]
    films["description"] = [" ".join(texts[(i + k) % size] for k in range(more[i] + 1)) for i in range(size)]
    return films


def semantic_ids(films, levels: int, codes: int) -> SemanticIds:
    "Random codes: what a step costs doesn't depend on them."
    return SemanticIds(films.item_id.tolist(), np.random.default_rng(0).integers(0, codes, (len(films), levels)), codes)


def peft_model(lm):
    "peft's TrainableTokens for the new tokens of `lm`."
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import TrainableTokensConfig, get_peft_model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(lm.merge(), TrainableTokensConfig(token_indices=lm.new_ids, target_modules=["embed_tokens"]))


class Contender:
    "One way to take a training step, and how long its steps took."

    def __init__(self, model, loss):
        self.parameters, self.loss, self.seconds = list(trainable(model).values()), loss, []
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)

    def step(self, batch):
        began = time.perf_counter()
        self.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)


def contenders(lm, examples, stack) -> dict:
    "The four, each with rows of its own, after a first small step that allocates what they need; the split ones packed until `stack` ends."
    masked, split, kept = MaskedEngine(lm), SplitEngine(copy.deepcopy(lm), budget_bytes=0), SplitEngine(copy.deepcopy(lm))
    peer = peft_model(lm)
    for engine in (split, kept):
        stack.enter_context(packed(engine))
    for model in (masked.model, peer.base_model.model):
        model.set_attn_implementation("eager")
    found = {name: Contender(engine, lambda batch, engine=engine: engine.token_losses(**batch).mean())
             for name, engine in (("masked", masked), ("split", split), ("kept", kept))}
    found["peft"] = Contender(peer, lambda batch: peer(**batch).loss)
    found["kept"].engine = kept
    for contender in found.values():
        contender.step(collate(examples[:2], lm.tokenizer.pad_token_id))
    return found


def race(found, lm, examples, turns: int, seconds: float):
    "Steps in turns, at least one and at most `turns` while `seconds` last; the examples of each batch."
    rng, drawn = np.random.default_rng(0), []
    batches = [[examples[i] for i in rng.choice(len(examples), BATCH, replace=False)] for _ in range(turns)]
    found["kept"].engine.keep(list({e for batch in batches for e in batch}))
    for contender in found.values():
        contender.seconds = []
    began = time.perf_counter()
    while len(drawn) < turns and (not drawn or time.perf_counter() - began < seconds):
        drawn.append(batches[len(drawn)])
        for contender in found.values():
            contender.step(collate(drawn[-1], lm.tokenizer.pad_token_id))
    return drawn


def ratio(slow, fast) -> float:
    return round(statistics.median(a / b for a, b in zip(slow.seconds, fast.seconds)), 2)


def operations(lm, batch, kept: bool) -> float:
    "Two for each multiply-add that an exact step on `batch` can't do without."
    cuts = [cut(e.prompt_ids + e.answer_ids, (-100,) * len(e.prompt_ids) + e.answer_ids, lm.first_new_id) for e in batch]
    shared = len(os.path.commonprefix([prefix for prefix, _, _ in cuts]))
    backbone = sum(p.numel() for p in lm.model.base_model.layers.parameters())
    suffix = sum(len(s) for _, s, _ in cuts)
    head = max(len(lm.model.get_output_embeddings().weight), lm.first_new_id + lm.n_new) * lm.new_rows.shape[1]
    prefix = 0 if kept else sum(len(p) - shared for p, _, _ in cuts) * backbone + len(cuts) * head
    return 2 * (prefix + 2 * suffix * (backbone + head) + (suffix + len(cuts)) * 2 * lm.new_rows.numel())


def floors(lm, found, batches) -> dict:
    "How long the operations of a step must take, and how often that fits into the time it took."
    speed, result = matmul_rate(lm.model.base_model.layers[0].mlp.up_proj.weight, BATCH * 32), {}
    for name in ("split", "kept"):
        seconds = [operations(lm, batch, name == "kept") / speed for batch in batches]
        result |= {f"{name}_floor_seconds": round(statistics.median(seconds), 3),
                   f"{name}_over_floor": round(statistics.median(t / f for t, f in zip(found[name].seconds, seconds)), 2)}
    return {"matmul_gflops": round(speed / 1e9)} | result


def compare(lm, found, tasks, turns: int, seconds: float) -> dict:
    "The figures of each of `tasks` (suffix of their names -> examples)."
    result = {}
    for suffix, task in tasks.items():
        batches = race(found, lm, task, turns, seconds)
        part = {"tokens": round(float(np.mean([len(e) for batch in batches for e in batch])), 1), "turns": len(batches)}
        part |= {f"{name}_seconds": round(statistics.median(c.seconds), 3) for name, c in found.items()}
        part |= {f"speedup_vs_{peer}": ratio(found[peer], found["split"]) for peer in ("masked", "peft")}
        part |= {"cached_speedup": ratio(found["masked"], found["kept"]), "cached_speedup_vs_peft": ratio(found["peft"], found["kept"])}
        if not suffix:
            part |= floors(lm, found, batches)
        print(suffix or "_60", part, flush=True)
        result |= {name + suffix: value for name, value in part.items()}
    return result


def largest_difference(model, tokenizer, films) -> dict:
    "Of the gradient of a row between the engines, in float32, on a batch of both directions."
    lm = extend(copy.deepcopy(model).float(), tokenizer, semantic_ids(films, LEVELS, CODES), initializer="mean")
    examples = grounding_examples(lm.tokenizer, films[:BATCH // 2], semantic_ids(films, LEVELS, CODES), templates=["both"])
    masked, split = MaskedEngine(lm), SplitEngine(lm)
    for engine in (masked, split):
        engine.token_losses(**collate(examples, lm.tokenizer.pad_token_id)).mean().backward()
    dense = masked.matrices()[0].grad[lm.new_ids]
    return {"max_grad_diff": (dense - lm.new_rows.grad).abs().max().item(), "max_grad": round(dense.abs().max().item(), 3)}


def state_bytes(lm, examples) -> int:
    "Of everything that training with the split engine holds: parameters that train, gradients, moments."
    engine = SplitEngine(copy.deepcopy(lm), budget_bytes=0)
    parameters = list(trainable(engine).values())
    optimizer = torch.optim.AdamW(parameters)
    engine.token_losses(**collate(examples[:1], lm.tokenizer.pad_token_id)).mean().backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    gradients = [p.grad for p in engine.parameters() if p.grad is not None]
    return sum(t.nbytes for t in (*parameters, *gradients, *moments))


def add_tokens_seconds(model, tokenizer, films) -> dict:
    "To add 24,576 tokens (3 levels of 8,192) and give them rows."
    sids, found = semantic_ids(films, 3, 8192), {}
    for initializer in ("mean", "description_mean"):
        began = time.perf_counter()
        extend(model, tokenizer, sids, films, initializer=initializer)
        found[initializer] = time.perf_counter() - began
    return {"add_tokens_seconds": round(found["mean"], 2), "add_tokens_description_mean_seconds": round(found["description_mean"], 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    quick = parser.parse_args().quick
    turns, seconds = (3, 4.0) if quick else (15, 100.0)
    model, tokenizer = load_base(device="cpu")
    result = {"benchmark": "grounding", "quick": quick, "dtype": str(model.dtype).removeprefix("torch."),
              "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1), "new_tokens": LEVELS * CODES, "batch": BATCH}
    films = catalogue(200, 0)
    sids = semantic_ids(films, LEVELS, CODES)
    lm = extend(model, tokenizer, sids)
    make = lambda films, *directions: grounding_examples(lm.tokenizer, films, sids, directions, ["both"])
    examples = make(films, "text_to_sid")
    tasks = {"": make(catalogue(200, 0.5), "text_to_sid"), "_120": make(catalogue(200, 4), "text_to_sid"),
             "_mixed": make(films, "text_to_sid", "sid_to_text")} | ({} if quick else {"_50": examples})
    with ExitStack() as stack:
        result |= compare(lm, contenders(lm, examples, stack), tasks, turns, seconds)
    result["mixed_speedup"] = min(result["speedup_vs_masked_mixed"], result["speedup_vs_peft_mixed"])
    result |= {"state_bytes": state_bytes(lm, examples), "state_bytes_wanted": lm.n_new * lm.new_rows.shape[1] * 16}
    result |= largest_difference(model, tokenizer, films) | add_tokens_seconds(model, tokenizer, films)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
