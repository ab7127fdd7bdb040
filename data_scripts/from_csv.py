"""Write your own catalogue and events as plain files: items.parquet, interactions.parquet and card.json.

    python data_scripts/from_csv.py ITEMS.csv EVENTS.csv OUT_FOLDER
    python data_scripts/from_csv.py products.tsv orders.csv.gz data/shop --title product_name --timestamp ordered_at

Both files have a header and are UTF-8, packed with gzip or not. The separator (comma, semicolon, tab or |) is the one that
splits the header most. Columns with usual names (item_id, id, asin, sku, ...; title, name; description; user_id, customer_id,
...; timestamp, date, ...; rating, stars) are found; the switches below name all others. What was found is printed.

Times are numbers (seconds, milli-, micro- or nanoseconds since 1970; the size of the first one tells which) or dates
(2024-01-31, 2024-01-31T18:30:00+01:00; UTC where no zone is given; another form with --date-format). They become whole seconds.
HTML is removed from titles and descriptions, and white space folded. The items' other columns are kept as they are. Second
mentions of one user, item and second are left out. OUT_FOLDER can stand in a config as `data:`."""

import csv
import math
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

from common import Conversion, add_switches, check_files, clean, lines, made_from, parser, publish, run, switches, table

from gti_nb.core import UserError

NAMES = {role: names.split() for role, names in {  # usual names without case, spaces and marks, the likeliest first
    "item_id": "itemid item asin parentasin productid product sku articleid outfitid movieid bookid isbn trackid songid jobid "
               "newsid iid id",
    "title": "title itemtitle producttitle movietitle booktitle name itemname productname prodname",
    "description": "description itemdescription productdescription desc detaildesc overview summary abstract text",
    "user_id": "userid user customerid customer reviewerid memberid visitorid sessionid uid",
    "timestamp": "timestamp unixreviewtime time datetime date eventtime createdat tdat ts",
    "rating": "rating stars score overall",
}.items()}
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
FIRST, LAST = -62_135_596_800, 253_402_300_800  # the years 1 to 9999


def separator_of(path: Path, given: str | None) -> str:
    "The separator that splits the header of `path` into most fields, if none is `given`."
    for _, line in lines(path):
        header = line.decode("utf-8-sig", "replace").strip("\r\n")
        fields = {mark: len(next(csv.reader([header], delimiter=mark))) for mark in ([given] if given else ",;\t|")}
        best = max(fields, key=fields.get)
        if fields[best] == 1:
            raise UserError(f"{path.name} has one column, {header[:60]!r}: name the separator with --separator")
        return best
    raise UserError(f"{path.name} is empty: give a header and rows")


def find_column(path: Path, header: list[str], role: str, given: str | None, needed: bool = True) -> int | None:
    "The place in `header` of the column called `given`, or else of the likeliest one for `role`; None if it can do without."
    if given is not None:
        if given not in header:
            raise UserError(f"{path.name} has no column {given!r}: it has {', '.join(map(repr, header))}")
        return header.index(given)
    plain = [re.sub(r"[^a-z0-9]", "", name.lower().partition(":")[0]) for name in header]  # "user_id:token" is RecBole's way
    for name in NAMES[role]:
        if name in plain:
            return plain.index(name)
    if needed:
        raise UserError(f"{path.name} has no column that looks like the {role}: it has {', '.join(map(repr, header))}; "
                        f"name it with --{role.replace('_', '-')}")
    return None


def show(path: Path, mark: str, header: list[str], **places):
    found = ", ".join(f"{role} from {' + '.join(repr(header[k]) for k in (place if isinstance(place, list) else [place]))}"
                      for role, place in places.items() if place not in (None, []))
    print(f"{path.name}, separated by {mark!r}: {found}", flush=True)


