"""A pytest plugin: each notebook begins without answers, as when it was built, and with an IPython profile of its own:
kernels that run side by side would share one history file. It is imported before nbval, which imports nbformat."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.launcher import launch_kernel
from jupyter_client.provisioning import local_provisioner

from tests.kernels import Kernel
from zerolab.world import nursery

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # as in zerolab.lab.__main__
_before = {name: os.environ.get(name) for name in ("ZEROLAB_MY", "IPYTHONDIR")}
_folder: tempfile.TemporaryDirectory[str] | None = None


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
