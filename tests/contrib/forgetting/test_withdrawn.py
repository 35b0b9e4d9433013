"""Withdrawn images stay out through every entry point, however they were changed; others are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ingest_project import encoded, make_project, make_submission, params_of, quarantined
from photos import photo
from PIL import Image, ImageOps

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.catalog import Catalog, find_copies, resolve_queries
from vlp_models.contrib.forgetting.withdrawn import WithdrawnImage, WithdrawnList, read_withdrawn, withdraw
from vlp_models.contrib.ingest import ingest
from vlp_models.curation.duplicates.hashes import ImageHashes, hash_image
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError
from vlp_models.pipeline.stages import prepare, validate

RULES = NearRules(max_hash_distance=8, keypoints=True)
CROP = (20, 10, 185, 135)


def hashed(image: Image.Image, form: str = "PNG") -> ImageHashes:
    return hash_image(encoded(image, form), 10**6, keypoints=True, held_out=True)


def entry(image: Image.Image, *images: str, keep_fingerprint: bool = False) -> WithdrawnImage:
    found = hashed(image)
    hexes = found.sha256.hex(), found.pixels.hex()
    return WithdrawnImage.create(*hexes, found.fingerprint, images, keep_fingerprint=keep_fingerprint)


def test_hashes_recognize_an_image_and_fingerprints_a_cropped_one(tmp_path: Path) -> None:
    file = tmp_path / "withdrawn.jsonl"
    assert not read_withdrawn(file, RULES)
    assert withdraw(file, [entry(photo(1), "a/1"), entry(photo(2))]) == 2
    assert withdraw(file, [entry(photo(1), "a/1")]) == 0
    withdraw(file, [entry(photo(5), "a/line\u2028separator.png")])
    listed = read_withdrawn(file, RULES)
    assert listed.has_id("a/line\u2028separator.png")
    same = {"byte for byte": hashed(photo(1)), "0 of 64 perceptual bits apart": hashed(ImageOps.mirror(photo(1)))}
    for how, picture in same.items():
        assert listed.match(picture) == how
    for changed in (photo(1).resize((100, 75)), photo(1).rotate(90, expand=True), ImageOps.grayscale(photo(2))):
        assert listed.match(hashed(changed, "JPEG"))
    assert not [seed for seed in range(3, 60) if seed != 5 and listed.match(hashed(photo(seed)))]
    assert listed.has_id("a/1") and not listed.has_id("a/2")

    assert not listed.match(hashed(photo(1).crop(CROP)))
    assert withdraw(file, [entry(photo(1), "a/1", keep_fingerprint=True)]) == 0, "already listed"
    assert withdraw(file, [entry(photo(2), "b/2", keep_fingerprint=True)]) == 0
    assert withdraw(file, [entry(photo(5), keep_fingerprint=True)]) == 0
    with_fingerprints = read_withdrawn(file, RULES)
    assert all(with_fingerprints.has_id(name) for name in ("a/1", "b/2", "a/line\u2028separator.png")), (
        "earlier ids are kept"
    )
    assert with_fingerprints.match(hashed(photo(1).crop(CROP))) and not with_fingerprints.match(
        hashed(photo(3).crop(CROP))
    )

    exact = WithdrawnList([entry(photo(1))], NearRules(max_hash_distance=-1, keypoints=False))
    assert exact.match(hashed(photo(1))) and not exact.match(hashed(ImageOps.mirror(photo(1))))


def test_damaged_list_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "withdrawn.jsonl"
    withdraw(file, [entry(photo(1))])
    file.write_text(file.read_text() + '{"sha256": "00"}\n')
    with pytest.raises(DataError, match=r"withdrawn\.jsonl:2: not a withdrawn image"):
        read_withdrawn(file, RULES)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A dataset whose training images are 0, 3, 6 and 9; 3 is a photo, 6 is a mirrored and cropped copy of it."""
    workspace = make_project(tmp_path / "p")
    photo(1).save(workspace.root / "data/raw/tested/3.png")
    ImageOps.mirror(photo(1).crop(CROP)).save(workspace.root / "data/raw/tested/6.png")
    return workspace


