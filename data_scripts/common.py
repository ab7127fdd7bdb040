"""What the data scripts share: reading by line, keeping what is needed on disk, and writing a folder whole or not at all.

A `Conversion` takes events and items one by one and writes what `gti_nb.data.load_dataset` reads. It holds each user id and
item id once, about 100 bytes an item for the card, and `PART` events at a time. The rest waits on disk beside the output, so
memory grows with the number of distinct users and items, not with the number of events."""

import argparse
import contextlib
import csv
import gzip
import hashlib
import html
import re
import shutil
import signal
import sys
import zlib
from array import array
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gti_nb.core import Progress, UserError, atomic_path, content_hash, read_json, write_json

PART = 1_000_000  # events held in memory at a time
NUMBER = " number"  # a column that is not in the output; no header's name begins with a space
SCRIPTS = Path(__file__).resolve().parent


# --- running a script ------------------------------------------------------------------------------------------------------

def run(script: str, work) -> int:
    "Call `work`; return the exit status. Bad input, a full disk and Ctrl-C end in one line."
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a terminated script, too, clears up behind itself
    try:
        work()
    except UserError as error:
        print(f"{script}: {error}", file=sys.stderr)
    except OSError as error:
        where = f" {str(error.filename)!r}" if error.filename else ""
        print(f"{script}: can't read or write{where} ({error.strerror or error}): give another folder", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{script}: stopped; nothing was written", file=sys.stderr)
        return 130
    else:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
    return 1


def parser(text: str) -> argparse.ArgumentParser:
    "A parser whose help shows `text`, a script's docstring, as it is written, and the defaults, but for nothing and no."
    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        def _get_help_string(self, action):
            return action.help if action.default is None or action.default is False else super()._get_help_string(action)

    return argparse.ArgumentParser(description=text, formatter_class=Formatter)


def add_switches(options: argparse.ArgumentParser, core: int, rated: bool = True):
    "The switches that leave events out, which work in the order in which they are listed, and the one that cuts texts."
    stay = options.add_argument_group("what stays, decided in this order")
    if rated:
        stay.add_argument("--min-rating", type=float, default=0, help="only events rated at least this; 0: all")
    stay.add_argument("--max-items", type=whole, default=0, help="only the items with the most events, this many; 0: all")
    stay.add_argument("--core", type=whole, default=core, help="only users and items with at least this many events each, "
                      "counted again until nothing changes (k-core); 0 or 1: all")
    options.add_argument("--longest", type=whole, default=4000,
                         help="cut descriptions to this many characters; 0 leaves them whole")


def whole(text: str) -> int:
    "A switch's number: whole, not negative."
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def positive(text: str) -> int:
    "A switch's number: whole, at least 1."
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def switches(options: argparse.Namespace, *paths: str) -> dict:
    "What was switched how, without the arguments called `paths`."
    return {name: value for name, value in sorted(vars(options).items()) if name not in (*paths, "out_folder")}


# --- the folder that is written --------------------------------------------------------------------------------------------

def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(paths):
    "Raise `UserError` about the first of `paths` that isn't a file."
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} {'is a folder' if path.is_dir() else 'is not there'}: give the path of the file")


def made_from(script: str, inputs: dict, switches: dict) -> dict:
    "What the output depends on: `inputs` (name -> path of a file, or its hash), the switches, and the code of the script."
    check_files(path for path in inputs.values() if isinstance(path, Path))
    inputs = {name: sha256(path) if isinstance(path, Path) else path for name, path in inputs.items()}
    code = content_hash(SCRIPTS / script, SCRIPTS / "common.py")
    return {"script": script, "code": code, "inputs": inputs, "switches": switches}


