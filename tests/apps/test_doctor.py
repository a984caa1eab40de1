"""`zerolab doctor`: its findings are true, on a machine made worse on purpose, and it always comes to an end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path

import psutil
import pytest
import torch

from zerolab.apps import doctor, machine
from zerolab.apps import rehearsal as room
from zerolab.cli import main
from zerolab.lab.ranks import live
from zerolab.world import nursery

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "zerolab.cli", "doctor"]


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, **options)


def findings_in(code: str, *before: str, prefix: tuple[str, ...] = ()) -> list[machine.Finding]:
    """What a check says in a process of its own, after each line that makes things worse there."""
    text = "import dataclasses, json\nfrom zerolab.apps import machine\n"
    text += "".join(f"{line}\nprint('found', json.dumps(dataclasses.asdict({code})))\n" for line in before)
    done = subprocess.run([*prefix, sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("found ") for line in done.stdout.splitlines() if line.startswith("found ")]
    return [machine.Finding(**json.loads(line)) for line in lines]


def here(folder: Path) -> dict[str, str]:
    """An environment by which all processes that come of a visit can be known; what they leave is in `folder`."""
    return os.environ | {"TMPDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}


def survivors(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("JUPYTER_RUNTIME_DIR") == str(folder) and process.pid != os.getpid():
                found.append(process)
    return found


@pytest.mark.exhaustive
def test_a_whole_visit(tmp_path):
    file = tmp_path / "doctor.json"
    before = os.times()
    done = run("--ranks", "3", "--students", "4", "--json", str(file), env=here(tmp_path))
    computed = os.times().children_user + os.times().children_system - before.children_user - before.children_system
    assert done.stderr == ""
    report = json.loads(file.read_text())
    states = {finding["subject"]: finding["state"] for finding in report["findings"]}
    assert done.returncode == report["status"] == int("fix" in states.values())
    assert {"Python", "torch", "packages", "memory", "shared memory", "open files", "loopback", "host name"} <= set(
        states
    )
    assert states["all-reduce (gloo, CPU)"] == states["packages"] == states["loopback"] == "good", done.stdout
    entry = report["all_reduce"][0]
    assert (entry["over"], entry["ranks"], entry["bytes"]) == ("gloo, CPU", 3, 2**24)
    assert 0 < entry["latency_seconds"] < entry["seconds"] < 10
    # As nccl-tests has it: 2(N-1)/N.
    assert entry["bus_bytes_per_second"] == pytest.approx(4 / 3 * entry["bytes"] / entry["seconds"])
    names = {row["lesson"][:2]: row for row in report["lessons"]}
    assert set(names) == {path.name[:2] for path in (ROOT / "lessons").glob("*.ipynb")}
    assert names["16"]["ranks"] == "-" and names["03"]["ranks"] == "4"
    for finding in report["findings"]:
        assert finding["subject"] in done.stdout
        assert bool(finding["fix"]) == (finding["state"] == "fix"), finding
    seen = report["class"]
    assert seen["ranks"] == 4 and seen["processes"] == 6 + 2 * nursery.FORKS  # notebooks of three ranks and of one
    assert 2**26 < seen["rank_bytes"] < 2**30 and 2**26 < seen["notebook_bytes"] < 2**30
    assert seen["rank_threads"] > 2 and seen["rank_files"] > 20 and seen["shared_memory"] >= 0
    assert seen["needed"] == 4 * (3 * seen["rank_bytes"] + seen["notebook_bytes"] + room.SERVER)
    assert states["class of 4"] == "good"
    assert survivors(tmp_path) == [] and not list(tmp_path.glob("zerolab-*"))
    assert not list((tmp_path / "zerolab").iterdir())  # nor is a notebook on record
    if not torch.cuda.is_available():
        assert computed < 60  # 30 s on two cores, whatever else they do


@pytest.mark.parametrize(
    "arguments",
    [["--ranks", "0"], ["--students", "0"], ["--port", "70000"], ["--json", "/nowhere/x"], ["--ranks", "x"]],
)
def test_a_wrong_argument_is_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == ""
    assert len(told.err.splitlines()) == 1 and arguments[1] in told.err


def test_versions():
    says = machine.check_torch("2.9.1+cu128")
    assert says.state == "fix" and "2.11 or newer" in says.says and "torch>=2.11" in says.fix
    assert [machine.check_torch(version).state for version in ("2.11.0", "2.13.0+cpu", "2.14.0a0")] == [
        "good",
        "good",
        "note",
    ]
    old = machine.check_python((3, 10, 4))
    assert old.state == "fix" and "3.10.4" in old.says
    missing = machine.check_packages(("json", "no_such_package"))
    assert missing.state == "fix" and "no_such_package" in missing.says and "json" not in missing.says
    # What it calls oldest and tested is what is declared and pinned.
    assert f'"torch>={machine.TORCH[0]}"' in (ROOT / "pyproject.toml").read_text()
    assert re.search(rf"^torch=={machine.TORCH[1]}\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["lab"]
    assert set(machine.EXTRA) == {re.match(r"[\w-]+", line).group() for line in declared}


def test_which_torch_and_whether_it_fits():
    fits = machine.check_build()
    assert fits.state == "good" or machine.has_gpu() != bool(torch.version.cuda)
    size = float(re.search(r"([\d.]+) GB on disk", fits.says)[1]) * 1e9
    library = sum(file.stat().st_size for file in (Path(torch.__file__).parent / "lib").glob("*.so*"))
    assert size > library > 10**8  # the libraries are most of it
    large = machine.check_build("13.0", gpu=False, size=4 * 10**9)
    assert large.state == "note" and large.says.startswith("CUDA 13.0 build, 4.0 GB on disk. It works")
    assert "make lab TORCH=cpu" in large.says and machine.CPU_WHEELS in large.says
    idle = machine.check_build(None, gpu=True, size=0)
    assert idle.state == "note" and idle.says == "CPU build, which does not use this machine's GPU"
    assert machine.check_build("13.0", gpu=True).state == machine.check_build(None, gpu=False).state == "good"
    assert f"CPU_WHEELS ?= {machine.CPU_WHEELS}\n" in (ROOT / "Makefile").read_text()


def test_a_limit_on_open_files():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {}))"
    limits = [(1024, 4096), (128, 4096), (128, 128)]  # what was lowered cannot be raised again
    enough, soft, hard = findings_in("machine.check_open_files(4)", *(limit.format(*pair) for pair in limits))
    assert enough.state == "good"
    assert soft.state == "fix" and "128 files" in soft.says and soft.fix.startswith("ulimit -n 192")
    assert hard.state == "fix" and "nofile" in hard.fix


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = machine.check_port(port)
        assert taken.state == "fix" and f"process {os.getpid()}" in taken.fix
    assert machine.check_port(port).state == "good"


@pytest.fixture
def no_network():
    """The start of a command that runs in a network of its own, with nothing in it that is up."""
    prefix = ("unshare", "--net")
    tried = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True, timeout=600)
    if not tried or tried.returncode:
        pytest.skip("needs a network namespace: Linux, unshare, and the permission")
    return prefix


def test_a_loopback_that_is_down_has_no_ports_or_a_firewall(no_network):
    ports = "/proc/sys/net/ipv4/ip_local_port_range"
    policy = "ip xfrm policy add src 127.0.0.1/32 dst 127.0.0.1/32 dir in action block"  # drops what comes in
    allow = [f"echo 0 > /proc/sys/net/ipv4/conf/lo/disable_{what}" for what in ("policy", "xfrm")]
    steps = [["true"], ["ip link set lo up", f"echo 40000 40007 > {ports}"]]
    steps += [[f"echo 32768 60999 > {ports}", *allow, policy]]
    lines = [f"import subprocess; subprocess.run({'; '.join(['set -e', *s])!r}, shell=True, check=True)" for s in steps]
    down, few, dropped = findings_in("machine.check_loopback(4)", *lines, prefix=no_network)
    assert down.state == "fix" and "ip link set lo up" in down.fix
    assert few.state == "fix" and "only 8 of 40 ports" in few.says and "(now 40000-40007)" in few.fix
    assert dropped.state == "fix" and "timed out" in dropped.says and "iptables" in dropped.fix


def test_little_shared_memory(tmp_path):
    enough = machine.check_shared_memory(str(tmp_path))
    assert enough.state == "good", enough
    gone = machine.check_shared_memory(str(tmp_path / "none"))
    assert gone.state == "fix"
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, timeout=600).returncode:
        pytest.skip("needs the permission to mount")
    try:
        small = machine.check_shared_memory(str(tmp_path))
        (tmp_path / "left behind").write_bytes(bytes(3 * 2**19))
        full = machine.check_shared_memory(str(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=600)
    assert small.state == "fix" and "2 MiB free of 2 MiB" in small.says and "--shm-size" in small.fix
    assert full.state == "fix" and "could not be written: No space left" in full.says


@pytest.mark.exhaustive
def test_a_rank_that_stops_does_not_stop_the_doctor(clock):
    answers = []

    def visit() -> None:
        answers.append(machine.all_reduce("cpu", 2, timeout=40, group_timeout=3, repeats=10**7))

    before = set(active_children())
    thread = threading.Thread(target=visit)
    begin = clock()
    thread.start()
    while True:
        ranks = [psutil.Process(child.pid) for child in set(active_children()) - before]
        ranks.sort(key=lambda process: process.pid)
        connected = [len([c for c in rank.net_connections() if c.status == "ESTABLISHED"]) for rank in ranks]
        if len(ranks) == 2 and min(connected) >= 2:  # the store, and each other
            break
        time.sleep(0.1)
    time.sleep(1.0)
    ranks[1].send_signal(signal.SIGSTOP)
    thread.join()
    assert clock() - begin < 40
    entry, finding = answers[0]
    assert entry is None and finding.state == "fix"
    assert "did not finish within 3 s, because rank 1 of 2 took no part" in finding.says
    assert not ranks[0].is_running() and not ranks[1].is_running()


def test_a_class_that_does_not_start_or_does_not_fit(tmp_path, monkeypatch, clock):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    begin = clock()
    seen, (late,) = room.hold_class(2, 1, timeout=1.0 - 2 * room.PER_STUDENT)
    assert seen is None and late.state == "fix" and clock() - begin < 15
    assert "2 ranks in 2 notebooks: 2 of 2 notebooks had no live ranks when time ran out" in late.says
    monkeypatch.setenv("PYTHONHASHSEED", "x")
    seen, (broken,) = room.hold_class(2, 4, timeout=600.0)
    assert seen is None and broken.state == "fix" and "notebook 0 ended while starting: " in broken.says
    assert survivors(tmp_path) == []

    seen = {"students": 20, "ranks_each": 4, "ranks": 20, "seconds": 40.0, "free": 17 * 2**30, "shared_memory": 0}
    seen |= {"rank_bytes": 2**28, "rank_threads": 19, "rank_files": 74}
    seen |= {"notebook_bytes": 2**27, "notebook_threads": 8, "notebook_files": 59}
    memory = {finding.subject: finding for finding in room.judge(seen)}["the class's memory"]
    assert memory.state == "fix" and "24.6 GiB of 17.0 GiB free" in memory.says  # (4 · 256 + 128 + 110) MiB each
    assert memory.fix.startswith("12 students here") and "lab.start(2) instead of 4" in memory.fix
    states = {finding.subject: finding.state for finding in room.judge(seen | {"free": 2**36, "rank_threads": 10**6})}
    assert states["the class's memory"] == "good" and states["the class's threads"] == "fix"
    assert room.START_TIMEOUT == live.START_TIMEOUT


def test_a_probe_that_hangs_is_given_up(tmp_path, clock):
    begin = clock()
    file = tmp_path / "lives"
    hang = f"import time\nwhile True: open({str(file)!r}, 'w').write(str(time.time())); time.sleep(0.05)"
    assert machine._in_a_process([sys.executable, "-c", hang], 5.0) == ("", "no answer within 5 s")
    assert clock() - begin < 12
    last = file.read_text()
    time.sleep(0.3)
    assert file.read_text() == last
    facts, findings = machine.look_at_gpus(0.05)  # torch takes longer to import
    assert facts == {"gpus": []} and findings[0].state == "fix" and "no answer within 0.05 s" in findings[0].says


def gpus(count: int, nccl: tuple[int, ...] | None = (2, 28, 9), peers: bool = True, **other: object) -> dict:
    """What `describe_gpus` would find on a machine with so many."""
    about = {"name": "a GPU", "problem": "", "free": 70 * 2**30, "total": 80 * 2**30}
    pairs = [[i, j] for i in range(count) for j in range(count) if i != j and (peers or i + j == 1)]
    facts = {"cuda": "12.8", "nccl": nccl, "gpus": [about] * count, "peers": pairs, "available": True, "warning": ""}
    return facts | other


def test_what_it_makes_of_gpus(monkeypatch, capsys):
    def judged(facts: dict, present: bool = True) -> dict[str, machine.Finding]:
        return {finding.subject: finding for finding in machine.judge_gpus(facts, present)}

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = judged(gpus(2))
    assert {finding.state for finding in two.values()} == {"good"} and "70.0 GiB free of 80.0 GiB" in two["GPU 1"].says
    assert (
        "before 2.30.3, NCCL refuses two ranks on one GPU" in two["NCCL"].says
        and "more than 2 ranks" in two["NCCL"].says
    )
    assert "reaches the others' memory" in two["peer access"].says
    apart = judged(gpus(3, (2, 30, 3), peers=False))
    assert apart["peer access"].state == "note" and apart["peer access"].says.startswith("GPUs 0 and 2, 1 and 2 cannot")
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in apart["NCCL"].says and "peer access" not in judged(gpus(1))
    assert judged(gpus(1, None))["NCCL"].state == "fix" and "NCCL" in judged(gpus(1, None))["NCCL"].says
    broken = gpus(1)
    broken["gpus"] = [{"name": "an old GPU", "problem": "no kernel image"}]
    assert judged(broken)["GPU 0"].state == "fix" and "no kernel image" in judged(broken)["GPU 0"].says
    full = gpus(1)
    full["gpus"] = [{**full["gpus"][0], "free": 2**30}]
    assert judged(full)["GPU 0"].state == "note"

    none = gpus(0, warning="the driver is too old")
    assert judged(none)["GPUs"].fix.startswith("nvidia-smi") and "the driver is too old" in judged(none)["GPUs"].says
    assert "built without CUDA" in judged(none | {"cuda": None})["GPUs"].says
    assert "make lab TORCH=cuda" in judged(none | {"cuda": None})["GPUs"].fix
    assert judged(none | {"cuda": None}, present=False)["GPUs"].state == "note"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert judged(none)["GPUs"].state == "note" and "hidden" in judged(none)["GPUs"].says

    doctor.show({"findings": [], "gpus": gpus(2, topology="GPU0 X NV18"), "lessons": []})
    assert "nvidia-smi topo -m" in (told := capsys.readouterr().out) and "GPU0 X NV18" in told


@pytest.mark.exhaustive
def test_without_the_extra_packages_it_says_so_and_goes_on():
    hide = f"import sys; sys.modules.update(dict.fromkeys({[n for n in machine.EXTRA if '-' not in n]}))\n"
    code = hide + "from zerolab.cli import main; sys.exit(main(['doctor', '--ranks', '1']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr == ""
    assert "FIX  packages: not installed, but the lessons need them: ipykernel," in done.stdout
    assert "zerolab[lab]" in done.stdout
    assert "ok   all-reduce (gloo, CPU): 1 rank:" in done.stdout and "00 · Welcome | 4 | gloo, CPU" in done.stdout
    assert "to be fixed: packages" in done.stdout


def test_what_is_left_in_the_environment():
    assert machine.check_environment({}) == []
    (wrong,) = machine.check_environment({"GLOO_SOCKET_IFNAME": "no-such-if0"})
    assert wrong.state == "fix" and "no-such-if0" in wrong.says and "lo" in wrong.says
    (half,) = machine.check_environment({"RANK": "1"})
    assert half.state == "fix" and "WORLD_SIZE" in half.says and half.fix.startswith("unset")
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    (whole,) = machine.check_environment(torchrun)
    assert whole.state == "note" and "rank 1 of 2" in whole.says
    assert machine.check_memory(4, 2**28).state == "fix" and machine.check_memory(4, 2**33).state == "good"
