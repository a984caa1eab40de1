"""A pytest plugin: each notebook begins without answers, as when it was built, and with an IPython profile of its own:
kernels that run side by side would share one history file. It is imported before nbval, which imports nbformat."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.launcher import launch_kernel
from jupyter_client.provisioning import local_provisioner

from tests.kernels import Kernel
from zerolab.world import nursery

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # as in zerolab.lab.__main__
_before = {name: os.environ.get(name) for name in ("ZEROLAB_MY", "IPYTHONDIR")}
_folder: tempfile.TemporaryDirectory[str] | None = None


_init = zmq.Context.__init__


def _remember(context: zmq.Context[Any], *args: Any, **options: Any) -> None:
    _init(context, *args, **options)
    context.__dict__["made"] = "".join(traceback.format_stack(limit=30)[:-1])


def _say(context: zmq.Context[Any]) -> None:
    if not context.closed and not context._shadow and not sys.is_finalizing():
        warnings.warn(f"nobody closed a zmq context that was made here:\n{context.__dict__.get('made')}", stacklevel=1)


# One that is collected together with its open sockets would wait for them, in whatever test runs by then, for ever.
# Here it is left as it is, and named.
zmq.Context.__init__, zmq.Context.__del__ = _remember, _say  # type: ignore[assignment, method-assign]


def pytest_configure() -> None:
    """A kernel's ports are chosen before it takes them, and by then another process may have one. Then the kernel dies
    at once, and JupyterLab starts it again on other ports. So do we."""
    import nbval.kernel

    start = nbval.kernel.start_new_kernel

    def start_again(*args: Any, **options: Any) -> Any:
        for _ in range(2):
            try:
                return start(*args, **options)
            except RuntimeError as error:
                if "died before" not in str(error):
                    raise
        return start(*args, **options)

    nbval.kernel.start_new_kernel = start_again


@pytest.hookimpl(tryfirst=True)  # before nbval starts the notebook's kernel
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _folder
    if item.path.suffix != ".ipynb":
        for name, value in _before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        local_provisioner.launch_kernel = launch_kernel
        return
    if nursery.FORKS:
        local_provisioner.launch_kernel = Kernel
    if _folder is None:
        _folder = tempfile.TemporaryDirectory()
    own = Path(_folder.name) / item.path.parent.name / item.path.stem
    os.environ |= {"ZEROLAB_MY": str(own / "my"), "IPYTHONDIR": str(own / "ipython")}


def pytest_unconfigure() -> None:
    if _folder is not None:
        _folder.cleanup()
