"""The data scripts: what they write, against plain pandas, by hand and on real texts; what they say when they can't; and that
a stopped script leaves nothing that looks finished. movielens.py has tests of its own."""

import csv
import gzip
import hashlib
import html
import json
import os
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import SHARED

from gti_nb.core import UserError, read_json
from gti_nb.data import dataset_card, leave_one_out, load_dataset
from gti_nb.evaluation import rank_metrics
from gti_nb.paper import GradedRetrieval, graded_metrics

SCRIPTS = Path(__file__).resolve().parents[1] / "data_scripts"
sys.path.insert(0, str(SCRIPTS))

import amazon  # noqa: E402
import common  # noqa: E402
import from_csv  # noqa: E402
import synthetic  # noqa: E402
import vibrent  # noqa: E402

INDUSTRIAL = SHARED / "amazon_industrial"
needs_industrial = pytest.mark.skipif(not INDUSTRIAL.is_dir(), reason=f"the texts of {INDUSTRIAL} aren't here")


def refused(capsys, status: int) -> str:
    "The one line that a script that failed wrote to stderr."
    error = capsys.readouterr().err
    assert status == 1 and error.count("\n") == 1, error
    return error


def check(folder: Path):
    "The data set in `folder`, after what holds for every one: it loads, and its card is right."
    dataset, card = load_dataset(folder), read_json(folder / "card.json")
    plain = dataset_card(dataset)
    assert list(card["statistics"]) == plain["quantity"].tolist()
    np.testing.assert_allclose(list(card["statistics"].values()), plain["value"].to_numpy(float), rtol=1e-12)
    for name in ("title", "description"):
        characters = dataset.items[name].str.len()
        assert card["characters"][name] == {"mean": pytest.approx(characters.mean(), abs=0.006), "median": characters.median(),
                                            "longest": characters.max(), "empty": (characters == 0).sum()}
    for name, hash in card["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == hash
    assert {path.name for path in folder.iterdir()} == {*card["sha256"], "card.json"}
    assert card["licence"] and card["source"]
    return dataset, card


# --- what the scripts share ------------------------------------------------------------------------------------------------

def plain_filter(events: pd.DataFrame, known: list, min_rating: float, max_items: int, core: int) -> pd.DataFrame:
    "What a `Conversion` keeps, in plain pandas."
    users = {user: k for k, user in enumerate(events.loc[events["rating"] >= min_rating, "user_id"].unique())}
    events = events[(events["rating"] >= min_rating) & events["item_id"].isin(known)].drop_duplicates(["user_id", "item_id", "timestamp"])
    if max_items:
        counts = events["item_id"].value_counts()
        events = events[events["item_id"].isin(sorted(counts.index, key=lambda item: (-counts[item], item))[:max_items])]
    while True:
        enough = np.logical_and(*(events.groupby(name)[name].transform("size") >= core for name in ("user_id", "item_id")))
        if enough.all():
            break
        events = events[enough]
    order = events.assign(number=events["user_id"].map(users))
    return order.sort_values(["number", "timestamp"], kind="stable").drop(columns="number").reset_index(drop=True)


@pytest.mark.parametrize("part", [1, 100, 10**6])
@pytest.mark.parametrize("min_rating, max_items, core", [(0, 0, 0), (3, 0, 0), (0, 9, 0), (0, 0, 5), (2, 20, 4)])
def test_conversion_equals_plain_pandas(tmp_path, part, min_rating, max_items, core):
    rng = np.random.default_rng(core)
    n, known = 1500, [f"i{k}" for k in range(30)][::-1]
    events = pd.DataFrame({"user_id": [f"u{k}" for k in rng.geometric(0.03, n)], "item_id": [f"i{k}" for k in rng.geometric(0.08, n)],
                           "timestamp": rng.integers(40, size=n), "rating": rng.integers(1, 6, n).astype(float)})
    assert events.duplicated(["user_id", "item_id", "timestamp"]).any() and not events["item_id"].isin(known).all()

    def write(folder):
        conversion = common.Conversion(folder / "work", ("brand",), min_rating=min_rating, part=part)
        for row in events.itertuples(index=False):
            conversion.event(*row)
        for item in known:
            conversion.item(item, f"title of {item}", "a text" * (len(item) - 2), "")
        return {"name": "x", "source": "s", "licence": "l"} | conversion.write(folder, max_items, core)

    common.publish(tmp_path / "out", {}, write)
    dataset, card = check(tmp_path / "out")
    expected = plain_filter(events, known, min_rating, max_items, core)
    assert 0 < len(expected) < n
    pd.testing.assert_frame_equal(dataset.interactions, expected, check_dtype=False)
    stay = set(expected["item_id"])
    assert dataset.items["item_id"].tolist() == ([item for item in known if item in stay] if max_items or core else known)
    assert sum(card["left_out"].values()) == n - len(expected)


def test_of_equally_frequent_items_the_smaller_ids_stay(tmp_path):
    conversion = common.Conversion(tmp_path / "work", part=2)
    for k, item in enumerate("dbca" * 3):
        conversion.event("u", item, k)
    for item in "dbca":
        conversion.item(item, "title", "")
    conversion.write(tmp_path, max_items=2)
    assert load_dataset(tmp_path).items["item_id"].tolist() == ["b", "a"]


def test_no_more_than_a_part_is_held(tmp_path):
    "Events come back from disk in parts of whole users; a part is larger than asked for only if one user is."
    conversion = common.Conversion(tmp_path / "work", part=50)
    numbers = np.random.default_rng(0).integers(1, 30, 200).tolist()
    for user, n in enumerate([*numbers, 70]):
        for k in range(n):
            conversion.event(f"u{user}", "i", k)
    conversion.item("i", "title", "")
    conversion._flush()
    conversion.spool.close()
    conversion._sort(np.array([True]))
    parts = [np.fromfile(path, common.EVENT)["user"] for path in conversion.parts]
    assert sum(map(len, parts)) == sum(numbers) + 70 and all(len(users) <= 50 or len(set(users)) == 1 for users in parts)
    assert len(set().union(*parts)) == sum(len(set(users)) for users in parts) and np.mean([len(users) for users in parts]) > 25


def two_files(folder: Path):
    "An items.csv and an events.csv for from_csv.py."
    (folder / "items.csv").write_text("id,title\na,First\nb,Second\n")
    (folder / "events.csv").write_text("user,item,time\n1,a,5\n1,b,6\n")
    return folder / "items.csv", folder / "events.csv"


def test_a_second_run_does_nothing_unless_something_changed(tmp_path, capsys):
    arguments, out = [*map(str, two_files(tmp_path)), str(tmp_path / "out")], tmp_path / "out"

    def stamps():
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.iterdir()}

    def bytes_of():
        return {path.name: path.read_bytes() for path in out.iterdir()}

    assert from_csv.main(arguments) == 0
    first, content = stamps(), bytes_of()
    assert from_csv.main(arguments) == 0 and stamps() == first and "nothing to do" in capsys.readouterr().out
    assert from_csv.main([*arguments, "--longest", "5"]) == 0 and stamps() != first  # another switch
    assert from_csv.main(arguments) == 0 and bytes_of() == content  # the same bytes again
    (out / "items.parquet").write_bytes(b"edited")
    assert from_csv.main(arguments) == 0 and bytes_of() == content  # an output that was changed is mended
    (tmp_path / "events.csv").write_text("user,item,time\n1,a,5\n2,b,6\n")
    assert from_csv.main(arguments) == 0 and bytes_of() != content  # another input


