"""Grounding: both engines give the same numbers, in every setting; nothing but the new rows moves; several processes equal one."""

import os

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from gti_nb.core import UserError
from gti_nb.grounding import (MaskedEngine, SplitEngine, _worth_keeping, frozen_hash, ground, grounding_accuracy, probes,
                              sid_accuracy, snapshots)
from gti_nb.initializers import extend
from gti_nb.processes import launch
from gti_nb.prompts import TEXT_TO_SID, collate, grounding_examples
from gti_nb.semantic_ids import SemanticIds
from gti_nb.sft import prepare
from gti_nb.training import TrainConfig, trainable
from gti_nb.vocabulary import ExtendedLM, _attention, tiny_model

ITEMS = pd.DataFrame({"item_id": [str(i) for i in range(12)],
                      "title": [f"The {word} Story" for word in "Toy Long Sad Odd Old New Red Blue Short Last First <a_1>".split()],
                      "description": [f"A film of {1930 + 7 * i}, number {i}. " + "It is long. " * (i % 4) for i in range(12)]})
TEXTS = (ITEMS.title + " " + ITEMS.description).tolist()
STEPS = TrainConfig(steps=8, batch_size=16, micro_batch_size=8, learning_rate=1e-2, weight_decay=0.1, clip=0.05)


def catalogue(k: int = 8) -> SemanticIds:
    return SemanticIds(ITEMS.item_id.tolist(), np.random.default_rng(0).integers(0, k, (len(ITEMS), 3)), k)


def model_of(k: int = 8, **kwargs):
    return extend(*tiny_model(TEXTS, **kwargs), catalogue(k), initializer="random")


def examples_of(lm, k: int = 8, **kwargs):
    return grounding_examples(lm.tokenizer, ITEMS, catalogue(k), **kwargs)


def results(engine, batch, rows):
    "Losses, and the gradient of `rows()` for losses that count differently."
    losses = engine.token_losses(**batch)
    (losses * torch.linspace(0.5, 1.5, len(losses))).mean().backward()
    return losses.detach(), torch.cat([r.float() for r in rows()])


def by_mask(lm, batch):
    engine = MaskedEngine(lm)
    return results(engine, batch, lambda: [m.grad[lm.new_ids] for m in engine.matrices()])


def by_split(lm, batch, kept=(), **kwargs):
    engine = SplitEngine(lm, **kwargs)
    engine.keep(kept)
    lm.zero_grad()
    return results(engine, batch, lambda: [r.grad for r in engine.rows()])


def assert_same(one, other, tolerance=1e-5):
    for a, b in zip(one, other):
        assert (a - b).abs().max() <= tolerance and a.abs().max() > 1e-3


# --- the same numbers ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("k, spare_rows", [(2, 7), (8, 7), (8, 0)])  # 6 new tokens on 7 spare rows; 24 on 7; 24 on none
def test_engines_agree_on_mixed_batches(tied, k, spare_rows):
    lm = model_of(k, tied=tied, spare_rows=spare_rows)
    examples = examples_of(lm, k)
    batch = collate(examples[5:37], lm.tokenizer.pad_token_id)
    masked = by_mask(lm, batch)
    assert_same(masked, by_split(lm, batch))
    assert_same(masked, by_split(lm, batch, kept=examples))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("template", TEXT_TO_SID)
@pytest.mark.parametrize("direction", ["text_to_sid", "sid_to_text"])
def test_engines_agree_on_each_template(tied, template, direction):
    lm = model_of(tied=tied)
    batch = collate(examples_of(lm, directions=[direction], templates=[template]), lm.tokenizer.pad_token_id)
    assert_same(by_mask(lm, batch), by_split(lm, batch))


def test_padding_on_the_left_changes_nothing():
    lm = model_of()
    batch = collate(examples_of(lm)[:16], lm.tokenizer.pad_token_id)
    left = {}
    for name, values in batch.items():
        left[name] = torch.stack([row.roll(int((mask == 0).sum())) for row, mask in zip(values, batch["attention_mask"])])
    assert (left["attention_mask"][:, 0] == 0).any() and (left["attention_mask"][:, -1] == 1).all()
    assert_same(by_split(lm, batch), by_split(lm, left), 0)
    assert_same(by_split(lm, batch), (lm.token_losses(**left).detach(),))


