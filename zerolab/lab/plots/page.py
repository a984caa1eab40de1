"""A picture on a page: small enough to keep in a notebook, with its sentence as text below it, not drawn."""

from __future__ import annotations

import io

from matplotlib.figure import Figure
from PIL import Image

from zerolab.lab.plots import style
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
            reduced(image.convert("RGB")).save(small, format="png", optimize=True)
        if small.tell() <= LIMIT:
            break
    for text in figure.texts:
        text.set_visible(True)
    return small.getvalue()


def reduced(image: Image.Image) -> Image.Image:
    """With a palette of 64 colours that includes white and the colours of the course. Otherwise a patch in a legend,
    with its few pixels, would lose its colour to another thing's."""
    own = [bytes.fromhex(colour[1:]) for colour in ("#FFFFFF", *style.COLOURS.values())]
    found = image.quantize(COLOURS - len(own), dither=Image.Dither.NONE).getpalette() or []
    others = zip(found[::3], found[1::3], found[2::3])
    # Pillow looks colours up in cells of 8 x 8 x 8; of two colours in one cell it may take either.
    apart = [new for new in others if all(max(abs(a - b) for a, b in zip(new, old)) > 8 for old in own)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for colour in (*own, *apart) for channel in colour])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


def show(picture: tuple[Figure, str]) -> None:
    """Show what a function of `zerolab.lab.plots` returned: the picture on the page, and the sentence as text."""
    from IPython.display import Image as Shown
    from IPython.display import display

    figure, sentence = picture
    display(Shown(png(figure), metadata={"alt": sentence}))  # the argument `alt` is younger than what Colab has
    print(sentence)
