"""What the lesson on semantic IDs can't show: random cases against plain definitions and peers, scale, real published SIDs."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from conftest import SHARED
from gti_nb import semantic_ids
from gti_nb.core import UserError
from gti_nb.rqvae import RQVAE, RQVAEConfig, collision_numbers, train_rqvae
from gti_nb.semantic_ids import (LEFTOVERS, SemanticIds, Trie, last_distances, neighbour_auc, quality_figure, random_codes,
                                 residual_kmeans, resolve, same_vectors)


def a_catalogue(items=400, levels=3, codebook_size=12, clusters=40, seed=0):
    "Vectors in clusters, their residual k-means codes, and `distances_of` which also notes what it was asked."
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((clusters, 8))[rng.integers(clusters, size=items)] + 0.2 * rng.standard_normal((items, 8))
    vectors = vectors.astype(np.float32)
    codes, codebooks = residual_kmeans(vectors, levels, codebook_size, seed, device="cpu")

    def distances_of(rows):
        distances_of.asked.append(np.asarray(rows))
        return last_distances(vectors[rows], codebooks)

    distances_of.asked = []
    return vectors, codes, distances_of


def in_groups(codes):
    "The rows with the same codes, by plain dictionary."
    found = {}
    for row, code in enumerate(map(tuple, codes.tolist())):
        found.setdefault(code, []).append(row)
    return found


def added(raw, new, distances):
    "Squared distance that the moves added, in all."
    everyone = np.arange(len(raw))
    return float((distances[everyone, new[:, len(raw[0]) - 1]] - distances[everyone, raw[:, -1]]).sum(dtype=np.float64))


# --- resolution -----------------------------------------------------------------------------------------------------------

def optimum(raw, distances):
    "The least that separating all items can add: scipy's assignment for each beginning with collisions."
    total, groups = 0.0, in_groups(raw)
    for beginning in in_groups(raw[:, :-1]):
        mine = {codes: rows for codes, rows in groups.items() if codes[:-1] == beginning}
        colliding = sum((rows for rows in mine.values() if len(rows) > 1), [])
        free = np.setdiff1d(np.arange(distances.shape[1]), [codes[-1] for codes, rows in mine.items() if len(rows) == 1])
        if colliding:
            chosen = linear_sum_assignment(distances[colliding][:, free].astype(np.float64))
            total += (distances[colliding][:, free][chosen] - distances[colliding, raw[colliding, -1]]).sum(dtype=np.float64)
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("items, codebook_size", [(150, 16), (300, 24), (300, 48)])
def test_moves_cost_what_the_best_assignment_costs(items, codebook_size, seed):
    vectors, raw, distances_of = a_catalogue(items, 3, codebook_size, clusters=80, seed=seed)
    distances = distances_of(np.arange(items))
    ours, one_by_one = (resolve(raw, codebook_size, distances_of, vectors, rounds=rounds) for rounds in (20, 0))
    best = optimum(raw, distances)
    assert collision_numbers(ours.codes)["collision_rate"] == collision_numbers(one_by_one.codes)["collision_rate"] == 0
    assert best * (1 - 1e-5) <= added(raw, ours.codes, distances) <= 1.02 * best
    assert added(raw, ours.codes, distances) <= added(raw, one_by_one.codes, distances) * (1 + 1e-5)
    assert ours.rounds <= 20


def test_sinkhorn_costs_less_than_one_by_one():
    "Over some catalogues it saves at least a tenth of what one by one adds."
    totals = np.zeros(2)
    for seed in range(3):
        vectors, raw, distances_of = a_catalogue(300, 3, 24, clusters=80, seed=seed)
        distances = distances_of(np.arange(300))
        totals += [added(raw, resolve(raw, 24, distances_of, vectors, rounds=rounds).codes, distances) for rounds in (20, 0)]
    assert totals[0] < 0.9 * totals[1]


@pytest.mark.parametrize("leftovers", LEFTOVERS)
@pytest.mark.parametrize("rounds", [0, 1, 20])
@pytest.mark.parametrize("items, levels, codebook_size", [(150, 3, 6), (60, 1, 16), (150, 2, 5), (1, 2, 4)])
def test_what_always_holds(items, levels, codebook_size, rounds, leftovers):
    vectors, raw, distances_of = a_catalogue(items, levels, codebook_size, clusters=30)
    found = resolve(raw, codebook_size, distances_of, vectors, rounds=rounds, leftovers=leftovers)
    new = found.codes
    assert new.dtype == np.int64 and new.min() >= 0 and new.max() < codebook_size
    assert (new[:, : levels - 1] == raw[:, :-1]).all()
    assert new.shape[1] == levels + (leftovers == "extra_level")
    before, after = in_groups(raw), in_groups(new)
    assert len(after) >= len(before)
    for codes, rows in before.items():
        if len(rows) == 1:  # whoever is alone keeps the code, and nobody joins
            assert after[tuple(new[rows[0]])] == rows and tuple(new[rows[0], :levels]) == codes
    assert found.moved.tolist() == np.flatnonzero((new[:, :levels] != raw).any(1)).tolist()
    for beginning, rows in in_groups(raw[:, :-1]).items():
        if leftovers == "nearest":  # as many names as there can be
            assert len({tuple(new[row]) for row in rows}) == min(len(rows), codebook_size)
    for sharing in after.values():
        if leftovers == "extra_level":  # shared only where the new level is full
            assert len(sharing) == 1 or len(in_groups(new[:, :levels])[tuple(new[sharing[0], :levels])]) > codebook_size
    assert found.report.loc["unique"].tolist() == [len(before), len(after)]
    assert found.report.loc["moved"].tolist() == [0, len(found.moved)]


def test_rounds_zero_and_share_changes_nothing():
    vectors, raw, distances_of = a_catalogue()
    found = resolve(raw, 12, distances_of, vectors, rounds=0, leftovers="share")
    assert (found.codes == raw).all() and not len(found.moved) and np.isnan(found.report.after["distance of the moved"])


def test_one_by_one_the_closest_of_each_group_keeps_its_code():
    "Even if somebody of another group, who is closer to its own code, would like to have it."
    table = np.array([[0.0, 0.1, 5], [0.05, 0.1, 5], [9, 0.3, 5], [9, 0.4, 5], [9, 9, 9]])
    codes = resolve(np.array([[0], [0], [1], [1]]), 3, lambda rows: table[rows], rounds=0).codes
    assert codes[:, 0].tolist() == [0, 2, 1, 1]  # the second row may have only the code that nobody has
    vectors, raw, distances_of = a_catalogue()
    found, distances = resolve(raw, 12, distances_of, rounds=0), distances_of(np.arange(len(raw)))
    for codes, rows in in_groups(raw).items():
        stayed = set(rows) - set(found.moved.tolist())
        assert min(rows, key=lambda row: distances[row, codes[-1]]) in stayed


def test_report_says_what_the_moves_cost():
    vectors, raw, distances_of = a_catalogue()
    seen = []
    found = resolve(raw, 12, distances_of, vectors, leftovers="extra_level", reconstruction=lambda c: seen.append(c) or len(seen))
    distances = distances_of(np.arange(len(raw)))[found.moved]
    everyone = np.arange(len(found.moved))
    for column, codes in zip(("before", "after"), (raw, found.codes)):
        expected = distances[everyone, codes[found.moved, 2]].mean()
        assert found.report[column]["distance of the moved"] == pytest.approx(expected, rel=1e-4)
    assert (seen[0] == raw).all() and (seen[1] == found.codes[:, :3]).all()  # the decoder knows L levels
    assert found.report.loc["reconstruction"].tolist() == [1, 2]
    assert np.isnan(found.report.before["level 4: codes used"])


def test_without_collisions_nothing_is_asked():
    raw = random_codes(50, 2, 10)
    found = resolve(raw, 10, None, np.random.default_rng(0).standard_normal((50, 4)))
    assert (found.codes == raw).all() and found.rounds == 0 and found.identical == []


def test_identical_items_take_part_once_and_the_rest_is_left_over():
    vectors, raw, distances_of = a_catalogue(200, 3, 24, clusters=80)
    which = np.concatenate([np.arange(200), np.arange(60), np.arange(20)])  # 40 items come twice, 20 three times
    vectors, raw, of_all = vectors[which], raw[which], lambda rows: distances_of(which[rows])
    identical = same_vectors(vectors, raw)
    assert [g.tolist() for g in identical] == [[k, 200 + k] + ([260 + k] if k < 20 else []) for k in range(60)]
    shared = resolve(raw, 24, of_all, vectors, leftovers="share")
    assert [g.tolist() for g in shared.identical] == [g.tolist() for g in identical]
    groups = in_groups(shared.codes)
    assert sorted(rows for rows in groups.values() if len(rows) > 1) == sorted(g.tolist() for g in identical)
    apart = resolve(raw, 24, of_all, vectors, leftovers="nearest").codes
    assert (collision_numbers(shared.codes)["unique"], collision_numbers(apart)["unique"]) == (200, 280)


def test_a_collapsed_quantizer_ends_and_holds_no_large_table(monkeypatch):
    "All items on one code: those closest get the places there are, and distances are asked for a few at a time."
    monkeypatch.setattr(semantic_ids, "_TABLE", 32 * 100)
    rng = np.random.default_rng(0)
    table, asked = rng.random((5000, 32)).astype(np.float32), []
    table[:, 0] *= 1e-3
    found = resolve(np.zeros((5000, 2), int), 32, lambda rows: asked.append(len(rows)) or table[rows])
    assert collision_numbers(found.codes)["unique"] == 32 and len(found.moved) == 31
    assert max(asked) <= 100 + 32
    closest = np.argsort(table[:, 0], kind="stable")[:32]
    assert set(found.moved) <= set(closest)


def test_no_move_is_made_in_vain():
    "Where no code is free, nobody moves: moving would separate nobody."
    table = np.random.default_rng(0).random((40, 4))
    raw = table.argmin(1)[:, None]
    for rounds in (0, 20):
        assert not len(resolve(raw, 4, lambda rows: table[rows], rounds=rounds).moved)


def test_only_items_under_a_disputed_beginning_are_measured(monkeypatch):
    monkeypatch.setattr(semantic_ids, "_TABLE", 12 * 50)
    vectors, raw, distances_of = a_catalogue(1000, 3, 12)
    few = resolve(raw, 12, distances_of, vectors)
    asked, colliding = distances_of.asked, {row for rows in in_groups(raw).values() if len(rows) > 1 for row in rows}
    assert set(np.concatenate(asked)) <= colliding and max(map(len, asked)) <= 50 + 12
    monkeypatch.undo()
    assert (few.codes == resolve(raw, 12, distances_of, vectors).codes).all()  # in one batch: the same


@pytest.mark.parametrize("change, complaint", [
    (dict(leftovers="drop"), "nearest, share, extra_level"), (dict(codebook_size=2), "codes go from 0 to 1"),
    (dict(codes=np.zeros(3, int)), "one row of codes an item"),
])
def test_resolve_refuses(change, complaint):
    arguments = dict(codes=np.array([[0, 2], [0, 2]]), codebook_size=3, distances_of=lambda rows: np.zeros((len(rows), 3)))
    with pytest.raises(UserError, match=complaint):
        resolve(**arguments | change)


# --- identical items ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(5))
def test_same_vectors_against_all_pairs(seed):
    rng = np.random.default_rng(seed)
    vectors = rng.integers(3, size=(120, 2)).astype(np.float32)  # many equal rows
    vectors += rng.choice([0, 3e-6, 4e-5, 1e-3], size=(120, 2)).astype(np.float32)
    codes = rng.integers(2, size=(120, 2))
    near = (np.abs(vectors[:, None] - vectors).max(2) <= 1e-5) & (codes[:, None] == codes).all(2)
    while not (near == (near @ near)).all():  # neighbours of neighbours belong together
        near = near @ near
    expected = sorted({tuple(np.flatnonzero(row)) for row in near if row.sum() > 1})
    assert len(expected) >= 5 and [tuple(group) for group in same_vectors(vectors, codes)] == expected


# --- sources --------------------------------------------------------------------------------------------------------------

def test_residual_kmeans_is_nearest_code_after_nearest_code():
    "Against scikit-learn: nearest centres, and clusters as tight as its own k-means finds."
    from sklearn.cluster import KMeans
    from sklearn.metrics import pairwise_distances_argmin

    vectors = np.random.default_rng(0).standard_normal((600, 16)).astype(np.float32)
    codes, codebooks = residual_kmeans(vectors, 3, 16, device="cpu")
    left = vectors
    for level in range(3):
        agree = pairwise_distances_argmin(left, codebooks[level]) == codes[:, level]
        assert agree.mean() > 0.999  # but for ties to rounding
        theirs = KMeans(16, n_init=1, random_state=0).fit(left).inertia_
        left = left - codebooks[level][codes[:, level]]
        assert (left**2).sum() < 1.05 * theirs
    assert (last_distances(vectors, codebooks).argmin(1) == codes[:, 2]).mean() > 0.999
    again = residual_kmeans(vectors, 3, 16, device="cpu")
    assert (again[0] == codes).all() and (again[1] == codebooks).all()


@pytest.mark.parametrize("items, levels, codebook_size", [(64, 3, 4), (65, 3, 4), (500, 1, 7), (1000, 5, 8192), (200, 30, 2)])
def test_random_codes_are_distinct_while_there_is_room(items, levels, codebook_size):
    codes = random_codes(items, levels, codebook_size, seed=3)
    sizes = [len(rows) for rows in in_groups(codes).values()]
    assert codes.shape == (items, levels) and codes.min() >= 0 and codes.max() < codebook_size
    assert max(sizes) == -(-items // min(items, codebook_size**levels))
    assert (codes == random_codes(items, levels, codebook_size, seed=3)).all()
    assert (codes != random_codes(items, levels, codebook_size, seed=4)).any()
    if items >= 200:  # each level varies
        assert all(len(np.unique(column)) > 1 for column in codes.T)


def test_permuted_keeps_everything_but_the_meaning():
    vectors, raw, _ = a_catalogue()
    sids = SemanticIds([f"i{k}" for k in range(len(raw))], raw, 12, vectors_hash="from somewhere")
    control = sids.permuted(5)
    assert control.item_ids == sids.item_ids and control.codebook_size == 12 and control.vectors_hash == ""
    assert sorted(map(tuple, control.codes)) == sorted(map(tuple, sids.codes))
    assert (control.codes == sids.permuted(5).codes).all() and (control.codes != sids.permuted(6).codes).any()
    assert neighbour_auc(vectors, raw) > 0.75 and abs(neighbour_auc(vectors, control.codes) - 0.5) < 0.03


def test_published_sids_of_amazon():
    path = SHARED / "amazon_industrial" / "published_sids.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    sids = SemanticIds.from_published(path)
    assert [len(np.unique(column)) for column in sids.codes.T] == [48, 256, 256]
    assert (len(sids), len(sids.unique), sids.codebook_size) == (3686, 3670, 256)
    assert round(100 * sids.collision_rate, 3) == 0.434
    assert sids.sid("0") == json.loads(path.read_text())["0"]
    some = SemanticIds.from_published(path, item_ids=["7", "3"])
    assert some.codes.tolist() == [sids.codes[sids.item_ids.index(item)].tolist() for item in ("7", "3")]


@pytest.mark.parametrize("source, complaint", [
    ({"x": "<a_1><b_2>", "y": "<a_1><c_2>"}, "item 'y'"), ({"x": "<a_1>", "y": "a_1"}, "item 'y'"),
    ({"x": "<a_1>", "y": "<a_1> "}, "item 'y'"), ({"x": [1], "y": [True]}, "item 'y'"), ({"x": [1], "y": []}, "item 'y'"),
    ({"x": [1], "y": 1}, "item 'y'"), ({"x": [1], "y": [1, 2]}, "item 'y' has 2 codes, that of 'x' has 1"),
    ({"x": [1], "y": [-1]}, "item 'y' has code -1"), ({"x": [1], "y": ["<a_x>"]}, "item 'y'"), ({"x": [1], "y": None}, "item 'y'"),
    ({}, "one row of codes an item"),
])
def test_published_sids_that_are_wrong(source, complaint):
    with pytest.raises(UserError, match=complaint):
        SemanticIds.from_published(source)


def test_published_files_that_are_wrong(tmp_path):
    for content, complaint in (("{", "not JSON"), ("[1]", "holds a list")):
        (tmp_path / "sids.json").write_text(content)
        with pytest.raises(UserError, match=complaint):
            SemanticIds.from_published(tmp_path / "sids.json")
    with pytest.raises(UserError, match="no published SIDs at"):
        SemanticIds.from_published(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="codes go from 0 to 3"):
        SemanticIds.from_published({"x": [4]}, codebook_size=4)


# --- the trie -------------------------------------------------------------------------------------------------------------

CATALOGUES = [(1, 1, 1), (3, 4, 1), (1, 3, 5), (40, 1, 7), (60, 3, 4), (500, 4, 9), (64, 2, 8), (50, 70, 1), (80, 40, 3),
              (60, 5, 2**13)]  # the last three, and only they, have rows of more than 62 bits


def plain_step(rows, lo, hi, level):
    "The definition of `Trie.step`, for one beam: code -> (first, one past the last) of the beam's rows with it at `level`."
    found = {}
    for row in range(lo, hi):
        found.setdefault(rows[row][level], []).append(row)
    assert all(with_it == list(range(with_it[0], with_it[-1] + 1)) for with_it in found.values())
    return {code: (with_it[0], with_it[-1] + 1) for code, with_it in found.items()}


def some_codes(items, levels, codebook_size, seed):
    "Codes with shared prefixes, dead ends and repeats, in no order; the largest code is there."
    rng = np.random.default_rng(seed)
    codes = rng.choice(rng.integers(codebook_size, size=3 + items // 20), size=(items, levels))
    codes[0] = codebook_size - 1
    return codes[rng.integers(items, size=2 * items)] if items > 1 else codes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("items, levels, codebook_size", CATALOGUES)
def test_every_step_is_its_definition(items, levels, codebook_size, seed):
    "All prefixes there are, level by level, in any order and with dead beams between them."
    codes = some_codes(items, levels, codebook_size, seed)
    trie, rng = Trie(codes, codebook_size), np.random.default_rng(seed)
    rows = sorted(set(map(tuple, codes.tolist())))
    assert list(map(tuple, trie.rows.tolist())) == rows and trie.levels == levels and trie.root() == (0, len(rows))
    beams, m = [trie.root()], len(rows)
    for level in range(levels):
        asked = beams + [(0, 0), (m, m), (m // 2, m // 2)]
        asked = [asked[k] for k in rng.permutation(len(asked))]
        lo, hi = torch.tensor(asked).T
        allowed, los, his = trie.step(lo, hi, level)
        assert allowed.shape == los.shape == his.shape == (len(asked), codebook_size)
        assert (allowed.dtype, los.dtype, his.dtype) == (torch.bool, torch.int64, torch.int64)
        assert los.is_contiguous() and his.is_contiguous()  # decoding takes views of them
        assert ((his > los) == allowed).all() and (his >= los).all()  # what is not allowed is dead
        beams = []
        for beam, (low, high) in enumerate(asked):
            new = {code: (los[beam, code].item(), his[beam, code].item()) for code in allowed[beam].nonzero()[:, 0].tolist()}
            assert new == plain_step(rows, low, high, level)
            beams += new.values()
    assert sorted(beams) == [(row, row + 1) for row in range(m)]  # each SID is reached, once


@pytest.mark.parametrize("items, levels, codebook_size", CATALOGUES)
def test_distinct_rows_are_those_of_numpy(items, levels, codebook_size):
    codes = some_codes(items, levels, codebook_size, seed=0)
    expected = np.unique(codes, axis=0)
    for found in (semantic_ids._distinct(codes, codebook_size), Trie(codes).rows.numpy()):
        assert found.dtype == np.int64 and found.tolist() == expected.tolist()


def test_rows_of_62_bits_still_are_one_integer_and_longer_ones_are_not(monkeypatch):
    codes = np.random.default_rng(0).integers(2**31, size=(50, 2))
    codes[:25, 0], codes[0] = 2**31 - 1, 2**31 - 1
    expected = np.unique(codes, axis=0).tolist()
    wider = np.unique(codes + 1, axis=0).tolist()
    asked, unique = [], np.unique
    monkeypatch.setattr(semantic_ids.np, "unique", lambda *a, **k: asked.append(1) or unique(*a, **k))
    assert semantic_ids._distinct(codes, 2**31).tolist() == expected and not asked
    assert semantic_ids._distinct(codes + 1, 2**31 + 1).tolist() == wider and asked


def test_a_saved_trie_is_the_same(tmp_path):
    trie = Trie(some_codes(60, 3, 4, seed=0), 6)
    trie.save(tmp_path / "trie.safetensors")
    again = Trie.load(tmp_path / "trie.safetensors")
    assert torch.equal(again.rows, trie.rows) and again.codebook_size == 6
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "trie.safetensors").read_bytes()
    with pytest.raises(UserError, match="no trie at .*nowhere"):
        Trie.load(tmp_path / "nowhere")


@pytest.mark.parametrize("codes, codebook_size, complaint", [
    (np.zeros((0, 3)), 4, "at least one SID"), ([1, 2], 4, "at least one SID"), ([[0, 4]], 4, "from 0 to 3"),
    ([[0, -1]], None, "from 0 to 0"),
])
def test_a_trie_refuses(codes, codebook_size, complaint):
    with pytest.raises(UserError, match=complaint):
        Trie(codes, codebook_size)


# --- neighbours -----------------------------------------------------------------------------------------------------------

def plain_auc(vectors, codes, k, judged):
    "The definition of `neighbour_auc`, pair by pair."
    unit, wins = vectors / np.linalg.norm(vectors, axis=1, keepdims=True), []
    for item in judged:
        others = [o for o in np.argsort(-(unit @ unit[item]), kind="stable") if o != item]
        shared = {o: next((n for n, (a, b) in enumerate(zip(codes[item], codes[o])) if a != b), codes.shape[1]) for o in others}
        wins.append(np.mean([(shared[near] > shared[rest]) + 0.5 * (shared[near] == shared[rest])
                             for near in others[:k] for rest in others[k:]]))
    return np.mean(wins)


@pytest.mark.parametrize("chunk", [1, 10**9])
def test_neighbour_auc_is_its_definition(chunk, monkeypatch):
    monkeypatch.setattr(semantic_ids, "_TABLE", chunk)
    vectors, codes, _ = a_catalogue(90, 3, 6)
    assert neighbour_auc(vectors, codes, k=7) == pytest.approx(plain_auc(vectors, codes, 7, range(90)), abs=1e-9)
    judged = np.random.default_rng(2).permutation(90)[:20]
    assert neighbour_auc(vectors, codes, k=7, sample=20, seed=2) == pytest.approx(plain_auc(vectors, codes, 7, judged), abs=1e-9)
    with pytest.raises(UserError, match="only 90 items"):
        neighbour_auc(vectors, codes, k=89)


# --- saving ---------------------------------------------------------------------------------------------------------------

def test_a_saved_model_gives_the_same_codes_in_another_process(tmp_path):
    vectors = a_catalogue(300)[0]
    model, _ = train_rqvae(vectors, RQVAEConfig(codebook_size=8, steps=30, hidden=(16,), code_dim=4), "cpu")
    codes = model.encode(vectors)
    model.save(tmp_path / "rqvae.safetensors")
    np.save(tmp_path / "vectors.npy", vectors)
    SemanticIds(range(300), codes, 8).save(tmp_path)
    code = (f"import numpy as np; from gti_nb.rqvae import RQVAE; from gti_nb.semantic_ids import SemanticIds\n"
            f"model, sids = RQVAE.load({str(tmp_path / 'rqvae.safetensors')!r}), SemanticIds.load({str(tmp_path)!r})\n"
            f"assert (model.encode(np.load({str(tmp_path / 'vectors.npy')!r})) == sids.codes).all()\n"
            f"sids.save({str(tmp_path / 'again')!r})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (RQVAE.load(tmp_path / "rqvae.safetensors").encode(vectors) == codes).all()
    for name in ("codes.safetensors", "semantic_ids.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


# --- figure ---------------------------------------------------------------------------------------------------------------

def test_quality_figure_shows_what_it_says():
    vectors, raw, distances_of = a_catalogue()
    new = resolve(raw, 12, distances_of, vectors, leftovers="extra_level").codes
    fig = quality_figure(raw, new, 12)
    lines = [trace for trace in fig.data if trace.type == "scatter"]
    assert [trace.name for trace in lines] == ["after"] * 4 + ["before"] * 3
    for trace, column in zip(lines, [*new.T, *raw.T]):
        assert list(trace.y) == sorted(np.bincount(column, minlength=12), reverse=True)
    bars = {trace.name: list(trace.y) for trace in fig.data if trace.type == "bar"}
    sizes = [len(rows) for rows in in_groups(raw).values()]
    assert bars["before"] == [sizes.count(2), sizes.count(3), sizes.count(4), sum(size >= 5 for size in sizes)]
    assert bars["after"] == [0, 0, 0, 0]