def _state(folder: Path, made: dict) -> str:
    """What is at `folder`: "nothing" (or an empty folder), "ours" (written by these scripts, from something else), "current"
    (from `made`, and unchanged since). Raises `UserError` if it is a file, or holds anything else, which would be lost."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{str(folder)!r} is a file: give another folder")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not names:
        return "nothing"
    try:
        card = read_json(folder / "card.json")
        hashes, before = dict(card["sha256"]), card.get("made_from")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        hashes, before = {}, None
    if names != {*hashes, "card.json"}:
        raise UserError(f"the folder {str(folder)!r} holds something that no data script wrote: give an empty or a new one")
    return "current" if before == made and all(sha256(folder / name) == hash for name, hash in hashes.items()) else "ours"


def publish(folder: Path, made: dict, write):
    """Have `write(temporary folder)` write files and return their card (a dict); then put them at `folder`, all at once.

    The card gets `sha256` (of every file) and `made_from` (`made`), and is printed. If `folder` was made from the same already,
    say so and do nothing. A script that stops, for whichever reason, leaves `folder` as it was."""
    folder = folder.expanduser().resolve()
    if _state(folder, made) == "current":
        print(f"{folder} is there already, made from the same files with the same switches: nothing to do")
        return
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        card = write(temporary)
        card["sha256"] = {path.name: sha256(path) for path in sorted(temporary.iterdir()) if path.name != "card.json"}
        write_json(temporary / "card.json", card | {"made_from": made})
    print_card(card)
    print(f"written to {folder}: {', '.join(card['sha256'])}, card.json")


def print_card(card: dict, indent: str = ""):
    "Print a card as lines of `name: value`."
    for name, value in card.items():
        if isinstance(value, dict):
            print(f"{indent}{name}:")
            print_card(value, indent + "  ")
        else:
            print(f"{indent}{name}: {f'{value:.6g}' if isinstance(value, float) else value}")


def lengths(characters) -> dict:
    "How long texts are, given the number of characters of each."
    characters = np.asarray(characters)
    return {"mean": round(float(characters.mean()), 2), "median": float(np.median(characters)),
            "longest": int(characters.max()), "empty": int((characters == 0).sum())}


# --- reading ---------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def _opened(path: Path):
    """Yield a binary file of what `path` holds, unpacked if it is gzip, and a function that shows how far it was read."""
    size = path.stat().st_size
    with path.open("rb") as raw, Progress(f"reading {path.name} (MB)", max(1, size >> 20)) as progress:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)

        def show(end: bool = False):
            progress.update((progress.total if end else min(raw.tell() >> 20, progress.total)) - progress.done)

        with gzip.open(raw) if packed else contextlib.nullcontext(raw) as file:
            yield file, show


def lines(path: Path):
    "Yield (line number, bytes) of each line of `path` that isn't blank; `path` may be gzip. Shows progress."
    number = 0
    with _opened(path) as (file, show):
        try:
            for number, line in enumerate(file, start=1):
                if number % 8192 == 0:
                    show()
                if not line.isspace():
                    yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path.name} breaks off or is damaged after line {number} ({error}): get the file again") from None
        show(end=True)


def table(path: Path, delimiter: str):
    """Yield the header of a CSV file, then (row, fields) of every row; rows count from 1, without the header.

    `path` may be gzip. Fields may be quoted, and then hold line breaks. Raises `UserError` naming file and row for a row with
    more or fewer fields than the header, a quote that doesn't close, and text that isn't UTF-8."""
    csv.field_size_limit(1 << 24)
    row, line = 0, 0

    def text():
        nonlocal line
        for line, raw in lines(path):
            if b"\0" in raw:
                raise UserError(f"{path.name}, line {line} holds a zero byte: write the file as UTF-8 text")
            yield raw.decode("utf-8-sig" if line == 1 else "utf-8")

    reader = csv.reader(text(), delimiter=delimiter, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            raise UserError(f"{path.name} is empty: give a header and rows")
        yield header
        for row, fields in enumerate(reader, start=1):
            if len(fields) != len(header):
                raise UserError(f"{path.name}, row {row} (line {line}) has {len(fields)} fields, the header has {len(header)}: "
                                f"put quotes around fields that hold {delimiter!r} or a line break")
            yield row, fields
    except csv.Error as error:
        raise UserError(f"{path.name}, row {row + 1} (up to line {line}) can't be read ({error}): "
                        "close or double its quotes") from None
    except UnicodeDecodeError:
        raise UserError(f"{path.name}, line {line} isn't UTF-8: save the file as UTF-8") from None


_IN_WORDS = re.compile(r"</?(?:a|b|em|font|i|small|span|strong|sub|sup|u)(?:\s[^<>]*)?>", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|<!--.*?-->", re.DOTALL)


def clean(text: str, most: int = 0) -> str:
    "`text` without HTML, white space folded, and cut between two words to at most `most` characters (0: not cut)."
    if "&" in text or "<" in text:
        text = html.unescape(html.unescape(text))  # pages were often escaped twice
        text = _TAG.sub(" ", _IN_WORDS.sub("", text))
    if not text.isascii():
        text = text.encode("utf-8", "ignore").decode()  # half of a pair of surrogates can't be written
    text = " ".join(text.split())
    if most and len(text) > most:
        text = text[:most + 1].rpartition(" ")[0] or text[:most]
    return text


# --- converting ------------------------------------------------------------------------------------------------------------

EVENT = np.dtype([("user", "<u4"), ("item", "<u4"), ("seconds", "<i8"), ("rating", "<f8")])


class _Table:
    "A parquet file to which rows are added: `kinds` maps column to pyarrow type."

    def __init__(self, path: Path, kinds: dict):
        self.schema = pa.schema(list(kinds.items()))
        self.writer = pq.ParquetWriter(path, self.schema, compression="zstd")

    def write(self, columns: list):
        arrays = [pa.array(column).cast(kind) for column, kind in zip(columns, self.schema.types)]
        self.writer.write_table(pa.Table.from_arrays(arrays, schema=self.schema))


class Conversion:
    """Events and items on their way into a folder. `work` is a folder for what waits on disk; `write` removes it.

    `columns` are what items have beyond id, title and description. `rated`: events have ratings. Events with a rating below
    `min_rating` are left out. `left_out` counts what was left out, by reason."""

    def __init__(self, work: Path, columns=(), rated: bool = True, min_rating: float = 0, part: int = PART):
        work.mkdir()
        self.work, self.columns, self.rated, self.min_rating, self.part = work, tuple(columns), rated, min_rating, part
        self.users, self.items, self.left_out, self.parts = {}, {}, {}, []  # id -> its number
        self.buffers, self.spool = [array("I"), array("I"), array("q"), array("d")], (work / "events").open("wb")
        self.catalogue = _Table(work / "items.parquet", {NUMBER: pa.uint32(), **{name: pa.string() for name in (
            "item_id", "title", "description", *self.columns)}})
        self.waiting, self.described = [], set()

    def leave_out(self, why: str, n: int = 1):
        if n:
            self.left_out[why] = self.left_out.get(why, 0) + int(n)

    def event(self, user: str, item: str, seconds: int, rating: float = 0.0):
        "Add an event. Ids must be printable text, `seconds` since 1970 a whole number."
        if rating < self.min_rating:
            return self.leave_out(f"events rated below {self.min_rating:g}")
        users, items, times, ratings = self.buffers
        users.append(self.users.setdefault(user, len(self.users)))
        items.append(self.items.setdefault(item, len(self.items)))
        times.append(seconds)
        ratings.append(rating)
        if len(users) >= 1 << 16:
            self._flush()

    def _flush(self):
        rows = np.empty(len(self.buffers[0]), EVENT)
        for name, buffer in zip(EVENT.names, self.buffers):
            rows[name] = buffer
            del buffer[:]
        rows.tofile(self.spool)

    def item(self, item_id: str, title: str, description: str, *more: str):
        "Add an item to the catalogue; each id once. `more` holds the values of `columns`."
        number = self.items.setdefault(item_id, len(self.items))
        self.described.add(number)
        self.waiting.append((number, item_id, title, description, *more))
        if len(self.waiting) >= 10_000:
            self._write_waiting()

    def _write_waiting(self):
        if self.waiting:
            self.catalogue.write(list(zip(*self.waiting)))
            self.waiting = []

    def write(self, folder: Path, max_items: int = 0, core: int = 0) -> dict:
        """Write items.parquet and interactions.parquet into `folder`: the items in the order in which they were added, the
        events by user (in the order of first events), time, and order of adding. Return the card's numbers.

        Events of items that weren't added and second mentions of an event are left out. If anything was to be left out by
        `max_items` or `core`, so are items without an event. Raises `UserError` if nothing is left."""
        self._flush()
        self._write_waiting()
        self.spool.close()
        self.catalogue.writer.close()
        known = np.zeros(len(self.items), bool)
        known[list(self.described)] = True
        self._sort(known)
        users, items = self._filter(known, max_items, core)
        stay = items if max_items > 0 or core > 1 else known
        texts = self._write_items(folder / "items.parquet", stay)
        statistics = self._write_events(folder / "interactions.parquet", users, items, stay)
        shutil.rmtree(self.work)
        statistics |= {"mean characters in a title": float(texts["title"].mean()),
                       "mean characters in a description": float(texts["description"].mean()),
                       "items with another's title and description": int(texts["twice"])}
        return {"statistics": statistics, "characters": {name: lengths(texts[name]) for name in ("title", "description")},
                "left_out": dict(sorted(self.left_out.items()))}

    def _rows(self, path: Path):
        "The events in `path`, at most `part` at a time."
        with path.open("rb") as file:
            while len(rows := np.fromfile(file, EVENT, self.part)):
                yield rows

    def _sort(self, known: np.ndarray):
        "Turn the spool into files in `parts`: by user and time, each user in one file, each event once, known items only."
        per_user = np.zeros(len(self.users), np.int64)
        for rows in self._rows(self.work / "events"):
            per_user += np.bincount(rows["user"], minlength=len(per_user))
        file_of, filled, n_files = np.zeros(len(per_user), np.int32), 0, 1
        for user, n in enumerate(per_user.tolist()):
            if filled and filled + n > self.part:
                filled, n_files = 0, n_files + 1
            file_of[user] = n_files - 1
            filled += n
        self.parts = [self.work / f"part{k}" for k in range(n_files)]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in self.parts]
            for rows in self._rows(self.work / "events"):
                target = file_of[rows["user"]]
                for k in np.unique(target):
                    rows[target == k].tofile(files[k])
        (self.work / "events").unlink()
        with Progress("sorting", n_files) as progress:
            for path in self.parts:
                rows = np.fromfile(path, EVENT)
                has_text = known[rows["item"]]
                self.leave_out("events of items without a title", (~has_text).sum())
                rows = rows[has_text]
                order = np.lexsort((rows["item"], rows["seconds"], rows["user"]))  # stable: of equals, the first comes first
                same = np.zeros(len(rows), bool)
                a, b = rows[order[1:]], rows[order[:-1]]
                same[order[1:]] = (a["user"] == b["user"]) & (a["item"] == b["item"]) & (a["seconds"] == b["seconds"])
                self.leave_out("second mentions of an event", same.sum())
                rows = rows[~same]
                rows[np.lexsort((rows["seconds"], rows["user"]))].tofile(path)
                progress.update()

    def _counts(self, users: np.ndarray, items: np.ndarray):
        "How many events each user and each item has, among the `users` and `items` that stay (bool)."
        per_user, per_item = np.zeros(len(users), np.int64), np.zeros(len(items), np.int64)
        for path in self.parts:
            rows = np.fromfile(path, EVENT)
            rows = rows[users[rows["user"]] & items[rows["item"]]]
            per_user += np.bincount(rows["user"], minlength=len(users))
            per_item += np.bincount(rows["item"], minlength=len(items))
        return per_user, per_item

    def _filter(self, known: np.ndarray, max_items: int, core: int):
        "Which users and which items keep an event (bool)."
        users, items = np.ones(len(self.users), bool), known
        per_user, per_item = self._counts(users, items)
        all_events = before = per_user.sum()
        if max_items > 0:
            ids = list(self.items)
            best = sorted(np.flatnonzero(per_item).tolist(), key=lambda k: (-per_item[k], ids[k]))[:max_items]
            items = np.isin(np.arange(len(items)), best)
            per_user, per_item = self._counts(users, items)
            self.leave_out(f"events outside the {max_items} items with the most", before - per_user.sum())
        before, rounds = per_user.sum(), 0
        while True:
            new_users, new_items = users & (per_user >= max(core, 1)), items & (per_item >= max(core, 1))
            if (new_users == users).all() and (new_items == items).all():
                break
            users, items, rounds = new_users, new_items, rounds + 1
            per_user, per_item = self._counts(users, items)
        self.leave_out(f"events outside the {core}-core", before - per_user.sum())
        if not per_user.sum():
            before = ", ".join(f"{n} {why}" for why, n in self.left_out.items()) or "none"
            raise UserError(f"no event is left of {all_events:,} with --max-items {max_items} and --core {core}: lower them, or "
                            f"check that the files belong together (left out: {before})")
        return users, items

    def _write_items(self, path: Path, stay: np.ndarray) -> dict:
        "Write the items that stay; return the lengths of their texts, and how many have the texts of an earlier one."
        waiting = pq.ParquetFile(self.work / "items.parquet")
        kinds = {field.name: field.type for field in waiting.schema_arrow if field.name != NUMBER}
        out, found, seen = _Table(path, kinds), {"title": [], "description": []}, set()
        with Progress("writing items", waiting.metadata.num_row_groups) as progress:
            for k in range(waiting.metadata.num_row_groups):
                rows = waiting.read_row_group(k)
                rows = rows.filter(pa.array(stay[rows[NUMBER].to_numpy()]))
                out.write([rows[name].combine_chunks() for name in kinds])
                texts = {name: rows[name].to_pylist() for name in found}
                for name, column in texts.items():
                    found[name].append(np.array([len(text) for text in column], np.int32))
                seen.update(hashlib.blake2b("\0".join(both).encode(), digest_size=16).digest() for both in zip(*texts.values()))
                progress.update()
        out.writer.close()
        found = {name: np.concatenate(parts) for name, parts in found.items()}
        return found | {"twice": len(found["title"]) - len(seen)}

    def _write_events(self, path: Path, users: np.ndarray, items: np.ndarray, stay: np.ndarray) -> dict:
        "Write the events of `users` on `items`; return the statistics of `gti_nb.data.dataset_card` that don't need the texts."
        names = [pa.array(ids, pa.large_string()) for ids in (list(self.users), list(self.items))]
        kinds = {"user_id": pa.string(), "item_id": pa.string(), "timestamp": pa.int64()}
        out = _Table(path, kinds | ({"rating": pa.float64()} if self.rated else {}))
        per_user, per_item = np.zeros(len(users), np.int64), np.zeros(len(items), np.int64)
        pairs, tied, first, last = 0, 0, None, None
        with Progress("writing events", len(self.parts)) as progress:
            for part in self.parts:
                rows = np.fromfile(part, EVENT)
                rows = rows[users[rows["user"]] & items[rows["item"]]]
                if len(rows):
                    out.write([names[0].take(pa.array(rows["user"])), names[1].take(pa.array(rows["item"])), rows["seconds"],
                               *([rows["rating"]] if self.rated else [])])
                    per_user += np.bincount(rows["user"], minlength=len(users))
                    per_item += np.bincount(rows["item"], minlength=len(items))
                    pairs += len(np.unique(rows["user"].astype(np.uint64) << np.uint64(32) | rows["item"]))
                    same = (rows["user"][1:] == rows["user"][:-1]) & (rows["seconds"][1:] == rows["seconds"][:-1])
                    tied += int((np.r_[False, same] | np.r_[same, False]).sum())
                    times = int(rows["seconds"].min()), int(rows["seconds"].max())
                    first, last = (min(first, times[0]), max(last, times[1])) if first is not None else times
                progress.update()
        out.writer.close()
        n_items, n_users, n = int(stay.sum()), int((per_user > 0).sum()), int(per_user.sum())
        per_user, per_item = per_user[per_user > 0], per_item[stay]
        top = np.sort(per_item)[::-1][:max(1, n_items // 10)].sum()
        return {"items": n_items, "users": n_users, "interactions": n, "sparsity": 1 - pairs / (n_items * n_users),
                "median events per user": float(np.median(per_user)),
                "users with fewer than 3 events": int((per_user < 3).sum()),
                "median events per item": float(np.median(per_item)),
                "items without an event": int((per_item == 0).sum()),
                "share of events on the top tenth of items": float(top / n),
                "share of events in the same second as another of their user": tied / n,
                "days from first to last event": (last - first) / 86_400}
