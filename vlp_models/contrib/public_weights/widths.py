"""A sentence of `vlp use` and `vlp plan` on a BERT whose states have another width than the model that starts from it.

The stage `initial` refuses it, but only after the features were extracted.
"""

from __future__ import annotations

import contextlib

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.public_weights.bert import read_json
from vlp_models.data.bert_folder import CONFIG, find_folder
from vlp_models.errors import VLPError
from vlp_models.models.meta_model import meta_model
from vlp_models.params import Params


def explain_widths(params: Params, workspace: Workspace, *, strict: bool = False) -> list[str]:
    """Return one sentence per model whose `hidden` differs from the hidden size of its `text_init`."""
    sentences = []
    for name, model in params.models.items():
        key = f"models.{name}"
        with contextlib.suppress(VLPError):  # a missing folder or package has an error of its own
            width = getattr(getattr(meta_model(model, f"{key}.config"), "config", None), "hidden", None)
            if not model.text_init or width is None:
                continue
            bert = read_json(find_folder(model.text_init, workspace.root, f"{key}.text_init") / CONFIG)
            if bert.get("hidden_size", width) != width:
                sentences.append(
                    f"`{key}.text_init: {model.text_init}` has states of {bert['hidden_size']} numbers, but "
                    f"`{key}.config.hidden` is {width}, so `initial` will refuse it: "
                    f"`vlp use --set {key}.config.hidden={bert['hidden_size']}`, and its heads"
                )
    return sentences
