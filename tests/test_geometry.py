"""The geometry against its peers (rsatoolbox, scikit-learn, scipy), against plain loops, at the edges, and on a small run."""

import itertools
import json
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch
from rsatoolbox.data import Dataset
from rsatoolbox.rdm import RDMs, calc_rdm, compare
from scipy import stats
from scipy.spatial.distance import pdist
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from gti_nb import geometry
from gti_nb.core import UserError
from gti_nb.diagnosis import Diagnosis
from gti_nb.geometry import (cosine_matrix, effective_rank, geometry_report, hubness, k_occurrence, map_2d, map_figure,
                             mean_cosine, nearest_tokens, norm_ratio, pairwise_figure, participation_ratio, rms_to_mean, rsa,
                             rsa_table, rsa_test, singular_values, stable_rank, token_pairs)
from gti_nb.config import make_config
from gti_nb.stages import Run, run_stage

COUNTS = (effective_rank, participation_ratio, stable_rank)


def noise(n: int, d: int, seed: int = 0) -> np.ndarray:
    "Rows with more or less of a common part, as trained ones have."
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) + rng.uniform(0, 2, (n, 1)) * rng.normal(size=d)


# --- RSA and rsatoolbox ----------------------------------------------------------------------------------------------------

PEER = {"pearson": "corr", "spearman": "spearman"}


@pytest.mark.parametrize("method", PEER)
@pytest.mark.parametrize("n, d, e", [(3, 2, 2), (20, 5, 8), (60, 300, 32), (150, 16, 4)])
def test_rsa_agrees_with_rsatoolbox(method, n, d, e):
    ours, reference = noise(n, d, 1), noise(n, e, 2)
    theirs = compare(RDMs(pdist(ours, "cosine")[None]), RDMs(pdist(reference, "cosine")[None]), method=PEER[method])
    assert rsa(ours, reference, method) == pytest.approx(theirs.item(), abs=1e-9)


@pytest.mark.parametrize("method", PEER)
def test_rsa_agrees_with_rsatoolbox_from_the_rows_on(method):
    "Their dissimilarity by correlation is one minus the cosine of rows whose values have mean 0."
    sides = [side - side.mean(1, keepdims=True) for side in (noise(40, 12, 1), noise(40, 30, 2))]
    theirs = compare(*(calc_rdm(Dataset(side), method="correlation") for side in sides), method=PEER[method])
    assert rsa(*sides, method) == pytest.approx(theirs.item(), abs=1e-9)


@pytest.mark.parametrize("method", PEER)
@pytest.mark.parametrize("kind", ["within", "between"])
def test_rsa_of_some_pairs_agrees_with_rsatoolbox(method, kind):
    ours, reference, level = noise(30, 6, 1), noise(30, 4, 2), np.arange(30) // 10
    i, j = np.triu_indices(30, 1)
    kept = (level[i] == level[j]) == (kind == "within")
    rdms = [np.where(kept, pdist(side, "cosine"), np.nan)[None] for side in (ours, reference)]  # they leave out NaN
    theirs = compare(*map(RDMs, rdms), method=PEER[method])
    assert rsa(ours, reference, method, codebook_size=10, pairs=kind) == pytest.approx(theirs.item(), abs=1e-9)


def test_ties_share_a_rank():
    ours = np.eye(8)[[0, 0, 0, 1, 1, 2, 3, 4]]
    reference = noise(8, 5)
    wanted = stats.spearmanr(1 - pdist(ours, "cosine"), 1 - pdist(reference, "cosine")).statistic
    assert rsa(ours, reference, "spearman") == pytest.approx(wanted, abs=1e-12)


