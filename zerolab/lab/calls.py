"""The name under which older copies of lessons import `calls` (zerolab.lab.ranks.calls).

Importing this module puts it in the place of the function `zerolab.lab.calls`, so the module can be called, too.
"""

import sys
from types import ModuleType
from typing import Any

from zerolab.lab.ranks.calls import calls

__all__ = ["calls"]


class _Callable(ModuleType):
    def __call__(self) -> Any:
        return calls()


sys.modules[__name__].__class__ = _Callable
