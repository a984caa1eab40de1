"""A flat buffer: where each parameter's elements are, what is padding, and where the buffer is cut."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.engine.layout import Layout
from zerolab.lab.plots.style import INK, Look, frame, many, plain

PALE = ("#CDE7F7", "#F9E2B8", "#BFE6DA", "#EBD3E1", "#F5CDB3")
WIDEST = 64  # elements


def flat_storage(layout: Layout) -> tuple[Figure, str]:
    """Each element is a cell with its parameter's letter. Hollow cells are padding, thick lines are cuts."""
    if layout.size > WIDEST:
        raise ValueError(f"{layout.size} elements are too many cells to draw: at most {WIDEST}")
    ranks = layout.world_size
    padding = layout.size - layout.numel
    sentence = (
        f"{many(len(layout.slots), 'parameter')} of {', '.join(str(slot.numel) for slot in layout.slots)} elements lie "
        f"in one buffer of {layout.size}, {padding} of them padding; it cuts into {many(ranks, 'equal piece')} of "
        f"{layout.shard_size}."
    )
    figure = frame("One flat buffer", f"Cut for {many(ranks, 'rank')}", sentence, (9.0, 2.6))
    axes = figure.add_axes((0.03, 0.3, 0.94, 0.33))
    plain(axes)
    axes.spines["bottom"].set_visible(False)
    for x in range(layout.size):
        number = next((i for i, s in enumerate(layout.slots) if s.offset <= x < s.end), None)
        look: Look = {"edgecolor": "#9a9a9a", "linewidth": 0.6}
        if number is None:
            axes.add_patch(Rectangle((x, 0), 1, 1, facecolor="white", linestyle=":", **look))
            axes.text(x + 0.5, 0.5, "0", ha="center", va="center", fontsize=11, color="#8a8a8a")
        else:
            axes.add_patch(Rectangle((x, 0), 1, 1, facecolor=PALE[number % len(PALE)], **look))
            name = layout.slots[number].name
            axes.text(x + 0.5, 0.5, name, ha="center", va="center", fontsize=12, color=INK)
    for rank in range(ranks + 1):
        axes.plot([rank * layout.shard_size] * 2, [-0.22, 1.22], color=INK, linewidth=2.2, clip_on=False)
        if rank < ranks:
            axes.text((rank + 0.5) * layout.shard_size, -0.42, f"rank {rank}", ha="center", va="center", fontsize=10)
    axes.set_xlim(-0.05, layout.size + 0.05)
    axes.set_ylim(-0.6, 1.3)
    axes.set_xticks([])
    axes.set_yticks([])
    return figure, sentence
