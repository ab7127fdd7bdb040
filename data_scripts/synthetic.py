"""Write made-up data in the shape of the paper's two data sets, with the best score that any method can reach on it.

    python data_scripts/synthetic.py vibrent RAW_FOLDER       four files like Vibrent's; then vibrent.py RAW_FOLDER OUT_FOLDER
    python data_scripts/synthetic.py industrial OUT_FOLDER    jobs with who looked at which, and queries with graded candidates

How events come about. Every item is of one kind (a category and a style), and has a weight within its kind. Every user has
one of a few hidden tastes, a distribution over kinds. The next event's kind comes from the taste, or, with a chance of 0.35,
from what follows the kind of the last event; the item of that kind comes by its weight. The taste can be inferred from the
history by Bayes' rule. So the probability of each next item given the history is known, and ranking by it can't be beaten on
average. card.json holds `best`: the recall and NDCG that this ranking expects on the last event of every user
(leave-one-out), computed exactly from these probabilities, and `popularity`, what always listing the likeliest items expects.

Titles and descriptions tell category and style in changing words, so semantic IDs made from them say which kind an item is.

`vibrent` writes outfits.csv (several copies of a design, with sizes, missing names and descriptions, partly Norwegian),
user_activity_triplets.csv, original_orders.csv and picture_triplets.csv. No user rents a design again within 30 days, so
vibrent.py with its own defaults leaves every event, and puts `best` on its card.

`industrial` writes items.parquet and interactions.parquet, and for `gti_nb.paper.GradedRetrieval` queries.parquet (query_id,
text, history) and pools.parquet (query_id, item_id, grade). A candidate's grade is drawn with known chances from how many of
the query's three wishes (category, style, place) it fulfils; `best_graded` holds the precision that ranking by these
chances expects."""

import csv
import sys
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
from common import Conversion, made_from, parser, positive, publish, run, switches, whole

from gti_nb.core import Progress, UserError

KS = (5, 10, 20, 50, 100)
FOLLOW = 0.35  # the chance that an event follows from the last one rather than from the taste
TASTES = 12
VIBRENT = {
    "categories": {"Dress": "dress|gown|kjole", "Skirt": "skirt|midi-skirt|skjørt", "Blazer": "blazer|jacket|dressjakke",
                   "Coat": "coat|overcoat|kåpe", "Knitwear": "sweater|cardigan|strikkegenser",
                   "Jumpsuit": "jumpsuit|playsuit|buksedrakt", "Top": "top|blouse|bluse", "Trousers": "trousers|pants|bukser"},
    "styles": {"Festive": "for a party or a wedding, with sequins|glittering, made to dance in|et festplagg med paljetter",
               "Office": "tailored, for meetings and the office|sharp lines for a working day|stilrent plagg til kontoret",
               "Romantic": "ruffles and small flowers|soft lace in the colours of spring|blomster og blonder",
               "Sporty": "stretchy, light, ready to move|with stripes and a hood|sporty plagg til hverdags",
               "Minimal": "plain, clean, without a pattern|one colour and one line|enkelt og rent snitt",
               "Vintage": "a cut of the seventies|found in an old wardrobe, still perfect|retro med sjel"},
}
INDUSTRIAL = {
    "categories": {"Nurse": "nurse|registered nurse|ward nurse",
                   "Data Engineer": "data engineer|pipeline engineer|warehouse engineer",
                   "Electrician": "electrician|electrical fitter|installation electrician",
                   "Accountant": "accountant|bookkeeper|ledger accountant",
                   "Teacher": "teacher|school teacher|classroom teacher", "Chef": "chef|cook|kitchen chef",
                   "Driver": "driver|truck driver|delivery driver", "Designer": "designer|interface designer|product designer"},
    "styles": {"Night": "you work nights and rest by day|night shifts with a bonus",
               "Remote": "work from wherever you like|fully remote, across time zones",
               "Lead": "you lead a team of eight|with responsibility for people and budget",
               "Junior": "a first job, with a mentor|no experience needed, we train you",
               "Part-time": "twenty hours a week|three days a week, school hours",
               "Contract": "a contract for six months|project work with a fixed end"},
    "places": ["Oslo", "Lyon", "Porto", "Graz", "Leeds", "Turku", "Ghent", "Malmö"],
}
COLOURS = ["Black", "Blue", "Green", "Red", "White", "Beige", "Pink", "Grey"]
BRANDS = ["Ostrava", "Fjordby", "Linden", "Mira Holt", "Kaldvik", "Sol & Sene", "Norrsken", "Papaver"]
FABRICS = ["Cotton", "Wool", "Silk", "Linen", "Viscose", "Velvet"]
MODELS = ["Heaston", "Nora", "Vilja", "Astrid", "Ines", "Camille", "Saga", "Ronja", "Thea", "Elin", "Agnes", "Petra"]
FIRMS = ["Alta", "Boreal", "Castell", "Dovre", "Elbe", "Fram", "Gallus", "Halden", "Isar", "Juno", "Kestrel", "Lumen"]
OFFERS = ["a bus stop at the door", "a canteen", "thirty days of holiday", "a training budget", "a bicycle", "a pension plan",
          "flexible starts", "a gym", "free coffee", "a choir"]
