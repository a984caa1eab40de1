"""What the doctor tries on this machine. Each trial returns a `Finding`.

Every finding comes from something tried here and now: ports are bound, files are written, ranks are started and add
numbers. Whatever may hang (a driver, a name server, a rank) runs in a process of its own with a time limit, so the
doctor always finishes. It needs torch; a missing package of the extra `lab` is a finding.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerolab
from zerolab.world.environment import Place, read_place

PYTHON = (3, 11)
TORCH = ("2.11", "2.13")  # the oldest that works and the newest that was tested
SHARING_NCCL = (2, 30, 3)  # the first NCCL with which several ranks may share a GPU
EXTRA = (
    "ipykernel",
    "ipywidgets",
    "jupyter_client",
    "jupyterlab",
    "matplotlib",
    "psutil",
    "rich",
    "scikit-learn",
    "tqdm",
)
MiB, GiB = 2**20, 2**30
PER_RANK = 300 * MiB  # measured: 245 MiB resident with a small model, a third of it shared between ranks
PROBE_TIMEOUT = 60.0  # seconds for the driver to answer
GROUP_TIMEOUT = 10.0  # seconds until a collective fails when a rank is missing

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"  # torch's own index; PyPI's wheels for Linux are of the CUDA build
CPU_BUILD = (
    "in a checkout: rm -r .venv && make lab TORCH=cpu; elsewhere, in a new virtual environment, before zerolab: "
    f"pip install torch --index-url {CPU_WHEELS}"
)
CUDA_BUILD = (
    "in a checkout: rm -r .venv && make lab TORCH=cuda; elsewhere, in a new virtual environment: pip install torch"
)
INSTALL = "pip install 'zerolab[lab]' (in a checkout: make lab, or pip install -c constraints.txt -e '.[lab]')"


@dataclass
class Finding:
    """One thing that was tried. state: "good", "note" (it works, but you should know) or "fix"."""

    subject: str
    state: str
    says: str
    fix: str = ""


class Refused(Exception):
    """The doctor cannot run like this. The message says why, in one line."""


# -- versions ----------------------------------------------------------------------------------------------------------


def check_python(version: Sequence[int] = tuple(sys.version_info[:3])) -> Finding:
    text = f"{platform.python_implementation()} {'.'.join(map(str, version[:3]))} on {platform.system()}"
    if tuple(version[:2]) < PYTHON:
        return Finding("Python", "fix", f"{text}, but 3.11 or newer is needed", "make PYTHON=python3.12 lab")
    return Finding("Python", "good", text)


def check_torch(version: str = torch.__version__) -> Finding:
    """`version` as torch writes it: 2.13.0+cpu."""
    oldest, newest = TORCH
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return Finding("torch", "note", f"{version}: unknown; tested with {oldest} to {newest}")
    numbers = tuple(map(int, found.groups()))
    if numbers < _numbers(oldest):
        fix = f"pip install 'torch>={oldest}' (in a checkout: pip install -c constraints.txt -e '.[lab]')"
        return Finding("torch", "fix", f"{version}, but {oldest} or newer is needed", fix)
    if numbers > _numbers(newest):
        return Finding("torch", "note", f"{version} is newer than {newest}, the newest that was tested")
    return Finding("torch", "good", version)


def check_build(cuda: str | None = torch.version.cuda, gpu: bool | None = None, size: int | None = None) -> Finding:
    """Whether this is the build of torch for this machine.

    gpu: whether the machine has one; size: bytes on disk. Both are looked up unless given.
    """
    gpu = has_gpu() if gpu is None else gpu
    size = torch_size() if size is None else size
    text = (f"CUDA {cuda} build" if cuda else "CPU build") + f", {size / 1e9:.1f} GB on disk" * (size > 0)
    if cuda and not gpu:
        text += f". It works, but there is no GPU here, and the CPU build is 3 GB smaller: {CPU_BUILD}"
        return Finding("torch's build", "note", text)
    if gpu and not cuda:
        return Finding("torch's build", "note", f"{text}, which does not use this machine's GPU")
    return Finding("torch's build", "good", text)


def torch_size() -> int:
    """The bytes of torch and of the packages that its CUDA build brings, as pip recorded them; 0 if it did not."""
    brought = re.compile(r"torch|triton|(nvidia|cuda)[-_].*")
    ours = [each for each in metadata.distributions() if brought.fullmatch(each.metadata["Name"] or "")]
    return sum(file.size or 0 for each in ours for file in each.files or ())


def has_gpu() -> bool:
    """Whether the system has NVIDIA's GPUs, even if torch does not see them."""
    windows = os.path.exists("/dev/dxg") and shutil.which("nvidia-smi")  # WSL2, where any GPU is /dev/dxg
    return bool(windows or list(Path("/dev").glob("nvidia[0-9]*")))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def check_packages(names: Sequence[str] = EXTRA) -> Finding:
    modules = {"scikit-learn": "sklearn"}
    missing = [name for name in names if importlib.util.find_spec(modules.get(name, name)) is None]
    if missing:
        return Finding("packages", "fix", f"not installed, but the lessons need them: {', '.join(missing)}", INSTALL)
    return Finding("packages", "good", "everything that the lessons need is installed")