def prepared(workspace: Workspace) -> set[str]:
    prepare.run(params_of(workspace), workspace, "tested")
    out = workspace.interim("tested")
    images = set(read_table("images", out)["image_id"].to_pylist())
    assert set(read_table("captions", out)["image_id"].to_pylist()) == images
    assert not read_table("quarantine", out).num_rows, "a withdrawn image is not quarantined"
    return images


def test_copies_found_by_id_path_or_file_are_left_out_of_the_tables(workspace: Workspace, tmp_path: Path) -> None:
    params = params_of(workspace)
    rules = NearRules.of(params.validate.near_duplicates)
    everything = prepared(workspace)
    (workspace.root / "data/accepted").mkdir()
    (tmp_path / "sent.jpg").write_bytes(encoded(photo(1), quality=60))
    cataloged = Catalog(params_only_tested(workspace), workspace)
    for name in ("tested/3.png", "data/raw/tested/3.png", str(tmp_path / "sent.jpg")):
        asked = resolve_queries([name], cataloged, params, Workspace(workspace.root))
        found = find_copies(asked, cataloged, rules)
        assert [one.image.image_id for one in found] == ["tested/3.png", "tested/6.png"]
        assert found[1].how.startswith("mirrored and changed; ") and found[1].of == name
    assert find_copies(asked, cataloged, rules, exact=True) == []
    with pytest.raises(DataError, match=r"^tested/99\.png: not an image id"):
        resolve_queries(["tested/99.png", "tested/3.png"], cataloged, params, workspace)

    withdraw(
        workspace.withdrawn,
        [
            WithdrawnImage.create(p.sha256, p.pixels, p.fingerprint, [p.image_id], keep_fingerprint=False)
            for p in (one.image for one in found)
        ],
    )
    assert prepared(workspace) == everything - {"tested/3.png", "tested/6.png"}
    counts = json.loads((workspace.interim("tested") / "manifest.json").read_text())["counts"]
    assert counts["left_out"] == {"withdrawn images": 2, "rows of withdrawn images": 2}
    (workspace.root / "data/raw/tested/3.png").unlink()
    assert prepared(workspace) == everything - {"tested/3.png", "tested/6.png"}, "its file may be deleted"
    validate.run(params_only_tested(workspace), workspace)


@pytest.mark.parametrize("change", [{"print": "00"}, {"sha256": "00"}, {"perceptual": [-1]}])
def test_line_of_another_format_is_an_error_that_names_it(workspace: Workspace, change: dict[str, object]) -> None:
    withdraw(workspace.withdrawn, [entry(photo(5), keep_fingerprint=True)])
    line = json.loads(workspace.withdrawn.read_text())
    workspace.withdrawn.write_text(json.dumps(line | change) + "\n")
    with pytest.raises(DataError, match=r"withdrawn\.jsonl:1: not a withdrawn image"):
        read_withdrawn(workspace.withdrawn, RULES)


def params_only_tested(workspace: Workspace):  # type: ignore[no-untyped-def]
    import dataclasses

    params = params_of(workspace)
    return dataclasses.replace(params, data={"tested": params.data["tested"]})


def test_later_batch_cannot_bring_withdrawn_images_back(workspace: Workspace) -> None:
    withdraw(workspace.withdrawn, [entry(photo(5), keep_fingerprint=True)])
    pictures = {
        "again.jpg": photo(5),
        "mirrored.jpg": ImageOps.mirror(photo(5)),
        "cropped.jpg": photo(5).crop(CROP),
        "new.jpg": photo(6),
    }
    files = {name: encoded(image) for name, image in pictures.items()}
    make_submission(workspace, "drop", [(name, f"a picture, {name}", "") for name in files], files)
    report = ingest.run(params_of(workspace), workspace)
    assert (report["new"], report["withdrawn"], report["bad"]) == (1, 3, 0)
    lost = quarantined(workspace, "drop")
    assert {verdict for verdict, _, _ in lost.values()} == {"withdrawn"} and "new.jpg" not in lost
    accepted = (workspace.root / "data" / "accepted").rglob("*.jpg")
    assert [file.read_bytes() for file in accepted] == [files["new.jpg"]]
