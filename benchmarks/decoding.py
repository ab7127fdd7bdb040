"""How fast constrained beam search is: `beam_search` against transformers' `generate` with prefix_allowed_tokens_fn.

    python benchmarks/decoding.py [--quick]

1. The embedded language model in float32, 76-token prompts, 3,000 items with SIDs of 4 levels of 256 codes, 20 and 100 beams. The
   hook of `generate` is a dictionary from beginnings to the tokens that may follow. A turn is one call of each: `beam_search`
   for 8 users, as it is meant to be used; for the first of them alone; and `generate` for that one. Seconds are per user, and
   `speedup` and `speedup_alone` are medians over the turns. `generate` repeats a prompt for each beam, so its call with one
   user is large already; the full run also calls it with 4 users, to show that this wouldn't help it (`generate_4_users`: the
   time per user with one user over that with 4). `identical`: the same beams, with scores to 1e-4, but for ties at this tolerance.
   The floor is the multiplications that an exact search with shared prompts can't do without, over the rate that this machine
   reaches for a product of the model's shape; attention's own products, norms and memory traffic are left out.
2. Milliseconds that the trie takes on one thread for a step of 100 beams (median over the levels after the first), by the number of SIDs.
   `trie_growth` is the growth from the smallest to the largest number, `log_growth` that of their logarithms, and
   `trie_build_seconds` what it takes to make the largest.

The last line is one JSON object. `--quick` takes fewer turns, and only 4 users at once with 100 beams."""

import argparse
import json
import math
import os
import statistics
import time
from collections import defaultdict

import numpy as np
import torch

from _rate import matmul_rate
from gti_nb.decoding import beam_search
from gti_nb.initializers import extend
from gti_nb.prompts import retrieval_example
from gti_nb.semantic_ids import SemanticIds, Trie
from gti_nb.vocabulary import load_base

LEVELS, CODES, ITEMS, TOKENS, USERS, TOLERANCE = 4, 256, 3000, 76, 8, 1e-4


def semantic_ids() -> SemanticIds:
    "Distinct random codes, more often small ones than large ones, so that branches differ in size as in real catalogues."
    rng = np.random.default_rng(0)
    codes = np.unique((CODES * rng.random((2 * ITEMS, LEVELS)) ** 2).astype(int), axis=0)
    codes = codes[np.sort(rng.permutation(len(codes))[:ITEMS])]
    return SemanticIds([f"item {k}" for k in range(len(codes))], codes, CODES)


def prompts(lm, sids, users: int) -> list[list[int]]:
    "The last 76 tokens of questions with eight items."
    rng = np.random.default_rng(1)
    questions = [retrieval_example(lm.tokenizer, sids, rng.choice(sids.item_ids, 8).tolist()) for _ in range(users)]
    return [list(question.prompt_ids)[-TOKENS:] for question in questions]


class Generate:
    "transformers' beam search over the catalogue: codes [users, beams, L] and scores [users, beams] of `prompts`."

    def __init__(self, lm, sids):
        self.model, self.first, follow = lm.merge(), lm.first_new_id + CODES * np.arange(LEVELS), defaultdict(set)
        for row in (sids.unique + self.first).tolist():
            for n, token in enumerate(row):
                follow[tuple(row[:n])].add(token)
        self.follow = {beginning: sorted(tokens) for beginning, tokens in follow.items()}

    def __call__(self, prompts, beams: int):
        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=beams, num_return_sequences=beams, max_new_tokens=LEVELS,
            prefix_allowed_tokens_fn=lambda _, so_far: self.follow.get(tuple(so_far[TOKENS:].tolist()), [0]), do_sample=False,
            length_penalty=0.0, early_stopping=False, repetition_penalty=1.0, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True)
        codes = out.sequences[:, TOKENS:].numpy() - self.first
        return codes.reshape(len(prompts), beams, LEVELS), out.sequences_scores.view(len(prompts), beams).numpy()


def identical(codes, scores, their_codes, their_scores) -> bool:
    "The same beams [beams, L], each with the same score to `TOLERANCE`? Beams that tie with the last one may differ."
    ours, theirs = ({tuple(c): s for c, s in zip(both[0].tolist(), both[1])} for both in ((codes, scores), (their_codes, their_scores)))
    cut = min(scores.min(), their_scores.min()) + 2 * TOLERANCE
    return len(ours) == len(theirs) == len(codes) and all(
        abs(a.get(code, -math.inf) - b.get(code, -math.inf)) <= TOLERANCE
        for a, b in ((ours, theirs), (theirs, ours)) for code, score in a.items() if score > cut)


