"""How time and memory grow with items, events, codes and beams, beside what `gti_nb.costs` says of it.

    python benchmarks/scale.py [--quick]

Catalogues are made up: a normal vector and a random text for each item, 20 events for each of n / 10 users. A table row is one size;
seconds are the best of two, memory is what the arrays or the tensors hold. `exponent` is the growth between the last two sizes: 1 means
twice the size, twice the time. Beams and codes are measured on a random model of two layers, by the FLOPs of its formula: if `exponent` against
FLOPs is near 1, the formula describes the growth. What the plan can't derive from a formula, seconds an event, an item and a list, stands
in the last line: `gti_nb.plan.HOST` has these constants from this script, rounded up.

The last line is one JSON object."""

import argparse
import json
import math
import tempfile
import time

import numpy as np
import pandas as pd
import torch

from gti_nb.costs import rqvae_flops, search_flops, shape_of
from gti_nb.data import Dataset, leave_one_out, load_dataset
from gti_nb.decoding import beam_search
from gti_nb.evaluation import popularity, predictions_table
from gti_nb.rqvae import RQVAE, RQVAEConfig
from gti_nb.semantic_ids import SemanticIds, random_codes, resolve
from gti_nb.vocabulary import ExtendedLM, tiny_model


def best(work, times: int = 2):
    "Seconds of the fastest of a few calls, and what the last one returned."
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        value = work()
        seconds.append(time.perf_counter() - began)
    return min(seconds), value


def catalogue(n: int) -> Dataset:
    "A data set of `n` items, n / 10 users, and 20 events for each of them."
    rng, users = np.random.default_rng(0), max(1, n // 10)
    items = pd.DataFrame({"item_id": [f"i{k}" for k in range(n)], "title": [f"Thing {k}" for k in range(n)], "description": "A thing. " * 10})
    events = pd.DataFrame({"user_id": np.repeat([f"u{k}" for k in range(users)], 20), "timestamp": np.tile(np.arange(20), users),
                           "item_id": items.item_id.to_numpy()[rng.integers(n, size=20 * users)]})
    return Dataset("made up", items, events)


def of_items(n: int) -> dict:
    "Data, quantizer, collisions and trie of a catalogue of `n` items."
    made = catalogue(n)

    def prepare():
        with tempfile.TemporaryDirectory() as folder:
            made.save(folder)
            return leave_one_out(load_dataset(folder).filter())
    data, splits = best(prepare)
    config, vectors = RQVAEConfig(levels=3, codebook_size=256, hidden=(128,)), np.random.default_rng(0).normal(size=(n, 64)).astype(np.float32)
    model, rows = RQVAE(64, config), torch.from_numpy(vectors[:config.batch_size])
    step, _ = best(lambda: model(rows)[0]["total"].backward())
    codes = random_codes(n, 3, 256)
    codes[n // 10:n // 5] = codes[:n // 5 - n // 10]  # a tenth collides
    collisions, found = best(lambda: resolve(codes, 256, lambda some: model.distances(vectors[some]), vectors), 1)
    sids = SemanticIds(made.items.item_id.tolist(), found.codes, 256)
    trie, _ = best(lambda: SemanticIds(sids.item_ids, sids.codes, 256).trie, 1)
    users = splits.test.user_id.tolist()
    lists, _ = best(lambda: predictions_table(users, [popularity(splits.train, 20)] * len(users)))
    return {"items": n, "data": data, "rqvae_step": step, "rqvae_gflops": rqvae_flops(64, config, n) / 1e9, "collisions": collisions, "trie": trie,
            "lists": lists, "events": len(made.interactions), "users": len(users), "vectors_mb": vectors.nbytes / 1e6, "codes_mb": codes.nbytes / 1e6}


def of_search(beams: int, size: int) -> dict:
    "A search with `beams` for SIDs of 3 levels of `size` codes, on a small random model."
    model, tokenizer = tiny_model(["Which item comes next?"], hidden_size=128)
    sids = SemanticIds([f"i{k}" for k in range(4000)], random_codes(4000, 3, size), size)
    lm = ExtendedLM(model, tokenizer, sids.token_names, torch.randn(3 * size, 128) * 0.02)
    prompts = [list(range(3, 43))] * 16
    beam_search(lm, prompts[:1], sids, beams, label="")
    seconds, _ = best(lambda: beam_search(lm, prompts, sids, beams, label=""))
    flops = search_flops(shape_of(model.config), 16, 40, beams, 3, size, len(tokenizer) + 3 * size)
    return {"beams": beams, "K": size, "seconds": seconds, "gflops": flops / 1e9, "rows_mb": 16 * 3 * size * 128 / 1e6}


def exponent(table: pd.DataFrame, column: str, against: str) -> float:
    "The growth of `column` between the last two rows, as a power of that of `against`."
    (a, b), (x, y) = table[column].tail(2), table[against].tail(2)
    return float(math.log(b / a) / math.log(y / x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller catalogues")
    quick = parser.parse_args().quick
    items = pd.DataFrame([of_items(n) for n in ((300, 1200) if quick else (2000, 20_000, 200_000))])
    beams = pd.DataFrame([of_search(b, 64) for b in ((10, 40) if quick else (10, 20, 40, 80, 160))])
    codes = pd.DataFrame([of_search(20, k) for k in ((32, 256) if quick else (32, 256, 2048, 8192))])
    with pd.option_context("display.width", 200, "display.max_columns", None):
        for title, table in (("catalogue", items), ("beams", beams), ("codes a level", codes)):
            print(f"{title}\n{table.round(4).to_string(index=False)}\n")
    last = items.iloc[-1]
    result = {"benchmark": "scale", "quick": quick, "data_seconds_an_event": last.data / last.events, "collisions_seconds_an_item": last.collisions / last["items"],
              "seconds_a_list": last.lists / last.users, "data_exponent": exponent(items, "data", "events"),
              "collisions_exponent": exponent(items, "collisions", "items"), "trie_exponent": exponent(items, "trie", "items"),
              "beams_exponent_by_flops": exponent(beams, "seconds", "gflops"), "codes_exponent_by_flops": exponent(codes, "seconds", "gflops")}
    print(json.dumps({name: round(float(v), 9) if isinstance(v, float) else v for name, v in result.items()}))


if __name__ == "__main__":
    main()
