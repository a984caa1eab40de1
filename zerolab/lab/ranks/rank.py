"""One rank of the lab: `main`, an IPython kernel that live.py starts and that ends with the notebook.

An engine of an ipyparallel cluster (cluster.py) is
a rank from `adopt` to `release`, which leaves the engine as it was.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import linecache
import os
import pickle
import socket
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

MIME = "application/x-zerolab"  # values on their way to the notebook: base64 of a pickle
NAME = "zerolab rank"  # of the process
TARGET = "zerolab"  # the Jupyter comm that brings values from the notebook

_inbox: list[str] = []


def main(arguments: list[str], lease: int | None = None) -> None:
    """Be a rank until the process ends. `lease` is the file whose lock holds the rank's GPUs."""
    import torch
    from ipykernel.kernelapp import IPKernelApp
    from traitlets.config import Config

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)  # a log holds what came before a violent end
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = Config()
    config.HistoryManager.enabled = False  # its database allows only one writer
    config.IPKernelApp.log_level = "ERROR"
    app = IPKernelApp.instance(config=config)
    app.initialize(arguments)
    _prepare(app.shell)
    app.start()


def _prepare(shell: Any) -> None:
    """Turn a shell into that of a rank."""
    import torch

    import zerolab

    # A widget here would have no browser to talk to. Without ipywidgets, tqdm.auto and others print instead.
    modules: dict[str, Any] = sys.modules
    modules["ipywidgets"] = None
    warnings.filterwarnings("ignore", "IProgress not found")
    warnings.filterwarnings("ignore", "To exit: use", UserWarning)
    # torch 2.13 has new names for two collectives, and the old ones are what everybody writes.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    shell.set_custom_exc((Exception, KeyboardInterrupt), _show_failure)
    shell.push({"torch": torch, "zerolab": zerolab}, interactive=False)
    shell.kernel.comm_manager.register_target(TARGET, _arrived)


# -- what the notebook runs here ---------------------------------------------------------------------------------------


def join(address: str, port: int, world: int, timeout: float, device: str, link: str | None) -> None:
    """Leave the process group, if there is one, and join a fresh one. `world` is a number that is never used twice."""
    import torch
    import torch.distributed as dist
    from IPython import get_ipython

    from zerolab.lab.ranks import guard, network
    from zerolab.world.environment import init, meet_in

    _leave()
    store = dist.TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    stores = (dist.PrefixStore(f"world {world}, group {group}", store) for group in itertools.count())
    meet_in(stores, cpu_too=True)  # lessons make their tensors on the CPU
    place = init(timeout)
    if device == "shared":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(place)
    guard.enter(dist.PrefixStore(f"world {world}, guard", store), store, timeout)
    network.use(link)
    names = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "device": place}
    get_ipython().push(names, interactive=False)