def timed(work):
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def race(lm, sids, generate, beams: int, users: int, turns: int, together: int) -> tuple[dict, bool]:
    """Seconds per user of each way, a list with one number a turn; and whether all beams were the same.

    `users` are decoded at once by `beam_search`; in `together` of the `turns`, `generate` is also called for 4 of them."""
    seconds, same = defaultdict(list), True
    asked = prompts(lm, sids, turns + users)
    for turn in range(turns):
        several, first = asked[turn:turn + users], asked[turn:turn + 1]
        took, ours = timed(lambda: beam_search(lm, several, sids, beams, users))
        seconds["ours"].append(took / users)
        took, theirs = timed(lambda: generate(first, beams))
        seconds["generate"].append(took)
        took, alone = timed(lambda: beam_search(lm, first, sids, beams))
        seconds["alone"].append(took)
        same &= all(identical(found.codes[0], found.scores[0], theirs[0][0], theirs[1][0]) for found in (ours, alone))
        if turn < together:
            took, theirs = timed(lambda: generate(several[:4], beams))
            seconds["generate_4_users"].append(took / 4)
            same &= all(identical(*both) for both in zip(ours.codes, ours.scores, *theirs))
    return seconds, same


def operations(lm, beams: int) -> float:
    "Two for each multiply-add, for one user: the prompt and the beams of all levels but the last, and the head after each."
    backbone = sum(p.numel() for p in lm.model.base_model.layers.parameters())
    head = max(len(lm.model.get_output_embeddings().weight), lm.first_new_id + lm.n_new) * lm.new_rows.shape[1]
    read = (LEVELS - 1) * beams
    return 2 * ((TOKENS + read) * backbone + (1 + read) * head)


def search(quick: bool) -> dict:
    model, tokenizer = load_base(device="cpu", dtype="float32")
    model.set_attn_implementation("sdpa")  # the faster one for both
    sids = semantic_ids()
    lm = extend(model, tokenizer, sids, initializer="random_vocab")
    generate, result, same = Generate(lm, sids), {}, True
    beam_search(lm, prompts(lm, sids, 1), sids, 2)
    generate(prompts(lm, sids, 1), 2)
    speed = matmul_rate(lm.model.base_model.layers[0].mlp.up_proj.weight, USERS * TOKENS)
    for beams, users, turns, together in ((20, USERS, 2, 0), (100, 4, 1, 0)) if quick else ((20, USERS, 9, 2), (100, USERS, 5, 1)):
        with torch.no_grad():
            seconds, equal = race(lm, sids, generate, beams, users, turns, together)
        same &= equal
        ratio = lambda a, b: statistics.median(x / y for x, y in zip(seconds[a], seconds[b]))
        floor = operations(lm, beams) / speed
        part = {"speedup": ratio("generate", "ours"), "speedup_alone": ratio("generate", "alone"), "floor_seconds": floor,
                "over_floor": statistics.median(seconds["ours"]) / floor}
        if together:
            part["generate_4_users"] = ratio("generate", "generate_4_users")
        part |= {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()}
        result |= {f"{name}_{beams}": value for name, value in part.items()}
        print(f"  {beams} beams: " + ", ".join(f"{name} {value:.3g}" for name, value in part.items()), flush=True)
    return result | {"identical": same, "matmul_gflops": speed / 1e9}


def step_ms(trie: Trie, beams: int = 100, walks: int = 20) -> float:
    "Milliseconds of a step of `beams` beams on random paths: the median over walks and levels after the first."
    generator, times = torch.Generator().manual_seed(0), []
    for _ in range(walks):
        lo, hi = (torch.tensor([end]) for end in trie.root())
        for level in range(trie.levels):
            took, (allowed, los, his) = timed(lambda: trie.step(lo, hi, level))
            times += [1000 * took] if level else []
            legal = allowed.flatten().nonzero()[:, 0]
            kept = legal[torch.randint(len(legal), (beams,), generator=generator)]
            lo, hi = los.flatten()[kept], his.flatten()[kept]
    return statistics.median(times)


def tries(quick: bool) -> dict:
    built, sizes = {}, [10**4, 10**5, 10**6, 10**7]
    for size in sizes:
        codes = np.random.default_rng(0).integers(CODES, size=(size, LEVELS))
        took, built[size] = timed(lambda: Trie(codes, CODES))
        print(f"  {len(built[size]):,} SIDs: built in {took:.1f} s", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rounds = [{size: step_ms(trie) for size, trie in built.items()} for _ in range(3 if quick else 9)]
    torch.set_num_threads(threads)
    found = {size: statistics.median(r[size] for r in rounds) for size in sizes}
    growth = statistics.median(r[sizes[-1]] / r[sizes[0]] for r in rounds)
    print("  a step: " + ", ".join(f"{ms:.3f} ms ({size:,})" for size, ms in found.items()), flush=True)
    return {"trie_ms": {str(size): round(ms, 4) for size, ms in found.items()}, "trie_growth": growth,
            "trie_build_seconds": took, "log_growth": math.log(sizes[-1]) / math.log(sizes[0])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in less than 50 seconds")
    quick, result = parser.parse_args().quick, {}
    os.environ["GTI_PROGRESS"] = "none"
    for name, part in (("beam search", search), ("the trie", tries)):
        print(f"{name}:", flush=True)
        result |= part(quick)
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}
    print(json.dumps({"benchmark": "decoding", "quick": quick, "threads": torch.get_num_threads(),
                      "load": round(os.getloadavg()[0], 1), **rounded}))


if __name__ == "__main__":
    main()