SIZES = ["XS", "S", "M", "L", "XL"]
GRADES = ("good", "maybe", "not")
CHANCES = np.array([[0.00, 0.05, 0.95], [0.05, 0.25, 0.70], [0.30, 0.50, 0.20], [1.00, 0.00, 0.00]])  # by fulfilled wishes


# --- the model of events -----------------------------------------------------------------------------------------------------

class World:
    """Kinds, tastes and weights, drawn from `rng`: `tastes` [T, K] and `follows` [K, K] are distributions over kinds in each
    row, `kind` [n_items] is each item's kind, `weight` [n_items] its probability within its kind."""

    def __init__(self, n_items: int, n_kinds: int, rng):
        if n_items < n_kinds:
            raise UserError(f"{n_items} items are too few for {n_kinds} kinds: give at least as many")
        self.kind = rng.permutation(np.arange(n_items) % n_kinds)
        weight = 1 / (1 + rng.permutation(n_items)) ** 0.8
        self.weight = weight / np.bincount(self.kind, weight)[self.kind]
        self.tastes = rng.dirichlet(np.full(n_kinds, 0.15), TASTES)
        self.tastes = 0.95 * self.tastes + 0.05 / n_kinds  # nothing is impossible
        self.follows = rng.dirichlet(np.full(n_kinds, 0.05), n_kinds)

    def step(self, last) -> np.ndarray:
        "Probabilities of the next kind, for each taste: [n, T, K], given the kinds [n] of the last event; -1: there is none."
        follows = np.where((last < 0)[:, None, None], self.tastes, self.follows[last][:, None])
        return (1 - FOLLOW) * self.tastes + FOLLOW * follows

    def draw(self, lengths: np.ndarray, rng) -> list[np.ndarray]:
        "The items of each user's events, for users with `lengths` events each."
        members = [np.flatnonzero(self.kind == k) for k in range(self.tastes.shape[1])]
        taste = rng.integers(TASTES, size=len(lengths))
        last, lives = np.full(len(lengths), -1), [[] for _ in lengths]
        for position in range(lengths.max()):
            alive = np.flatnonzero(lengths > position)
            chances = self.step(last[alive])[np.arange(len(alive)), taste[alive]]
            last[alive] = (rng.random((len(alive), 1)) > chances.cumsum(1)[:, :-1]).sum(1)
            for user in alive:
                inside = members[last[user]]
                lives[user].append(inside[min(np.searchsorted(self.weight[inside].cumsum(), rng.random()), len(inside) - 1)])
        return [np.array(life) for life in lives]

    def next_kind(self, histories: list[np.ndarray]) -> np.ndarray:
        "Probabilities of the next event's kind given each history of items: [n, K]. The tastes are weighed by Bayes' rule."
        kinds = [self.kind[history] for history in histories]
        log_taste, last = np.zeros((len(kinds), TASTES)), np.full(len(kinds), -1)
        for position in range(max(map(len, kinds))):
            alive = np.array([k for k, life in enumerate(kinds) if len(life) > position])
            seen = np.array([kinds[k][position] for k in alive])
            log_taste[alive] += np.log(self.step(last[alive])[np.arange(len(alive)), :, seen])
            last[alive] = seen
        taste = np.exp(log_taste - log_taste.max(1, keepdims=True))
        taste /= taste.sum(1, keepdims=True)
        return np.einsum("nt,ntk->nk", taste, self.step(last))

    def best(self, histories: list[np.ndarray], ks=KS) -> tuple[dict, dict]:
        """What ranking by the probability of the next item expects, and what one ranking for all users expects (the items by
        their mean probability): recall and ndcg at each of `ks`, exactly, over `histories`."""
        ks = [k for k in ks if k <= len(self.kind)]
        discount = 1 / np.log2(2 + np.arange(max(ks)))
        sums, mean = {}, np.zeros(len(self.kind))
        with Progress("best score", len(histories)) as progress:
            for start in range(0, len(histories), 256):
                part = histories[start:start + 256]
                items = self.next_kind(part)[:, self.kind] * self.weight
                mean += items.sum(0) / len(histories)
                top = -np.sort(np.partition(-items, max(ks) - 1)[:, :max(ks)])
                for k in ks:
                    sums[f"recall@{k}"] = sums.get(f"recall@{k}", 0) + top[:, :k].sum()
                    sums[f"ndcg@{k}"] = sums.get(f"ndcg@{k}", 0) + (top[:, :k] * discount[:k]).sum()
                progress.update(len(part))
        popular = np.sort(mean)[::-1]
        return ({name: round(value / len(histories), 6) for name, value in sums.items()},
                {name: round(value, 6) for k in ks for name, value in (
                    (f"recall@{k}", float(popular[:k].sum())), (f"ndcg@{k}", float((popular[:k] * discount[:k]).sum())))})


