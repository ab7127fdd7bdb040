"""Fine-tuning in every mode: what moves and what doesn't, one result however it is kept, and the same numbers as peft."""

import copy
import json
import warnings

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from gti_nb.core import UserError
from gti_nb.grounding import frozen_hash
from gti_nb.prompts import Example, collate
from gti_nb.sft import PROJECTIONS, SFTSettings, finetune, load_model, prepare, save_model
from gti_nb.training import TrainConfig, trainable
from gti_nb.vocabulary import ExtendedLM, NewRows, load_base, tiny_model

NAMES = [f"<a_{i}>" for i in range(12)]
CONFIG = TrainConfig(steps=4, batch_size=8, micro_batch_size=4, learning_rate=1e-2, weight_decay=0.1, checkpoint_every=2)
MODES = [(mode, base_rows) for mode in ("full", "lora", "qlora") for base_rows in (False, True)]
every_mode = pytest.mark.parametrize("mode, base_rows", MODES)
both_ties = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "Where a tiny base lies, tied or not. Its numbers are bfloat16's, so that it is the same base in both dtypes."
    made = {}
    for tied in (True, False):
        model, tokenizer = tiny_model(["A comedy about a time machine."], tied=tied)
        made[tied] = str(tmp_path_factory.mktemp("base"))
        model.bfloat16().float().save_pretrained(made[tied])
        tokenizer.save_pretrained(made[tied])
    return made


@pytest.fixture
def fresh(folders):
    "A function that loads the base and gives it 12 new tokens, of which seven lie on spare rows."
    def make(tied=True, dtype="float32", four_bit=False):
        model, tokenizer = load_base(folders[tied], "cpu", dtype, four_bit)
        rows = 0.05 * torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(1))
        return ExtendedLM(model, tokenizer, NAMES, rows[0], None if tied else rows[1])
    return make


def examples_of(lm, n=24):
    "Questions and answers with old and new tokens in both."
    rng, made = np.random.default_rng(0), []
    for _ in range(n):
        ids = [lm.new_ids[i] for i in rng.integers(0, 12, 4)]
        text = lm.tokenizer(["a time machine", "comedy", "about a comedy A"][rng.integers(3)])["input_ids"]
        made.append(Example((*text, *ids[:2]), (*ids[2:], *text[:2]), "made"))
    return made


def ids_of(lm):
    return torch.tensor([lm.tokenizer("A comedy <a_0> about <a_11> a time machine")["input_ids"]])


@torch.no_grad()
def live(lm):
    return lm.logits(lm.eval().hidden(ids_of(lm)).last_hidden_state)


@torch.no_grad()
def plain(model, lm):
    return model(input_ids=ids_of(lm)).logits.float()


def parameters(lm):
    "A copy of every parameter (4-bit ones as they are packed), by name; adapters don't count into a name."
    return {name.replace(".base_layer.", "."): p.detach().clone() for name, p in lm.named_parameters()}


def farthest(a, b):
    return (a - b).abs().max().item()


# --- what moves ----------------------------------------------------------------------------------------------------------

@every_mode
@both_ties
@both_dtypes
def test_exactly_what_was_asked_for_moves(mode, base_rows, tied, dtype, fresh, tmp_path):
    lm = fresh(tied, dtype, mode == "qlora")
    before, ends = parameters(lm), (lm.model.get_input_embeddings(), lm.model.get_output_embeddings())
    pointers = []

    def observe(done):
        assert (ends[0].weight.data_ptr() == ends[1].weight.data_ptr()) == tied
        assert all(p.dtype == torch.float32 for p in trainable(lm).values())
        pointers.append(done)

    finetune(lm, examples_of(lm), CONFIG, tmp_path, settings=SFTSettings(mode=mode, train_base_rows=base_rows), observe=observe)
    assert pointers == [0, 1, 2, 3, 4]
    assert (ends[0].weight is ends[1].weight) == tied
    after = parameters(lm)
    matrices = {"model.model.embed_tokens.weight"} | ({"model.lm_head.weight"} if not tied else set())
    rows = {"new_rows"} | ({"head_rows"} if not tied else set())
    backbone = set(before) - matrices - rows
    assert {name for name in before if not torch.equal(before[name], after[name])} == (
        rows | (matrices if base_rows else set()) | (backbone if mode == "full" else set()))
    assert len(backbone) == 2 * 11 + 1 and {after[n].dtype for n in matrices} == {getattr(torch, dtype)}
    adapters = {name for name in after if name not in before}
    assert len(adapters) == (0 if mode == "full" else 2 * 7 * 2) and all(".lora_" in name for name in adapters)
    assert all(after[name].any() for name in adapters)  # the second factor of each starts at zero


