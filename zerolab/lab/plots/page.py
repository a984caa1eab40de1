"""A picture on a page: small enough to keep in a notebook, with its sentence below it as text, not drawn."""

from __future__ import annotations

import io

from matplotlib.figure import Figure
from PIL import Image

from zerolab.lab.plots.style import SENTENCE

DOTS, COLOURS = 90, 64  # per inch; in the palette
LIMIT = 60_000  # bytes


def png(figure: Figure) -> bytes:
    """The picture without its sentence, as a PNG of at most 60 kB with a palette of 64 colours."""
    for text in figure.texts:
        text.set_visible(text.get_gid() != SENTENCE)
    for dots in (DOTS, 2 * DOTS // 3, DOTS // 2):
        drawn, small = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=dots, bbox_inches="tight", pad_inches=0.12)
        with Image.open(drawn) as image:
            image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
        if small.tell() <= LIMIT:
            break
    for text in figure.texts:
        text.set_visible(True)
    return small.getvalue()


def show(picture: tuple[Figure, str]) -> None:
    """Show what a function of `zerolab.lab.plots` returned: the picture where there is a page, and the sentence."""
    from IPython.display import Image as Shown
    from IPython.display import display

    figure, sentence = picture
    display(Shown(png(figure), alt=sentence))
    print(sentence)