def check_backends() -> Finding:
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("gloo", "fix", "this torch was built without gloo", "install torch from PyPI: pip install torch")
    names = ["gloo"] + ["NCCL"] * dist.is_nccl_available()
    return Finding("backends", "good", f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} built in")


# -- the machine -------------------------------------------------------------------------------------------------------


def check_memory(ranks: int, available: int | None = None) -> Finding:
    """available: bytes that processes can still get; default: what the system and its container say."""
    available = available_memory() if available is None else available
    cores = _usable_cores()
    if available is None:
        return Finding("memory", "note", f"{cores} cores; this system does not say how much memory is free")
    text = f"{available / GiB:.1f} GiB free, {cores} cores; {ranks} small ranks take about {ranks * PER_RANK / GiB:.1f}"
    if available < ranks * PER_RANK:
        fix = "end other programs or other notebooks' ranks; give a container more (docker run --memory 4g)"
        return Finding("memory", "fix", text, fix)
    return Finding("memory", "good", text)


def available_memory() -> int | None:
    left = []
    with suppress(OSError):
        for kibibytes in re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text()):
            left.append(int(kibibytes) * 1024)
    with suppress(OSError, ValueError):  # "max", which is not a number, means no limit
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        used -= int(cached.group(1)) if cached else 0  # the system gives this back when somebody needs it
        left.append(int((group / "memory.max").read_text()) - used)
    return min(left) if left else None


def check_shared_memory(path: str = "/dev/shm", gpus: int = 0) -> Finding:
    """NCCL needs shared memory between GPUs, and a DataLoader needs it for its workers."""
    needed = GiB if gpus > 1 else 32 * MiB
    fix = (
        "in a container: docker run --shm-size=1g (or --ipc=host), in Kubernetes an emptyDir with medium: Memory at "
        "/dev/shm; elsewhere: mount -o remount,size=1g /dev/shm as root; delete files there that dead programs left"
    )
    if not os.path.isdir(path):
        if path == "/dev/shm" and sys.platform == "darwin":
            return Finding("shared memory", "good", "macOS has its own kind, without such a limit")
        return Finding("shared memory", "fix", f"there is no {path}", fix)
    usage = shutil.disk_usage(path)
    text = f"{path}: {in_bytes(usage.free)} free of {in_bytes(usage.total)}"
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0" * MiB)
            file.flush()
    except OSError as error:
        return Finding("shared memory", "fix", f"{text}; a file of 1 MiB could not be written: {error.strerror}", fix)
    if usage.free < needed:
        why = "NCCL between GPUs" if gpus > 1 else "a DataLoader's workers"
        return Finding("shared memory", "fix", f"{text}, but {why} may need {in_bytes(needed)}", fix)
    return Finding("shared memory", "good", text)