@both_ties
def test_rows_that_nobody_uses_stay(tied, fresh, tmp_path):
    "With old rows training and weights decaying: rows behind a new token's id, and those of tokens that don't occur."
    lm = fresh(tied)
    before = lm.model.get_input_embeddings().weight.detach().clone()
    finetune(lm, examples_of(lm), CONFIG, tmp_path, settings=SFTSettings(train_base_rows=True))
    moved = (lm.model.get_input_embeddings().weight != before).any(-1)
    assert not moved[lm.first_new_id:lm.first_new_id + lm.n_new].any()
    seen = {i for e in examples_of(lm) for i in (*e.prompt_ids, *e.answer_ids) if i < lm.first_new_id}
    assert moved[list(seen)].any()  # a token that only ends an answer isn't read by anything
    unseen = [i for i in range(lm.first_new_id) if i not in seen]
    assert moved[unseen].all() == tied and moved[unseen].any() == tied  # a head pushes all rows


def test_weights_decay_and_rows_norms_and_biases_do_not(fresh, tmp_path):
    lm = fresh(tied=False)
    prepare(lm, SFTSettings(mode="full", train_base_rows=True, rows_lr_scale=3))
    from gti_nb.sft import _groups
    found = {}
    for group in _groups(lm, CONFIG):
        for name, p in trainable(lm).items():
            if any(p is q for q in group["params"]):
                found[name] = (group["weight_decay"], group.get("lr_scale", 1.0))
    assert set(found) == set(trainable(lm))
    for name, settings in found.items():
        rows = name in ("new_rows", "head_rows")
        assert settings == (0.1 if name.endswith("_proj.weight") else 0.0, 3.0 if rows else 1.0), name


def test_new_rows_have_a_rate_of_their_own(fresh, tmp_path):
    "Adam's first step is the learning rate, whatever the gradient."
    steps = {}
    for scale in (1.0, 3.0):
        lm = fresh()
        before = parameters(lm)
        config = TrainConfig(steps=1, batch_size=8, micro_batch_size=8, learning_rate=1e-3, warmup=0)
        finetune(lm, examples_of(lm), config, tmp_path / str(scale), settings=SFTSettings(mode="full", rows_lr_scale=scale))
        after = parameters(lm)
        steps[scale] = [farthest(before[n], after[n]) for n in ("new_rows", "model.model.layers.0.mlp.up_proj.weight")]
    assert np.allclose(steps[1.0], [1e-3, 1e-3], rtol=1e-2) and np.allclose(steps[3.0], [3e-3, 1e-3], rtol=1e-2)


# --- one result, however it is kept --------------------------------------------------------------------------------------

def tuned(lm, folder, mode, base_rows):
    history = finetune(lm, examples_of(lm), CONFIG, folder, settings=SFTSettings(mode=mode, train_base_rows=base_rows, r=4))
    assert history.loss.notna().all()
    return lm


