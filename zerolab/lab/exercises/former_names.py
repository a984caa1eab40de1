"""The engine's former names, for answers that learners wrote before the names changed.

Importing this module gives Unit and Layout the old names beside the new ones, to read, to write and to delete. Only the
exercises import it, where they load answers; the engine and the course use the new names alone.
"""

from __future__ import annotations

from typing import Any

from zerolab.engine.layout import Layout
from zerolab.engine.unit import Unit

OF_A_UNIT = {
    "whole": "full",
    "wholes": "full_params",
    "show_whole": "show_full",
    "whole_grad": "bucket.full",
    "grad": "bucket.grad",
    "reduction": "bucket.reduction",
    "release_grad": "bucket.release",
    "complete": "bucket.complete",
}
OF_A_LAYOUT = {"wholes": "views"}


def _alias(path: str) -> property:
    """Another name for the attribute at `path`, such as "bucket.full"."""
    owner, _, name = path.rpartition(".")

    def holder(self: Any) -> Any:
        return getattr(self, owner) if owner else self

    return property(
        lambda self: getattr(holder(self), name),
        lambda self, value: setattr(holder(self), name, value),
        lambda self: delattr(holder(self), name),
    )


for _class, _names in ((Unit, OF_A_UNIT), (Layout, OF_A_LAYOUT)):
    for _old, _new in _names.items():
        setattr(_class, _old, _alias(_new))
