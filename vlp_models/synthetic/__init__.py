"""Synthetic worlds, by the name params.yaml gives them: each writes genuine formats."""

GENERATORS = {
    "objects": "vlp_models.synthetic.scenes.objects:write",
    "web": "vlp_models.synthetic.scenes.objects:write",
    "sentences": "vlp_models.synthetic.scenes.sentences:write",
    "boxes": "vlp_models.synthetic.boxes.dataset:write",
}