@every_mode
@both_ties
@both_dtypes
def test_live_merged_saved_exported_are_one(mode, base_rows, tied, dtype, fresh, folders, tmp_path):
    lm = tuned(fresh(tied, dtype, mode == "qlora"), tmp_path / "run", mode, base_rows)
    ours, start = live(lm), live(fresh(tied, dtype, mode == "qlora"))
    assert farthest(ours, start) > 0.05
    save_model(lm, tmp_path / "saved", "tiny")
    again = load_model(tmp_path / "saved", *load_base(folders[tied], "cpu", dtype, mode == "qlora"))
    assert torch.equal(live(again), ours) and again.settings == lm.settings and not again.training
    lm.export(tmp_path / "plain")
    exported, tokenizer = load_base(str(tmp_path / "plain"), "cpu", dtype)
    merged = lm.merge()
    assert torch.equal(plain(merged, lm), plain(exported, lm)) and len(tokenizer) == len(lm.tokenizer)
    assert torch.equal(plain(again.merge(), lm), plain(merged, lm))
    assert not hasattr(merged, "peft_config") and not getattr(merged, "is_loaded_in_4bit", False)
    assert not hasattr(exported.config, "quantization_config")
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == tied
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    assert ("lm_head.weight" in stored) != tied and {t.dtype for t in stored.values()} == {getattr(torch, dtype)}
    if dtype == "float32":
        assert farthest(plain(merged, lm), ours) < 1e-5
    else:  # the same numbers rounded in another order, with 8 bits; a sum of weight and adapter is rounded once (see below)
        error = farthest(plain(merged, lm), ours)
        assert error == 0 if mode == "full" else 0 < error < 2 ** -6 * ours.abs().max()
        exact = live(load_model(tmp_path / "saved", *load_base(folders[tied], "cpu", "float32", mode == "qlora")))
        assert farthest(ours, exact) < 2 ** -6 * ours.abs().max()


@every_mode
def test_saved_twice_is_the_same_and_small(mode, base_rows, fresh, folders, tmp_path):
    lm = tuned(fresh(four_bit=mode == "qlora"), tmp_path / "run", mode, base_rows)
    save_model(lm, tmp_path / "one", "tiny")
    save_model(load_model(tmp_path / "one", *load_base(folders[True], "cpu", "float32", mode == "qlora")), tmp_path / "two", "tiny")
    files = [sorted(p.relative_to(tmp_path / n).as_posix() for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("one", "two")]
    wanted = {"rows.safetensors", "settings.json"} | ({"base.safetensors"} if base_rows or mode == "full" else set())
    adapter = set() if mode == "full" else {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert files[0] == files[1] and {f for f in files[0] if not f.endswith("README.md")} == wanted | adapter
    for name in files[0]:
        if name.endswith(".safetensors"):
            one, two = load_file(tmp_path / "one" / name), load_file(tmp_path / "two" / name)
            assert set(one) == set(two) and all(torch.equal(one[k], two[k]) for k in one)
    assert len({NewRows.load(tmp_path / n / "rows.safetensors").base_hash for n in ("one", "two")}) == 1
    trained = sum(p.numel() * p.element_size() for p in trainable(lm).values())
    assert trained < sum((tmp_path / "one" / n).stat().st_size for n in files[0] if n.endswith("tensors")) < trained + 20_000
    assert json.loads((tmp_path / "one" / "settings.json").read_text())["mode"] == mode


@both_dtypes
@every_mode
def test_a_model_in_training_can_be_looked_at(mode, base_rows, dtype, fresh, tmp_path):
    "Its logits and its merged copy, between two steps; and looking changes nothing."
    def run(observe):
        lm = fresh(dtype=dtype, four_bit=mode == "qlora")
        finetune(lm, examples_of(lm), CONFIG, tmp_path / str(observe), settings=SFTSettings(mode=mode, train_base_rows=base_rows),
                 observe=lambda done: look(lm) if observe else None)
        return lm

    def look(lm):
        merged = lm.merge()
        assert {p.dtype for p in merged.parameters()} | {lm.dtype, lm.embed(ids_of(lm)).dtype} == {getattr(torch, dtype)}
        seen.append(farthest(plain(merged, lm), live(lm)))
        lm.train()

    seen = []
    looked, other = run(True), run(False)
    assert len(seen) == 5 and max(seen) < (1e-5 if dtype == "float32" else 0.05)
    assert torch.equal(live(looked), live(other))


@pytest.mark.parametrize("mode, base_rows, dtype", [("full", True, "bfloat16"), ("lora", True, "float32"), ("qlora", False, "bfloat16")])
def test_a_killed_run_ends_with_the_same_bits(mode, base_rows, dtype, fresh, tmp_path):
    def run(folder, stop=None):
        def observe(done):
            if done == stop:
                raise KeyboardInterrupt

        lm = fresh(dtype=dtype, four_bit=mode == "qlora")
        finetune(lm, examples_of(lm), CONFIG, folder, settings=SFTSettings(mode=mode, train_base_rows=base_rows), observe=observe)
        return lm

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", stop=3)
    after = run(tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), after.parameters(), strict=True))


