"""The demo web page in Gradio: its layout, and which handler each event calls (handlers.py)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vlp_models.common.packages import INSTALL
from vlp_models.contrib.demo_page.handlers import Page, Result
from vlp_models.contrib.demo_page.photos import open_photo, scale_for_page
from vlp_models.data.images import FORMATS
from vlp_models.errors import MissingToolError, ParamsError
from vlp_models.serving.images import MAX_BYTES

if TYPE_CHECKING:
    import gradio

ENVIRONMENT = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_SHARE": "False"}
EXAMPLE_SIDE = 240  # pixels of an example's longer side
MAX_AGE = 3600  # seconds that an uploaded photo stays on disk, and between clean-ups
PRIVACY = (
    "Nothing leaves the machine that serves this page. Uploads are deleted when the page stops, or after two hours."
)
KEPT = "A photo with a caption that you correct is kept, together with your caption, for the next training."
PERCENTAGES = "Each percentage belongs to that answer alone, so they need not add up to 100."
STYLE = """
.gradio-container {max-width: 1180px !important; margin: 0 auto !important}
#caption textarea, #caption input {font-size: 20px !important; font-weight: 600; line-height: 1.3}
#picture img {object-fit: contain; max-height: 400px}
#examples, #examples .grid-wrap {height: auto !important; min-height: 0 !important; max-height: none !important}
#examples .grid-container {grid-template-columns: repeat(4, minmax(0, 1fr)) !important; padding: 0 !important}
#examples .grid-container button {min-width: 0 !important; width: 100% !important; height: auto !important}
.thumbnail-lg:has(.caption-label) {aspect-ratio: auto !important; height: auto !important}
.thumbnail-lg:has(.caption-label) img {aspect-ratio: 1; height: auto !important}
.caption-label {position: static !important; max-width: none !important}
.caption-label {white-space: normal !important; overflow-wrap: anywhere}
#found .grid-wrap {max-height: none !important; min-height: 0 !important}
@media (max-width: 640px) {
  .gradio-container > main, .gradio-container {padding: 8px !important}
  #picture, #picture img {height: auto !important; max-height: 44vh !important}
  #found .grid-container {grid-template-columns: repeat(2, minmax(0, 1fr)) !important}
}
"""


def check_installed() -> None:
    """Check that Gradio is installed, before any model is loaded."""
    if find_spec("gradio") is None:
        raise MissingToolError(f"`vlp demo`: gradio is not installed; install it with `{INSTALL}`")


def build(page: Page) -> gradio.Blocks:
    """Build the page."""
    gr = _gradio()
    # All events share one limit, as they share the models, and none is listed as a public API.
    one_at_a_time = {"concurrency_limit": 1, "concurrency_id": "models", "api_visibility": "private"}
    # Files older than an hour are deleted, and the check runs every hour: two hours at most.
    with gr.Blocks(title=page.title, analytics_enabled=False, delete_cache=(MAX_AGE, MAX_AGE)) as blocks:
        gr.Markdown(f"# {page.title}\n{page.subtitle}")
        if page.warning:
            gr.Markdown(f"**{page.warning}**", elem_id="warning")
        if page.captions or page.answerer:
            _photo_part(gr, page, one_at_a_time)
        if page.search:
            _search_part(gr, page, one_at_a_time)
        gr.Markdown("### The models, their training data and their limits")
        with gr.Row():
            for task in page.tasks:
                with gr.Column(min_width=300):
                    gr.Markdown(page.about(task), elem_id=f"about-{task}")
    return blocks.queue(api_open=False, max_size=32)


def _photo_part(gr: Any, page: Page, one_at_a_time: dict[str, Any]) -> None:
    """Lay out what is done with one photo: the photo with its caption; next to them upload, examples and questions.

    The page opens with the first example's result. A field without a text is hidden.
    """
    example = str(page.examples[0]) if page.examples else None
    opening = _describe(page, example) if example else Result()
    current = gr.State(example)  # path of the photo that is shown: an upload or an example
    with gr.Row():
        with gr.Column(scale=1):
            picture = gr.Image(
                opening.overlay.picture if opening.overlay else None,
                show_label=False,  # a label would cover the picture's corner and the number of a box there
                height=400,
                interactive=False,
                format="png",
                buttons=[],
                elem_id="picture",
            )
            captions: list[Any] = []
            if page.captions:
                label, beam_label = page.caption_labels()
                captions = [_text(gr, opening.caption, label, "caption", info=page.version_title("captioning"))]
                if page.captioner:
                    with gr.Accordion("Other captions", open=False):
                        captions += [
                            _text(gr, opening.beam, beam_label, "beam"),
                            _text(gr, opening.greedy, "Caption by the most likely next word", "greedy"),
                        ]
            # The caption that is shown stays on the server, so that a correction records the true one.
            caption = gr.State(opening.caption)
            corrected = sent = None
            if page.captions and page.corrections:
                with gr.Accordion("Correct this caption", open=False, elem_id="correction"):
                    corrected = gr.Textbox(opening.caption, label="Your caption", elem_id="corrected")
                    corrector = gr.Textbox(label="Your name", placeholder="optional", max_lines=1, elem_id="corrector")
                    send = gr.Button("Send", elem_id="send")
                    gr.Markdown(KEPT)
                    sent = gr.Textbox(label="Sent", visible=False, interactive=False, elem_id="sent")
            if page.neighbors:
                gr.Markdown("The most similar training photos:")
                similar = gr.Gallery(
                    list(opening.photos),
                    show_label=False,  # a label would cover the first photo
                    columns=3,
                    height="auto",
                    allow_preview=False,
                    buttons=[],
                    elem_id="similar",
                    format="png",
                )
            problem = gr.Textbox(label="Problem", visible=False, interactive=False, elem_id="problem")
            note = _text(gr, opening.overlay.note if opening.overlay else "", "The boxes on the photo", "note")
        with gr.Column(scale=1):
            photo = gr.File(label="Upload a photo", file_types=sorted(FORMATS), height=150, elem_id="photo")
            if page.examples:
                gr.Markdown("or click an example:")
                examples = gr.Gallery(
                    value=[scale_for_page(open_photo(path), EXAMPLE_SIDE) for path in page.examples],
                    show_label=False,  # a label would cover the first example
                    columns=4,
                    height="auto",
                    object_fit="cover",
                    allow_preview=False,
                    interactive=False,
                    buttons=[],
                    elem_id="examples",
                    format="png",
                )
            gr.Markdown(PRIVACY)
            if page.answerer:
                question = gr.Textbox(
                    label="Ask about the photo", placeholder="What color is the ball?", elem_id="question", max_lines=1
                )
                ask = gr.Button("Ask", elem_id="ask")
                answers = gr.Label(label="Most likely answers", num_top_classes=5, visible=False, elem_id="answers")
                gr.Markdown(f"From {page.version_title('vqa')}. {PERCENTAGES}", elem_id="answered-by")
    # A new photo clears the answer to a question about the old one.
    cleared = [answers] if page.answerer else []
    galleries = [similar] if page.neighbors else []

    def describe(path: str | None) -> list[Any]:
        result = _describe(page, path)
        picture, note = (result.overlay.picture, result.overlay.note) if result.overlay else (None, "")
        # Without a captioner `captions` is empty, and so are the texts; otherwise one per field.
        texts = [result.caption, result.beam, result.greedy][: len(captions)]
        shown = [_show(gr, text) for text in (note, *texts)]
        correction = [result.caption, _hide(gr)] if corrected is not None else []
        # In the order of `fields`.
        return [
            *(path, picture, *shown),
            *(_hide(gr) for _ in cleared),
            *(list(result.photos) for _ in galleries),
            *(_show(gr, result.problem), result.caption, *correction),
        ]

    correction_fields = [corrected, sent] if corrected is not None else []
    fields = [current, picture, note, *captions, *cleared, *galleries, problem, caption, *correction_fields]
    # Not `change`: an example empties the upload, which must not empty the page.
    for event in (photo.upload, photo.clear):
        event(describe, photo, fields, **one_at_a_time)

    if page.examples:

        def choose(event: Any) -> list[Any]:
            return [None, *describe(str(page.examples[event.index]))]

        choose.__annotations__["event"] = gr.SelectData  # Gradio passes the event by this type
        examples.select(choose, None, [photo, *fields], **one_at_a_time)

    if corrected is not None:

        def correct(path: str | None, shown: str, text: str, by: str) -> list[Any]:
            result = page.correct(path, shown, text, by)
            return [_show(gr, result.caption), _show(gr, result.problem)]

        send.click(correct, [current, caption, corrected, corrector], [sent, problem], **one_at_a_time)

    if page.answerer:

        def answered(path: str | None, text: str) -> list[Any]:
            result = page.answer(path, text)
            # Without a new overlay the picture and the note stay as they are.
            if result.overlay:
                overlay = [result.overlay.picture, _show(gr, result.overlay.note)]
            else:
                overlay = [gr.skip(), gr.skip()]
            likely = gr.update(value=dict(result.answers), visible=True) if result.answers else _hide(gr)
            return [*overlay, likely, _show(gr, result.problem)]

        for event in (ask.click, question.submit):
            event(answered, [current, question], [picture, note, answers, problem], **one_at_a_time)


def _search_part(gr: Any, page: Page, one_at_a_time: dict[str, Any]) -> None:
    """Lay out the search of the indexed photos by text."""
    assert page.search is not None
    searched_photos = (
        f"The best matches among {page.search.photo_count:,} photos of the split {page.search.split}, with scores; "
        f"{page.version_title('retrieval')}"
    )
    gr.Markdown("### Search")
    query = gr.Textbox(
        label="Search by text", info=searched_photos, placeholder="Describe a photo", max_lines=1, elem_id="wanted"
    )
    start = gr.Button("Search", elem_id="look")
    gallery = gr.Gallery(
        visible=False,  # until a search
        show_label=False,  # a label would cover the first photo
        columns=3,
        height="auto",
        buttons=[],
        elem_id="found",
        format="png",
    )
    problem = gr.Textbox(label="Problem", visible=False, interactive=False, elem_id="lost")

    def searched(text: str) -> list[Any]:
        result = page.find(text)
        return [gr.update(value=list(result.photos), visible=bool(result.photos)), _show(gr, result.problem)]

    for event in (start.click, query.submit):
        event(searched, query, [gallery, problem], **one_at_a_time)


@contextmanager
def serving(page: Page, *, host: str, port: int) -> Iterator[str]:
    """Serve the page while the block runs; yield its address. Uploads go to a temporary folder that is then deleted.

    Raises:
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
                theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]).set(
                    block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300"
                ),
                css=STYLE,
            )
        except OSError as error:
            reason = str(error).partition(".")[0]
            raise ParamsError(f"vlp demo: {host} port {port}: {reason}; choose others with --host and --port") from None
        # The server runs in a thread of its own until the block ends.
        try:
            yield address.rstrip("/")
        finally:
            blocks.close(verbose=False)


def _describe(page: Page, path: str | None) -> Result:
    """Return the caption of a photo; without a captioner, the plain photo until a question is asked."""
    return page.caption(path) if path and page.captions else page.show(path)


def _text(gr: Any, text: str, label: str, name: str, **more: Any) -> Any:
    """Lay out a field that is visible only while it has a text."""
    return gr.Textbox(text, label=label, visible=bool(text), interactive=False, elem_id=name, **more)


def _show(gr: Any, text: str) -> Any:
    """Update such a field."""
    return gr.update(value=text, visible=bool(text))


def _hide(gr: Any) -> Any:
    return gr.update(value=None, visible=False)


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