def test_text_between_and_before_new_tokens():
    "Not only grounding's own prompts: new tokens in a question, before old and new answers."
    from gti_nb.prompts import Example, render
    lm = model_of()
    asked = [render(lm.tokenizer, "After <a_1><b_2><c_3> and <a_0><b_0><c_1> comes", answer) for answer in ("<a_3><b_1><c_1>", "a film", "")]
    old = [render(lm.tokenizer, "What is a film?", "A story"), render(lm.tokenizer, "Why?", "<a_2> is")]
    batch = collate(asked + old, lm.tokenizer.pad_token_id)
    assert_same(by_mask(lm, batch), by_split(lm, batch))
    with pytest.raises(UserError, match="put text before it"):
        by_split(lm, collate([Example((lm.new_ids[0],), (5, 6))], lm.tokenizer.pad_token_id))


@pytest.mark.parametrize("tied", [True, False])
def test_engines_agree_with_peft(tied):
    "peft's TrainableTokens with the model's own loss, in the embedding and, untied, in the head."
    from peft import TrainableTokensConfig, get_peft_model
    lm = model_of(tied=tied)
    batch = collate(examples_of(lm)[:16], lm.tokenizer.pad_token_id)
    modules = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    peer = get_peft_model(lm.merge(), TrainableTokensConfig(token_indices=lm.new_ids, target_modules=modules))
    loss = peer(**batch).loss
    loss.backward()
    engine = SplitEngine(lm)
    own = engine.token_losses(**batch).mean()
    own.backward()
    theirs = [p.grad for p in peer.parameters() if p.requires_grad]
    assert_same((own.detach()[None], *(r.grad for r in engine.rows())), (loss.detach()[None], *theirs))


def test_bfloat16_backbone():
    lm = model_of()
    lm.model.bfloat16()
    batch = collate(examples_of(lm)[:32], lm.tokenizer.pad_token_id)
    exact = by_split(model_of(), batch)
    rounded = by_split(lm, batch)
    assert lm.new_rows.dtype == lm.new_rows.grad.dtype == torch.float32
    assert (rounded[0] - exact[0]).abs().max() < 0.05
    assert torch.cosine_similarity(rounded[1].flatten(), exact[1].flatten(), 0) > 0.999


def quantized(folder):
    "A tiny model in bitsandbytes' nf4, its tokenizer, and the same model with the same rounded weights in float32."
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    plain, tokenizer = tiny_model(TEXTS)
    plain.save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    with torch.no_grad():
        for name, module in plain.named_modules():
            packed = model.get_submodule(name)
            if isinstance(module, nn.Linear) and packed.weight.dtype == torch.uint8:
                module.weight.copy_(dequantize_4bit(packed.weight.data, packed.weight.quant_state))
    return model, tokenizer, plain


def test_four_bit_backbone(tmp_path):
    "The numbers of the float32 model that has the rounded weights; none of them moves."
    model, tokenizer, plain = quantized(tmp_path / "base")
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    lm, reference = (extend(m, tokenizer, catalogue(), initializer="random") for m in (model, plain))
    examples = examples_of(lm)
    batch = collate(examples[:24], lm.tokenizer.pad_token_id)
    assert_same(by_mask(reference, batch), by_split(lm, batch, kept=examples[:6]))
    before = lm.new_rows.detach().clone()
    ground(lm, examples, STEPS, tmp_path)  # checks the hash over everything else
    assert not torch.equal(before, lm.new_rows)


