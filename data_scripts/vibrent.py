"""Write the Vibrent Clothes Rental data as plain files: items.parquet, interactions.parquet and card.json.

    python data_scripts/vibrent.py RAW_FOLDER OUT_FOLDER

RAW_FOLDER holds the files of https://www.kaggle.com/datasets/kaborg15/vibrent-clothes-rental-dataset (fields end with ';'):

    outfits.csv                  needed
    user_activity_triplets.csv   rentals from 2020 on      at least one of these two
    original_orders.csv          rentals before 2020
    picture_triplets.csv         adds a column `picture`, the front view's file; the data can do without
    card.json                    only of made-up data (synthetic.py); says so, and what the best score is

Columns are found by name, in whatever order. An event is a rental at the start of its first day (UTC); rentals of one day are
ordered by their last day, then as in the files, the older file first. Copies of one design (`group`) become one item, and a
rental of the same item less than 30 days after the last one that counted is left out, as in the data's own paper. Outfits
without a name get one from their tags; those without tags as well, and rentals of them, are left out. The description is the
owner's, then the tags by category, but for the size, which is a copy's and not the design's.
OUT_FOLDER can stand in a config as `data:`."""

import argparse
import ast
import re
import sys
from datetime import date
from pathlib import Path

from common import Conversion, add_switches, clean, made_from, parser, publish, run, switches, table

from gti_nb.core import UserError, read_json

ORDERS = ("original_orders.csv", "user_activity_triplets.csv")  # the older one first
FILES = ("outfits.csv", *ORDERS, "picture_triplets.csv", "card.json")
RENTAL = ("customer.id", "outfit.id", "rentalPeriod.start", "rentalPeriod.end")
OUTFIT = ("id", "name", "description", "group", "outfit_tags", "tag_categories")
SOURCE = "Vibrent Clothes Rental Dataset (RecSys 2024): https://www.kaggle.com/datasets/kaborg15/vibrent-clothes-rental-dataset"
LICENCE = "the paper is CC BY 4.0; see the data's page for the terms of the data itself before you pass rows on"
DAYS, SECONDS = 30, 86_400
_LETTERS = r"(?:X{0,3}S|M|X{0,4}L|[2-5]XL|3[2-9]|4\d|5[0-4])"
_SIZE = re.compile(rf"{_LETTERS}(?:/{_LETTERS})? +(?=\S)")
_NOTHING = {"", "nan", "none", "null"}


def rows(path: Path, columns):
    "Yield (row, values of `columns`) of a file with ';' between the fields."
    reader = table(path, ";")
    header = [name.strip() for name in next(reader)]
    for column in columns:
        if column not in header:
            raise UserError(f"{path.name} has no column {column!r}: it has {', '.join(map(repr, header))}; "
                            "is it the file of that name?")
    places = [header.index(column) for column in columns]
    for row, fields in reader:
        yield row, [fields[place].strip() for place in places]


def day(path: Path, row: int, column: str, value: str) -> int:
    "Days from 1970 to the date in `value`; a time of day is dropped."
    try:
        return date.fromisoformat(value[:10]).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        raise UserError(f"{path.name}, row {row}: {column} {value!r} is no date: write it as YYYY-MM-DD") from None


def tags_of(path: Path, row: int, tags: str, categories: str) -> dict:
    "Category -> its tags, from two texts that hold Python lists of equal length."
    lists = []
    for column, value in (("outfit_tags", tags), ("tag_categories", categories)):
        try:
            found = [] if value.lower() in _NOTHING else ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found = None
        if not isinstance(found, list):
            raise UserError(f"{path.name}, row {row}: {column} {value[:60]!r} is no list: write it like ['Dress', 'Blue']")
        lists.append([clean(str(part)) for part in found])
    if len(lists[0]) != len(lists[1]):
        raise UserError(f"{path.name}, row {row}: {len(lists[0])} outfit_tags and {len(lists[1])} tag_categories: "
                        "give each tag its category")
    by_category = {}
    for tag, category in zip(*lists):
        by_category.setdefault(category, []).append(tag)
    return by_category


def read_outfits(path: Path, grouped: bool) -> tuple[dict, dict]:
    "Item id -> its outfits (id, name, description, tags), and outfit id -> item id; an item is a group, or an outfit."
    items, item_of = {}, {}
    for row, (outfit, name, description, group, tags, categories) in rows(path, OUTFIT):
        if outfit.lower() in _NOTHING:
            raise UserError(f"{path.name}, row {row}: id is empty: give every outfit its id")
        if outfit in item_of:
            raise UserError(f"{path.name}, row {row}: id {outfit!r} is there already: give each outfit one row")
        item_of[outfit] = group if grouped and group.lower() not in _NOTHING else outfit
        texts = ["" if text.lower() in _NOTHING else clean(text) for text in (name, description)]
        items.setdefault(item_of[outfit], []).append((outfit, *texts, tags_of(path, row, tags, categories)))
    return items, item_of


