"""A picture on a page: small enough to keep in a notebook, with its sentence below it as text."""

from __future__ import annotations

import io

from matplotlib.figure import Figure
from PIL import Image

DOTS, COLOURS = 90, 64  # per inch; in the palette
LIMIT = 60_000  # bytes


def png(figure: Figure) -> bytes:
    """The picture as a PNG of at most 60 kB, with a palette of 64 colours."""
    for dots in (DOTS, 2 * DOTS // 3, DOTS // 2):
        drawn, small = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=dots)
        with Image.open(drawn) as image:
            image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
        if small.tell() <= LIMIT:
            break
    return small.getvalue()


def show(picture: tuple[Figure, str]) -> None:
    """Show what a function of `zerolab.lab.plots` returned: the picture where there is a page, and the sentence."""
    from IPython.display import Image as Shown
    from IPython.display import display

    figure, sentence = picture
    display(Shown(png(figure), alt=sentence))
    print(sentence)
