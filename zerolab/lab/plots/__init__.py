"""The pictures of the course. Each takes what was measured, and returns the figure and one sentence: what to see."""

from zerolab.lab.plots.bench import step_times
from zerolab.lab.plots.calls import Cost, call_costs
from zerolab.lab.plots.cells import before_after
from zerolab.lab.plots.cost import cost, fit_cost
from zerolab.lab.plots.curves import curves
from zerolab.lab.plots.flat import flat_storage
from zerolab.lab.plots.gantt import gantt
from zerolab.lab.plots.growth import fit_line, growth
from zerolab.lab.plots.holdings import who_holds_what
from zerolab.lab.plots.hybrid import sharding_map, where_time_goes
from zerolab.lab.plots.ladder import ladder
from zerolab.lab.plots.memory import memory_plan
from zerolab.lab.plots.page import png, show
from zerolab.lab.plots.ring import ring_against_root
from zerolab.lab.plots.scaling import scaling
from zerolab.lab.plots.scrubber import moment_picture
from zerolab.lab.plots.skyline import skyline
from zerolab.lab.plots.stacks import stacks
from zerolab.lab.plots.style import COLOURS, HATCHES, LABELS
from zerolab.lab.plots.trillion import to_a_trillion

__all__ = [
    "COLOURS",
    "HATCHES",
    "LABELS",
    "Cost",
    "before_after",
    "call_costs",
    "cost",
    "curves",
    "fit_cost",
    "fit_line",
    "flat_storage",
    "gantt",
    "growth",
    "ladder",
    "memory_plan",
    "moment_picture",
    "png",
    "ring_against_root",
    "scaling",
    "sharding_map",
    "show",
    "skyline",
    "stacks",
    "step_times",
    "to_a_trillion",
    "where_time_goes",
    "who_holds_what",
]
