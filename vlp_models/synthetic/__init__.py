"""Synthetic worlds, by the name params.yaml gives them: each writes genuine formats."""

GENERATORS = {
    "objects": "vlp_models.synthetic.scenes.dataset:write",
    "web": "vlp_models.synthetic.scenes.dataset:write",
    "sentences": "vlp_models.synthetic.scenes.dataset:write_sentences",
    "boxes": "vlp_models.synthetic.boxes.dataset:write",
}
