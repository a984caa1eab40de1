"""Where the system allows it, each lab gets its own view of the files: packages read-only, other folders out of sight.

The view is a mount namespace, made by `unshare`. Root gives up the right to undo it. Any other user never has that
right: such a user is root in the namespace only while the mounts are made.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import zerolab

PROBE_TIMEOUT = 20.0

# Arguments: the class's folder, the student's, an empty one, the read-only paths, --, the command.
MOUNTS = """
set -e
class=$1 home=$2 aside=$3; shift 3
while [ "$1" != -- ]; do mount -n --bind "$1" "$1"; mount -n -o remount,bind,ro "$1"; shift; done; shift
mount -n --bind "$home" "$aside"
mount -n -t tmpfs -o mode=755,size=1m tmpfs "$class"
mkdir "$home"
mount -n --move "$aside" "$home"
cd "$home/work"
exec "$@"
"""


def shielded(command: list[str], folder: Path, home: Path, aside: Path) -> list[str]:
    """`command` with a view of its own: `folder` holds nothing but `home`, and the packages cannot be written to."""
    packages = Path(zerolab.__file__).resolve().parent
    shared = {sys.prefix, sys.base_prefix, str(packages), str(packages.parent / "lessons")}
    paths = sorted(path for path in shared if os.path.isdir(path) and path != "/")
    inside = ["sh", "-c", MOUNTS, "classroom", str(folder), str(home), str(aside), *paths, "--"]
    if os.geteuid() == 0:
        away = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
        return ["unshare", "--mount", *inside, *away, *command]
    back = ["unshare", "--user", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}"]
    return ["unshare", "--user", "--map-root-user", "--mount", *inside, *back, *command]


def why_not(folder: Path, home: Path, aside: Path) -> str:
    """Why the system does not allow it; "" if it does."""
    try:
        probe = shielded(["true"], folder, home, aside)
        done = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip().partition("\n")[0] or f"exit {done.returncode}"


def view_of(pid: int) -> int:
    """Which view of the files a process has, which, unlike its environment, it keeps; 0 if that cannot be seen."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino
    return 0
