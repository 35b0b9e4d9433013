"""Flickr8k (Hodosh et al. 2013): five captions a photo, in either of the layouts that it is handed on in.

As its authors send it: `Flickr8k.token.txt`, lines of `1000268201_693b08cb0e.jpg#0<tab>A child in a pink dress ...`,
and the official split `Flickr_8k.{trainImages,devImages,testImages}.txt`, one file name a line; these may lie in
`Flickr8k_text/`, the photos in `Flicker8k_Dataset/` (sic). As copies have it: `captions.txt`, a csv of `image,caption`
with quotes, and `Images/`; put the official lists beside it.

Official dev is val here. `split_files: {train: [Flickr_8k.trainImages.txt], test: [Flickr_8k.devImages.txt]}` and
`val_fraction: 0.1` report dev, and choose on a tenth of train. The token file has captions of photos that no list has;
they are left out, and counted.
"""

from __future__ import annotations

from pathlib import Path

from vlp_models.data.formats.base import Tables, need_root
from vlp_models.data.formats.flickr_captions import fill, read_quoted, read_tokens
from vlp_models.data.formats.photo_lists import photo_folder, read_lists, text_folders
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

LISTS = {"train": "Flickr_8k.trainImages.txt", "val": "Flickr_8k.devImages.txt", "test": "Flickr_8k.testImages.txt"}
TEXTS = {"Flickr8k.token.txt": read_tokens, "captions.txt": read_quoted}


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """
    Raises:
        DataError: the folder, the captions or the lists of photos are missing, or the captions are in neither form.
    """
    root = need_root(base, params.root, "Flickr8k comes on request; set data.<name>.root to its folder")
    tables = Tables()
    there = [(folder / file, reader) for file, reader in TEXTS.items() for folder in text_folders(root)]
    found = next(((path, reader) for path, reader in there if path.is_file()), None)
    if found is None:
        raise DataError(f"{root}: holds none of {', '.join(TEXTS)}; is it Flickr8k's folder?")
    path, reader = found
    listed = read_lists(name, params, root, LISTS, tables)
    fill(tables, name, params, reader(path, tables), listed.splits, photo_folder(root, params.images))
    return tables
