"""Two explorers for notebooks. Without a kernel, each shows the picture that was drawn last.

memory_explorer()            does a run fit? parameters, ranks, precision, optimizer, activations, a GPU's memory
timeline_scrubber(lines)     move through a recorded step and see each rank's buffers come and go
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from zerolab.lab.plots import memory_plan, moment_picture, png
from zerolab.measure.allocations import Timeline
from zerolab.measure.planning import OPTIMIZERS, PRECISIONS, plan, read_parameters
from zerolab.measure.units import read_bytes

Picture = tuple[Figure, str]
WIDGET = "application/vnd.jupyter.widget-view+json"


class Explorer:
    """Controls, and below them the picture that `draw(**values)` makes from their values.

    If `draw` raises ValueError, its message replaces the sentence and the last good picture stays. A notebook shows the
    controls; a page without a kernel shows the picture and its sentence (`figure`, `sentence`).
    """

    def __init__(self, controls: dict[str, Any], draw: Callable[..., Picture]) -> None:
        self.controls, self._draw = controls, draw
        self.image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
        self.said = widgets.HTML()
        grid = widgets.Layout(grid_template_columns="repeat(auto-fit, minmax(290px, 1fr))", max_width="920px")
        cells = widgets.GridBox(list(controls.values()), layout=grid)
        self.widget = widgets.VBox([cells, self.said, self.image])
        for control in controls.values():
            control.observe(lambda _: self.refresh(), names="value")
        self.refresh()

    def refresh(self) -> None:
        """Draw with the present values of the controls."""
        try:
            self.figure, self.sentence = self._draw(**{name: c.value for name, c in self.controls.items()})
        except ValueError as why:
            self.said.value = f"<b>{_escaped(str(why))}</b>"
            return
        self.said.value = _escaped(self.sentence)
        self.image.value = png(self.figure)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The controls if a kernel runs, and the picture and its sentence for readers of the stored page."""
        bundle: dict[str, Any] = {}
        if self.widget.comm is not None:  # made here: ipywidgets 7, which Colab has, has no method for it
            bundle[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        bundle["image/png"] = base64.b64encode(png(self.figure)).decode()
        bundle["text/plain"] = self.sentence
        return bundle


def memory_explorer(
    parameters: str = "7.5B",
    ranks: int = 64,
    precision: str = "bf16",
    optimizer: str = "adam",
    activations: str = "0 GB",
    memory: str = "80 GB",
    offload: bool = False,
    replicas: int = 1,
) -> Explorer:
    """Does it fit? The stages against a GPU's memory, by the formulas (`zerolab plan` as a picture)."""

    def draw(
        parameters: str,
        activations: str,
        memory: str,
        ranks: int,
        precision: str,
        optimizer: str,
        offload: bool,
        replicas: int,
    ) -> Picture:
        count, size = read_parameters(parameters.strip()), read_bytes(memory)
        rows = plan(count, ranks, size, precision, optimizer, read_bytes(activations), offload, replicas)
        title = f"{parameters.strip()} parameters on {ranks:,} ranks, {precision}, {optimizer}"
        if offload:
            title += " on the host"
        if replicas > 1:
            title += f", {replicas} replicas"
        return memory_plan(rows, size, title)

    controls = {
        "parameters": _text("parameters", parameters),
        "ranks": widgets.BoundedIntText(ranks, 1, 1_000_000, description="ranks"),
        "precision": widgets.Dropdown(options=list(PRECISIONS), value=precision, description="precision"),
        "optimizer": widgets.Dropdown(options=list(OPTIMIZERS), value=optimizer, description="optimizer"),
        "activations": _text("activations", activations),
        "memory": widgets.Combobox(
            value=memory,
            options=["24 GB", "80 GB", "141 GB"],
            description="GPU",
            continuous_update=False,
            ensure_option=False,
        ),
        "offload": widgets.Dropdown(
            options=[("none", False), ("optimizer to the host", True)], value=offload, description="offload"
        ),
        "replicas": widgets.BoundedIntText(replicas, 1, 1_000_000, description="replicas"),
    }
    return Explorer(controls, draw)


def timeline_scrubber(lines: Sequence[Timeline], moment: int | None = None) -> Explorer:
    """Move through a step that every rank recorded with `measure.timeline`: the buffers, and the lines that made them.

    lines: one per rank, all of the same stage. moment: the event to begin at (default: the first rank's peak).
    """
    if not lines:
        raise ValueError("there are no timelines to show")
    last = max(len(line.events) - line.before for line in lines)
    begin = lines[0].peak_moment - lines[0].before if moment is None else moment

    def draw(moment: int, rank: int) -> Picture:
        return moment_picture(lines, moment, rank)

    controls = {
        "moment": widgets.BoundedIntText(begin, 0, last, description="moment"),
        "rank": widgets.Dropdown(
            options=[(f"rank {line.rank}", number) for number, line in enumerate(lines)],
            value=0,
            description="buffers of",
        ),
    }
    explorer = Explorer(controls, draw)
    slider = widgets.IntSlider(begin, 0, last, readout=False, layout=widgets.Layout(width="600px"))
    widgets.link((slider, "value"), (controls["moment"], "value"))
    explorer.widget.children = (slider, *explorer.widget.children)
    return explorer


def _text(description: str, value: str) -> Any:
    return widgets.Text(value, description=description, continuous_update=False)


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)