def test_steps_that_bfloat16_would_round_away_count(fresh, tmp_path):
    "Forty steps of a thousandth of a weight's size."
    lm = fresh(dtype="bfloat16")
    before = parameters(lm)["model.model.norm.weight"]
    config = TrainConfig(steps=40, batch_size=4, micro_batch_size=4, learning_rate=1e-3, warmup=0)
    finetune(lm, examples_of(lm), config, tmp_path, settings=SFTSettings(mode="full"))
    after = parameters(lm)["model.model.norm.weight"]
    assert after.dtype == torch.bfloat16 and (after != before).float().mean() > 0.2
    naive = before.clone()  # half a step of bfloat16 below 1 is 2e-3
    for _ in range(40):
        naive -= 1e-3
    assert torch.equal(naive, before)


def test_sixteen_bytes_a_trained_number(fresh):
    lm = fresh(dtype="bfloat16")
    prepare(lm, SFTSettings(mode="full", train_base_rows=True))
    found = trainable(lm)
    optimizer = torch.optim.AdamW(found.values())
    lm.token_losses(**collate(examples_of(lm), lm.tokenizer.pad_token_id)).mean().backward()
    optimizer.step()
    state = [t for p in found.values() for t in (p, p.grad, *optimizer.state[p].values()) if t.ndim]
    assert sum(t.nbytes for t in state) == 16 * sum(p.numel() for p in found.values())


def test_scaled_embeddings(tmp_path):
    "Gemma multiplies what it looks up; merged, saved and live agree when old rows train, too."
    import transformers

    def base():
        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                               num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0)
        return transformers.Gemma3ForCausalLM(config).eval(), tiny_model()[1]

    model, tokenizer = base()
    lm = ExtendedLM(model, tokenizer, NAMES, 0.05 * torch.randn(12, 32, generator=torch.Generator().manual_seed(1)))
    tuned(lm, tmp_path / "run", "full", True)
    save_model(lm, tmp_path / "saved", "gemma")
    assert torch.equal(live(load_model(tmp_path / "saved", *base())), live(lm))
    assert farthest(plain(lm.merge(), lm), live(lm)) < 1e-5 and lm.tied


# --- 4 bits --------------------------------------------------------------------------------------------------------------

@both_ties
def test_a_4_bit_run_merges_into_the_full_base(tied, fresh, folders, tmp_path):
    "Exactly the full base plus the adapters; and as far from the 4-bit model as 4 bits are from the full base."
    from peft import PeftModel

    lm = fresh(tied, four_bit=True)
    untrained = live(lm)
    tuned(lm, tmp_path / "run", "qlora", False)
    save_model(lm, tmp_path / "saved", "tiny")
    model, tokenizer = load_base(folders[tied], "cpu", "float32")
    merged = load_model(tmp_path / "saved", model, tokenizer).merge()
    theirs = PeftModel.from_pretrained(load_base(folders[tied], "cpu", "float32")[0], tmp_path / "saved" / "adapter").merge_and_unload()
    for (name, ours), peer in zip(merged.named_parameters(), theirs.parameters(), strict=True):
        if "embed" not in name and "lm_head" not in name:
            assert farthest(ours, peer) < 1e-6, name
    assert torch.equal(merged.get_input_embeddings().weight[lm.new_ids], lm.new_rows)
    rounding = farthest(untrained, live(fresh(tied)))
    assert 1e-2 < farthest(plain(merged, lm), live(lm)) < 3 * rounding


