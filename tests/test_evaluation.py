"""Evaluation against its peers (torchmetrics, scikit-learn, scipy), against plain loops, in two processes, and at the edges."""

import multiprocessing
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from gti_nb import evaluation
from gti_nb.core import UserError
from gti_nb.data import Dataset
from gti_nb.evaluation import (KS, average_runs, beam_predictions, compare, drop_seen, hash_order, history_vectors,
                               merge_shards, metrics_from_predictions, nearest_items, paired_difference, predictions_table,
                               rank_metrics, shard, sid_metrics, summarize, to_items)
from gti_nb.paper import GRADES, GradedRetrieval, graded_metrics, graded_retrieval, paper_results, paper_table
from gti_nb.semantic_ids import SemanticIds

ALL = ("recall", "hit", "precision", "mrr", "ndcg")
ITEMS = [f"item{i}" for i in range(150)]


def rankings(n: int, seed: int, length: int = 120) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [[ITEMS[i] for i in rng.permutation(len(ITEMS))[:length]] for _ in range(n)]


def test_modules_import_neither_torch_nor_plotly():
    code = "import sys, gti_nb.evaluation, gti_nb.paper; print([m for m in ('torch', 'plotly', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- metrics and torchmetrics, scikit-learn ------------------------------------------------------------------------------

def torchmetrics_of(name: str, found: np.ndarray, k: int) -> float:
    "The metric of one user by torchmetrics; `found` says which items of the whole ranking are right."
    import torch
    from torchmetrics.functional import retrieval

    theirs = {"recall": retrieval.retrieval_recall, "hit": retrieval.retrieval_hit_rate, "precision": retrieval.retrieval_precision,
              "mrr": retrieval.retrieval_reciprocal_rank, "ndcg": retrieval.retrieval_normalized_dcg}[name]
    return float(theirs(torch.arange(len(found), 0, -1).double(), torch.as_tensor(found), top_k=k))


@pytest.mark.parametrize("n_right", [1, 3, 30])
def test_metrics_agree_with_torchmetrics(n_right):
    lists, rng = rankings(12, n_right, length=len(ITEMS)), np.random.default_rng(n_right)
    right = [set(rng.choice(ITEMS, n_right, replace=False)) for _ in lists]
    ours = rank_metrics(lists, right, KS, ALL)
    for row, (items, wanted) in enumerate(zip(lists, right)):
        found = np.array([item in wanted for item in items])
        for name in ALL:
            for k in KS:
                assert ours.loc[row, f"{name}@{k}"] == pytest.approx(torchmetrics_of(name, found, k), abs=1e-6), (name, k)
    assert 0 < ours["recall@50"].mean() < 1


def test_one_target_as_text_and_as_a_set_is_the_same():
    lists, targets = rankings(40, 0), ITEMS[:40]
    assert rank_metrics(lists, targets, KS, ALL).equals(rank_metrics(lists, [{t} for t in targets], KS, ALL))


def test_what_is_not_predicted_is_a_miss():
    short = rank_metrics([["a"], []], ["a", "a"], (5,), ALL)
    assert short["precision@5"].tolist() == [0.2, 0] and short["recall@5"].tolist() == [1, 0]
    with pytest.raises(UserError, match="no target"):
        rank_metrics([["a"]], [set()])


@pytest.mark.parametrize("seed", range(3))
def test_graded_metrics_agree_with_peers(seed):
    import torch
    from sklearn.metrics import ndcg_score
    from torchmetrics.functional.retrieval import retrieval_normalized_dcg

    rng, lists = np.random.default_rng(seed), rankings(6, seed, length=len(ITEMS))
    pools = pd.DataFrame([(str(q), item, grade) for q in range(6) for item, grade in zip(
        rng.choice(ITEMS, 100, replace=False), rng.choice(list(GRADES), 100, p=[0.2, 0.3, 0.5]))], columns=["query_id", "item_id", "grade"])
    task = GradedRetrieval(pd.DataFrame({"query_id": [str(q) for q in range(6)], "text": "?"}), pools)
    ours = graded_metrics(lists, task, KS)
    for q, items in enumerate(lists):
        grade = pools[pools.query_id == str(q)].set_index("item_id").grade
        order = [item for item in items if item in grade.index]
        gains = grade[order].map(GRADES).to_numpy(float)
        for k in KS:
            scores = np.arange(len(gains), 0, -1, dtype=float)
            assert ours.loc[str(q), f"ndcg@{k}"] == pytest.approx(ndcg_score([gains], [scores], k=k), abs=1e-9)
            theirs = retrieval_normalized_dcg(torch.as_tensor(scores), torch.as_tensor(gains), top_k=k)
            assert ours.loc[str(q), f"ndcg@{k}"] == pytest.approx(float(theirs), abs=1e-6)
            assert ours.loc[str(q), f"precision_good@{k}"] == pytest.approx((grade[order[:k]] == "good").mean())
            assert ours.loc[str(q), f"precision_good_maybe@{k}"] == pytest.approx((grade[order[:k]] != "not").mean())


