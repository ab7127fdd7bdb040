"""Write MovieLens-100K as plain files: items.csv, interactions.csv and card.json.

    python data_scripts/movielens.py OUT_FOLDER

The data comes with the installed package `recbole`; nothing is downloaded. Running it again changes nothing.
The folder can then stand in a config in the place of `embedded:movielens-100k`."""

import sys
from pathlib import Path

from common import lengths, made_from, parser, publish, run

from gti_nb.core import content_hash, read_json
from gti_nb.data import load_dataset

SOURCE = "MovieLens-100K (GroupLens Research, 1998), as packaged in recbole: dataset_example/ml-100k"
LICENCE = ("GroupLens' terms: for research; no commercial use and no redistribution without their permission; say so in "
           "publications and cite Harper and Konstan, The MovieLens Datasets (2015), doi 10.1145/2827872. "
           "See https://grouplens.org/datasets/movielens/100k/")


def convert(folder: Path):
    "Write the data set into `folder`."
    dataset = load_dataset("embedded:movielens-100k")

    def write(temporary: Path) -> dict:
        dataset.save(temporary)
        characters = {column: lengths(dataset.items[column].str.len()) for column in ("title", "description")}
        return read_json(temporary / "card.json") | {"characters": characters, "source": SOURCE, "licence": LICENCE}

    inputs = {"items": content_hash(dataset.items), "interactions": content_hash(dataset.interactions)}
    publish(folder, made_from("movielens.py", inputs, {}), write)


def main(arguments=None) -> int:
    options = parser(__doc__)
    options.add_argument("out_folder", type=Path, help="the folder to write; it is made if it isn't there")
    folder = options.parse_args(arguments).out_folder
    return run("movielens.py", lambda: convert(folder))


if __name__ == "__main__":
    sys.exit(main())