def check_open_files(ranks: int) -> Finding:
    try:
        import resource
    except ModuleNotFoundError:
        return Finding("open files", "note", "this system does not say how many files may be open")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 128 + 16 * ranks  # a notebook with n live ranks has 70 + 10n open, a rank 62 + n (a test measures it)
    limits = f"a process may have {_limit(soft)} files open (the system allows {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < needed:
        more = hard == resource.RLIM_INFINITY or hard >= needed
        fix = f"ulimit -n {needed} in the shell that starts the notebooks"
        if not more:
            fix = f"raise the hard limit: docker run --ulimit nofile={needed}, or nofile in /etc/security/limits.conf"
        return Finding("open files", "fix", f"{limits}, but {ranks} ranks may need {needed}", fix)
    return Finding("open files", "good", limits)


def _limit(value: int) -> str:
    return "any number of" if value < 0 or value > 2**60 else f"{value:,}"


def in_bytes(value: float) -> str:
    """In binary units, as the system counts memory: `1.5 GiB`, `300 MiB`."""
    return f"{value / GiB:.1f} GiB" if value >= GiB else f"{value / MiB:.0f} MiB"


# -- the network of this machine ---------------------------------------------------------------------------------------


def check_loopback(ranks: int) -> Finding:
    """Bind as many ports as live ranks take (five per kernel, three for its groups), and send a byte through one."""
    count = 8 * ranks + 8
    what, had = "ports on 127.0.0.1", []
    with ExitStack() as held:
        try:
            for _ in range(count):
                listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
                had.append(listener)
        except OSError as error:
            fix = f"widen the system's range of ports (now {_port_range()}), or end the programs that hold them"
            if not had:
                fix = "is the loopback interface up? ip link set lo up"
            text = f"could bind only {len(had)} of {count} {what}: {error.strerror}"
            return Finding("loopback", "fix", text, fix)
        try:
            had[0].settimeout(2.0)
            with socket.create_connection(had[0].getsockname(), timeout=2.0) as client:
                server, _ = had[0].accept()
                with server:
                    client.sendall(b".")
                    server.settimeout(2.0)
                    server.recv(1)
        except OSError as error:
            fix = "is it up? ip link set lo up"
            if isinstance(error, TimeoutError):
                fix = "a firewall drops them: allow everything on this interface (iptables -I INPUT -i lo -j ACCEPT)"
            return Finding("loopback", "fix", f"connections to 127.0.0.1 do not get through: {error}", fix)
    return Finding("loopback", "good", f"{count} {what} at once, and bytes get through")


def _port_range() -> str:
    try:
        return "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return "unknown"


def check_port(port: int) -> Finding:
    """Whether a port is free, such as torchrun's 29500. Raises Refused if it is not a port number."""
    if not 0 < port < 2**16:
        raise Refused(f"--port {port} is not a port: ports go from 1 to 65535")
    try:
        with socket.socket() as probe:  # bound but not listening, so nobody can connect meanwhile
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))  # on all interfaces, as torchrun does
    except OSError as error:
        fix = f"choose another (torchrun --master-port, python -m zerolab.lab --port), or end {_holder(port)}"
        return Finding(f"port {port}", "fix", f"is not available: {error.strerror}", fix)
    return Finding(f"port {port}", "good", "is free")


def _holder(port: int) -> str:
    with suppress(Exception):  # psutil may be missing (extra `lab`), or may not look at other users' processes
        import psutil

        for connection in psutil.net_connections("tcp"):
            if connection.status == "LISTEN" and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid}, {psutil.Process(connection.pid).name()}, which holds it"
    return "the program that holds it"


def check_host_name() -> Finding:
    """Unless an interface is named, gloo listens at the address of the host name; across hosts it must be right."""
    name = socket.gethostname()
    code = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    out, problem = _in_a_process([sys.executable, "-c", code, name], 5.0)
    needed = "one machine needs no name; for several, set GLOO_SOCKET_IFNAME=<interface> on each, as ip addr names it"
    if problem:
        return Finding("host name", "note", f"{name} has no address here ({problem.splitlines()[-1]}); {needed}")
    if out.startswith("127."):
        return Finding("host name", "note", f"{name} is {out}, which other machines cannot reach; {needed}")
    return Finding("host name", "good", f"{name} is {out}")


