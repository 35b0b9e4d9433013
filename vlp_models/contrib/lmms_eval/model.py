"""The class that lmms-eval instantiates for `--model vlp_flows`; the only module that imports lmms-eval.

Imported by lmms-eval, from the path in the manifest (requests.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from lmms_eval.api.model import lmms

from vlp_models.common.progress import progress_bar
from vlp_models.contrib.lmms_eval.requests import MODEL_ID, ModelArgs, answer_all, open_predictor
from vlp_models.errors import ParamsError


class RegisteredModel(lmms):
    """A registered captioning or VQA model. Arguments: see `ModelArgs`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.args = ModelArgs.parse(arguments)
        # One process per GPU under `accelerate launch`; lmms-eval distributes the requests.
        local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(self.args.device or local)
        self.predictor, name = open_predictor(self.args, str(self.device))
        print(f"{MODEL_ID}: {name}, a {self.predictor.task} model, on {self.device}", file=sys.stderr)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return one answer per request. Generation settings are the version's own, not the request's."""
        arguments, answers = [request.args for request in requests], list[str]()
        with progress_bar(f"{MODEL_ID} {self.rank}" if self.rank else MODEL_ID, len(requests), "requests") as progress:
            for batch in answer_all(self.predictor, arguments, self.task_dict, self.args.batch_size):
                answers += batch
                progress.advance(by=len(batch))
        for (prompt, settings, *_), text in zip(arguments, answers, strict=True):
            self.cache_hook.add_partial("generate_until", (prompt, settings), text)
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        """Refuse: the models answer, and do not score a text that they are given."""
        raise ParamsError(
            f"{MODEL_ID} answers generate_until tasks, and this task asks for the likelihood of given texts; choose "
            "its variant that generates, if it has one"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> NoReturn:
        """Refuse: the models answer a single question about an image."""
        raise ParamsError(f"{MODEL_ID} answers single questions, and this task asks in several rounds")