class Clock:
    "Turns times as written into whole seconds since 1970; the first one decides how they are written, unless that is given."

    def __init__(self, path: Path, column: str, unit: str, form: str | None):
        self.path, self.column, self.unit, self.form = path, column, "date" if form else unit, form

    def __call__(self, row: int, value: str) -> int:
        if self.unit == "auto":
            self.unit = self._guess(value)
            read_as = "dates" if self.unit == "date" else f"numbers in {self.unit}"
            print(f"{self.path.name}: {self.column} is read as {read_as}", flush=True)
        try:
            seconds = self._date(value) if self.unit == "date" else self._number(value)
            if FIRST <= seconds < LAST:
                return seconds
        except (ValueError, OverflowError):
            pass
        expected = f"time in {self.unit} since 1970" if self.unit != "date" else f"date {f'like {self.form}' if self.form else ''}"
        raise UserError(f"{self.path.name}, row {row}: {self.column} {value!r} is no {expected.strip()}: repair the row, or say how "
                        f"times are written with --time-unit or --date-format")

    @staticmethod
    def _guess(value: str) -> str:
        try:
            size = abs(float(value))
        except ValueError:
            return "date"
        return "s" if size < 1e11 else "ms" if size < 1e14 else "us" if size < 1e17 else "ns"

    def _number(self, value: str) -> int:
        try:
            return int(value) // UNITS[self.unit]
        except ValueError:
            return math.floor(float(value) / UNITS[self.unit])

    def _date(self, value: str) -> int:
        found = datetime.strptime(value, self.form) if self.form else datetime.fromisoformat(value)
        return math.floor((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp())


def identifier(path: Path, row: int, column: str, value: str) -> str:
    value = value.strip()
    if not value or not value.isprintable():
        raise UserError(f"{path.name}, row {row}: {column} {value!r} is no id: give every row its {column}")
    return value


class Catalogue:
    "The file of items: which column is what. `more` are the names of the columns that are kept as they are."

    def __init__(self, options):
        self.path, self.most = options.items, options.longest
        self.mark = separator_of(self.path, options.separator)
        self.rows = table(self.path, self.mark)
        self.header = [name.strip() for name in next(self.rows)]
        self.item, self.title = (find_column(self.path, self.header, role, getattr(options, role))
                                 for role in ("item_id", "title"))
        given = options.description or [None]
        places = [find_column(self.path, self.header, "description", name, needed=False) for name in given]
        self.description = [place for place in places if place is not None]
        used, taken = {self.item, self.title, *self.description}, {"", "item_id", "title", "description"}
        self.kept = [k for k, name in enumerate(self.header) if k not in used and name not in taken.union(self.header[:k])]
        self.more = [self.header[k] for k in self.kept]

    def read(self, conversion: Conversion):
        show(self.path, self.mark, self.header, item_id=self.item, title=self.title, description=self.description,
             kept=self.kept)
        column = self.header[self.item]
        for row, fields in self.rows:
            item = identifier(self.path, row, column, fields[self.item])
            if item in conversion.items:
                raise UserError(f"{self.path.name}, row {row}: {column} {item!r} is there already: give each item one row")
            title = clean(fields[self.title])
            if not title:
                raise UserError(f"{self.path.name}, row {row}: {self.header[self.title]} is empty: give every item a title")
            description = clean(" ".join(fields[k] for k in self.description), self.most)
            conversion.item(item, title, description, *(fields[k] for k in self.kept))


class Events:
    "The file of events: which column is what."

    def __init__(self, options):
        self.path, self.drop = options.events, options.drop_unknown
        self.unit, self.form = options.time_unit, options.date_format
        self.mark = separator_of(self.path, options.separator)
        self.rows = table(self.path, self.mark)
        self.header = [name.strip() for name in next(self.rows)]
        item_id = options.event_item_id or (options.item_id if options.item_id in self.header else None)
        given = {"user_id": options.user_id, "item_id": item_id, "timestamp": options.timestamp, "rating": options.rating}
        self.user, self.item, self.time, self.rating = (
            find_column(self.path, self.header, role, name, needed=role != "rating") for role, name in given.items())
        if self.rating is None and options.min_rating > 0:
            raise UserError(f"{self.path.name} has no column that looks like the rating: name it with --rating, "
                            "or drop --min-rating")

    def read(self, conversion: Conversion, catalogue: Path):
        show(self.path, self.mark, self.header, user_id=self.user, item_id=self.item, timestamp=self.time, rating=self.rating)
        names, known, clock = self.header, conversion.items, Clock(self.path, self.header[self.time], self.unit, self.form)
        for row, fields in self.rows:
            user = identifier(self.path, row, names[self.user], fields[self.user])
            item = fields[self.item].strip()
            if item not in known:
                identifier(self.path, row, names[self.item], item)
                if not self.drop:
                    raise UserError(f"{self.path.name}, row {row}: {names[self.item]} {item!r} isn't in {catalogue.name}: "
                                    f"add the item, or leave such events out with --drop-unknown")
                conversion.leave_out(f"events of items that {catalogue.name} lacks")
                continue
            conversion.event(user, item, clock(row, fields[self.time].strip()), *self._rating(row, fields))

    def _rating(self, row: int, fields: list[str]) -> tuple:
        if self.rating is None:
            return ()
        try:
            if math.isfinite(rating := float(fields[self.rating])):
                return (rating,)
        except ValueError:
            pass
        raise UserError(f"{self.path.name}, row {row}: {self.header[self.rating]} {fields[self.rating]!r} is no number: "
                        f"rate every event, or rename the column if it isn't a rating")


def convert(options):
    check_files([options.items, options.events])
    made = made_from("from_csv.py", {"items": options.items, "events": options.events}, switches(options, "items", "events"))

    def write(folder: Path) -> dict:
        catalogue, events = Catalogue(options), Events(options)
        conversion = Conversion(folder / "work", catalogue.more, events.rating is not None, options.min_rating or -math.inf)
        catalogue.read(conversion)
        events.read(conversion, options.items)
        return {"name": options.out_folder.resolve().name} | conversion.write(folder, options.max_items, options.core) | {
            "source": f"{options.items.name} and {options.events.name}", "licence": options.licence}

    publish(options.out_folder, made, write)


def main(arguments=None) -> int:
    options = parser(__doc__)
    options.add_argument("items", type=Path, help="the file of items")
    options.add_argument("events", type=Path, help="the file of events")
    options.add_argument("out_folder", type=Path, help="the folder to write; it is made if it isn't there")
    options.add_argument("--separator", help="what separates fields in both files, such as ';' (found if not given)")
    columns = options.add_argument_group("columns (found if not given)")
    columns.add_argument("--item-id", metavar="NAME", help="the item's id, in the file of items, and of events if it is there")
    columns.add_argument("--title", metavar="NAME", help="the item's title")
    columns.add_argument("--description", metavar="NAME", action="append",
                         help="the item's description; give it several times and the columns are joined")
    columns.add_argument("--user-id", metavar="NAME", help="whose event it is")
    columns.add_argument("--event-item-id", metavar="NAME", help="the item's id in the file of events")
    columns.add_argument("--timestamp", metavar="NAME", help="when it was; a position (0, 1, 2, ...) will do")
    columns.add_argument("--rating", metavar="NAME", help="how the item was rated; the data can do without")
    options.add_argument("--time-unit", choices=("auto", *UNITS, "date"), default="auto", help="how times are written")
    options.add_argument("--date-format", metavar="FORMAT", help="how dates are written, for instance %%d.%%m.%%Y")
    options.add_argument("--drop-unknown", action="store_true", help="leave events of items that the catalogue lacks out")
    add_switches(options, core=0)
    options.add_argument("--licence", default="not stated", help="under which terms the data may be used; goes on the card")
    options = options.parse_args(arguments)
    return run("from_csv.py", lambda: convert(options))


if __name__ == "__main__":
    sys.exit(main())