def test_centred_rsa_subtracts_the_mean_of_each_level():
    ours, reference = noise(30, 6, 1), noise(30, 4, 2)
    by_hand = [np.concatenate([side[k:k + 10] - side[k:k + 10].mean(0) for k in (0, 10, 20)]) for side in (ours, reference)]
    assert rsa(ours, reference, center=True, codebook_size=10) == pytest.approx(rsa(*by_hand), abs=1e-12)
    shifted = ours + np.repeat(np.random.default_rng(0).normal(size=(3, 6)), 10, axis=0)
    assert rsa(shifted, reference, center=True, codebook_size=10) == pytest.approx(rsa(*by_hand), abs=1e-9)


# --- pairs, sampled and not ------------------------------------------------------------------------------------------------

def test_the_papers_pairs_are_all_taken():
    i, j = token_pairs(1024)
    assert len(i) == 1024 * 1023 // 2 <= geometry.PAIRS and len(set(zip(i.tolist(), j.tolist()))) == len(i)


@pytest.mark.parametrize("kind", ["all", "within", "between"])
def test_sampled_pairs_are_of_their_kind_and_tell_the_same(kind, monkeypatch):
    latent = noise(300, 8, 1)
    ours, reference = np.hstack([latent, noise(300, 8, 2)]), latent
    exact = rsa(ours, reference, codebook_size=100, pairs=kind)
    monkeypatch.setattr(geometry, "PAIRS", 8000)
    i, j = token_pairs(300, 100, kind)
    assert len(i) == 8000 and (i < j).all()
    assert kind == "all" or ((i // 100 == j // 100) == (kind == "within")).all()
    if kind == "all":
        assert (i // 100 == j // 100).mean() == pytest.approx(1 / 3, abs=0.03)
    assert 0.2 < exact < 0.95 and rsa(ours, reference, codebook_size=100, pairs=kind) == pytest.approx(exact, abs=0.03)
    assert not np.array_equal(i, token_pairs(300, 100, kind, seed=1)[0])
    assert np.array_equal(i, token_pairs(300, 100, kind)[0])


def test_pairs_that_do_not_exist_are_none():
    assert [len(token_pairs(5000, size, kind)[0]) for size, kind in ((None, "between"), (1, "within"))] == [0, 0]
    assert np.isnan(rsa(noise(5, 3), noise(5, 3), pairs="between"))
    assert np.isnan(rsa(noise(1, 3), noise(1, 3)))


# --- chance ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", PEER)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", ["all", "within", "between"])
def test_permuted_pairs_are_what_permuted_tokens_give(method, center, kind, monkeypatch):
    "The fast path exchanges the pairs' values; the plain one exchanges the reference's rows and starts over."
    ours, reference = noise(24, 5, 1), noise(24, 4, 2)
    rng, orders = np.random.default_rng(0), []
    for _ in range(20):
        orders.append((np.arange(0, 24, 8)[:, None] + rng.permuted(np.tile(np.arange(8), (3, 1)), axis=1)).ravel())
    plain = np.array([rsa(ours, reference[order], method, center, 8, kind) for order in orders])
    found = rsa_test(ours, reference, method, center, 8, kind, permutations=20)
    assert found["chance_95"] == pytest.approx(np.quantile(plain, 0.95), abs=1e-9)
    assert found["p"] == (1 + (plain >= found["rsa"] - 1e-12).sum()) / 21


def test_p_agrees_with_all_orders_there_are():
    for seed in range(3):
        latent = noise(6, 3, seed)
        ours, reference = latent + 0.8 * noise(6, 3, seed + 10), latent
        value = rsa(ours, reference)
        orders = [rsa(ours, reference[list(order)]) for order in itertools.permutations(range(6))]
        exact = np.mean([other >= value - 1e-12 for other in orders])
        found = rsa_test(ours, reference, permutations=4000)
        assert found["p"] == pytest.approx(exact, abs=5 * np.sqrt(exact * (1 - exact) / 4000))
        assert found["rsa"] == value


def test_tokens_stay_in_their_level():
    "With two codes a level and one pair each there are few orders; a test over all tokens would have many."
    ours, reference = noise(4, 3, 1), noise(4, 3, 2)
    levels = [[a, b, c, d] for a, b in ((0, 1), (1, 0)) for c, d in ((2, 3), (3, 2))]
    possible = {round(rsa(ours, reference[order], codebook_size=2), 9) for order in levels}
    square = rsa_test(ours, reference, codebook_size=2, permutations=400)
    assert square["chance_95"] == pytest.approx(max(possible), abs=1e-6) or square["chance_95"] in possible
    assert square["p"] == pytest.approx(np.mean([v >= square["rsa"] - 1e-9 for v in possible]), abs=0.12)


def test_many_tokens_are_tested_on_some(monkeypatch):
    latent = noise(200, 8, 1)
    ours = np.hstack([latent, noise(200, 8, 2)])
    monkeypatch.setattr(geometry, "TESTED", 60)
    sizes, plain = [], geometry._permuted
    monkeypatch.setattr(geometry, "_permuted", lambda *given: sizes.append(given[3:5]) or plain(*given))
    found = rsa_test(ours, latent, codebook_size=100, permutations=99)
    assert sizes == [(60, 30)]
    assert found["p"] == 0.01 and found["rsa"] == pytest.approx(rsa(ours, latent, codebook_size=100), abs=0.2)
    assert rsa_test(ours, noise(200, 8, 3), codebook_size=100, permutations=99)["p"] > 0.02
    assert rsa_test(ours, latent, codebook_size=100, permutations=99, seed=1)["rsa"] != found["rsa"]


# --- rows without structure ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [2, 7, 33, 48, 50, 96])
def test_equal_rows_have_no_structure_whatever_rounding_leaves(n):
    same = np.tile(np.random.default_rng(n).normal(size=576).astype(np.float32), (n, 1))
    assert all(np.isnan(rsa(same, noise(n, 5), method, center)) for method in PEER for center in (False, True))
    assert all(np.isnan(value) for value in rsa_test(same, noise(n, 5), center=True).values())
    assert [count(same, center=True) for count in COUNTS] == [0, 0, 0]
    assert [count(same, center=False) for count in COUNTS] == pytest.approx([1, 1, 1])
    assert geometry_report(same, noise(9, 576))["spread_ratio"] < 1e-12
    assert np.isnan(map_2d({"same": same}, noise(9, 576)).attrs["kept"]["same"])


def test_zero_rows_are_allowed():
    rows = np.vstack([np.zeros((2, 4)), np.eye(4)])
    assert mean_cosine(rows) == 0 and np.isnan(rsa(rows, noise(6, 3)))
    assert np.isfinite(rsa(np.vstack([rows[:2], noise(4, 4)]), noise(6, 3)))
    assert all(np.isfinite(value) for value in geometry_report(rows).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_float_type_means_its_values(dtype):
    rows = torch.from_numpy(noise(20, 8)).to(dtype)
    assert geometry_report(rows, rows) == pytest.approx(geometry_report(rows.double().numpy(), rows.double().numpy()))


def test_float64_rows_stay_float64():
    rows = 1 + 1e-10 * torch.from_numpy(noise(20, 8))
    assert rms_to_mean(rows) == pytest.approx(1e-10 * rms_to_mean(noise(20, 8)), rel=1e-4)


@pytest.mark.parametrize("wrong, says", [
    (np.zeros(5), "give a matrix"), (np.zeros((0, 3)), "give a matrix"),
    (np.array([[1.0, 2], [np.inf, 0]]), "row 1 of 2 holds values that aren't finite")])
def test_bad_rows_are_refused(wrong, says):
    with pytest.raises(UserError, match=says):
        geometry_report(wrong)


# --- counts of directions --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("n, d", [(5, 40), (40, 5), (30, 30)])
def test_counts_know_neither_scale_nor_axes(center, n, d):
    rows = noise(n, d)
    turned = rows @ np.linalg.qr(np.random.default_rng(0).normal(size=(d, d)))[0]
    for count in COUNTS:
        value = count(rows, center)
        assert 1 <= value <= min(n, d) and count(1e-5 * turned, center) == pytest.approx(value)
    assert stable_rank(rows, center) <= participation_ratio(rows, center) <= effective_rank(rows, center)


def test_counts_by_their_definitions():
    rows = noise(40, 12)
    s = singular_values(rows, center=True)
    eigenvalues = PCA().fit(rows).explained_variance_
    np.testing.assert_allclose(s**2 / 39, eigenvalues, rtol=1e-9)
    assert participation_ratio(rows, True) == pytest.approx(eigenvalues.sum() ** 2 / (eigenvalues**2).sum())
    assert stable_rank(rows, False) == pytest.approx(np.linalg.norm(rows) ** 2 / np.linalg.norm(rows, 2) ** 2)
    assert effective_rank(rows, True) == pytest.approx(np.exp(stats.entropy(s / s.sum())))


def test_the_report_is_what_the_functions_say_and_fits_into_json():
    rows, base = noise(20, 6), noise(500, 6, 1)
    report = geometry_report(torch.from_numpy(rows), torch.from_numpy(base))
    wanted = {"rows": 20, "dim": 6, "mean_cosine": mean_cosine(rows), "rms_to_mean": rms_to_mean(rows),
              "norm_ratio": norm_ratio(rows, base), "spread_ratio": rms_to_mean(rows) / rms_to_mean(base)}
    wanted |= {count.__name__ + "_centered" * center: count(rows, center) for count in COUNTS for center in (False, True)}
    assert report == pytest.approx(wanted) and json.loads(json.dumps(report)) == pytest.approx(wanted)


# --- neighbours ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, k", [(30, 1), (300, 10), (700, 5)])  # 700 rows take several pieces
def test_neighbour_counts_agree_with_scikit_learn(n, k):
    rows = noise(n, 20)
    near = NearestNeighbors(n_neighbors=k, metric="cosine").fit(rows).kneighbors(return_distance=False)
    counts = np.bincount(near.ravel(), minlength=n)
    assert np.array_equal(k_occurrence(rows, k), counts) and counts.sum() == n * k
    assert hubness(rows, k) == pytest.approx({"skewness": stats.skew(counts), "antihubs": (counts == 0).mean()})


def test_equal_rows_make_no_hubs():
    counts = k_occurrence(np.ones((400, 3)), 10)
    assert counts.max() < 30 and counts.min() > 0  # the same ten for everybody would have 399


class Words:
    "As much of a tokenizer as `nearest_tokens` needs."

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def decode(self, ids):
        return f"word {ids[0]}"


@pytest.mark.parametrize("center", [False, True])
def test_nearest_tokens_agree_with_a_full_sort(center):
    base, rows = noise(20000, 12, 1).astype(np.float32), noise(1100, 12, 2)  # several pieces on both sides
    found = nearest_tokens(rows, base, Words(19000), 4, center)
    a, b = (rows - rows.mean(0), base[:19000] - base[:19000].mean(0, dtype=float)) if center else (rows, base[:19000])
    cosines = (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (b / np.linalg.norm(b, axis=1, keepdims=True)).T
    best = np.sort(-cosines, axis=1)[:, :4]
    np.testing.assert_allclose(found.cosine.to_numpy().reshape(1100, 4), -best, atol=1e-5)
    np.testing.assert_allclose(cosines[found.row, found.id], found.cosine, atol=1e-5)
    assert found["rank"].tolist() == [1, 2, 3, 4] * 1100 and found.token[5] == f"word {found.id[5]}" and found.id.max() < 19000


def test_rows_without_direction_have_no_neighbours():
    base = torch.from_numpy(noise(50, 6))
    rows = np.vstack([noise(3, 6, 1), np.zeros((1, 6))])
    assert nearest_tokens(rows, base, Words(50), 2).row.tolist() == [0, 0, 1, 1, 2, 2]
    same = nearest_tokens(np.tile(noise(1, 6), (7, 1)), base, Words(50), 2, center=True)
    assert same.empty and list(same) == ["row", "rank", "id", "token", "cosine"]


# --- memory ----------------------------------------------------------------------------------------------------------------

def peak_mb(work) -> float:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def test_many_tokens_never_make_a_square():
    "The [n, n] cosines of 24,576 tokens are 4,832 MB, those of 4,000 are 128 MB."
    rows, codes = np.random.default_rng(0).normal(size=(24576, 64)).astype(np.float32), noise(24576, 8)
    assert peak_mb(lambda: mean_cosine(rows)) < 20
    assert peak_mb(lambda: rsa(rows, codes, center=True, codebook_size=8192, pairs="within")) < 200
    assert peak_mb(lambda: rsa_test(rows, codes, codebook_size=8192, permutations=3)) < 200
    assert peak_mb(lambda: nearest_tokens(rows[:3000], rows, Words(24576), 3)) < 300
    assert peak_mb(lambda: k_occurrence(rows[:4000])) < 50


# --- figures ---------------------------------------------------------------------------------------------------------------

def test_the_plane_is_that_of_the_principal_components():
    cloud = noise(300, 9) * np.linspace(3, 0.3, 9)
    table = map_2d({"again": cloud}, cloud, sample=300)
    peer = PCA(2).fit(cloud)
    for part in (table[table.group == "old"], table[table.group == "again"]):
        np.testing.assert_allclose(np.abs(part[["x", "y"]]), np.abs(peer.transform(cloud)), atol=1e-8)
    assert table.attrs["kept"]["again"] == pytest.approx(peer.explained_variance_ratio_.sum())


def test_a_group_weighs_the_same_whatever_its_size():
    base, new = noise(2000, 5), 10 + noise(20, 5, 1)
    once, often = (map_2d({"new": rows}, base, sample=3000) for rows in (new, np.tile(new, (50, 1))))
    old = [table[table.group == "old"][["x", "y"]] for table in (once, often)]
    np.testing.assert_allclose(*old, atol=1e-8)


def test_large_maps_are_thinned_over_all_levels():
    table = map_2d({"new": noise(3000, 5)}, noise(5000, 5), sample=100)
    assert table.group.value_counts().to_dict() == {"old": 100, "new": 100}
    rows = table[table.group == "new"].row
    assert rows.iloc[0] == 0 and rows.iloc[-1] == 2999 and rows.is_unique
    figure = map_figure({"a": noise(3000, 5), "b": noise(3000, 5)}, noise(5000, 5), [str(k) for k in range(3000)],
                        np.arange(3000) // 1000, sample=90)
    assert [trace.name for trace in figure.data] == ["old", "new, level 1", "new, level 2", "new, level 3"] * 2
    assert figure.data[1].text[:2] == ("0", "34") and len(figure.data[1].x) == 30


def test_the_pairwise_figure_holds_old_and_new():
    old, new = noise(6, 5), noise(4, 5, 1)
    figure = pairwise_figure({"a": new, "b": 2 * new}, old, list("ttuvwx"), list("abcd"))
    both = cosine_matrix(np.vstack([old, new]))
    assert [np.abs(trace.z / 100 - both).max() < 0.0051 for trace in figure.data] == [True, True]
    assert figure.data[0].x[:2] == ("1 t", "2 t") and figure.data[0].x[-1] == "10 d"
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-100, 100)


# --- a run -----------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "The smallest run with an extra level of collisions, as far as its rows."
    sizes = {"max_items": 20, "levels": 2, "codebook_size": 3, "collisions": "extra_level", "min_rating": 4}
    sizes |= {"rqvae_steps": 5, "grounding_steps": 2, "sft_steps": 2}
    made = Run(make_config({"run_dir": str(tmp_path_factory.mktemp("run")), **sizes}))
    for name in made.stages:
        if not name.startswith(("evaluate", "geometry", "comparison")):
            run_stage(made, name)
    return made


def test_the_base_is_read_once_and_the_report_has_a_yardstick(run, monkeypatch):
    diagnosis, reads = Diagnosis(run), []
    monkeypatch.setattr(Run, "base", lambda self, real=Run.base: reads.append(1) or real(self))
    report = diagnosis.report()
    diagnosis.pairwise(), diagnosis.map(), diagnosis.moves()
    assert len(reads) == 1 and report.index[0] == "old tokens" and len(report) == 1 + len(run.moments())
    base, _ = diagnosis.base()
    wanted = geometry_report(run.rows("gti", "ground").rows, base)
    assert report.loc["gti, after grounding"].to_dict() == pytest.approx(wanted)


def test_structure_is_against_the_codebooks_without_the_extra_level(run):
    diagnosis = Diagnosis(run)
    assert diagnosis.sids.levels == 3 and len(diagnosis.codebooks()) == 2 * 3
    table = diagnosis.structure([("gti", "sft")], permutations=9)
    wanted = rsa_table(run.rows("gti", "sft").rows[:6], diagnosis.codebooks(), 3, 9)
    pd.testing.assert_frame_equal(table.drop(columns=["arm", "moment"]), wanted)
    assert set(table.arm + table.moment) == {"gtisft"}


def test_moves_by_hand(run):
    moves = Diagnosis(run).moves().set_index(["arm", "to"])
    assert list(moves.index) == [("mean", "sft"), ("gti", "ground"), ("gti", "sft")]
    old, new = (run.rows("gti", moment).rows.double().numpy() for moment in ("ground", "sft"))
    change = new - old
    found = moves.loc["gti", "sft"]
    assert found["from"] == "ground" and found.kept == pytest.approx(rsa(old, new, center=True))
    mean = np.tile(change.mean(0), (len(change), 1))
    assert found.together == pytest.approx((mean**2).sum() / (change**2).sum())
    assert found.distance == pytest.approx(np.sqrt((change**2).sum(1).mean()) / rms_to_mean(Diagnosis(run).base()[0]))


def test_a_token_is_named_with_its_items_and_neighbours(run):
    diagnosis, sids = Diagnosis(run), run.sids()
    table = diagnosis.nearest("gti", "ground", ["<b_1>", 0], k=2, titles=100)
    carried = run.dataset().items.title[sids.codes[:, 1] == 1]
    assert table.index.tolist() == ["<b_1>", "<a_0>"] and table["items"].iloc[0] == len(carried)
    assert table.examples.iloc[0] == ", ".join(carried)
    rows, (base, tokenizer) = run.rows("gti", "ground").rows, diagnosis.base()
    near = nearest_tokens(rows, base, tokenizer, 2, center=True)
    assert table.nearest.iloc[1] == " ".join(map(repr, near[near.row == 0].token))
    assert (diagnosis.nearest("mean", "init").nearest == "").all()


def test_what_a_run_lacks_is_refused(run, tmp_path):
    diagnosis = Diagnosis(run)
    with pytest.raises(UserError, match="no rows of arm 'mean' at moment 'ground': it has mean init, mean sft"):
        diagnosis.report([("mean", "ground")])
    with pytest.raises(UserError, match="no token <z_1>: give a name from <a_0>"):
        diagnosis.nearest("gti", "sft", ["<z_1>"])
    (run.folder("sft-mean") / "DONE.json").rename(tmp_path / "DONE.json")
    try:
        with pytest.raises(UserError, match="stage sft-mean .* isn't finished"):
            diagnosis.rows("mean", "sft")
    finally:
        (tmp_path / "DONE.json").rename(run.folder("sft-mean") / "DONE.json")