def texts_of(copies: list, grouped: bool, most: int) -> tuple[str, str, str, str]:
    "Title, description, brand and categories of an item: the first name and the longest description, the tags of all copies."
    tags = {}
    for *_, by_category in copies:
        for category, names in by_category.items():
            if category.lower() != "size":
                tags.setdefault(category, {}).update(dict.fromkeys(names))
    tags = {category: list(names) for category, names in sorted(tags.items())}
    named = [name for _, name, _, _ in copies if name]
    if named:
        title = _SIZE.sub("", named[0], count=1) if grouped and _SIZE.match(named[0]) else named[0]
    else:
        title = " ".join(tags.get("Brand", [])[:1] + tags.get("Category", [])[:1])
        title = title or " ".join(next(iter(tags.values()), [])[:3])
    own = max((description for _, _, description, _ in copies), key=len)  # of equals, the first
    listed = " ".join(f"{category}: {', '.join(names)}." for category, names in tags.items())
    return title, clean(f"{own} {listed}", most), ", ".join(tags.get("Brand", [])), ", ".join(tags.get("Category", []))


def read_pictures(path: Path, item_of: dict) -> dict:
    "Item id -> the file name of its front view: the picture with the lowest displayOrder, of equals the first."
    best, named = {}, "file_name" in next(table(path, ";"))  # the copy on GitHub has ids only
    for row, (outfit, order, name) in rows(path, ("outfit.id", "displayOrder", "file_name" if named else "picture.id")):
        try:
            order = float(order)
        except ValueError:
            raise UserError(f"{path.name}, row {row}: displayOrder {order!r} is no number: give 0 for the front") from None
        item = item_of.get(outfit)
        if item is not None and (item not in best or order < best[item][0]):
            best[item] = order, name
    return {item: name for item, (_, name) in best.items()}


def read_rentals(paths, item_of: dict) -> list[tuple]:
    "(first day, last day, user, item) of each rental, in time order."
    found = []
    for path in paths:
        for row, (user, outfit, start, end) in rows(path, RENTAL):
            for column, value in (("customer.id", user), ("outfit.id", outfit)):
                if not value.isprintable() or value.lower() in _NOTHING:
                    raise UserError(f"{path.name}, row {row}: {column} {value!r} is no id: give every rental its {column}")
            days = [day(path, row, column, value) for column, value in zip(RENTAL[2:], (start, end))]
            found.append((*days, user, item_of.get(outfit, outfit)))
    return sorted(found, key=lambda rental: rental[:2])  # stable: then as in the files


def origin(card: Path | None, changed: bool) -> dict:
    "Name, source and licence; of made-up data from its card, with its best score, unless what is written was `changed`."
    if card is None:
        return {"name": "vibrent", "source": SOURCE, "licence": LICENCE}
    try:
        found = read_json(card)
        keys = ("name", "source", "licence", *(() if changed else ("best", "popularity")))
        return {key: found[key] for key in keys}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{card} isn't the card that synthetic.py wrote: take it out of the folder") from None


def convert(options):
    paths = {name: path for name in FILES if (path := options.raw_folder / name).is_file()}
    if "outfits.csv" not in paths or not paths.keys() & set(ORDERS):
        lacks = " and ".join(ORDERS) if "outfits.csv" in paths else "outfits.csv"
        raise UserError(f"{str(options.raw_folder)!r} lacks {lacks}: unpack the files of the data set there")
    made = made_from("vibrent.py", paths, switches(options, "raw_folder"))

    def write(folder: Path) -> dict:
        items, item_of = read_outfits(paths["outfits.csv"], options.group_copies)
        pictures = read_pictures(paths["picture_triplets.csv"], item_of) if "picture_triplets.csv" in paths else {}
        conversion = Conversion(folder / "work", ("brand", "categories", "copies", "picture"), rated=False)
        for item, copies in items.items():
            title, *texts = texts_of(copies, options.group_copies, options.longest)
            if title:
                conversion.item(item, title, *texts, str(len(copies)), pictures.get(item, ""))
        last = {}
        for start, _, user, item in read_rentals([paths[name] for name in ORDERS if name in paths], item_of):
            if options.collapse_repeats and start - last.get((user, item), start - DAYS) < DAYS:
                conversion.leave_out(f"rentals less than {DAYS} days after one of the same item")
                continue
            last[user, item] = start
            conversion.event(user, item, start * SECONDS)
        changed = not (options.group_copies and options.collapse_repeats) or options.max_items > 0 or options.core > 1
        card = origin(paths.get("card.json"), changed)
        return {"name": card.pop("name")} | conversion.write(folder, options.max_items, options.core) | card

    publish(options.out_folder, made, write)


def main(arguments=None) -> int:
    options, either = parser(__doc__), argparse.BooleanOptionalAction
    options.add_argument("raw_folder", type=Path, help="the folder with the files of the data set")
    options.add_argument("out_folder", type=Path, help="the folder to write; it is made if it isn't there")
    options.add_argument("--group-copies", action=either, default=True, help="make the copies of one design one item")
    options.add_argument("--collapse-repeats", action=either, default=True,
                         help=f"leave out a rental of the same item less than {DAYS} days after the last one that counted")
    add_switches(options, core=0, rated=False)
    options = options.parse_args(arguments)
    return run("vibrent.py", lambda: convert(options))


if __name__ == "__main__":
    sys.exit(main())