# --- semantic IDs to items -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("distinct", [1, 2, 7, 50, 150])
def test_sharing_cannot_raise_the_item_score(distinct):
    "Every item is the target once. Whatever shares an SID, any ranking of all of them then scores exactly chance on items."
    rng = np.random.default_rng(distinct)
    sids = SemanticIds(ITEMS, np.stack([rng.permutation(len(ITEMS)) % distinct, np.zeros(len(ITEMS), int)], axis=1), 150)
    codes = np.broadcast_to(sids.unique[rng.permutation(len(sids.unique))], (len(ITEMS), len(sids.unique), 2))
    scores = np.broadcast_to(-np.arange(len(sids.unique), dtype=float), codes.shape[:2])
    for k in (5, 10, 100):
        found = rank_metrics(to_items(codes, scores, sids, k), ITEMS, (k,))[f"recall@{k}"].mean()
        assert found == pytest.approx(k / len(ITEMS))
        of_sids = sid_metrics(codes, scores, sids, ITEMS, (k,))[f"sid_recall@{k}"].mean()
        assert of_sids == pytest.approx(found) if distinct == 150 else of_sids > found


def test_order_of_shared_items_ignores_the_catalogue():
    codes, flat = np.zeros((len(ITEMS), 2), int), (np.zeros((1, 1, 2), int), np.zeros((1, 1)))
    forward, backward = (to_items(*flat, SemanticIds(ids, codes, 1), 20) for ids in (ITEMS, ITEMS[::-1]))
    assert forward == backward == [hash_order(ITEMS)[:20]]
    assert forward != [ITEMS[:20]]


def test_beams_count_by_score_and_empty_ones_not_at_all():
    sids = SemanticIds(["a", "b", "c"], [[0], [1], [2]], 3)
    codes, scores = [[[2], [0], [1], [0]]], [[-3.0, -1.0, -np.inf, -9.0]]
    assert to_items(codes, scores, sids, 9) == [["a", "c"]]
    table = beam_predictions(["u"], codes, scores, sids, 9)
    assert table.score.tolist() == [-1, -3]


# --- floors --------------------------------------------------------------------------------------------------------------

def test_nearest_items_equal_a_plain_loop():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(len(ITEMS), 8)).astype(np.float32)
    histories = [list(rng.choice(ITEMS, n)) for n in rng.integers(1, 9, 600)]  # more than one chunk
    found = nearest_items(history_vectors(histories, ITEMS, vectors), ITEMS, vectors, 10)
    for history, items in zip(histories[::37], found[::37]):
        mean = np.mean([vectors[ITEMS.index(i)] for i in history], axis=0)
        assert items == [ITEMS[i] for i in np.argsort(-(vectors @ mean))[:10]]


# --- predictions -----------------------------------------------------------------------------------------------------------

def people(n: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"user_id": [f"u{i}" for i in range(n)], "target": rng.choice(ITEMS, n),
                         "history": [list(rng.choice(ITEMS, rng.integers(0, 60))) for _ in range(n)]})


def test_every_headline_number_comes_out_of_the_saved_predictions(tmp_path):
    users, arms = people(80), {"a": rankings(80, 1), "b": rankings(80, 2)}
    direct, again = {}, {}
    for arm, lists in arms.items():
        predictions_table(users.user_id.tolist(), lists).to_parquet(tmp_path / f"{arm}.parquet", index=False)
        direct[arm] = rank_metrics(lists, users.target.tolist(), KS, ALL).set_axis(pd.Index(users.user_id), axis=0)
        again[arm] = metrics_from_predictions(pd.read_parquet(tmp_path / f"{arm}.parquet"), users, KS, ALL)
        pd.testing.assert_frame_equal(direct[arm], again[arm], check_exact=True)
    pd.testing.assert_frame_equal(summarize(direct, 200), summarize(again, 200), check_exact=True)
    pd.testing.assert_frame_equal(compare(direct, "a", 200), compare(again, "a", 200), check_exact=True)