def test_4_bit_weights_are_nf4_with_double_quantization(fresh):
    model = fresh(four_bit=True, dtype="bfloat16").model
    layers = [m for m in model.modules() if hasattr(getattr(m, "weight", None), "quant_state")]
    assert len(layers) == 14
    for layer in layers:
        state = layer.weight.quant_state
        assert (state.quant_type, state.nested, layer.compute_dtype) == ("nf4", True, torch.bfloat16)
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16


def test_4_bit_weights_keep_their_bits(fresh, tmp_path):
    "Packed weights, their scales, and the scales of the scales; after training, use and saving."
    def packed(lm):
        return {name.replace("base_layer.", ""): tensor.clone() for name, tensor in lm.model.state_dict().items()
                if "_proj.weight" in name.replace("base_layer.", "") and "lora" not in name}

    lm = fresh(four_bit=True)
    before = packed(lm)
    tuned(lm, tmp_path / "run", "qlora", True)
    live(lm), lm.merge(), save_model(lm, tmp_path / "saved", "tiny")
    after = packed(lm)
    assert len(before) > 14 * 4 and set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_matrix_is_not_in_4_bits_and_rows_fit_both_bases(fresh, folders):
    "Rows that were grounded on the full base go onto the 4-bit one."
    rows = NewRows.of(fresh(), "tiny")
    lm = rows.apply(*load_base(folders[True], "cpu", "bfloat16", four_bit=True))
    assert torch.equal(lm.new_rows, rows.rows) and lm.dtype == torch.bfloat16


# --- the same numbers as peft --------------------------------------------------------------------------------------------

def peer(model, **kwargs):
    from peft import LoraConfig, get_peft_model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, LoraConfig(lora_dropout=0.0, target_modules=list(PROJECTIONS), **kwargs))


def copy_adapters(source, target):
    "Random adapters into `source`, the same into `target`; their names."
    theirs, names = dict(target.named_parameters()), []
    for name, p in source.named_parameters():
        if ".lora_" in name:
            p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(names)))
            found = [q for n, q in theirs.items() if n.endswith(name.removeprefix("model."))]
            assert len(found) == 1
            found[0].data.copy_(p)
            names.append(name)
    return names


@both_ties
def test_gradients_are_those_of_modules_to_save(tied, fresh):
    "The paper's way: peft trains both matrices of the resized model. Rows old and new, and adapters, have its gradients."
    lm = fresh(tied)
    theirs = peer(lm.merge(), r=4, lora_alpha=8, modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=tied)
    prepare(lm, SFTSettings(train_base_rows=True, r=4, alpha=8, dropout=0))
    names = copy_adapters(lm, theirs)
    batch = collate(examples_of(lm), lm.tokenizer.pad_token_id)
    loss = theirs(**batch).loss
    loss.backward()
    ours = lm.token_losses(**batch).mean()
    ours.backward()
    assert abs(loss.item() - ours.item()) < 1e-5
    ends = [m for m in (theirs.get_input_embeddings(), theirs.get_output_embeddings())]
    assert (ends[0].weight is ends[1].weight) == tied
    own = [(lm.model.get_input_embeddings(), lm.new_rows), (lm.model.get_output_embeddings(), lm.head_rows)]
    for (matrix, new_rows), end in list(zip(own, ends))[:1 if tied else 2]:
        gradient, first, n = end.weight.grad, lm.first_new_id, lm.n_new
        assert gradient[:first].abs().max() > 1e-3 and gradient[first:first + n].abs().max() > 1e-3
        assert farthest(matrix.weight.grad[:first], gradient[:first]) < 1e-5
        assert farthest(new_rows.grad, gradient[first:first + n]) < 1e-5
    for name in names:
        [other] = [q for n, q in theirs.named_parameters() if n.endswith(name.removeprefix("model."))]
        assert farthest(lm.get_parameter(name).grad, other.grad) < 1e-5 and other.grad.abs().max() > 1e-4