def test_four_bit_weights_repacked_for_inference_are_refused(tmp_path):
    model, tokenizer, _ = quantized(tmp_path / "base")
    with torch.no_grad():
        model.eval()(torch.tensor([[1, 2]]))
    if not getattr(model.model.layers[0].mlp.up_proj.weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("bitsandbytes doesn't repack on this CPU")
    lm = extend(model, tokenizer, catalogue(), initializer="random")
    with pytest.raises(UserError, match="load the base model again"):
        ground(lm, examples_of(lm), STEPS, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_grouped_attention_gives_what_transformers_gives(tied):
    "The attention of models on a CPU, behind a cache and without one."
    lm = model_of(tied=tied)
    examples = examples_of(lm)
    batch = collate(examples[5:37], lm.tokenizer.pad_token_id)
    lm.model.set_attn_implementation("eager")
    plain = by_mask(lm, batch)
    lm.model.set_attn_implementation(_attention(lm.model.config, lm.device))
    assert lm.model.config._attn_implementation == "grouped"
    for found in (by_mask(lm, batch), by_split(lm, batch), by_split(lm, batch, kept=examples)):
        assert_same(plain, found)


def test_dropout_is_off():
    lm = model_of()
    for layer in lm.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    batch = collate(examples_of(lm)[:8], lm.tokenizer.pad_token_id)
    lm.train()
    noisy = lm.token_losses(**batch)
    for engine in (MaskedEngine(lm), SplitEngine(lm)):
        engine.train()
        assert not any(module.training for module in engine.modules())
        assert torch.equal(engine.token_losses(**batch), engine.token_losses(**batch))
    assert (noisy - SplitEngine(lm).train().token_losses(**batch)).abs().max() > 1e-3


def test_pull_is_the_gradient_of_the_penalty():
    lm = model_of(tied=False)
    batch = collate(examples_of(lm)[:8], lm.tokenizer.pad_token_id)
    for engine in (MaskedEngine(lm, pull=0.7), SplitEngine(lm, pull=0.7)):
        free = type(engine)(lm)
        with torch.no_grad():
            for matrix in (engine.matrices() if isinstance(engine, MaskedEngine) else engine.rows()):
                matrix += 0.01
            for matrix in (free.matrices() if isinstance(engine, MaskedEngine) else ()):
                matrix += 0.01
        losses, without = engine.token_losses(**batch), free.token_losses(**batch)
        assert torch.equal(losses, without)
        parameters = [list(trainable(e).values()) for e in (engine, free)]
        pulled, plain = (torch.autograd.grad(l.mean(), p) for l, p in zip((losses, without), parameters))
        for a, b in zip(pulled, plain):
            moved = (a - b)[lm.new_ids] if isinstance(engine, MaskedEngine) else a - b
            assert (moved - 2 * 0.7 * 0.01).abs().max() < 1e-5


# --- work left out -------------------------------------------------------------------------------------------------------

@pytest.fixture
def positions(monkeypatch):
    "How many positions have gone through the backbone, with gradients (True) and without."
    counted, hidden = {True: 0, False: 0}, ExtendedLM.hidden

    def count(lm, ids, *args, **kwargs):
        counted[torch.is_grad_enabled()] += ids.numel()
        return hidden(lm, ids, *args, **kwargs)

    monkeypatch.setattr(ExtendedLM, "hidden", count)
    return counted


def test_with_kept_prefixes_only_the_new_tokens_run(positions):
    lm = model_of()
    examples = examples_of(lm, directions=["text_to_sid"])[:8]
    engine = SplitEngine(lm)
    engine.keep(examples)
    positions[False] = 0
    engine.token_losses(**collate(examples, lm.tokenizer.pad_token_id))
    assert positions == {True: 8 * 3, False: 0}


def test_the_instruction_runs_once(positions):
    lm = model_of()
    examples = examples_of(lm, directions=["text_to_sid"], templates=["title"])
    engine, instruction = SplitEngine(lm, budget_bytes=0), os.path.commonprefix([e.prompt_ids for e in examples])
    assert len(instruction) > 20
    for _ in range(3):
        engine.token_losses(**collate(examples, lm.tokenizer.pad_token_id))
    rest = max(len(e.prompt_ids) for e in examples) - len(instruction)
    assert positions[False] <= len(instruction) + 3 * len(examples) * rest


def test_sid_to_text_prompts_share_their_prefix():
    lm = model_of()
    examples = examples_of(lm, directions=["sid_to_text"])
    engine = SplitEngine(lm)
    engine.keep(examples)
    assert len(engine.kept) == 2  # two templates begin alike, and the item comes after that


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_budget_is_kept_and_changes_no_result(share):
    lm = model_of()
    examples = examples_of(lm)
    whole = SplitEngine(lm)
    whole.keep(examples)
    budget = int(share * whole.kept_bytes)
    engine = SplitEngine(lm, budget_bytes=budget)
    report = engine.keep(examples)
    held = sum(prefix.cache.untyped_storage().nbytes() for prefix in engine.kept.values())
    assert held == engine.kept_bytes <= budget and report.startswith(f"{len(engine.kept)} of {len(whole.kept)} prefixes kept")
    assert (len(engine.kept) > 0) == (share > 0) and (len(engine.kept) < len(whole.kept)) == (share < 1)
    batch = collate(examples[:24], lm.tokenizer.pad_token_id)
    assert_same((whole.token_losses(**batch).detach(),), (engine.token_losses(**batch).detach(),))


def test_only_what_comes_up_again_is_kept():
    few = TrainConfig(steps=3, batch_size=4)
    assert _worth_keeping(list(range(12)), few) == []
    assert sorted(_worth_keeping(list(range(6)), few)) == list(range(6))


def test_training_holds_four_numbers_a_value():
    lm = model_of()
    engine = SplitEngine(lm)
    optimizer = torch.optim.AdamW(trainable(engine).values())
    engine.token_losses(**collate(examples_of(lm)[:4], lm.tokenizer.pad_token_id)).mean().backward()
    optimizer.step()
    [parameter] = trainable(engine).values()
    moments = [t for t in optimizer.state[parameter].values() if t.ndim]
    assert sum(t.nbytes for t in (parameter, parameter.grad, *moments)) == lm.n_new * 64 * 16
    assert all(p.grad is None for p in lm.model.parameters())


# --- training ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [True, False])
def test_nothing_else_moves(tmp_path, tied):
    lm = model_of(tied=tied)
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    ground(lm, examples_of(lm), STEPS, tmp_path)
    moved = {name for name, tensor in lm.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == ({"new_rows"} if tied else {"new_rows", "head_rows"})


@pytest.mark.parametrize("tied", [True, False])
def test_engines_end_alike(tmp_path, tied):
    "The same rows after some steps with clipping, without weight decay, which the masked engine can't have."
    config = TrainConfig(**STEPS.model_dump() | {"weight_decay": 0.0})
    found = []
    for engine in ("split", "masked"):
        lm = model_of(tied=tied)
        history = ground(lm, examples_of(lm), config, tmp_path / engine, engine=engine)
        found.append([lm.new_rows.detach(), *([] if tied else [lm.head_rows.detach()]), torch.tensor(history.to_numpy())])
    for one, other in zip(*found):
        assert (one - other).abs().max() < 1e-3
    start = model_of(tied=tied).new_rows.detach()
    assert (found[0][0] - start).abs().max() > 0.02


def test_masked_refuses_to_have_moved_old_rows(tmp_path):
    lm = model_of()
    with pytest.raises(UserError, match="weight decay does that"):
        ground(lm, examples_of(lm), STEPS, tmp_path, engine="masked")


def test_a_hash_sees_one_bit():
    lm = model_of()
    before = frozen_hash(lm.model)
    with torch.no_grad():
        lm.model.model.norm.weight[3] += 1e-7
    assert frozen_hash(lm.model) != before
    assert frozen_hash(lm.merge(), lm.new_ids) == frozen_hash(extend_like(lm), lm.new_ids) != frozen_hash(extend_like(lm))


def extend_like(lm):
    "`lm` merged, with other new rows."
    merged = lm.merge()
    with torch.no_grad():
        merged.get_input_embeddings().weight[lm.new_ids] = 1.0
    return merged


def test_no_movement_is_an_error(tmp_path):
    lm = model_of()
    with pytest.raises(UserError, match="no new row moved"):
        ground(lm, examples_of(lm), TrainConfig(steps=2, batch_size=4, learning_rate=1e-30), tmp_path)


@pytest.mark.parametrize("engine", ["split", "masked"])
def test_adapters_are_refused(tmp_path, engine):
    lm = model_of()
    prepare(lm)
    with pytest.raises(UserError, match="ground before adapters are added"):
        ground(lm, examples_of(lm), STEPS, tmp_path, engine=engine)


@pytest.mark.parametrize("direction", ["text_to_sid", "sid_to_text"])
def test_one_direction_alone(tmp_path, direction):
    lm = model_of()
    examples = examples_of(lm, directions=[direction])
    history = ground(lm, examples, STEPS, tmp_path, probe=lambda lm: grounding_accuracy(lm, examples, catalogue()))
    assert set(history.columns) == {"step", "loss", direction}
    assert ("exact" in probes(tmp_path)) == (direction == "text_to_sid")
    assert ("text_tokens" in probes(tmp_path)) == (direction == "sid_to_text")


@pytest.mark.parametrize("engine", ["split", "masked"])
def test_snapshots_are_small_and_resumable(tmp_path, engine):
    config = TrainConfig(**STEPS.model_dump() | {"weight_decay": 0.0, "checkpoint_every": 3})
    whole, killed = model_of(), model_of()
    examples = examples_of(whole)
    history = ground(whole, examples, config, tmp_path / "whole", engine=engine, moments=4)

    def dies(lm):
        if (tmp_path / "killed" / "snapshots").exists() and len(snapshots(tmp_path / "killed")) == 2:
            raise KeyboardInterrupt  # at step 4, one after a checkpoint
        return {}

    with pytest.raises(KeyboardInterrupt):
        ground(killed, examples, config, tmp_path / "killed", engine=engine, moments=4, probe=dies)
    resumed = model_of()
    pd.testing.assert_frame_equal(ground(resumed, examples, config, tmp_path / "killed", engine=engine, moments=4), history)
    assert torch.equal(resumed.new_rows, whole.new_rows)
    assert list(snapshots(tmp_path / "killed")) == [0, 2, 4, 6, 8]
    pd.testing.assert_frame_equal(probes(tmp_path / "killed"), probes(tmp_path / "whole"))
    sizes = [path.stat().st_size for path in (tmp_path / "whole" / "snapshots").iterdir()]
    assert max(sizes) < 24 * 64 * 2 + 1024


def test_accuracy_is_that_of_greedy_decoding():
    "`exact` is the share of items whose SID is the one that beam search with a single beam finds."
    from gti_nb.decoding import beam_search
    lm = model_of(4)
    nn.init.normal_(lm.new_rows, std=0.3, generator=torch.Generator().manual_seed(3))
    sids, examples = catalogue(4), examples_of(lm, 4, directions=["text_to_sid"])
    found = beam_search(lm, [list(e.prompt_ids) for e in examples], sids, beams=1).codes[:, 0]
    truth = [[t - lm.first_new_id - level * 4 for level, t in enumerate(e.answer_ids[:3])] for e in examples]
    exact = float((np.asarray(found) == np.array(truth)).all(1).mean())
    assert sid_accuracy(lm, examples, sids)["exact"] == exact > 0


# --- several processes ---------------------------------------------------------------------------------------------------

def ground_beside_others(folder):
    "Called in each of several processes: grounds, and writes what this process ends with."
    from accelerate import PartialState
    from safetensors.torch import save_file
    rank, lm = PartialState().process_index, model_of()
    history = ground(lm, examples_of(lm), STEPS, folder)
    save_file({"rows": lm.new_rows.detach()}, f"{folder}/rows-{rank}.safetensors")
    history.to_csv(f"{folder}/history-{rank}.csv", index=False)


def test_two_processes_equal_one(tmp_path):
    from safetensors.torch import load_file
    lm = model_of()
    history = ground(lm, examples_of(lm), STEPS, tmp_path / "one")
    folder = tmp_path / "two"
    folder.mkdir()
    launch("test_grounding:ground_beside_others", {"folder": str(folder)}, processes=2, device="cpu")
    ranks = [load_file(folder / f"rows-{rank}.safetensors")["rows"] for rank in range(2)]
    assert torch.equal(*ranks)
    assert (ranks[0] - lm.new_rows.detach()).abs().max() < 1e-5
    assert np.abs(pd.read_csv(folder / "history-1.csv").to_numpy() - history.to_numpy()).max() < 1e-5
    assert list(snapshots(folder)) == list(snapshots(tmp_path / "one"))
