"""A Slurm of two nodes on this machine: munged, slurmctld and a slurmd per node, in a temporary folder, on loopback.

The nodes are called 127.0.0.1 and 127.0.0.2, so that ranks can reach the first by its name; both have this machine's
host name, its files and its cores, of which Slurm believes that there are more. Their four GPUs are empty files.
Everything that runs on a node, daemons and jobs, is below a keeper: `python slurm.py COMMAND` adopts what daemons leave
behind, and kills all of it when its input is closed, so also when the process that started it dies.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from ports import free_ports

from zerolab.world.processes import Patience

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue")
NODES = ("127.0.0.1", "127.0.0.2")
CONFIGURATION = """\
ClusterName=zerolab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdTimeout=6
MessageTimeout=5
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=127.0.0.1 NodeAddr=127.0.0.1 NodeHostname=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=1000 Gres=gpu:4
NodeName=127.0.0.2 NodeAddr=127.0.0.1 NodeHostname=127.0.0.2 Port={ports[2]} CPUs=64 RealMemory=1000 Gres=gpu:4
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=2 State=UP
"""
# cred_expire is also how many seconds a job that was requeued waits; Slurm's default is two minutes.


def missing() -> str:
    """Why there can be no Slurm here, or ''."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, for a Slurm of its own"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    absent = [name for name in NEEDED if not shutil.which(name, path=path)]
    return f"needs {', '.join(absent)}: apt-get install slurm-wlm munge" if absent else ""


class Slurm:
    """`with Slurm(folder) as slurm:`; folder: new, and with a short path (a socket is made in it)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keepers: dict[str, subprocess.Popen] = {}
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH_"))}
        self.env["SLURM_CONF"] = str(folder / "slurm.conf")
        self.env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), self.env["PATH"], "/usr/sbin"])

    def __enter__(self) -> Slurm:
        self.folder.chmod(0o711)  # munged insists; the key in it is for root alone
        (self.folder / "state").mkdir(0o700)
        for number in range(4):
            (self.folder / f"gpu{number}").touch()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-3]\n")
        text = CONFIGURATION.format(folder=self.folder, ports=free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        try:
            files = {
                "key-file": key.name,
                "socket": "munge.socket",
                "pid-file": "munged.pid",
                "seed-file": "munge.seed",
            }
            options = [f"--{option}={self.folder / name}" for option, name in files.items()]
            self.keep("munged", "munged", "--foreground", *options)
            self.wait_until(lambda: (self.folder / "munge.socket").exists(), 30.0, "munged")
            self.keep("slurmctld", "slurmctld", "-D", "-i")
            for node in NODES:
                self.start_node(node)
            self.wait_until(lambda: self.states().count("idle") == 2, 60.0, "two nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in [*NODES, "slurmctld", "munged"]:
            self.end(name)

    def keep(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("a") as out:
            self.keepers[name] = subprocess.Popen(
                [sys.executable, __file__, *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        self.keep(node, "slurmd", "-D", "-N", node)

    def end(self, name: str) -> None:
        """Like a machine that loses power, with everything that runs there."""
        if keeper := self.keepers.pop(name, None):
            keeper.stdin.close()
            keeper.wait(20)

    def run(self, *command: object, seconds: float = 60.0, cwd: Path | None = None, **env: object) -> str:
        """A command of Slurm; what it printed. Any failure is an error with its output."""
        words, variables = [str(word) for word in command], {name: str(value) for name, value in env.items()}
        done = subprocess.run(words, env=self.env | variables, cwd=cwd, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *command: object, cwd: Path, **env: object) -> int:
        told = self.run("sbatch", "--parsable", *command, cwd=cwd, **env)
        return int(told.split(";")[0])

    def state(self, job: int) -> str:
        """PENDING, RUNNING, COMPLETING ...; of an array, each task's once; '' when it has ended."""
        with suppress(AssertionError):  # an id that is no longer known is an error
            return " ".join(sorted(set(self.run("squeue", "-h", "-o", "%T", "-j", job).split())))
        return ""

    def states(self) -> list[str]:
        """Of the nodes: idle, mix, down* (the star: it does not answer)."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            return self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t", seconds=5.0).split()
        return []

    def wait_until(self, condition: Callable[[], object], seconds: float, what: str, *logs: Path) -> None:
        patience = Patience(seconds)
        while not condition():
            if patience.turn() <= 0:
                files = [*logs, *sorted(self.folder.glob("*.log")), *sorted(self.folder.glob("*.out"))]
                ends = [f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in files if file.exists()]
                raise AssertionError(f"{what} did not come within {seconds:g} s\n" + "\n".join(ends))
            time.sleep(0.2)


def listening(folder: Path) -> set[str]:
    """The addresses at which the daemons of this folder wait for connections."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if re.match(r"slurm|munge|srun", process.name()) and process.environ().get("SLURM_CONF", "").startswith(
                str(folder)
            ):
                found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def keep(command: list[str]) -> None:
    """Run a command until the input ends, then kill it and everything that it started, also what left its parent."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to this process
    subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # from now on the dead are not kept
    sys.stdin.buffer.read()
    while processes := psutil.Process().children(recursive=True):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


if __name__ == "__main__":
    keep(sys.argv[1:])
