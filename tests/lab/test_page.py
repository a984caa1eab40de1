"""A picture on a page is made small; what its colours say must not be lost with that."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from zerolab.lab.plots import stacks
from zerolab.lab.plots.page import COLOURS as MOST
from zerolab.lab.plots.page import LIMIT, png
from zerolab.lab.plots.style import COLOURS

pytestmark = pytest.mark.slow


def test_every_category_keeps_its_colour_where_it_has_few_pixels():
    thin = {kind: 0.004 for kind in COLOURS}
    bars = {f"bar {i}": thin | {"parameters": 1.0 + i / 7, "optimizer": 0.5 + i / 3} for i in range(12)}
    drawn = png(stacks(bars, "Thin slices", "of most categories", "MB")[0])
    with Image.open(io.BytesIO(drawn)) as image:
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
        colours = {colour for _, colour in image.convert("RGB").getcolors(MOST)}
    missing = {kind for kind, colour in COLOURS.items() if tuple(bytes.fromhex(colour[1:])) not in colours}
    assert not missing
    assert len(drawn) < LIMIT
