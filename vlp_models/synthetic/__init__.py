"""Generators of synthetic datasets, by their name in params.yaml. All write the files of public formats."""

from vlp_models.common.plugins import Table

GENERATORS = Table(
    "generators",
    {
        "objects": "vlp_models.synthetic.scenes.dataset:write",
        "sentences": "vlp_models.synthetic.scenes.dataset:write_sentences",
    },
)
# option of the generator `objects` -> (pictures, options, folder) -> counts: writes further files about the same images
SCENE_FILES = Table("scene_files", {})