@pytest.mark.parametrize("break_it, message", [
    (lambda t: t[t.user_id != "u3"], "1 of 9 users have no predictions"),
    (lambda t: pd.concat([t, t[t.user_id == "u3"]]), "user 'u3' are not 1, 2, 3"),
    (lambda t: t[~((t.user_id == "u3") & (t["rank"] == 2))], "user 'u3' are not 1, 2, 3"),
    (lambda t: t.replace({"user_id": {"u3": "stranger"}}), "1 are not test users"),
    (lambda t: t.assign(item_id="item1"), "repeat an item"),
])
def test_broken_predictions_are_refused(break_it, message):
    users = people(9)
    with pytest.raises(UserError, match=message):
        metrics_from_predictions(break_it(predictions_table(users.user_id.tolist(), rankings(9, 0))), users)


def test_dropping_seen_items_equals_a_plain_loop():
    users, lists = people(40), rankings(40, 3)
    users.at[0, "history"] = ITEMS  # nothing is left for this one
    table = predictions_table(users.user_id.tolist(), lists, [list(np.linspace(1, 0, len(items))) for items in lists])
    found = drop_seen(table.sample(frac=1, random_state=0), users)
    for user, history, items in zip(users.user_id, users.history, lists):
        left = [(i, s) for i, s in zip(items, np.linspace(1, 0, len(items))) if i not in history]
        rows = found[found.user_id == user]
        assert rows.item_id.tolist() == ([i for i, _ in left] or [""])
        assert rows.score.tolist() == ([s for _, s in left] or [-np.inf])
        assert rows["rank"].tolist() == (list(range(1, len(left) + 1)) or [0])
    assert metrics_from_predictions(found, users).loc["u0"].sum() == 0
    pd.testing.assert_frame_equal(drop_seen(table, users.assign(history=[[]] * 40)), table)


# --- several processes -----------------------------------------------------------------------------------------------------

def evaluate_share(rank: int, world: int, folder: str):
    "What one process does: predict for its users and write them down."
    users = people(25)
    mine = shard(len(users), rank, world)
    lists = [rankings(25, 5)[i] for i in mine]
    predictions_table(users.user_id.iloc[mine].tolist(), lists).to_parquet(f"{folder}/{rank}.parquet", index=False)