def _leave() -> None:
    import torch.distributed as dist

    from zerolab.lab.ranks import guard, network

    guard.leave()
    network.use(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def _arrived(comm: Any, message: dict[str, Any]) -> None:
    """Keep values from the notebook for `take` to unpack. Their message is signed with this kernel's key."""
    _inbox.append(message["content"]["data"]["values"])


def take() -> None:
    """Put the values that have arrived into the user's namespace, under their names."""
    from IPython import get_ipython

    get_ipython().push(pickle.loads(base64.b64decode(_inbox.pop())), interactive=False)


def give(name: str) -> None:
    """Send the user's variable `name` to the notebook."""
    from IPython import get_ipython
    from IPython.display import publish_display_data

    shell = get_ipython()
    if name not in shell.user_ns:
        raise NameError(f"there is no variable {name!r} here")
    buffer = io.BytesIO()
    try:
        pickle.dump(shell.user_ns[name], buffer)
    except Exception as error:
        kind = type(shell.user_ns[name]).__name__
        raise TypeError(f"{name!r}, a {kind}, cannot be sent to the notebook: {error}") from None
    publish_display_data({MIME: base64.b64encode(buffer.getvalue()).decode()})


# -- an engine of a cluster, for a while -------------------------------------------------------------------------------

# Variables that hold a process's rank. Slurm's comes last: mpirun in a Slurm job passes on its daemon's number.
SCHEDULER = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_lent: dict[str, Any] = {}  # the engine's state from before it became a rank
_store: Any = None


def describe(gpus: bool) -> dict[str, Any]:
    """Who this engine is. gpus: count them too, which initializes CUDA."""
    release()  # the notebook that used it before may have gone without a word
    import torch

    return {
        "host": socket.gethostname(),
        "ranks": {name: os.environ[name] for name in SCHEDULER if name in os.environ},
        "gpus": torch.cuda.device_count() if gpus and _nccl() else 0,
        "chosen": bool(os.environ.get("CUDA_VISIBLE_DEVICES")),
        "own": "SLURM_GPUS_PER_TASK" in os.environ,  # each sees only its own
    }


def _nccl() -> bool:
    import torch.distributed as dist

    return dist.is_nccl_available()


def serve(towards: str) -> tuple[str, int]:
    """Open the ranks' store here. Returns its address as seen from the host `towards`, and its port."""
    global _store
    import torch.distributed as dist

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing, only finds the route
        address = probe.getsockname()[0]
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    _store = dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return address, port


def adopt(world: dict[str, str]) -> None:
    """Make this engine a rank. `world` is what torchrun would set in its environment."""
    import torch
    from IPython import get_ipython

    _lent["threads"] = torch.get_num_threads()
    _lent["ipywidgets"] = sys.modules.get("ipywidgets")
    _lent["environment"] = {name: os.environ.get(name) for name in (*world, "GLOO_SOCKET_IFNAME")}
    os.environ.update(world)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    _prepare(get_ipython())


def release() -> None:
    """Make this engine nobody's rank again. Variables are kept."""
    global _store
    _store = None
    if not _lent:
        return
    import torch
    from IPython import get_ipython

    from zerolab.world.environment import meet_in

    _leave()
    meet_in(None)
    shell = get_ipython()
    shell.set_custom_exc((), None)
    shell.kernel.comm_manager.unregister_target(TARGET, _arrived)
    if _lent["ipywidgets"] is None:
        sys.modules.pop("ipywidgets", None)
    else:
        sys.modules["ipywidgets"] = _lent["ipywidgets"]
    for name, value in _lent["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(_lent["threads"])
    _inbox.clear()
    _lent.clear()


# -- tracebacks --------------------------------------------------------------------------------------------------------


def _show_failure(shell: Any, kind: type, error: BaseException, trace: TracebackType, tb_offset: Any = None) -> list:
    """What the notebook shows of an exception: the frames of the learner's own lines, and the last frame.

    It travels as the message's traceback: first what report.py needs to know, as JSON, then the frames.
    """
    about = {"consequence": bool(getattr(error, "consequence", False)), "time": time.time()}
    shown = [_syntax(error)] if isinstance(error, SyntaxError) and error.text else _frames(shell, trace)
    text = [json.dumps(about), *shown]
    shell._showtraceback(kind, error, text)
    return text


def _syntax(error: SyntaxError) -> str:
    """The line of the cell, with a mark under the error."""
    text = error.text or ""
    mark = " " * (max(error.offset or 1, 1) - 1 - (len(text) - len(text.lstrip())))
    return f"  line {error.lineno or 1} of the cell\n    {text.strip()}\n    {mark}^"


def _frames(shell: Any, trace: TracebackType) -> list[str]:
    summary = [frame for frame in traceback.extract_tb(trace) if "IPython/core/" not in frame.filename]
    own = [frame for frame in summary if not _foreign(frame.filename)]
    if summary and summary[-1] not in own and not summary[-1].filename.endswith("lab/ranks/guard.py"):
        own = own[-7:] + summary[-1:]
    lines = []
    for frame in own[-8:]:
        cell = frame.filename in getattr(shell.compile, "_filename_map", {}) or "ipykernel_" in frame.filename
        where = "the cell" if cell else _shown(frame.filename)
        code = linecache.getline(frame.filename, frame.lineno or 0).strip()
        function = "" if frame.name.startswith(("<module>", "<cell line")) else f", in {frame.name}"
        lines.append(f"  line {frame.lineno} of {where}{function}\n    {code}")
    return lines


def _shown(path: str) -> str:
    """A file's name without the machine's folders: from the package on, or else relative to here."""
    installed = path.rpartition("site-packages/")
    if installed[1]:
        return installed[2]
    home = str(Path(__file__).parents[3])  # zerolab is here
    return os.path.relpath(path, home if path.startswith(os.path.join(home, "zerolab", "")) else None)


def _foreign(path: str) -> bool:
    """Whether a file is not the learner's, but belongs to an installed package, to Python, or to this package."""
    package = str(Path(__file__).parents[2])
    return path.startswith((package, sys.prefix, sys.base_prefix, "<")) or "site-packages" in path