def numbers_of_events(users: int, mean: float, rng) -> np.ndarray:
    "How many events each user has: at least 3, most few, some many, `mean` on average."
    return 3 + rng.poisson(rng.gamma(1, max(mean - 3, 0.01), users))


# --- Vibrent -----------------------------------------------------------------------------------------------------------------

def _write(path: Path, header: list[str], rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=";", lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _hex(rng, n: int, prefix: str) -> list[str]:
    "`n` different ids: `prefix` and 32 hex digits."
    return [prefix + row.tobytes().hex() for row in rng.integers(256, size=(n, 16), dtype=np.uint8)]


def _pick(options: list[str], rng) -> str:
    return options[rng.integers(len(options))]


def _design(category: str, style: str, rng) -> dict:
    words, phrases = VIBRENT["categories"][category].split("|"), VIBRENT["styles"][style].split("|")
    colour, brand, word, fabric = (_pick(options, rng) for options in (COLOURS, BRANDS, words, FABRICS))
    text = f"{colour} {word} from {brand} in {fabric.lower()}: {_pick(phrases, rng)}. {_pick(phrases, rng).capitalize()}."
    return {"name": f"{_pick(MODELS, rng)} {word.title()}", "description": text.replace(";", ":"),
            "tags": [category, style, colour, brand, fabric], "categories": ["Category", "Style", "Color", "Brand", "Material"]}


def _outfits(kinds: np.ndarray, copies: np.ndarray, names: list[tuple], rng):
    "Rows of outfits.csv, and the ids of each design's copies. A tenth of the copies lacks a name, a tenth the description."
    groups, ids = _hex(rng, len(kinds), "group."), iter(_hex(rng, copies.sum(), "outfit."))
    rows, of_design = [], []
    for kind, n, group in zip(kinds, copies, groups):
        design, price, mine = _design(*names[kind], rng), int(rng.integers(4, 60)) * 100, []
        for number in range(n):
            size, mine = _pick(SIZES, rng), [*mine, next(ids)]
            created = date(2015, 6, 1) + timedelta(int(rng.integers(200)))
            name, text = ("" if blank else value for blank, value in zip(
                rng.random(2) < 0.1, (f"{size} {design['name']}", design["description"])))
            rows.append([mine[-1], name, text, group, f"o_{rng.integers(300):05d}", f"{created} 10:00:00", price,
                         [*design["tags"], size], [*design["categories"], "Size"], price // 10, price // 4])
        of_design.append(mine)
    return rows, of_design


def _days(life: np.ndarray, rng) -> list[date]:
    "A start for each rental, later than the one before; at least 30 days after the last rental of the same design."
    day, last, found = date(2016, 1, 1) + timedelta(int(rng.integers(5 * 365))), {}, []
    for design, gap in zip(life.tolist(), rng.integers(1, 30, len(life)).tolist()):
        day += timedelta(gap)
        if design in last:
            day = max(day, last[design] + timedelta(30))
        last[design] = day
        found.append(day)
    return found


def vibrent(folder: Path, options) -> dict:
    "Write the four files into `folder`."
    rng = np.random.default_rng(options.seed)
    names = [(category, style) for category in VIBRENT["categories"] for style in VIBRENT["styles"]]
    world = World(options.items or 8000, len(names), rng)
    lives = world.draw(numbers_of_events(options.users or 5000, options.events or 14, rng), rng)
    rows, copies = _outfits(world.kind, 1 + rng.poisson(1, len(world.kind)), names, rng)
    users = [f"{number:05d}" for number in rng.permutation(len(lives))]
    rentals = [(user, copies[design][rng.integers(len(copies[design]))], day, day + timedelta(int(rng.integers(3, 15))))
               for user, life in zip(users, lives) for design, day in zip(life, _days(life, rng))]
    header, split = ["customer.id", "outfit.id", "rentalPeriod.start", "rentalPeriod.end"], date(2020, 1, 1)
    _write(folder / "outfits.csv", ["id", "name", "description", "group", "owner", "timeCreated", "retailPrice", "outfit_tags",
                                    "tag_categories", "pricePerWeek", "pricePerMonth"], rows)
    _write(folder / "original_orders.csv", header, (rental for rental in rentals if rental[2] < split))
    _write(folder / "user_activity_triplets.csv", header, (rental for rental in rentals if rental[2] >= split))
    pictures = _hex(rng, 3 * len(rows), "picture.")
    _write(folder / "picture_triplets.csv", ["picture.id", "outfit.id", "displayOrder", "file_name"], (
        (picture, rows[k // 3][0], k % 3, f"{picture}.jpg") for k, picture in enumerate(pictures)))
    best, popularity = world.best([life[:-1] for life in lives])
    counts = {"outfits": len(rows), "designs": len(copies), "users": len(users), "rentals": len(rentals)}
    return {"name": "synthetic-rentals", "rows": counts, "best": best, "popularity": popularity}


# --- industrial --------------------------------------------------------------------------------------------------------------

def _job(category: str, style: str, place: str, rng) -> tuple[str, str]:
    "Title and description of a job."
    word, firm = _pick(INDUSTRIAL["categories"][category].split("|"), rng), _pick(FIRMS, rng)
    first, second = rng.permutation(INDUSTRIAL["styles"][style].split("|"))
    offers = " and ".join(_pick(OFFERS, rng) for _ in range(2))
    pay = f"{rng.integers(24, 70)},000 euros a year"
    return f"{word.title()} at {firm}, {place}", (
        f"{firm} looks for a {word} in {place}: {first}. {second.capitalize()}. {style} position, from {pay}, with {offers}.")


def _queries(world: World, names: list[tuple], places: np.ndarray, ids: list[str], options, rng):
    """Queries, their pools, and the chances of "good" and of "good or maybe" [n, pool] that the pools' grades were drawn with.

    A query wishes what one job, its first candidate, has; half of the others have its kind."""
    queries, pools, chances = [], [], []
    category, style = (np.array([pair[k] for pair in names])[world.kind] for k in (0, 1))
    histories = world.draw(rng.integers(3, 9, options.queries), rng)
    for number, history in enumerate(histories):
        wish, query = rng.integers(len(ids)), f"q{number}"
        close = np.flatnonzero((category == category[wish]) | (style == style[wish]))
        others = rng.permutation(close)[:options.candidates // 2]
        pool = list(dict.fromkeys([wish, *others, *rng.permutation(len(ids))]))[:options.candidates]
        fulfilled = sum((values[pool] == values[wish]).astype(int) for values in (category, style, places))
        drawn = (rng.random((len(pool), 1)) > CHANCES[fulfilled].cumsum(1)[:, :-1]).sum(1)
        word, phrase = (_pick(INDUSTRIAL[key][value].split("|"), rng) for key, value in (
            ("categories", category[wish]), ("styles", style[wish])))
        queries.append((query, f"Wanted: {word} in {places[wish]}. Best if: {phrase}.", [ids[k] for k in history]))
        order = rng.permutation(len(pool))  # where a candidate stands says nothing
        pools += [(query, ids[pool[k]], GRADES[drawn[k]]) for k in order]
        chances.append(CHANCES[fulfilled])
    queries, chances = pd.DataFrame(queries, columns=["query_id", "text", "history"]), np.array(chances)
    pools = pd.DataFrame(pools, columns=["query_id", "item_id", "grade"])
    return queries, pools, chances[:, :, 0], chances[:, :, :2].sum(2)


def industrial(folder: Path, options) -> dict:
    "Write items, interactions, queries and pools into `folder`."
    rng = np.random.default_rng(options.seed)
    names = [(category, style) for category in INDUSTRIAL["categories"] for style in INDUSTRIAL["styles"]]
    world = World(options.items or 4000, len(names), rng)
    if not 1 <= options.candidates <= len(world.kind):
        raise UserError(f"--candidates {options.candidates} doesn't fit {len(world.kind)} items: give 1 to {len(world.kind)}")
    ids, places = [f"job{k:06d}" for k in range(len(world.kind))], rng.choice(INDUSTRIAL["places"], len(world.kind))
    lives = world.draw(numbers_of_events(options.users or 3000, options.events or 8, rng), rng)
    conversion = Conversion(folder / "work", ("category", "style", "place"), rated=False)
    for k, kind in enumerate(world.kind):
        conversion.item(ids[k], *_job(*names[kind], places[k], rng), *names[kind], str(places[k]))
    for user, life in enumerate(lives):
        times = 1_700_000_000 + rng.integers(86_400 * 30) + rng.integers(60, 86_400, len(life)).cumsum()
        for item, time in zip(life, times.tolist()):
            conversion.event(f"u{user}", ids[item], time)
    card = {"name": "synthetic-jobs"} | conversion.write(folder)
    queries, pools, good, both = _queries(world, names, places, ids, options, rng)
    queries.to_parquet(folder / "queries.parquet", index=False)
    pools.to_parquet(folder / "pools.parquet", index=False)
    ranked = {name: np.sort(chances)[:, ::-1] for name, chances in (("precision_good", good), ("precision_good_maybe", both))}
    card["best"], card["popularity"] = world.best([life[:-1] for life in lives])
    card["best_graded"] = {f"{name}@{k}": round(float(chances[:, :k].mean()), 6) for name, chances in ranked.items()
                           for k in KS if k <= options.candidates}
    card["grades"] = pools["grade"].value_counts().to_dict()
    return card


def convert(options):
    kinds = {"vibrent": vibrent, "industrial": industrial}

    def write(folder: Path) -> dict:
        card = kinds[options.kind](folder, options)
        return card | {"source": "made up by data_scripts/synthetic.py", "licence": "Apache-2.0, as this project"}

    publish(options.out_folder, made_from("synthetic.py", {}, switches(options)), write)


def main(arguments=None) -> int:
    options = parser(__doc__)
    options.add_argument("kind", choices=("vibrent", "industrial"), help="which data set it should look like")
    options.add_argument("out_folder", type=Path, help="the folder to write; it is made if it isn't there")
    options.add_argument("--items", type=whole, default=0, help="designs or jobs; 0: 8000 for vibrent, 4000 for industrial")
    options.add_argument("--users", type=whole, default=0, help="users; 0: 5000 for vibrent, 3000 for industrial")
    options.add_argument("--events", type=whole, default=0,
                         help="events of a user on average, from 3; 0: 14 for vibrent, 8 for industrial")
    options.add_argument("--queries", type=positive, default=200, help="graded queries (industrial)")
    options.add_argument("--candidates", type=positive, default=200, help="graded candidates of each query (industrial)")
    options.add_argument("--seed", type=whole, default=0, help="another seed makes another world")
    options = options.parse_args(arguments)
    return run("synthetic.py", lambda: convert(options))


if __name__ == "__main__":
    sys.exit(main())