def test_two_processes_evaluate_each_user_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=evaluate_share, args=(rank, 2, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    parts, users = [pd.read_parquet(tmp_path / f"{rank}.parquet") for rank in range(2)], people(25)
    alone = predictions_table(users.user_id.tolist(), rankings(25, 5))
    pd.testing.assert_frame_equal(merge_shards(parts, users.user_id.tolist()), alone)
    for wrong, message in (([parts[0]], "12 of 25 users have no predictions"), ([*parts, parts[1]], "12 users were evaluated by more"),
                           ([parts[0], parts[1].replace({"user_id": {"u1": "u0"}})], "more than one process")):
        with pytest.raises(UserError, match=message):
            merge_shards(wrong, users.user_id.tolist())


@pytest.mark.parametrize("n, world", [(0, 1), (1, 4), (10, 3), (11, 4), (12, 4)])
def test_shards_cover_everyone_once(n, world):
    shares = [shard(n, rank, world) for rank in range(world)]
    assert sorted(np.concatenate(shares)) == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# --- intervals -------------------------------------------------------------------------------------------------------------

def table_of(n: int, seed: int, rate: float = 0.2) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    hits = rng.random(n) < rate
    return pd.DataFrame({"recall@10": hits.astype(float), "ndcg@10": hits * rng.random(n)})


def test_bootstrap_equals_drawing_the_rows():
    values, n_boot = table_of(1001, 0).to_numpy(), 2500  # 2,500 draws of 1,001 users come in two chunks
    draws = np.random.default_rng(7).integers(0, len(values), (n_boot, len(values)))
    plain = np.stack([values[users].mean(axis=0) for users in draws])
    np.testing.assert_allclose(evaluation._bootstrap_means(values, n_boot, 7), plain, rtol=0, atol=1e-12)


def test_intervals_agree_with_scipy():
    from scipy.stats import bootstrap

    a, b = table_of(400, 1), table_of(400, 2)
    for metric in a:
        ours = paired_difference(a, b, metric, n_boot=20_000)
        theirs = bootstrap(((a - b)[metric].to_numpy(),), np.mean, n_resamples=20_000, method="percentile", random_state=1).confidence_interval
        assert [ours["low"], ours["high"]] == pytest.approx([theirs.low, theirs.high], abs=0.002)
        assert ours["wins"] == (a[metric] > b[metric]).sum() and ours["losses"] == (a[metric] < b[metric]).sum()


def test_runs_are_averaged_within_users():
    runs = [table_of(300, seed) for seed in range(3)]
    one, several = summarize({"arm": average_runs(runs)}), summarize({"arm": runs})
    assert one[["mean", "low", "high"]].equals(several[["mean", "low", "high"]])
    assert several.hits.tolist() == [sum(int((run[m] > 0).sum()) for run in runs) for m in runs[0]]
    assert several.lowest.tolist() == pytest.approx([min(run[m].mean() for run in runs) for m in runs[0]])
    assert several.highest.tolist() == pytest.approx([max(run[m].mean() for run in runs) for m in runs[0]])
    copies = summarize({"arm": [runs[0]] * 3})  # three times the same is no more than once
    assert copies[["low", "high"]].to_numpy() == pytest.approx(summarize({"arm": runs[0]})[["low", "high"]].to_numpy())
    other = [table_of(300, seed) for seed in (8, 9)]
    assert paired_difference(runs, other, "ndcg@10") == paired_difference(average_runs(runs), average_runs(other), "ndcg@10")


@pytest.mark.parametrize("hits, low, high", [(0, 0, 1 - 0.025 ** (1 / 60)), (60, 0.025 ** (1 / 60), 1)])
def test_no_hit_at_all_is_not_certainty(hits, low, high):
    from scipy.stats import binomtest

    row = summarize({"arm": pd.DataFrame({"recall@5": [float(hits > 0)] * 60})}).iloc[0]
    assert [row.low, row.high] == pytest.approx([low, high])
    exact = binomtest(hits, 60).proportion_ci(0.95, "exact")
    assert [row.low, row.high] == pytest.approx([exact.low, exact.high])


def test_equal_arms_are_not_certainly_equal():
    a = table_of(100, 0)
    same = paired_difference(a, a, "ndcg@10")
    assert (same["mean"], same["wins"], same["losses"]) == (0, 0, 0)
    assert same["high"] == pytest.approx(1 - 0.025 ** (1 / 100)) and same["low"] == -same["high"]


def test_comparison_equals_the_single_differences():
    arms = {"base": table_of(250, 0), "better": table_of(250, 1, 0.4), "runs": [table_of(250, 2), table_of(250, 3)]}
    rows = compare(arms, "base", 500, seed=4).set_index(["arm", "metric"])
    for (arm, metric), row in rows.iterrows():
        single = paired_difference(arms[arm], arms["base"], metric, 500, seed=4)
        assert row[list(single)].tolist() == pytest.approx(list(single.values()), abs=1e-12)
        gain = 100 * (average_runs(arms[arm])[metric].mean() / arms["base"][metric].mean() - 1)
        assert row.relative == pytest.approx(gain) and row.relative_low < gain < row.relative_high
    assert rows.loc["better"].relative_low.min() > 0


def test_a_gain_over_next_to_nothing_has_no_interval():
    base = pd.DataFrame({"recall@5": [1.0] + [0.0] * 99})
    row = compare({"base": base, "arm": table_of(100, 0)[["recall@10"]].set_axis(["recall@5"], axis=1)}, "base").iloc[0]
    assert row.relative > 0 and np.isnan([row.relative_low, row.relative_high]).all()
    assert paper_table(3, row.to_frame().T.infer_objects(), "movielens").iloc[0, 0] == "too few hits"


# --- graded retrieval ------------------------------------------------------------------------------------------------------

def lives(columns=("genres", "year"), users: int = 12, events: int = 60, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    items = pd.DataFrame({"item_id": ITEMS, "title": [f"Title {i % 140}" for i in range(150)], "description": "",
                          "genres": rng.choice(["Drama, War", "Comedy", "Sci-Fi", ""], 150), "year": rng.choice(["1950", "1994", ""], 150)})
    rows = [(f"u{u}", item, t, float(rng.integers(1, 6))) for u in range(users)
            for t, item in enumerate(rng.choice(ITEMS, events, replace=False))]
    return Dataset("made up", items[["item_id", "title", "description", *columns]],
                   pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp", "rating"]))


@pytest.mark.parametrize("columns", [("genres", "year"), ("genres",), ()])
def test_queries_know_nothing_of_what_is_graded(columns):
    dataset = lives(columns)
    task = graded_retrieval(dataset, pool_size=30)
    assert len(task.queries) > 8
    events, title = dataset.interactions, dataset.items.set_index("item_id").title
    for query, text, history in task.queries.itertuples(index=False):
        known, pool = events[events.user_id == query].iloc[:18], task.pools[task.pools.query_id == query]
        assert len(pool) == 30 and not set(title[pool.item_id]) & set(title[known.item_id])
        assert history == known[known.rating >= 4].item_id.tolist() == task.train[query]
        rating = events[events.user_id == query].set_index("item_id").rating[pool.item_id].to_numpy()
        assert pool.grade.tolist() == ["good" if r >= 4 else "maybe" if r >= 3 else "not" for r in rating]
    later = events.groupby("user_id").cumcount() >= 18
    changed = events.assign(rating=events.rating.where(~later, 5.0), item_id=events.item_id)
    again = graded_retrieval(Dataset("changed", dataset.items, changed), pool_size=30)
    assert dict(task.queries[["query_id", "text"]].values).items() <= dict(again.queries[["query_id", "text"]].values).items()
    early = events.assign(rating=events.rating.where(later, 6 - events.rating))  # a text that ignored the ratings wouldn't move
    assert graded_retrieval(Dataset("changed", dataset.items, early), pool_size=30).queries.text.tolist() != task.queries.text.tolist()


def test_a_query_says_what_its_user_likes_more_than_others():
    items = pd.DataFrame({"item_id": list("abcdef"), "title": list("ABCDEF"), "description": "",
                          "genres": ["Drama", "Drama", "Drama, War", "Drama, War", "War", "War"], "year": ["1950"] * 3 + ["1994"] * 3})
    events = pd.DataFrame({"user_id": "u", "item_id": list("abcdef") , "timestamp": range(6), "rating": [1.0, 2, 5, 4, 5, 5]})
    task = graded_retrieval(Dataset("six", items, events), pool_size=1, described=0.84)
    assert task.queries.text.tolist() == ["A viewer who likes War and Drama, most of all from the 1990s. Favourites: E, C and D."]
    assert task.pools.values.tolist() == [["u", "f", "good"]] and task.train == {"u": ["c", "d", "e"]}


def test_graded_retrieval_needs_ratings():
    dataset = lives()
    with pytest.raises(UserError, match="no column 'rating'"):
        graded_retrieval(Dataset("unrated", dataset.items, dataset.interactions.drop(columns="rating")))
    with pytest.raises(UserError, match="lower pool_size"):
        graded_retrieval(dataset, pool_size=55)


def test_the_whole_pool_is_the_same_for_every_arm():
    task = graded_retrieval(lives(), pool_size=30)
    n = len(task.queries)
    full = [graded_metrics(lists, task, (5, 30)) for lists in (rankings(n, 0), rankings(n, 1), [[]] * n)]
    for metric in ("precision_good@30", "precision_good_maybe@30"):
        assert full[0][metric].equals(full[1][metric]) and full[0][metric].equals(full[2][metric])
    assert not full[0]["precision_good@5"].equals(full[1]["precision_good@5"])
    assert full[2].equals(graded_metrics([hash_order(ITEMS)] * n, task, (5, 30)))


# --- the paper -------------------------------------------------------------------------------------------------------------

def test_the_printed_gains_follow_from_the_printed_values():
    "Each gain of Table 3 lies where the rounding of Table 4 lets it: a slip of the pen in either would show."
    half = 0.5e-4
    for metric in ("recall", "ndcg"):
        values, gains = paper_results(4).loc[metric], paper_results(3).loc[metric]
        base = values.loc["mean init + SFT"]
        for arm, name in (("LC-Rec", "LC-Rec"), ("GTI", "GTI+Vanilla")):
            low, high = (100 * ((values.loc[arm] + s * half) / (base - s * half) - 1) for s in (-1, 1))
            assert (low <= gains.loc[name] + 0.005).all() and (gains.loc[name] - 0.005 <= high).all()


@pytest.mark.parametrize("table, of", [(1, compare), (2, compare), (3, compare), (4, summarize)])
def test_tables_have_the_papers_shape(table, of):
    names = paper_results(table).index.unique("metric")
    arms = {arm: pd.DataFrame({f"{m}{k}": table_of(200, seed)["ndcg@10"] for m in names for k in paper_results(table)})
            for seed, arm in enumerate(("mean", "gti", "shuffled control"))}
    ours = compare(arms, "mean", 200) if of is compare else summarize(arms, 200)
    alone, beside = (paper_table(table, ours, name) for name in ("movielens-100k", {1: "industrial", 2: "industrial"}.get(table, "vibrent")))
    assert alone.columns.tolist() == ["@5", "@10", "@20", "@50", "@100"] and alone.index.unique("source").tolist() == ["ours"]
    assert [arm for arm in arms if of is summarize or arm != "mean"] == alone.loc[names[0]].index.get_level_values("arm").tolist()
    printed = beside.xs("paper", level="source")
    numbers = printed.astype(float)
    pd.testing.assert_frame_equal(numbers.loc[list(names)], paper_results(table), check_names=False)
    assert (beside.xs("ours", level="source") == alone.xs("ours", level="source")).all(axis=None)
