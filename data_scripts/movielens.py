"""Write MovieLens-100K as plain files: items.csv, interactions.csv and card.json.

    python data_scripts/movielens.py OUT_FOLDER

The data comes with the installed package `recbole`; nothing is downloaded. Running it again writes the same bytes.
The folder can then stand in a config in the place of `embedded:movielens-100k`."""

import argparse
import hashlib
import sys
from pathlib import Path

from gti_nb.core import UserError, read_json, write_json
from gti_nb.data import dataset_card, load_dataset

SOURCE = "MovieLens-100K (GroupLens Research, 1998), as packaged in recbole: dataset_example/ml-100k"
LICENCE = ("GroupLens' terms: for research; no commercial use and no redistribution without their permission; say so in "
           "publications and cite Harper and Konstan, The MovieLens Datasets (2015), doi 10.1145/2827872. "
           "See https://grouplens.org/datasets/movielens/100k/")


def lengths(texts) -> dict:
    "How long `texts` are, in characters."
    characters = texts.str.len()
    return {"mean": round(float(characters.mean()), 2), "median": float(characters.median()), "longest": int(characters.max()),
            "empty": int((characters == 0).sum())}


def write(folder: Path) -> dict:
    "Write the data set into `folder`; return its card."
    dataset = load_dataset("embedded:movielens-100k")
    dataset.save(folder)
    card = read_json(folder / "card.json")
    card["source"], card["licence"] = SOURCE, LICENCE
    card["characters"] = {column: lengths(dataset.items[column]) for column in ("title", "description")}
    card["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("items.csv", "interactions.csv")}
    write_json(folder / "card.json", card)
    print(dataset_card(dataset).to_string(index=False, header=False))
    print(f"written to {folder}: items.csv, interactions.csv, card.json")
    return card


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_folder", type=Path, help="the folder to write into; it is made if it isn't there")
    folder = parser.parse_args(arguments).out_folder
    try:
        write(folder)
    except UserError as error:
        print(f"movielens.py: {error}", file=sys.stderr)
    except OSError as error:
        print(f"movielens.py: can't write into {str(folder)!r} ({error.strerror}): give another folder", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
