"""The page itself, in Gradio: where things stand, and what a click calls (handlers.py)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vlp_models.common.packages import INSTALL
from vlp_models.data.images import FORMATS
from vlp_models.errors import MissingToolError, ParamsError
from vlp_models.serving.images import MAX_BYTES
from vlp_models.serving.page.handlers import TITLES, Page

if TYPE_CHECKING:
    import gradio

TITLE = "What the champions say of a photo"
SWITCHES = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_SHARE": "False"}
KEPT = 3600  # seconds that a dropped photo stays on disk, at most
PROMISE = (
    "Nothing leaves the machine that serves this page. What you drop is deleted when the page ends, or after two "
    "hours. What you read below is a model's guess; at the foot of the page stands what it learned from and what it "
    "can't do."
)
NONE = "no version to ask; see below"
WIDTH = ".gradio-container {max-width: 1180px !important}"


def check_installed() -> None:
    """To be asked before any model is loaded.

    Raises:
        MissingToolError: Gradio is not installed.
    """
    if find_spec("gradio") is None:
        raise MissingToolError(f"`vlp demo`: gradio is not installed; `{INSTALL}` brings it")


def build(page: Page) -> gradio.Blocks:
    """
    Raises:
        MissingToolError: Gradio, or a package that it needs, is not installed.
    """
    gr = _gradio()
    one = {"concurrency_limit": 1, "concurrency_id": "models", "api_visibility": "private"}
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(KEPT, KEPT)) as blocks:
        gr.Markdown(f"## {TITLE}\n{PROMISE}")
        with gr.Row():
            with gr.Column(scale=1):
                photo = gr.File(label="Drop a photo", file_types=sorted(FORMATS), height=110, elem_id="photo")
                gr.Markdown("What the model was given")
                picture = gr.Image(
                    show_label=False,  # it would lie over the picture's corner, and a box's number there
                    height=400,
                    interactive=False,
                    format="png",
                    buttons=[],
                    elem_id="picture",
                )
                note = gr.Textbox(label="The boxes", interactive=False, lines=2, elem_id="note")
            with gr.Column(scale=1):
                gr.Markdown("### Caption")
                by_captioner = page.answers("captioning") if page.captioner else NONE
                found_how, beams_own = page.caption_labels()
                caption = gr.Textbox(label=f"{found_how} ({by_captioner})", interactive=False, elem_id="caption")
                beam = gr.Textbox(label=beams_own, visible=bool(beams_own), interactive=False, elem_id="beam")
                greedy = gr.Textbox(label="Caption, word by word (greedy)", interactive=False, elem_id="greedy")
                gr.Markdown("### Question")
                by_answerer = page.answers("vqa") if page.answerer else NONE
                question = gr.Textbox(
                    label="Ask about the photo", placeholder="What colour is the ball?", elem_id="question", max_lines=1
                )
                ask = gr.Button("Ask", elem_id="ask")
                answers = gr.Label(label=f"Likeliest answers ({by_answerer})", num_top_classes=5, elem_id="answers")
                problem = gr.Textbox(label="What went wrong", visible=False, interactive=False, elem_id="problem")
        gr.Markdown("### Search")
        if page.search:
            where = (
                f"{page.search.photo_count:,} photos of the split {page.search.split}; {page.answers('retrieval')}"
            )
        else:
            where = NONE
        wanted = gr.Textbox(label=f"Search by text ({where})", max_lines=1, elem_id="wanted")
        look = gr.Button("Search", elem_id="look")
        gallery = gr.Gallery(
            label="Best first, with the score", columns=6, height=240, buttons=[], elem_id="found", format="png"
        )
        gallery_problem = gr.Textbox(label="What went wrong", visible=False, interactive=False, elem_id="lost")
        gr.Markdown("### Who answers, what it learned from, and what it can't do")
        with gr.Row():
            for task in TITLES:
                gr.Markdown(page.about(task), elem_id=f"about-{task}")

        def describe(path: str | None) -> list[Any]:
            if not path:
                return [None, "", "", "", "", None, _hidden(gr)]
            found = page.caption(path)
            drawn = [found.seen.picture, found.seen.note] if found.seen else [None, ""]
            return [*drawn, found.caption, found.beam, found.greedy, None, _hidden(gr, found.problem)]

        def answered(path: str | None, text: str) -> list[Any]:
            found = page.answer(path, text)
            drawn = [found.seen.picture, found.seen.note] if found.seen else [gr.skip(), gr.skip()]
            return [*drawn, dict(found.answers) or None, _hidden(gr, found.problem)]

        def caption_search(text: str) -> list[Any]:
            found = page.find(text)
            return [list(found.photos), _hidden(gr, found.problem)]

        photo.change(describe, photo, [picture, note, caption, beam, greedy, answers, problem], **one)
        for event in (ask.click, question.submit):
            event(answered, [photo, question], [picture, note, answers, problem], **one)
        for event in (look.click, wanted.submit):
            event(caption_search, wanted, [gallery, gallery_problem], **one)
    return blocks.queue(api_open=False, max_size=32)


@contextmanager
def serving(page: Page, *, host: str, port: int) -> Iterator[str]:
    """Serves the page for the length of the block; yields its address.

    Dropped photos lie in a temporary folder that goes with it.

    Raises:
        MissingToolError: see `build`. ParamsError: the port is taken, or the host is none of this machine's.
    """
    gr = _gradio()
    with tempfile.TemporaryDirectory(prefix="vlp-page-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        blocks = build(page)
        try:
            _, address, _ = blocks.launch(
                server_name=host,
                server_port=port,
                share=False,
                inbrowser=False,
                quiet=True,
                show_error=False,
                prevent_thread_lock=True,
                max_file_size=MAX_BYTES,
                footer_links=[],
                run_history=False,
                enable_monitoring=False,
                ssr_mode=False,
                mcp_server=False,
                theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
                css=WIDTH,
            )
        except OSError as error:
            reason = str(error).partition(".")[0]
            way_out = "choose another with --host and --port"
            raise ParamsError(f"vlp demo: {host} port {port}: {reason}; {way_out}") from None
        try:
            yield address.rstrip("/")
        finally:
            blocks.close(verbose=False)


def _hidden(gr: Any, text: str = "") -> Any:
    """A problem's place: it is there only while there is one."""
    return gr.update(value=text, visible=bool(text))


def _gradio() -> Any:
    os.environ.update(SWITCHES)  # read when it is imported
    check_installed()
    try:
        import gradio
    except ImportError as error:
        raise MissingToolError(
            f"`vlp demo`: gradio can't be loaded ({error}); `{INSTALL}` brings what it needs"
        ) from None
    return gradio