def test_a_folder_with_other_things_is_left_alone(tmp_path, capsys):
    files = [*map(str, two_files(tmp_path))]
    assert "no data script wrote" in refused(capsys, from_csv.main([*files, str(tmp_path)]))
    assert from_csv.main([*files, str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert "no data script wrote" in refused(capsys, from_csv.main([*files, str(tmp_path / "out"), "--longest", "1"]))
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert "is a file" in refused(capsys, from_csv.main([*files, files[0]]))


PAUSED = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import common, from_csv

def half(self, path, *_):  # items.parquet is there, the events are not
    path.write_bytes(b"half of it")
    print("under way", flush=True)
    time.sleep(100)

common.Conversion._write_events = half
sys.exit(from_csv.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("stop, there_before", [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_stopped_script_leaves_the_folder_as_it_was(tmp_path, stop, there_before):
    out, files = tmp_path / "out", two_files(tmp_path)
    if there_before:
        assert from_csv.main([*map(str, files), str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()} if there_before else None
    again = [*map(str, files), str(out), "--licence", "mine"]
    with subprocess.Popen([sys.executable, "-c", PAUSED, SCRIPTS, *again], stdout=subprocess.PIPE, text=True) as script:
        try:
            assert "under way\n" in iter(script.stdout.readline, "")
            assert [path.name for path in tmp_path.glob(".out.*/*.parquet")] != []
            script.send_signal(stop)
            assert script.wait(60) != 0
        finally:
            script.kill()
    assert ({path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else None) == before
    assert bool(list(tmp_path.glob(".out.*"))) == (stop == signal.SIGKILL)  # which no program can answer
    assert from_csv.main(again) == 0 and check(out)[1]["licence"] == "mine"


@pytest.mark.parametrize("text, most, expected", [
    ("Nuts &amp; bolts&nbsp;<br>\n 5 < 6", 0, "Nuts & bolts 5 < 6"), ("&amp;quot;L&amp;quot;", 0, '"L"'),
    ("<p class='x'><B>O</b>ne</p><!-- no\n -->two<br/>3", 0, "One two 3"), ("one two three", 8, "one two"), ("one two three", 7, "one two"),
    ("abcdefgh", 3, "abc"), ("half \ud83d of é", 0, "half of é"), ("", 5, ""),
])
def test_clean(text, most, expected):
    assert common.clean(text, most) == expected


@pytest.mark.parametrize("content, complaint", [
    ("a;b\n1;2\n3\n", "x.csv, row 2 (line 3) has 1 fields, the header has 2"),
    ('a;b\n1;2\n3;"4\n5;6\n', "x.csv, row 2 (up to line 4) can't be read"),
    ("", "x.csv is empty"), (b"a;b\n1;\xff\n", "x.csv, line 2 isn't UTF-8"), (b"a;b\n1;\0\n", "line 2 holds a zero byte"),
    (gzip.compress(b"a;b\n" + os.urandom(9000).hex().encode() + b";1\n")[:-2000], "breaks off or is damaged"),
])
def test_table_says_what_is_wrong(tmp_path, content, complaint):
    path = tmp_path / "x.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        list(common.table(path, ";"))
    assert complaint in str(error.value)


def test_table_reads_quotes_line_breaks_and_gzip(tmp_path):
    (tmp_path / "x.csv").write_bytes(gzip.compress('\ufeffa;b\r\n"1;1";"two\n\nlines ""here"""\r\n\r\n3;\r\n'.encode()))
    assert list(common.table(tmp_path / "x.csv", ";")) == [["a", "b"], (1, ["1;1", 'two\nlines "here"']), (2, ["3", ""])]


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.glob("*.py") if path.name != "common.py"))
def test_help_tells_how_it_is_called(name):
    done = subprocess.run([sys.executable, SCRIPTS / name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and f"python data_scripts/{name} " in done.stdout and "OUT_FOLDER" in done.stdout
    assert "None" not in done.stdout


# --- Amazon ------------------------------------------------------------------------------------------------------------------

def write_lines(path: Path, rows) -> str:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return str(path)


def review(year: int, user: str, item: str, stars: float, seconds: int) -> dict:
    if year == 2018:
        return {"overall": stars, "reviewerID": user, "asin": item, "reviewText": "Good.", "unixReviewTime": seconds}
    return {"rating": stars, "title": "Good", "asin": "variant of " + item, "parent_asin": item, "user_id": user, "timestamp": seconds * 1000 + 7}


def metadata(year: int, item: str, title: str, description, features=(), brand="", categories=()) -> dict:
    if year == 2018:
        return {"asin": item, "title": title, "description": description, "feature": features, "brand": brand, "category": categories}
    return {"parent_asin": item, "title": title, "description": description, "features": features, "store": brand or None,
            "categories": categories}


@pytest.mark.parametrize("year, ending", [(2018, ".json.gz"), (2023, ".jsonl")])
def test_amazon_by_hand(tmp_path, year, ending):
    reviews = [(f"u{user}", item, stars, 1_400_000_000 + k) for k, (user, item, stars) in enumerate([
        (2, "B1", 5.0), (1, "B2", 4.0), (2, "B2", 1.0), (1, "B1", 5.0), (3, "B1", 3.0), (3, "B9", 5.0), (3, "B8", 5.0), (1, "B3", 2.0)])]
    reviews.append(reviews[0])  # told twice
    meta = [metadata(year, "B7", "Nobody bought this", ["x"]), metadata(year, "B2", "Pan &amp; lid", [], ["Heavy.", "Steel."]),
            metadata(year, "B1", "<b>Pot</b>", ["One.", "Two  <br>three."], ["unused"], "Potter", ["Home", "Kitchen &amp; Dining"]),
            metadata(year, "B9", "", ["no title"]), metadata(year, "B8", "var getTime = 1", []), metadata(year, "B1", "Other pot", []),
            metadata(year, "B3", "Third", None)]
    files = [write_lines(tmp_path / f"Home{ending}", [review(year, *row) for row in reviews]), write_lines(tmp_path / f"meta{ending}", meta)]
    assert amazon.main([*files, str(tmp_path / "out"), "--core", "0", "--longest", "9"]) == 0
    dataset, card = check(tmp_path / "out")
    assert dataset.name == f"amazon-{year}-home" and str(year) in card["source"]
    assert dataset.items.to_dict("records") == [
        {"item_id": "B2", "title": "Pan & lid", "description": "Heavy.", "brand": "", "categories": ""},
        {"item_id": "B1", "title": "Pot", "description": "One. Two", "brand": "Potter", "categories": "Home > Kitchen & Dining"},
        {"item_id": "B3", "title": "Third", "description": "", "brand": "", "categories": ""}]
    assert dataset.interactions.values.tolist() == [
        ["u2", "B1", 1_400_000_000, 5.0], ["u2", "B2", 1_400_000_002, 1.0], ["u1", "B2", 1_400_000_001, 4.0], ["u1", "B1", 1_400_000_003, 5.0],
        ["u1", "B3", 1_400_000_007, 2.0], ["u3", "B1", 1_400_000_004, 3.0]]
    assert card["left_out"] == {"events of items without a title": 2, "second mentions of an event": 1}
    assert amazon.main([*files, str(tmp_path / "out"), "--core", "2"]) == 0  # u3 and B3 go, each with one event left
    dataset, card = check(tmp_path / "out")
    assert set(dataset.interactions["user_id"]) == {"u1", "u2"} and dataset.items["item_id"].tolist() == ["B2", "B1"]
    assert amazon.main([*files, str(tmp_path / "out"), "--core", "0", "--min-rating", "4"]) == 0
    assert check(tmp_path / "out")[0].interactions["rating"].tolist() == [5.0, 4.0, 5.0]


GOOD = review(2018, "u1", "B1", 5.0, 1_400_000_000)
GOOD_2023 = review(2023, "u1", "B1", 5.0, 1_400_000_000)


@pytest.mark.parametrize("reviews, complaint", [
    ([GOOD, "{'asin': 'B1'}"], "r.json, line 2 isn't JSON (the files of 2014"), ([GOOD, "", "[1]"], "r.json, line 3 holds no JSON object"),
    ([GOOD, GOOD | {"overall": "5"}], "line 2: overall is '5', not a rating"), ([GOOD, GOOD | {"asin": " "}], "line 2: asin is ' ', not an id"),
    ([GOOD, {k: v for k, v in GOOD.items() if k != "reviewerID"}], "line 2: reviewerID is missing"),
    ([GOOD | {"unixReviewTime": 1_400_000_000_000}], "line 1: unixReviewTime is 1400000000000, not a time in seconds"),
    ([GOOD_2023 | {"timestamp": None}], "line 1: timestamp is None, not a time in milliseconds"),
    ([GOOD_2023, GOOD_2023 | {"user_id": "\ud800"}], "line 2: user_id is"), ([], "r.json is empty"),
    ([metadata(2018, "B1", "Pot", [])], "line 1 has neither 'reviewerID' (2018) nor 'user_id' (2023)"),
    ([GOOD | {"asin": "B5"}], "no item of m.json was reviewed"), ([GOOD], "no event is left of 1 with --max-items 0 and --core 5"),
    ([GOOD_2023], "m.json, line 1: parent_asin is missing, not an id (are these the metadata of 2023?)"),
])
def test_amazon_says_what_is_wrong(tmp_path, capsys, reviews, complaint):
    files = [write_lines(tmp_path / "r.json", reviews), write_lines(tmp_path / "m.json", [metadata(2018, "B1", "Pot", [])])]
    assert complaint in refused(capsys, amazon.main([*files, str(tmp_path / "out")]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.json", "r.json"]


def test_amazon_says_which_file_is_not_there(tmp_path, capsys):
    assert "r.json is not there" in refused(capsys, amazon.main([str(tmp_path / "r.json"), "m.json", str(tmp_path / "out")]))


@needs_industrial
@pytest.mark.parametrize("year", [2018, 2023])
def test_amazon_on_real_texts(tmp_path, year):
    items, events = (pd.read_csv(INDUSTRIAL / f"{name}.csv", dtype=str, keep_default_na=False) for name in ("items", "interactions"))
    escaped = items["title"].str.replace("&", "&amp;amp;").str.replace("<", "&lt;").str.replace('"', "&quot;")
    files = [write_lines(tmp_path / "Industrial.jsonl.gz", (review(year, user, item, 5.0, 1_500_000_000 + int(position)) for user, item, position in
                                                            events[["user_id", "item_id", "position"]].itertuples(index=False))),
             write_lines(tmp_path / "meta.jsonl.gz", (metadata(year, item, title, text.split(". "), brand=brand) for item, title, text, brand in
                                                      zip(items["item_id"], escaped, items["description"], items["brand"])))]
    assert amazon.main([*files, str(tmp_path / "all"), "--core", "0", "--longest", "0"]) == 0
    dataset, _ = check(tmp_path / "all")
    bought = items[items["item_id"].isin(events["item_id"])].reset_index(drop=True)
    assert dataset.items["item_id"].tolist() == bought["item_id"].tolist()
    assert dataset.items["title"].tolist() == [" ".join(title.split()) for title in bought["title"]]
    assert (dataset.items["description"] != "").sum() == (bought["description"] != "").sum()
    ours = dataset.interactions.groupby("user_id")["item_id"].apply(list)
    assert ours.to_dict() == events.groupby("user_id")["item_id"].apply(list).to_dict()
    assert amazon.main([*files, str(tmp_path / "core")]) == 0
    dataset, _ = check(tmp_path / "core")
    assert dataset.interactions["user_id"].value_counts().min() == 5 == dataset.interactions["item_id"].value_counts().min()


# --- Vibrent -----------------------------------------------------------------------------------------------------------------

OUTFITS = [  # the columns stand in an order of their own
    ["o1", "L Nora Dress", "", "g1", "['Dress', 'L', 'Ganni']", "['Category', 'Size', 'Brand']"],
    ["o2", "M Nora Dress", "Blue dress: a \"classic\".", "g1", "['Dress', 'M', 'Ganni', 'Blue']", "['Category', 'Size', 'Brand', 'Color']"],
    ["o3", "", "", "g2", "['Skirt', 'Tiger']", "['Category', 'Brand']"], ["o4", "", "no tags, no name", "g3", "[]", "[]"],
    ["o5", "Small Coat", "", "", "['Coat']", "['Category']"]]
OLDER = [["00007", "o1", "2019-01-10", "2019-01-20"], ["00007", "o2", "2019-02-08", "2019-02-12"], ["00007", "o2", "2019-02-09", "2019-02-12"],
         ["05238", "o3", "2019-03-01", "2019-03-09"], ["05238", "o9", "2019-03-01", "2019-03-05"]]
NEWER = [["05238", "o5", "2020-01-02", "2020-01-09"], ["05238", "o1", "2020-01-02", "2020-01-05"], ["00007", "o4", "2021-01-02", "2021-01-05"]]
SECONDS = {row[2]: (date.fromisoformat(row[2]) - date(1970, 1, 1)).days * 86_400 for row in OLDER + NEWER}


@pytest.fixture
def raw(tmp_path):
    "A folder with the four files."
    folder = tmp_path / "raw"
    folder.mkdir()
    header = ["customer.id", "outfit.id", "rentalPeriod.start", "rentalPeriod.end"]
    for name, rows in {
        "outfits.csv": [["id", "name", "description", "group", "outfit_tags", "tag_categories", "owner"], *([*row, "o_00001"] for row in OUTFITS)],
        "original_orders.csv": [header, *OLDER], "user_activity_triplets.csv": [header[::-1], *(row[::-1] for row in NEWER)],
        "picture_triplets.csv": [["picture.id", "outfit.id", "displayOrder", "file_name"], ["p1", "o1", "1", "side.jpg"],
                                 ["p2", "o2", "0", "front.jpg"], ["p3", "o1", "0", "later.jpg"], ["p4", "o7", "0", "lost.jpg"]],
    }.items():
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, delimiter=";").writerows(rows)
    return folder


def test_vibrent_by_hand(tmp_path, raw):
    assert vibrent.main([str(raw), str(tmp_path / "out")]) == 0
    dataset, card = check(tmp_path / "out")
    assert dataset.name == "vibrent" and "CC BY 4.0" in card["licence"]
    assert dataset.items.to_dict("records") == [
        {"item_id": "g1", "title": "Nora Dress", "description": 'Blue dress: a "classic". Brand: Ganni. Category: Dress. Color: Blue.',
         "brand": "Ganni", "categories": "Dress", "copies": "2", "picture": "front.jpg"},
        {"item_id": "g2", "title": "Tiger Skirt", "description": "Brand: Tiger. Category: Skirt.", "brand": "Tiger", "categories": "Skirt",
         "copies": "1", "picture": ""},
        {"item_id": "o5", "title": "Small Coat", "description": "Category: Coat.", "brand": "", "categories": "Coat", "copies": "1", "picture": ""}]
    # 29 days after the rental that counted is a repeat; 30 days after it isn't, though it is one day after the repeat
    assert dataset.interactions.values.tolist() == [
        ["00007", "g1", SECONDS["2019-01-10"]], ["00007", "g1", SECONDS["2019-02-09"]], ["05238", "g2", SECONDS["2019-03-01"]],
        ["05238", "g1", SECONDS["2020-01-02"]], ["05238", "o5", SECONDS["2020-01-02"]]]  # of one day: by the last day
    assert card["left_out"] == {"events of items without a title": 2, "rentals less than 30 days after one of the same item": 1}
    splits = leave_one_out(dataset)
    assert splits.test[["user_id", "target"]].values.tolist() == [["05238", "o5"]] and splits.train["05238"] == ["g2"]


@pytest.mark.parametrize("switches, items, events", [
    (["--no-collapse-repeats"], 3, 6), (["--no-group-copies"], 4, 5), (["--no-group-copies", "--no-collapse-repeats"], 4, 6)])
def test_vibrent_switches(tmp_path, raw, switches, items, events):
    assert vibrent.main([str(raw), str(tmp_path / "out"), *switches]) == 0
    dataset, _ = check(tmp_path / "out")
    assert (len(dataset.items), len(dataset.interactions)) == (items, events)
    assert ("L Nora Dress" in set(dataset.items["title"])) == ("--no-group-copies" in switches)


def test_vibrent_pictures_without_file_names(tmp_path, raw):
    (raw / "picture_triplets.csv").write_text("picture.id;outfit.id;displayOrder\np1;o1;2\np2;o2;0\n")
    assert vibrent.main([str(raw), str(tmp_path / "out")]) == 0
    assert check(tmp_path / "out")[0].items["picture"].tolist() == ["p2", "", ""]


def test_vibrent_on_the_older_rentals_alone(tmp_path, raw):
    for name in ("user_activity_triplets.csv", "picture_triplets.csv"):
        (raw / name).unlink()
    assert vibrent.main([str(raw), str(tmp_path / "out")]) == 0
    assert len(check(tmp_path / "out")[0].interactions) == 3


@pytest.mark.parametrize("name, old, new, complaint", [
    ("outfits.csv", "['Coat']", "Coat", "outfits.csv, row 5: outfit_tags 'Coat' is no list"), ("outfits.csv", "o2;", "o1;", "row 2: id 'o1' is there already"),
    ("outfits.csv", "['Coat']", "['Coat', 'Red']", "row 5: 2 outfit_tags and 1 tag_categories"), ("outfits.csv", "id;name", "id;title", "no column 'name'"),
    ("outfits.csv", "[]", "[exit()]", "row 4: outfit_tags '[exit()]' is no list"), ("original_orders.csv", "2019-02-08", "08.02.2019", "row 2: rentalPeriod.start"),
    ("original_orders.csv", "00007;o1", ";o1", "original_orders.csv, row 1: customer.id '' is no id"), ("picture_triplets.csv", ";1;", ";one;", "displayOrder 'one'"),
])
def test_vibrent_says_what_is_wrong(tmp_path, raw, capsys, name, old, new, complaint):
    text = (raw / name).read_text()
    assert old in text
    (raw / name).write_text(text.replace(old, new, 1))
    assert complaint in refused(capsys, vibrent.main([str(raw), str(tmp_path / "out")]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", [["outfits.csv"], ["original_orders.csv", "user_activity_triplets.csv"]])
def test_vibrent_says_which_file_is_missing(tmp_path, raw, capsys, missing):
    for name in missing:
        (raw / name).unlink()
    assert f"lacks {' and '.join(missing)}" in refused(capsys, vibrent.main([str(raw), str(tmp_path / "out")]))


# --- anyone's files ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("items, events, switches", [
    ("item_id,title,description\nA,One,x\nB,Two,\n", "user_id,item_id,timestamp\n1,A,10\n1,B,11\n", []),
    ("Product ID;Name;Overview\nA;One;x\nB;Two;\n", "when|CustomerID|SKU\n10|1|A\n11|1|B\n", ["--timestamp", "when"]),
    ("item_id:token\tmovie_title:token_seq\tabout\nA\tOne\tx\nB\tTwo\t\n", "user_id:token\titem_id:token\ttimestamp:float\n1\tA\t10.0\n1\tB\t11.9\n",
     ["--description", "about"]),
    ("key,label,one,two\nA,One,x,\nB,Two,,\n", "id,who,key,at\n9,1,A,10000\n9,1,B,11000\n",
     ["--item-id", "key", "--title", "label", "--description", "one", "--description", "two", "--user-id", "who", "--timestamp", "at", "--time-unit", "ms"]),
])
def test_from_csv_finds_the_columns(tmp_path, items, events, switches):
    (tmp_path / "i.csv").write_text(items)
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress(events.encode()))
    assert from_csv.main([str(tmp_path / "i.csv"), str(tmp_path / "e.csv.gz"), str(tmp_path / "shop"), *switches]) == 0
    dataset, _ = check(tmp_path / "shop")
    assert dataset.name == "shop"
    assert dataset.items[["item_id", "title", "description"]].values.tolist() == [["A", "One", "x"], ["B", "Two", ""]]
    assert dataset.interactions.values.tolist() == [["1", "A", 10], ["1", "B", 11]]


@pytest.mark.parametrize("first, second, expected, switches", [
    ("1700000000", "1700000001", 1_700_000_001, []), ("1700000000000", "1700000001999", 1_700_000_001, []), ("0", "1", 1, []),
    ("1700000000000000", "1700000001000000", 1_700_000_001, []), ("1700000000000000000", "1700000001999999999", 1_700_000_001, []),
    ("1.7e9", "1700000001.5", 1_700_000_001, []), ("2023-11-14", "2023-11-14T22:13:21Z", 1_700_000_001, []),
    ("2023-11-14 22:13:20", "2023-11-14T23:13:21.7+01:00", 1_700_000_001, []), ("1969-12-31", "1969-12-31 23:59:59.5", -1, []),
    ("14.11.2023 00:00", "14.11.2023 22:13", 1_699_999_980, ["--date-format", "%d.%m.%Y %H:%M"]), ("20231114", "20231115", 1_700_006_400, ["--time-unit", "date"]),
])
def test_from_csv_reads_times(tmp_path, first, second, expected, switches):
    items, events = two_files(tmp_path)
    events.write_text(f"user,item,time\n1,a,{first}\n1,b,{second}\n")
    assert from_csv.main([str(items), str(events), str(tmp_path / "out"), *switches]) == 0
    assert load_dataset(tmp_path / "out").interactions.set_index("item_id")["timestamp"]["b"] == expected


@pytest.mark.parametrize("items, events, switches, complaint", [
    ("id,title\na,One\na,Two\n", "", [], "items.csv, row 2: id 'a' is there already"), ("id,title\na,One\n,Two\n", "", [], "items.csv, row 2: id '' is no id"),
    ("id,title\na, \n", "", [], "items.csv, row 1: title is empty"), ("key,title\na,One\n", "", [], "no column that looks like the item_id: it has 'key', 'title'"),
    ("id,label\na,One\n", "", [], "name it with --title"), ("id,title\na,One\n", "", ["--title", "name"], "items.csv has no column 'name'"),
    ("id\na\n", "", [], "items.csv has one column, 'id': name the separator"), ("", "", [], "items.csv is empty"),
    ("", "user,item,time\n1,a,5\n1,c,6\n", [], "events.csv, row 2: item 'c' isn't in items.csv"), ("", "who,item,time\n1,a,5\n", [], "name it with --user-id"),
    ("", "user,item,time\n1,a,5\n ,a,6\n", [], "events.csv, row 2: user '' is no id"), ("", "user,item,time\n1,a,5\n1,a,\n", [], "events.csv, row 2: time '' is no time in s"),
    ("", "user,item,time\n1,a,2024-01-31\n1,a,2024-02-31\n", [], "row 2: time '2024-02-31' is no date"),
    ("", "user,item,time\n1,a,5\n1,a,1700000000000\n", [], "row 2: time '1700000000000' is no time in s"), ("", "user,item,time\n1,a,nan\n", [], "time 'nan' is no time"),
    ("", "user,item,time,rating\n1,a,5,4\n1,b,5,good\n", [], "row 2: rating 'good' is no number"), ("", "", ["--min-rating", "3"], "no column that looks like the rating"),
])
def test_from_csv_says_what_is_wrong(tmp_path, capsys, items, events, switches, complaint):
    files = two_files(tmp_path)
    for path, text in zip(files, (items, events)):
        if text or "is empty" in complaint and path == files[0]:
            path.write_text(text)
    assert complaint in refused(capsys, from_csv.main([*map(str, files), str(tmp_path / "out"), *switches]))
    assert not (tmp_path / "out").exists()


def test_from_csv_switches(tmp_path):
    items, events = two_files(tmp_path)
    items.write_text('id,title,price,,title\na,"<i>First</i>, or so",007,0,x\nb,Second,3.50,1,y\nc,Third,1,2,z\n')
    events.write_text("user,item,time,stars\n01,a,5,1\n01,b,6,-2\n01,z,7,3\n2,a,5,5\n")
    assert from_csv.main([str(items), str(events), str(tmp_path / "out"), "--drop-unknown", "--licence", "mine"]) == 0
    dataset, card = check(tmp_path / "out")
    assert dataset.items.values.tolist() == [["a", "First, or so", "", "007"], ["b", "Second", "", "3.50"], ["c", "Third", "", "1"]]
    assert dataset.interactions["rating"].tolist() == [1.0, -2.0, 5.0] and dataset.interactions["user_id"].tolist() == ["01", "01", "2"]
    assert card["left_out"] == {"events of items that items.csv lacks": 1} and card["licence"] == "mine"
    assert from_csv.main([str(items), str(events), str(tmp_path / "out"), "--drop-unknown", "--min-rating", "1", "--max-items", "1"]) == 0
    assert check(tmp_path / "out")[0].items["item_id"].tolist() == ["a"]


@needs_industrial
def test_from_csv_on_real_texts(tmp_path):
    files = [str(INDUSTRIAL / f"{name}.csv") for name in ("items", "interactions")]
    assert from_csv.main([*files, str(tmp_path / "out"), "--timestamp", "position"]) == 0
    dataset, _ = check(tmp_path / "out")
    items, events = (pd.read_csv(file, dtype=str, keep_default_na=False) for file in files)
    assert dataset.items["title"].tolist() == [" ".join(html.unescape(title).split()) for title in items["title"]]
    assert dataset.items["brand"].tolist() == items["brand"].tolist()
    assert dataset.interactions[["user_id", "item_id"]].values.tolist() == events[["user_id", "item_id"]].values.tolist()


# --- made-up data ------------------------------------------------------------------------------------------------------------

def plain_next_item(world, history) -> np.ndarray:
    "The probability of each next item: the sum over all tastes of what each gives to the history and then to the item."
    total = np.zeros(len(world.kind))
    for taste in range(len(world.tastes)):
        chance, last = 1 / len(world.tastes), None
        for item in [*history, None]:
            kinds = world.tastes[taste]
            if last is not None:
                kinds = (1 - synthetic.FOLLOW) * kinds + synthetic.FOLLOW * world.follows[world.kind[last]]
            items = np.array([kinds[kind] * weight for kind, weight in zip(world.kind, world.weight)])
            if item is None:
                total += chance * items
            else:
                chance, last = chance * items[item], item
    return total / total.sum()


@pytest.fixture(scope="module")
def world():
    return synthetic.World(60, 12, np.random.default_rng(1))


def test_best_is_the_plain_sum_over_tastes(world):
    lives = world.draw(np.array([3, 7, 1, 4, 12]), np.random.default_rng(2))
    assert [len(life) for life in lives] == [3, 7, 1, 4, 12]
    plain = [plain_next_item(world, life) for life in lives]
    np.testing.assert_allclose(world.next_kind(lives)[:, world.kind] * world.weight, plain, rtol=1e-9)
    best, popularity = world.best(lives, ks=(5, 10, 100))
    assert list(best) == ["recall@5", "ndcg@5", "recall@10", "ndcg@10"]  # no more than there are items
    top, mean = [np.sort(chances)[::-1][:10] for chances in plain], np.sort(np.mean(plain, axis=0))[::-1][:10]
    discount = 1 / np.log2(np.arange(2, 12))
    assert best["recall@5"] == pytest.approx(np.mean([chances[:5].sum() for chances in top]), abs=1e-6)
    assert best["ndcg@10"] == pytest.approx(np.mean([chances @ discount for chances in top]), abs=1e-6)
    assert popularity["recall@10"] == pytest.approx(mean.sum(), abs=1e-6)


def test_best_is_what_the_best_ranking_reaches_and_no_other_does(world):
    lives = world.draw(np.full(4000, 8), np.random.default_rng(3))
    histories, targets = [life[:-1] for life in lives], np.array([life[-1] for life in lives])
    chances = world.next_kind(histories)[:, world.kind] * world.weight
    last_kind = world.kind[[history[-1] for history in histories]]
    rankings = {"best": chances, "popular": np.tile(chances.mean(0), (len(lives), 1)),
                "after the last": world.follows[last_kind][:, world.kind] * world.weight}
    found = {name: rank_metrics([list(map(str, row)) for row in np.argsort(-scores, axis=1)[:, :10]], list(map(str, targets)), ks=(5, 10))
             for name, scores in rankings.items()}
    best, popularity = world.best(histories, ks=(5, 10))
    for metric in best:
        error = found["best"][metric].std() / np.sqrt(len(lives))
        assert abs(found["best"][metric].mean() - best[metric]) < 4 * error
        assert abs(found["popular"][metric].mean() - popularity[metric]) < 4 * error
        for other in ("popular", "after the last"):
            assert found[other][metric].mean() < best[metric] - 5 * error


def test_events_come_as_the_model_says(world):
    "How often a kind follows a kind, over all tastes, against the model's own probabilities."
    lives = world.draw(np.full(20_000, 2), np.random.default_rng(4))
    pairs = np.array([world.kind[life] for life in lives])
    chances = world.tastes.mean(0)
    np.testing.assert_allclose(np.bincount(pairs[:, 0], minlength=12) / len(pairs), chances, atol=4 * 0.5 / np.sqrt(len(pairs)))
    joint = np.einsum("ta,atb->ab", world.tastes / len(world.tastes), world.step(np.arange(12)))
    seen = np.zeros((12, 12))
    np.add.at(seen, tuple(pairs.T), 1 / len(pairs))
    np.testing.assert_allclose(seen, joint, atol=4 * 0.5 / np.sqrt(len(pairs)))


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    "Small data sets of both kinds, and what vibrent.py makes of the first."
    folder = tmp_path_factory.mktemp("synthetic")
    small = ["--items", "200", "--users", "120", "--events", "9"]
    assert synthetic.main(["vibrent", str(folder / "raw"), *small]) == 0
    assert synthetic.main(["industrial", str(folder / "jobs"), *small, "--queries", "150", "--candidates", "100"]) == 0
    assert vibrent.main([str(folder / "raw"), str(folder / "vibrent")]) == 0
    return folder


def test_vibrent_keeps_every_made_up_rental(made_up):
    dataset, card = check(made_up / "vibrent")
    raw = read_json(made_up / "raw" / "card.json")
    assert card["left_out"] == {} and dataset.name == raw["name"] == "synthetic-rentals"
    assert all(card[key] == raw[key] for key in ("best", "popularity", "source", "licence"))
    assert raw["rows"] == {"outfits": dataset.items["copies"].astype(int).sum(), "designs": len(dataset.items),
                           "users": dataset.interactions["user_id"].nunique(), "rentals": len(dataset.interactions)}
    assert dataset.interactions.duplicated(["user_id", "item_id"]).any()  # there are repeats, but later than 30 days
    assert (dataset.interactions["user_id"].str.len() == 5).all() and len(leave_one_out(dataset).test) == raw["rows"]["users"]
    outfits = pd.read_csv(made_up / "raw" / "outfits.csv", sep=";", dtype=str)
    assert list(outfits.columns) == ["id", "name", "description", "group", "owner", "timeCreated", "retailPrice", "outfit_tags", "tag_categories",
                                     "pricePerWeek", "pricePerMonth"]
    assert outfits["name"].isna().any() and outfits["description"].isna().any() and outfits["group"].duplicated().any()
    for name in ("original_orders.csv", "user_activity_triplets.csv"):
        rentals = pd.read_csv(made_up / "raw" / name, sep=";", dtype=str)
        assert len(rentals) and ((rentals["rentalPeriod.start"] < "2020") == (name == "original_orders.csv")).all()


def test_the_best_score_holds_for_all_of_the_data_only(made_up, tmp_path):
    assert vibrent.main([str(made_up / "raw"), str(tmp_path / "out"), "--max-items", "50"]) == 0
    card = check(tmp_path / "out")[1]
    assert "best" not in card and "made up" in card["source"]


def test_made_up_texts_tell_the_kind(made_up):
    for name in ("vibrent", "jobs"):
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression
        items = load_dataset(made_up / name).items
        words = CountVectorizer().fit_transform(items["title"] + " " + items["description"])
        kind = items["category"] if name == "jobs" else items["categories"]
        model = LogisticRegression(max_iter=300).fit(words[:150], kind[:150])
        assert model.score(words[150:], kind[150:]) > 0.9


def test_made_up_queries_are_graded_as_the_card_says(made_up):
    dataset, card = check(made_up / "jobs")
    queries, pools = (pd.read_parquet(made_up / "jobs" / f"{name}.parquet") for name in ("queries", "pools"))
    task = GradedRetrieval(queries, pools, leave_one_out(dataset).train)
    assert len(task.queries) == 150 and len(task.pools) == 15_000 and set(pools["item_id"]) <= set(dataset.items["item_id"])
    assert all(set(history) <= set(dataset.items["item_id"]) for history in queries["history"])
    known = dataset.items.set_index("item_id")
    wishes = {query: text for query, text in zip(queries["query_id"], queries["text"])}

    def fulfilled(query, item):  # as a reader would see it, from the words
        words, wish = known.loc[item], wishes[query]
        hit = [words["place"] in wish, any(word in wish.split(" in ")[0] for word in synthetic.INDUSTRIAL["categories"][words["category"]].split("|")),
               any(phrase in wish for phrase in synthetic.INDUSTRIAL["styles"][words["style"]].split("|"))]
        return -sum(hit)

    lists = [sorted(pool["item_id"], key=lambda item: fulfilled(query, item)) for query, pool in pools.groupby("query_id", sort=False)]
    metrics = graded_metrics(lists, task, ks=(5, 20, 50))
    for name in ("precision_good@5", "precision_good@20", "precision_good_maybe@20", "precision_good_maybe@50"):
        error = metrics[name].std() / np.sqrt(len(metrics))
        assert abs(metrics[name].mean() - card["best_graded"][name]) < 4 * error
    plain = graded_metrics([sorted(items) for items in lists], task, ks=(5,))
    assert plain["precision_good@5"].mean() < card["best_graded"]["precision_good@5"] / 3


def test_a_seed_makes_one_world(made_up, tmp_path):
    small = ["--items", "200", "--users", "120", "--events", "9"]
    hashes = []
    for seed in ("0", "1"):
        assert synthetic.main(["vibrent", str(tmp_path / seed), *small, "--seed", seed]) == 0
        hashes.append(read_json(tmp_path / seed / "card.json")["sha256"])
    assert hashes[0] == read_json(made_up / "raw" / "card.json")["sha256"] and hashes[1]["outfits.csv"] != hashes[0]["outfits.csv"]


@pytest.mark.parametrize("arguments, complaint", [(["vibrent", "--items", "20"], "20 items are too few for 48 kinds"),
                                                  (["industrial", "--items", "60", "--candidates", "61"], "--candidates 61 doesn't fit 60 items")])
def test_synthetic_says_what_is_wrong(tmp_path, capsys, arguments, complaint):
    assert complaint in refused(capsys, synthetic.main([arguments[0], str(tmp_path / "out"), *arguments[1:]]))
