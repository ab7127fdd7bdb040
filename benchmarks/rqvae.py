"""How fast an RQ-VAE trains, and how good its semantic IDs are.

    python benchmarks/rqvae.py [--quick] [--catalogue FOLDER]

1. Time of a training step at the paper's sizes (1024 numbers an item, 4 levels of 256 codes, batches of 1024): `RQVAE` with the default
   settings and with the paper's whole recipe, against the same autoencoder without a quantizer (the floor: no quantizer can
   be faster) and around vector-quantize-pytorch's ResidualVQ with the same features (moving averages, restarts).
   All take turns in one process; the ratios are medians over the turns.
2. Items per second that are quantized with 3 levels of 8192 codes.
3. On a real catalogue (items.csv, and published_sids.json to compare with): usage, collisions before and after resolution, and how
   well semantic IDs keep the neighbours of the encoder's space. Skipped, and said so, if the folder isn't there. The
   comparison favours ours: our IDs come from the vectors that define the neighbours, the published ones from another encoder.

The last line is one JSON object. `--quick` takes fewer turns, and trains on titles alone for a short time."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from gti_nb.encode import encode_items
from gti_nb.quantizer import ResidualQuantizer, straight_through
from gti_nb.rqvae import RQVAE, RQVAEConfig, _mlp, _Training, quality_report, train_rqvae
from gti_nb.semantic_ids import SemanticIds, neighbour_auc, resolve

WIDTH, BATCH = 1024, 1024
SIZES = dict(levels=4, codebook_size=256, hidden=(1024, 512, 256), dropout=0.1, batch_size=BATCH, restart_after=20)
PAPER = dict(update="gradient", balanced_levels=(-1,), diversity=1e-4)


class Around(torch.nn.Module):
    "The autoencoder of `RQVAE` with `middle` between encoder and decoder: z to (z', extra loss)."

    def __init__(self, middle, config: RQVAEConfig):
        super().__init__()
        widths = [WIDTH, *config.hidden, config.code_dim]
        self.encoder, self.decoder = (_mlp(w, config.activation, config.dropout) for w in (widths, widths[::-1]))
        self.middle = middle

    def forward(self, vectors):
        z, extra = self.middle(self.encoder(vectors))
        return F.mse_loss(self.decoder(z), vectors) + extra


class Peer(torch.nn.Module):
    "vector-quantize-pytorch's residual quantizer, set up to do what ours does."

    def __init__(self, config: RQVAEConfig):
        super().__init__()
        from vector_quantize_pytorch import ResidualVQ

        self.vq = ResidualVQ(dim=config.code_dim, num_quantizers=config.levels, codebook_size=config.codebook_size,
                             decay=config.decay, commitment_weight=config.commitment, threshold_ema_dead_code=2,
                             rotation_trick=False)

    def forward(self, z):
        quantized, _, losses = self.vq(z)
        return quantized, losses.mean()


def plain_step(model, data, config: RQVAEConfig):
    "A function that does one step of training of `model`, which returns its loss."
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True)
    model.train()

    def step():
        rows = torch.randperm(len(data))[:BATCH]
        loss = model(data[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def our_step(data, config: RQVAEConfig):
    training = _Training(data, config)
    training.model.train()
    return training.step


def quantizer_step(z, config: RQVAEConfig):
    "What our quantizer alone adds to a step: forward, backward to `z`, moving averages, restarts."
    quantizer, generator = ResidualQuantizer(config.levels, config.codebook_size, config.code_dim), torch.Generator()
    quantizer.codebooks.requires_grad_(False)

    def step():
        found = quantizer(z)
        (straight_through(z, found.vectors).sum() + config.commitment * found.commitment_loss.mean()).backward()
        quantizer.average(found, config.decay)
        quantizer.restart(found, config.restart_after, generator)

    return step


def peer_step(z, config: RQVAEConfig):
    peer = Peer(config).train()

    def step():
        quantized, loss = peer(z)
        (quantized.sum() + loss).backward()

    return step


def in_turn(steps: dict, turns: int, each: int = 3) -> dict:
    "Seconds per step of each of `steps`, for each turn."
    for step in steps.values():
        step()
    seconds = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(each):
                step()
            seconds[name].append((time.perf_counter() - began) / each)
    return seconds


def speed(quick: bool) -> dict:
    torch.manual_seed(0)
    data, config = torch.randn(4 * BATCH, WIDTH), RQVAEConfig(**SIZES)
    steps = {"rqvae": our_step(data, config), "paper": our_step(data, RQVAEConfig(**SIZES, **PAPER)),
             "floor": plain_step(Around(lambda z: (z, 0.0), config), data, config),
             "vqp": plain_step(Around(Peer(config), config), data, config)}
    z = torch.randn(BATCH, config.code_dim, requires_grad=True)
    steps |= {"rqvae's quantizer": quantizer_step(z, config), "vqp's quantizer": peer_step(z, config)}
    seconds = in_turn(steps, turns=5 if quick else 25)
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(seconds[a], seconds[b]))
    for name, times in seconds.items():
        print(f"  {name:17} {1000 * statistics.median(times):7.1f} ms a step (from {1000 * min(times):.1f} to {1000 * max(times):.1f})")
    return {"floor_ratio": ratio("rqvae", "floor"), "floor_ratio_paper_recipe": ratio("paper", "floor"),
            "speedup_vs_vqp": ratio("vqp", "rqvae"), "quantizer_speedup_vs_vqp": ratio("vqp's quantizer", "rqvae's quantizer"),
            "step_ms": 1000 * statistics.median(seconds["rqvae"])}


def throughput(quick: bool) -> dict:
    model = RQVAE(384, RQVAEConfig(levels=3, codebook_size=8192)).eval()
    items = np.random.default_rng(0).standard_normal((8192 if quick else 65536, 384), dtype=np.float32)
    model.encode(items[:1024])
    began = time.perf_counter()
    model.encode(items)
    return {"items_per_second_3x8192": len(items) / (time.perf_counter() - began)}


def catalogue(folder: Path, quick: bool) -> dict:
    if not (folder / "items.csv").is_file():
        print(f"  skipped: there is no items.csv in {folder}; name a folder with --catalogue")
        return {}
    items = pd.read_csv(folder / "items.csv", dtype=str, keep_default_na=False)
    vectors = encode_items(items.assign(description="") if quick else items)
    config = CATALOGUE.model_copy(update={"steps": 300}) if quick else CATALOGUE
    began = time.perf_counter()
    model, history = train_rqvae(vectors, config)
    seconds, raw, size = time.perf_counter() - began, model.encode(vectors), config.codebook_size
    report = quality_report(raw, size)
    found = resolve(raw, size, lambda rows: model.distances(vectors[rows]), vectors,
                    reconstruction=lambda codes: model.reconstruction_error(vectors, codes))
    ours = SemanticIds(items.item_id.tolist(), found.codes, size)
    print(report.to_string(index=False), found.report.to_string(), sep="\n")
    result = {"usage": float((report.used / report.of).min()), "collision_rate_raw": report.attrs["collision_rate"],
              "collision_rate": ours.collision_rate, "training_seconds": seconds, "training_steps": config.steps,
              "reconstruction": found.report.after["reconstruction"], "neighbour_auc": neighbour_auc(vectors, ours.codes)}
    if (folder / "published_sids.json").is_file():
        published = SemanticIds.from_published(folder / "published_sids.json", items.item_id.tolist(), size)
        result |= {"published_collision_rate": published.collision_rate,
                   "published_usage": quality_report(published.codes, size).used.tolist(),
                   "published_neighbour_auc": neighbour_auc(vectors, published.codes)}
    return result | {"shuffled_neighbour_auc": neighbour_auc(vectors, ours.permuted(0).codes)}


# Chosen on this catalogue for few collisions (longer training has more, and loses less variance); the seed is not chosen.
CATALOGUE = RQVAEConfig(levels=3, codebook_size=256, hidden=(512, 256), code_dim=8, balanced_levels=(-1,), steps=800)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in less than 50 seconds")
    parser.add_argument("--catalogue", type=Path, default=Path(__file__).resolve().parents[2] / "shared/data/amazon_industrial",
                        help="a folder with items.csv (item_id, title, description) and perhaps published_sids.json")
    options, result = parser.parse_args(), {}
    for name, part in (("a training step", lambda: speed(options.quick)), ("large codebooks", lambda: throughput(options.quick)),
                       ("a catalogue", lambda: catalogue(options.catalogue, options.quick))):
        print(f"{name}:", flush=True)
        result |= part()
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}
    print(json.dumps({"benchmark": "rqvae", "quick": options.quick, "threads": torch.get_num_threads(), **rounded}))


if __name__ == "__main__":
    sys.exit(main())