def test_modules_to_save_without_a_word_about_tying_parts_the_ends(fresh):
    "What `ensure_weight_tying` is for, and what the lesson shows: our gradient is the sum of the two copies'."
    lm = fresh()
    theirs = peer(lm.merge(), r=4, modules_to_save=["embed_tokens", "lm_head"])
    prepare(lm, SFTSettings(train_base_rows=True, r=4, alpha=8, dropout=0))
    copy_adapters(lm, theirs)
    batch = collate(examples_of(lm), lm.tokenizer.pad_token_id)
    theirs(**batch).loss.backward()
    lm.token_losses(**batch).mean().backward()
    ends = [theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight]
    assert ends[0] is not ends[1]
    first = lm.first_new_id
    assert farthest(lm.model.get_input_embeddings().weight.grad[:first], (ends[0].grad + ends[1].grad)[:first]) < 1e-5


@pytest.mark.parametrize("r, alpha, dtype", [(8, 32, "float32"), (4, 8, "float32"), (1, 1, "bfloat16"), (8, 32, "bfloat16")])
def test_adapters_add_alpha_over_r_to_every_projection(r, alpha, dtype, fresh):
    lm = fresh(dtype=dtype)
    weights = {name: p.detach().clone() for name, p in lm.model.named_parameters() if name.endswith("_proj.weight")}
    prepare(lm, SFTSettings(r=r, alpha=alpha))
    copy_adapters(lm, lm)
    merged = dict(lm.merge().named_parameters())
    assert len(weights) == 2 * len(PROJECTIONS)
    for name, weight in weights.items():
        a, b = (lm.model.get_parameter(name.replace("weight", f"lora_{x}.default.weight")) for x in "AB")
        assert a.shape == (r, weight.shape[1]) and b.shape == (weight.shape[0], r)
        wanted = weight.float() + alpha / r * (b @ a)
        assert torch.equal(merged[name], wanted.bfloat16()) if dtype == "bfloat16" else farthest(merged[name], wanted) < 1e-5
        assert farthest(merged[name], weight) > 1e-3
    dropouts = {m.p for m in lm.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert dropouts == {0.05}


def test_adapters_alone_are_peft_s(fresh, folders, tmp_path):
    "peft loads them without this library; on text without new tokens the model is ours."
    from peft import PeftModel

    lm = tuned(fresh(), tmp_path / "run", "lora", False)
    save_model(lm, tmp_path / "saved", "tiny")
    model, tokenizer = load_base(folders[True], "cpu", "float32")
    theirs = PeftModel.from_pretrained(model, tmp_path / "saved" / "adapter").eval()
    ids = torch.tensor([tokenizer("A comedy about a time machine")["input_ids"]])
    with torch.no_grad():
        ours = lm.logits(lm.hidden(ids).last_hidden_state)[..., :lm.first_new_id]
        assert farthest(theirs(input_ids=ids).logits[..., :lm.first_new_id], ours) < 1e-5
    assert not any("embed" in key or "lm_head" in key for key in load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors"))


# --- logits in parts -----------------------------------------------------------------------------------------------------

def states_of(lm, n):
    "Hidden states for `n` positions, and what comes next there: old tokens, and each of the new ones."
    states = torch.randn(n, 64, generator=torch.Generator().manual_seed(2)).to(lm.dtype).requires_grad_(True)
    return states, torch.arange(n) * 7 % (lm.first_new_id + lm.n_new)


def losses_and_gradients(lm, states, targets):
    "For losses that count differently; gradients of the states and of all that trains in the matrices, float32."
    losses = lm.losses_at(states, targets)
    ends = [p for name, p in trainable(lm).items() if "lora" not in name and p.shape[1:] == (64,)]
    found = torch.autograd.grad(losses @ torch.linspace(0.5, 1.5, len(losses)), [states, *ends], allow_unused=True)
    return losses.detach(), [g.float() for g in found if g is not None]


@both_ties
@both_dtypes
@pytest.mark.parametrize("base_rows", [False, True])
def test_parts_change_no_number(tied, dtype, base_rows, fresh, monkeypatch):
    lm = fresh(tied, dtype)
    prepare(lm, SFTSettings(train_base_rows=base_rows))
    states, targets = states_of(lm, 600)
    whole, gradients = losses_and_gradients(lm, states, targets)
    assert torch.equal(whole, torch.nn.functional.cross_entropy(lm.logits(states), targets, reduction="none"))
    assert len(gradients) == 2 + base_rows
    monkeypatch.setattr(ExtendedLM, "_part", lambda lm: 37)
    losses, others = losses_and_gradients(lm, states, targets)
    with torch.no_grad():
        assert farthest(lm.losses_at(states, targets), whole) < 1e-5
    assert farthest(losses, whole) < (1e-5 if dtype == "float32" else 0.02)
    for one, other in zip(gradients, others):
        assert farthest(one, other) < (1e-5 if dtype == "float32" else 0.01) * one.abs().max()


@pytest.mark.parametrize("base_rows", [False, True])
def test_long_texts_fit(base_rows, monkeypatch):
    "The most bytes at a time, as the lesson says: a part's three tables of logits; without parts it would be more than ten times as much."
    from torch.distributed._tools.mem_tracker import MemTracker

    monkeypatch.setattr("gti_nb.vocabulary.LOGIT_BYTES", 2**20)
    model, tokenizer = tiny_model(spare_rows=4000)
    lm = ExtendedLM(model, tokenizer, NAMES, torch.zeros(12, 64))
    model.get_output_embeddings().weight.requires_grad_(base_rows)
    states, targets = states_of(lm, 2500)
    matrix, peaks = model.get_output_embeddings().weight.nbytes, {}
    for part in (2500, lm._part()):
        with MemTracker() as tracker, monkeypatch.context() as patch:
            tracker.track_external(lm)
            before = tracker.get_tracker_snapshot("current")[lm.device]["Total"]
            patch.setattr(ExtendedLM, "_part", lambda lm: part)
            losses_and_gradients(lm, states, targets)
        peaks[part] = tracker.get_tracker_snapshot("peak")[lm.device]["Total"] - before
    kept = 3 * states.nbytes + 2 * 2500 * 4  # states and their gradients, losses and denominators
    assert peaks[lm._part()] < 3 * matrix + kept + 3 * matrix * base_rows < peaks[2500] / 10


@both_ties
def test_nothing_as_large_as_the_new_vocabulary_waits_for_the_way_back(tied, monkeypatch):
    "Of 1,000 positions and 500 new tokens, less stays than the hidden states' own gradients, twice."
    from torch.distributed._tools.mem_tracker import MemTracker

    monkeypatch.setattr(ExtendedLM, "_part", lambda lm: 50)
    lm = ExtendedLM(*tiny_model(tied=tied), [f"<a_{k}>" for k in range(500)], torch.randn(500, 64))
    states, targets = states_of(lm, 1000)
    with MemTracker() as tracker:
        tracker.track_external(lm, states, targets)
        now = lambda: tracker.get_tracker_snapshot("current")[lm.device]["Total"]
        before, losses = now(), lm.losses_at(states, targets)
        kept = now() - before
    assert losses.grad_fn is not None and kept < 2 * states.nbytes < 1000 * 500 * 4 / 2


# --- refusals ------------------------------------------------------------------------------------------------------------

def test_a_mode_and_a_base_must_fit(fresh):
    for mode in ("full", "lora"):
        with pytest.raises(UserError, match="needs a base in full precision"):
            prepare(fresh(four_bit=True), SFTSettings(mode=mode))
    lm = fresh()
    with pytest.raises(UserError, match="needs a base in 4 bits: load it with load_base"):
        prepare(lm, SFTSettings(mode="qlora"))
    assert lm.settings is None and list(trainable(lm)) == ["new_rows"]


def test_nothing_is_prepared_twice(fresh, folders, tmp_path):
    lm = tuned(fresh(), tmp_path / "run", "lora", False)
    save_model(lm, tmp_path / "saved", "tiny")
    for again in (lm, load_model(tmp_path / "saved", *load_base(folders[True], "cpu", "float32"))):
        with pytest.raises(UserError, match="before: load a fresh one"):
            prepare(again)


def test_a_run_refuses_another_base(fresh, folders, tmp_path):
    lm = tuned(fresh(), tmp_path / "run", "full", True)
    save_model(lm, tmp_path / "saved", "tiny")
    other, tokenizer = load_base(folders[False], "cpu", "float32")
    before = frozen_hash(other)
    with pytest.raises(UserError, match="load that base model"):
        load_model(tmp_path / "saved", other, tokenizer)
    assert frozen_hash(other) == before
    with pytest.raises(UserError, match="in full precision"):
        load_model(tmp_path / "saved", *load_base(folders[True], "cpu", "float32", four_bit=True))


def test_repacked_weights_are_refused(fresh):
    lm = fresh(four_bit=True, dtype="bfloat16")
    layers = [m for m in lm.model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    assert len(layers) == 14 and not any(m.support_avx512bf16_for_cpu for m in layers)
    live(lm)
    assert not any(getattr(m.weight.quant_state, "packing_format_for_cpu", False) for m in layers)
    layers[3].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UserError, match="repacked for inference"):
        prepare(lm, SFTSettings(mode="qlora"))


def test_a_4_bit_base_can_be_used_before_it_is_extended(folders):
    model, tokenizer = load_base(folders[True], "cpu", "bfloat16", four_bit=True)
    with torch.no_grad():
        model(input_ids=torch.tensor([tokenizer("A comedy")["input_ids"]]))
    lm = ExtendedLM(model, tokenizer, NAMES, torch.zeros(12, 64))
    prepare(lm, SFTSettings(mode="qlora"))
    lm.token_losses(**collate(examples_of(lm), lm.tokenizer.pad_token_id)).mean().backward()
    assert all(p.grad is not None for p in trainable(lm).values())


def test_4_bits_without_bitsandbytes_is_a_message(folders, monkeypatch):
    monkeypatch.setattr("gti_nb.vocabulary.find_spec", lambda name: None)
    with pytest.raises(UserError, match="need the package bitsandbytes"):
        load_base(folders[True], "cpu", four_bit=True)


@pytest.mark.parametrize("bad", [dict(mode="LoRA"), dict(r=0), dict(dropout=1.0), dict(rank=8), dict(rows_lr_scale=0)])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValidationError):
        SFTSettings(**bad)


def test_a_second_training_goes_on_where_the_first_stopped(fresh, folders, tmp_path):
    "The same parameters train, the adapters too; what was saved and loaded is only for use."
    for mode, dtype in (("lora", "float32"), ("full", "bfloat16")):
        lm, settings = fresh(dtype=dtype), SFTSettings(mode=mode, dropout=0.0)
        finetune(lm, examples_of(lm), CONFIG, tmp_path / mode / "one", settings=settings)
        names, first = set(trainable(lm)), {name: p.detach().clone() for name, p in trainable(lm).items()}
        save_model(lm, tmp_path / mode / "saved", "tiny")
        finetune(lm, examples_of(lm), CONFIG, tmp_path / mode / "two", settings=settings)
        assert set(trainable(lm)) == names and lm.autocast is None
        moved = {name for name, p in trainable(lm).items() if not torch.equal(p.detach().to(first[name].dtype), first[name])}
        assert len(moved) > 0.8 * len(names)
        with pytest.raises(UserError, match="load a fresh one"):
            finetune(load_model(tmp_path / mode / "saved", *load_base(folders[True], "cpu", dtype)), examples_of(lm), CONFIG,
                     tmp_path / mode / "three", settings=settings)
