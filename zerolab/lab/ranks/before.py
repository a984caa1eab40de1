"""Run by path in each kernel of `zerolab lab`, before any cell: `%%ranks` and `%%exercise` say which cell to run first.

`%load_ext zerolab.lab` puts the real ones in their place. Nothing of zerolab is imported here, since that brings torch.
"""

from __future__ import annotations


def _stand_in() -> None:
    from typing import Any

    from IPython import get_ipython
    from IPython.core.error import UsageError

    def stand_in(shell: Any, name: str) -> None:
        def not_yet(line: str, cell: str) -> None:
            raise UsageError(
                f"%%{name} is not loaded yet: first run the cell that begins with %load_ext zerolab.lab, "
                "which also starts the ranks. After a restart of the kernel, run it again."
            )

        shell.register_magic_function(not_yet, "cell", name)

    if (shell := get_ipython()) is not None:
        for name in ("ranks", "exercise"):
            stand_in(shell, name)


_stand_in()
del _stand_in, annotations  # the learner's names begin empty
