"""The demo web page in Gradio: its layout, and which handler each event calls (handlers.py)."""

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

TITLE = "Try the champion models"
ENVIRONMENT = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_SHARE": "False"}
MAX_AGE = 3600  # seconds that an uploaded photo stays on disk, and between clean-ups
NOTICE = (
    "Nothing leaves the machine that serves this page. Uploads are deleted when the page stops, or after two hours. "
    "The results are a model's guesses; the models, their training data and their limits are described at the end of "
    "the page."
)
NO_VERSION = "no version; see below"
WIDTH = ".gradio-container {max-width: 1180px !important}"


def check_installed() -> None:
    """Check that Gradio is installed, before any model is loaded.

    Raises:
        MissingToolError: Gradio is not installed.
    """
    if find_spec("gradio") is None:
        raise MissingToolError(f"`vlp demo`: gradio is not installed; install it with `{INSTALL}`")


def build(page: Page) -> gradio.Blocks:
    """Build the page.

    Raises:
        MissingToolError: Gradio, or a package that it needs, is not installed.
    """
    gr = _gradio()
    one = {"concurrency_limit": 1, "concurrency_id": "models", "api_visibility": "private"}
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(MAX_AGE, MAX_AGE)) as blocks:
        gr.Markdown(f"## {TITLE}\n{NOTICE}")
        with gr.Row():
            with gr.Column(scale=1):
                photo = gr.File(label="Upload a photo", file_types=sorted(FORMATS), height=110, elem_id="photo")
                gr.Markdown("What the model read")
                picture = gr.Image(
                    show_label=False,  # a label would cover the picture's corner and the number of a box there
                    height=400,
                    interactive=False,
                    format="png",
                    buttons=[],
                    elem_id="picture",
                )
                note = gr.Textbox(label="About the boxes", interactive=False, lines=2, elem_id="note")
            with gr.Column(scale=1):
                gr.Markdown("### Caption")
                by_captioner = page.version_title("captioning") if page.captioner else NO_VERSION
                caption_label, beam_label = page.caption_labels()
                caption = gr.Textbox(label=f"{caption_label} ({by_captioner})", interactive=False, elem_id="caption")
                beam = gr.Textbox(label=beam_label, visible=bool(beam_label), interactive=False, elem_id="beam")
                greedy = gr.Textbox(label="Caption, greedy decoding", interactive=False, elem_id="greedy")
                gr.Markdown("### Question")
                by_answerer = page.version_title("vqa") if page.answerer else NO_VERSION
                question = gr.Textbox(
                    label="Ask about the photo", placeholder="What color is the ball?", elem_id="question", max_lines=1
                )
                ask = gr.Button("Ask", elem_id="ask")
                answers = gr.Label(label=f"Most likely answers ({by_answerer})", num_top_classes=5, elem_id="answers")
                problem = gr.Textbox(label="Problem", visible=False, interactive=False, elem_id="problem")
        gr.Markdown("### Search")
        if page.search:
            title = page.version_title("retrieval")
            where = f"{page.search.photo_count:,} photos of the split {page.search.split}; {title}"
        else:
            where = NO_VERSION
        wanted = gr.Textbox(label=f"Search by text ({where})", max_lines=1, elem_id="wanted")
        look = gr.Button("Search", elem_id="look")
        gallery = gr.Gallery(
            label="Results with scores, best first", columns=6, height=240, buttons=[], elem_id="found", format="png"
        )
        gallery_problem = gr.Textbox(label="Problem", visible=False, interactive=False, elem_id="lost")
        gr.Markdown("### The models, their training data and their limits")
        with gr.Row():
            for task in TITLES:
                gr.Markdown(page.about(task), elem_id=f"about-{task}")

        def describe(path: str | None) -> list[Any]:
            if not path:
                return [None, "", "", "", "", None, _hidden(gr)]
            found = page.caption(path)
            drawn = [found.overlay.picture, found.overlay.note] if found.overlay else [None, ""]
            return [*drawn, found.caption, found.beam, found.greedy, None, _hidden(gr, found.problem)]

        def answered(path: str | None, text: str) -> list[Any]:
            found = page.answer(path, text)
            drawn = [found.overlay.picture, found.overlay.note] if found.overlay else [gr.skip(), gr.skip()]
            return [*drawn, dict(found.answers) or None, _hidden(gr, found.problem)]

        def searched(text: str) -> list[Any]:
            found = page.find(text)
            return [list(found.photos), _hidden(gr, found.problem)]

        photo.change(describe, photo, [picture, note, caption, beam, greedy, answers, problem], **one)
        for event in (ask.click, question.submit):
            event(answered, [photo, question], [picture, note, answers, problem], **one)
        for event in (look.click, wanted.submit):
            event(searched, wanted, [gallery, gallery_problem], **one)
    return blocks.queue(api_open=False, max_size=32)


@contextmanager
def serving(page: Page, *, host: str, port: int) -> Iterator[str]:
    """Serve the page while the block runs; yield its address. Uploads go to a temporary folder that is then deleted.

    Raises:
        MissingToolError: see `build`.
        ParamsError: the port is taken, or the host is not an address of this machine.
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
            raise ParamsError(f"vlp demo: {host} port {port}: {reason}; choose others with --host and --port") from None
        try:
            yield address.rstrip("/")
        finally:
            blocks.close(verbose=False)


def _hidden(gr: Any, text: str = "") -> Any:
    """Update a problem field, which is visible only while it has a text."""
    return gr.update(value=text, visible=bool(text))


def _gradio() -> Any:
    os.environ.update(ENVIRONMENT)  # Gradio reads it when it is imported
    check_installed()
    try:
        import gradio
    except ImportError as error:
        raise MissingToolError(
            f"`vlp demo`: gradio cannot be imported ({error}); install what it needs with `{INSTALL}`"
        ) from None
    return gradio
