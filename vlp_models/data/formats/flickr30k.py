"""Flickr30k (Young et al. 2014): `results_20130124.token`, or `results.csv` of copies, and a list of photos a split.

A line of the token file is `1000092795.jpg#0<tab>Two young guys with shaggy hair look at their hands .`; one of the
csv `1000092795.jpg| 0| Two young guys ...`. The splits are those of Flickr30k Entities (`train.txt`, `val.txt`,
`test.txt`, ids without an ending), or those of the Karpathy file that `params.karpathy` names (29,000, 1,014 and 1,000
photos). The photos lie in `flickr30k-images/`, or in `params.images`.
"""

from __future__ import annotations

from pathlib import Path

from vlp_models.data.formats.base import Tables, need_root
from vlp_models.data.formats.flickr_captions import fill, read_piped, read_tokens
from vlp_models.data.formats.photo_lists import photo_folder, read_lists
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

LISTS = {"train": "train.txt", "val": "val.txt", "test": "test.txt"}
TEXTS = {"results_20130124.token": read_tokens, "results.csv": read_piped}


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """
    Raises:
        DataError: the folder, the captions or the lists of photos are missing, or the captions are in neither form.
    """
    root = need_root(base, params.root, "Flickr30k comes on request; set data.<name>.root to its folder")
    tables = Tables()
    found = next(((root / file, reader) for file, reader in TEXTS.items() if (root / file).is_file()), None)
    if found is None:
        raise DataError(f"{root}: holds none of {', '.join(TEXTS)}; is it Flickr30k's folder?")
    path, reader = found
    listed = read_lists(name, params, root, LISTS, tables)
    fill(tables, name, params, reader(path, tables), listed.splits, photo_folder(root, params.images))
    return tables