def check_environment(env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Leftover variables that would mislead ranks."""
    findings = []
    interfaces = {name for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        named = [name for name in env.get(variable, "").split(",") if name]
        exact = [name.lstrip("=") for name in named if variable.startswith("GLOO") or name.startswith("=")]
        if wrong := [name for name in exact if name not in interfaces]:
            text = f"names {', '.join(wrong)}, but the interfaces here are {', '.join(sorted(interfaces))}"
            findings.append(Finding(variable, "fix", text, f"unset {variable}, or name one of these"))
    # A batch script is one process, which has the number of the first task without being it.
    batch = env.get("SLURM_PROCID") == "0" and not {"RANK", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"} & env.keys()
    try:
        place = Place() if batch else read_place(env)
    except RuntimeError as error:
        findings.append(Finding("environment", "fix", str(error), "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR ..."))
    else:
        if place.world_size > 1:
            text = f"a program started here would think that it is rank {place.rank} of {place.world_size}"
            findings.append(Finding("environment", "note", f"{text} (torchrun's or Slurm's variables are set)"))
    return findings


def check_slurm(env: Mapping[str, str] = os.environ) -> list[Finding]:
    """What Slurm gave to the job that this runs in, and whether this process has it; nothing outside of a job."""
    if "SLURM_JOB_ID" not in env:
        return []
    job = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env:
        job = f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '?')}"
    nodes, gpus = env.get("SLURM_JOB_NUM_NODES", "1"), env.get("SLURM_GPUS_ON_NODE", "")
    text = f"job {job}, {nodes} node{'s' * (nodes != '1')} ({env.get('SLURM_JOB_NODELIST', '?')})"
    text += f", here {env.get('SLURM_CPUS_ON_NODE', '?')} cores and {gpus or 'no'} GPU{'s' * (gpus != '1')}"
    if env.get("SLURM_NTASKS", "1") != "1":
        text += f", {env['SLURM_NTASKS']} tasks"
    if env.get("SLURM_JOB_END_TIME", "").isdecimal():
        text += f"; {max(0, int(env['SLURM_JOB_END_TIME']) - int(time.time())) // 60} minutes left"
    if (again := env.get("SLURM_RESTART_COUNT", "0")) != "0":
        text += f"; requeued {again} time{'s' * (again != '1')} so far"
    findings = [Finding("Slurm", "good", text)]
    given, usable = env.get("SLURM_CPUS_ON_NODE", ""), _usable_cores()
    if given.isdecimal() and usable > int(given):
        text = f"gave {given} cores, but lets this process use {usable}: torch counts threads by those"
        findings.append(Finding("Slurm's cores", "note", f"{text}; set OMP_NUM_THREADS"))
    if not gpus and list(Path("/dev").glob("nvidia[0-9]*")):
        findings.append(Finding("Slurm's GPUs", "note", "the node has some, the job asked for none: --gpus-per-node=4"))
    return findings


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_a_process(command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a command. Returns its output, and what went wrong or "". A process that cannot be killed is left behind."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5.0)
        return "", f"no answer within {timeout:g} s"
    if process.returncode:
        return out.strip(), err.strip() or f"exit status {process.returncode}"
    return out.strip(), ""


# -- GPUs --------------------------------------------------------------------------------------------------------------


def describe_gpus() -> None:
    """Print what torch sees, as JSON. This runs in a process of its own, because a driver may hang."""
    facts: dict[str, Any] = {"cuda": torch.version.cuda, "nccl": None, "gpus": [], "peers": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts["available"] = torch.cuda.is_available()
    facts["warning"] = "; ".join(str(warning.message).strip() for warning in caught)
    if dist.is_nccl_available():
        with suppress(Exception):
            facts["nccl"] = list(torch.cuda.nccl.version())
    count = torch.cuda.device_count() if facts["available"] else 0
    for i in range(count):
        about: dict[str, Any] = {"name": torch.cuda.get_device_name(i), "problem": ""}
        try:
            about["free"], about["total"] = torch.cuda.mem_get_info(i)
            total = (torch.arange(1000, device=f"cuda:{i}") + 1).sum().item()
            if total != 500_500:
                about["problem"] = f"adds 1 to 1000 to {total}"
        except RuntimeError as error:
            about["problem"] = str(error).splitlines()[0]
        facts["gpus"].append(about)
    facts["peers"] = [
        [i, j] for i in range(count) for j in range(count) if i != j and torch.cuda.can_device_access_peer(i, j)
    ]
    print("\n" + json.dumps(facts))


def look_at_gpus(timeout: float = PROBE_TIMEOUT) -> tuple[dict[str, Any], list[Finding]]:
    code = f"from {__name__} import describe_gpus; describe_gpus()"
    out, problem = _in_a_process([sys.executable, "-c", code], timeout)
    if problem:
        fix = "look at nvidia-smi and dmesg; to go without GPUs, set CUDA_VISIBLE_DEVICES= (empty)"
        return {"gpus": []}, [Finding("GPUs", "fix", f"torch could not say: {problem.splitlines()[-1]}", fix)]
    facts = json.loads(out.splitlines()[-1])
    if len(facts["gpus"]) > 1:
        facts["topology"] = _in_a_process(["nvidia-smi", "topo", "-m"], 15.0)[0]
    return facts, judge_gpus(facts, has_gpu())


def judge_gpus(facts: dict[str, Any], present: bool) -> list[Finding]:
    """present: whether the system has GPUs, even if torch does not see them."""
    gpus, nccl = facts["gpus"], facts["nccl"]
    if not gpus:
        if not present:
            return [Finding("GPUs", "note", "none here: the ranks run on the CPU, and the whole course works that way")]
        if os.environ.get("CUDA_VISIBLE_DEVICES") is not None and facts["cuda"]:
            hidden = f"hidden by CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}"
            return [Finding("GPUs", "note", f"there are some, {hidden}: the ranks run on the CPU")]
        if not facts["cuda"]:
            says, fix = "there are some, but this torch was built without CUDA", CUDA_BUILD
        else:
            why = facts["warning"] or "no reason given"
            says = f"there are some, but torch (CUDA {facts['cuda']}) sees none: {why}"
            fix = "nvidia-smi shows the driver's CUDA: update the driver, or install a torch for it (pytorch.org)"
        return [Finding("GPUs", "fix", says, fix)]
    findings = []
    for i, gpu in enumerate(gpus):
        if gpu["problem"]:
            fix = "does this torch support it (torch.cuda.get_arch_list())? Does another program have it to itself?"
            findings.append(Finding(f"GPU {i}", "fix", f"{gpu['name']}: {gpu['problem']}", fix))
        else:
            memory = f"{in_bytes(gpu['free'])} free of {in_bytes(gpu['total'])}"
            state = "good" if gpu["free"] > 2 * GiB else "note"
            findings.append(Finding(f"GPU {i}", state, f"{gpu['name']}, {memory}"))
    findings.append(Finding("CUDA", "good", f"torch was built for CUDA {facts['cuda']}"))
    findings.append(_judge_nccl(nccl, len(gpus)))
    apart = [(i, j) for i in range(len(gpus)) for j in range(i) if [i, j] not in facts["peers"]]
    if apart:
        pairs = ", ".join(f"{j} and {i}" for i, j in apart[:4]) + ", ..." * (len(apart) > 4)
        text = f"GPUs {pairs} cannot reach each other's memory: NCCL goes through the host's memory, which is slower"
        findings.append(Finding("peer access", "note", text))
    elif len(gpus) > 1:
        findings.append(Finding("peer access", "good", "each GPU reaches the others' memory"))
    return findings


def _judge_nccl(nccl: Sequence[int] | None, gpus: int) -> Finding:
    if nccl is None:
        return Finding("NCCL", "fix", "this torch has no NCCL, so ranks on GPUs talk through gloo", "pip install torch")
    version = ".".join(map(str, nccl))
    text = f"{version}: one GPU per rank; more than {gpus} rank{'s' * (gpus > 1)} must share through gloo: "
    text += 'lab.start(4, device="cuda")'
    if tuple(nccl) < SHARING_NCCL:
        return Finding("NCCL", "good", f"{text}; before 2.30.3, NCCL refuses two ranks on one GPU")
    return Finding(
        "NCCL", "good", f"{text}; NCCL_MULTI_RANK_GPU_ENABLE=1 make gpu tries two ranks on one GPU with NCCL"
    )


# -- a real all-reduce -------------------------------------------------------------------------------------------------


def time_all_reduce(kind: str, sizes: Sequence[int], repeats: int) -> tuple[list[float], int]:
    """On each rank: the median time of an all-reduce of each size in bytes, and the number of open files.

    kind: "cpu", "nccl", or "shared" for ranks that share GPUs and talk through gloo. The sums are checked.
    """
    device = zerolab.init()
    if kind == "shared":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    n, times = dist.get_world_size(), []
    for size in sizes:
        ones = torch.ones(size // 4, device=device)
        warm_up = 3
        elapsed = []
        for turn in range(warm_up + repeats):
            value = ones * (dist.get_rank() + 1)
            _finish(device)
            begin = time.perf_counter()
            dist.all_reduce(value)
            _finish(device)
            if turn >= warm_up:
                elapsed.append(time.perf_counter() - begin)
        if not (value == n * (n + 1) // 2).all():
            raise RuntimeError(f"the sum of 1 to {n} came to {value.unique().tolist()[:4]}")
        times.append(statistics.median(elapsed))
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return times, files


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_reduce(
    kind: str, ranks: int, timeout: float = 60.0, group_timeout: float = GROUP_TIMEOUT, repeats: int = 20
) -> tuple[dict[str, Any] | None, Finding]:
    """The latency of 4 bytes and the bandwidth of many, on ranks started for it. None if it did not finish.

    Bus bandwidth is nccl-tests': 2(N-1)/N · bytes / time, which is what a link carries in a ring. Times are those of
    the slowest rank.
    """
    name = {"cpu": "gloo, CPU", "nccl": "NCCL, a GPU each", "shared": "gloo, sharing GPUs"}[kind]
    large = 256 * MiB if kind == "nccl" else 16 * MiB
    subject = f"all-reduce ({name})"
    try:
        with _seeing_gpus(kind != "cpu"), zerolab.Ranks(ranks) as pool:
            results = pool.run(time_all_reduce, kind, (4, large), repeats, timeout=timeout, group_timeout=group_timeout)
    except zerolab.RankError as error:
        return None, Finding(subject, "fix", _explain(error, ranks, group_timeout), _cure(kind))
    except OSError as error:
        return None, Finding(subject, "fix", f"the ranks could not be started: {error}", _cure(kind))
    latency, seconds = (max(times[i] for times, _ in results) for i in range(2))
    bandwidth = 2 * (ranks - 1) / ranks * large / seconds
    entry = {"over": name, "ranks": ranks, "latency_seconds": latency, "bytes": large, "seconds": seconds}
    entry |= {"bus_bytes_per_second": bandwidth, "open_files": max(files for _, files in results)}
    text = f"{ranks} rank{'s' * (ranks > 1)}: {latency * 1e6:.0f} µs for 4 bytes"
    text += f", {bandwidth / 1e9:.2f} GB/s bus bandwidth with {in_bytes(large)}" if ranks > 1 else ", nobody to talk to"
    return entry, Finding(subject, "good", text)


def _explain(error: zerolab.RankError, ranks: int, group_timeout: float) -> str:
    """launch's message in one line: which rank failed, and which did not come."""
    heads = [line for line in str(error).splitlines() if re.match(r"(time is up: )?rank \d+ ", line)]
    late = [int(line.split()[1]) for line in heads if line.endswith("had not finished")]
    if late and "Timed out" in str(error):
        who = f"rank {', '.join(map(str, late))} of {ranks}"
        return f"did not finish within {group_timeout:g} s, because {who} took no part"
    return "; ".join(head.removesuffix(f", in {__name__}.time_all_reduce") for head in heads)


def _cure(kind: str) -> str:
    if kind == "nccl":
        return "NCCL_DEBUG=WARN says why; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 may avoid it. Then run this again"
    return "see memory and loopback above; was a process stopped or killed? (dmesg, ulimit -a). Then run this again"


@contextmanager
def _seeing_gpus(seen: bool) -> Iterator[None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not seen:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if not seen and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif not seen and before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
