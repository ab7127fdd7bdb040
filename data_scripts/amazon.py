"""Write Amazon reviews (2018 or 2023) and their metadata as plain files: items.parquet, interactions.parquet and card.json.

    python data_scripts/amazon.py REVIEWS METADATA OUT_FOLDER
    python data_scripts/amazon.py Industrial_and_Scientific.jsonl.gz meta_Industrial_and_Scientific.jsonl.gz data/industrial

Both files hold one JSON object a line, packed with gzip or not. Which year they are from is seen from their fields:

    2018  reviews reviewerID, asin, overall, unixReviewTime          metadata asin, title, description, brand, category
    2023  reviews user_id, parent_asin, rating, timestamp (in ms)    metadata parent_asin, title, description, store, categories

An event is a review; its time is in whole seconds. Items without a title, and events on them, are left out; so are titles
that hold a page's script (2018) and second mentions of one user, item and second. The description is the metadata's, or, where
that is empty, the list of features. HTML is removed and white space folded. OUT_FOLDER can stand in a config as `data:`."""

import json
import sys
from pathlib import Path

from common import Conversion, add_switches, clean, lines, made_from, parser, publish, run, switches

from gti_nb.core import UserError

YEARS = {  # the first field tells the year
    2018: {"reviews": ("reviewerID", "asin", "overall", "unixReviewTime"), "in a second": 1,
           "item": "asin", "brand": "brand", "categories": "category", "features": "feature",
           "source": "Amazon review data (2018): https://cseweb.ucsd.edu/~jmcauley/datasets/amazon_v2/",
           "licence": "the source names none; it asks to cite Ni, Li and McAuley, Justifying Recommendations using "
                      "Distantly-Labeled Reviews and Fine-Grained Aspects (EMNLP 2019). Don't pass the texts on"},
    2023: {"reviews": ("user_id", "parent_asin", "rating", "timestamp"), "in a second": 1000,
           "item": "parent_asin", "brand": "store", "categories": "categories", "features": "features",
           "source": "Amazon Reviews 2023: https://amazon-reviews-2023.github.io/",
           "licence": "the source names none; it asks to cite Hou et al., Bridging Language and Items for Retrieval and "
                      "Recommendation (2024), arXiv 2403.03952. Don't pass the texts on"},
}


def objects(path: Path):
    "Yield (line number, dict) of each line of `path`."
    for number, line in lines(path):
        try:
            found = json.loads(line)
        except ValueError as error:  # also UnicodeDecodeError
            hint = " (the files of 2014 aren't JSON: take 2018 or 2023)" if line.startswith(b"{'") else ""
            raise UserError(f"{path.name}, line {number} isn't JSON{hint}: {error}; repair or delete the line") from None
        if not isinstance(found, dict):
            raise UserError(f"{path.name}, line {number} holds no JSON object: repair or delete the line")
        yield number, found


def year_of(path: Path) -> int:
    "The year whose fields the first review has. Raises `UserError` if that is none."
    for number, review in objects(path):
        for year, fields in YEARS.items():
            if fields["reviews"][0] in review:
                return year
        raise UserError(f"{path.name}, line {number} has neither 'reviewerID' (2018) nor 'user_id' (2023): give the file of "
                        f"reviews first, then that of metadata (fields found: {', '.join(review) or 'none'})")
    raise UserError(f"{path.name} is empty: give the file of reviews")


def _wrong(path: Path, number: int, found: dict, field: str, what: str):
    value = repr(found[field])[:60] if field in found else "missing"
    raise UserError(f"{path.name}, line {number}: {field} is {value}, not {what}: repair or delete the line")


def read_reviews(path: Path, year: int, conversion: Conversion):
    "Hand every review to `conversion`."
    (user_field, item_field, rating_field, time_field), units = YEARS[year]["reviews"], YEARS[year]["in a second"]
    users, items, event, latest = conversion.users, conversion.items, conversion.event, units << 32
    for number, review in objects(path):
        user, item = review.get(user_field), review.get(item_field)
        rating, time = review.get(rating_field), review.get(time_field)
        for field, value, known in ((user_field, user, users), (item_field, item, items)):
            if not isinstance(value, str) or value not in known and (not value.isprintable() or not value.strip()):
                _wrong(path, number, review, field, "an id")
        if type(rating) not in (int, float) or not 0 <= rating <= 5:
            _wrong(path, number, review, rating_field, "a rating from 0 to 5")
        if type(time) is not int or not 0 <= time < latest:
            _wrong(path, number, review, time_field, f"a time in {'milliseconds' if units > 1 else 'seconds'} since 1970")
        event(user, item, time // units, rating)


def texts(value) -> list[str]:
    "What a metadata field says: a text, a list of texts, or nothing."
    return [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str)]


def read_metadata(path: Path, year: int, conversion: Conversion, most: int):
    "Hand the items that have events to `conversion`, each once; the first line with a title counts."
    names, found_any = YEARS[year], False
    for number, found in objects(path):
        item = found.get(names["item"])
        if not isinstance(item, str):
            _wrong(path, number, found, names["item"], f"an id (are these the metadata of {year}?)")
        index = conversion.items.get(item)
        if index is None or index in conversion.described:
            continue
        title, description, features, brand = (clean(" ".join(texts(found.get(name)))) for name in (
            "title", "description", names["features"], names["brand"]))
        if not title or "getTime" in title:  # the page of the data of 2018 says that such titles are a page's script
            continue
        categories = " > ".join(filter(None, map(clean, texts(found.get(names["categories"])))))
        conversion.item(item, title, clean(description or features, most), brand, categories)
        found_any = True
    if not found_any:
        raise UserError(f"no item of {path.name} was reviewed: give the reviews and the metadata of the same category and year")


def convert(options):
    made = made_from("amazon.py", {"reviews": options.reviews, "metadata": options.metadata},
                     switches(options, "reviews", "metadata"))
    year = year_of(options.reviews)

    def write(folder: Path) -> dict:
        conversion = Conversion(folder / "work", ("brand", "categories"), min_rating=options.min_rating)
        read_reviews(options.reviews, year, conversion)
        read_metadata(options.metadata, year, conversion, options.longest)
        name = f"amazon-{year}-{options.reviews.name.partition('.')[0].lower()}"
        return {"name": name} | conversion.write(folder, options.max_items, options.core) | {
            "source": YEARS[year]["source"], "licence": YEARS[year]["licence"]}

    publish(options.out_folder, made, write)


def main(arguments=None) -> int:
    options = parser(__doc__)
    options.add_argument("reviews", type=Path, help="the file of reviews")
    options.add_argument("metadata", type=Path, help="the file of metadata of the same category and year")
    options.add_argument("out_folder", type=Path, help="the folder to write; it is made if it isn't there")
    add_switches(options, core=5)
    options = options.parse_args(arguments)
    return run("amazon.py", lambda: convert(options))


if __name__ == "__main__":
    sys.exit(main())
