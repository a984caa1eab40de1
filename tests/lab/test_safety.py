"""Who could come in: where ranks listen, what of the server's secrets they see, and what the lab refuses to open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerolab.lab import __main__ as opening

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# A notebook's process with two live ranks, and then two of a launch: who listens where, what a cell can show.
SCRIPT = """
import io, json, os, sys, threading, time
from contextlib import redirect_stdout
import psutil
import zerolab
from zerolab import lab
from zerolab.lab.ranks import session

me = psutil.Process()

def listening():
    here = [me, *me.children(recursive=True)]
    # A UDP socket has no such state: any counts that takes from everybody, and not only what it asked for (of DNS).
    return {p.pid: sorted({c.laddr.ip for c in p.net_connections("inet")
                           if c.status == "LISTEN" or (c.type == 2 and not c.raddr)}) for p in here}

if __name__ == "__main__":
    before, told = me.num_fds(), io.StringIO()
    with redirect_stdout(told):
        live = lab.start(2)
        live.run("import os, torch, torch.distributed as dist; dist.all_reduce(torch.ones(1)); print(dict(os.environ))",
                 show=True)
    keys = [rank.client.session.key.decode() for rank in live._ranks.values()]
    files = [me.num_fds() - before, *(psutil.Process(rank.process.pid).num_fds() for rank in live._ranks.values())]
    report = {"lab": listening(), "told": told.getvalue(), "keys": keys, "files": files}
    report["mode"] = os.stat(live._folder).st_mode & 0o777
    lab.stop()
    with zerolab.Ranks(2) as pool:
        pool.run(os.getpid)
        run = threading.Thread(target=pool.run, args=(time.sleep, 3.0))
        run.start()
        while run.is_alive() and sum(map(bool, report.setdefault("launch", {}).values())) < 3:
            report["launch"] = listening()
        run.join()
    print(json.dumps(report), file=sys.stderr)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux tells of sockets and files")
def test_nothing_listens_beyond_loopback_and_no_secret_is_shown(tmp_path):
    """Not even where an IPython profile opens every kernel to the network, and the server's tokens are around."""
    profile = tmp_path / "profile_default"
    profile.mkdir()
    (profile / "ipython_kernel_config.py").write_text('c.IPKernelApp.ip = "0.0.0.0"\n')
    script = tmp_path / "notebook.py"
    script.write_text(SCRIPT)
    secrets = dict.fromkeys(("JUPYTER_TOKEN", "JPY_API_TOKEN", "JUPYTERHUB_API_TOKEN"), "very-secret")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | secrets | {"IPYTHONDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stderr.splitlines()[-1])
    for what in ("lab", "launch"):
        assert len(report[what]) >= 3  # this process and two ranks
        for pid, addresses in report[what].items():
            assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, (what, pid)
        assert sum(bool(addresses) for addresses in report[what].values()) >= 3  # a listing that lists
    assert "PATH" in report["told"]
    assert not [key for key in [*report["keys"], "very-secret"] if key in report["told"]]
    assert report["mode"] == 0o700  # of the folder where kernels write their keys, for a moment
    # What the doctor asks of the limit on open files is enough, and not much more than that.
    notebook, *ranks = report["files"]
    assert 128 / 3 < max(notebook + 60, *ranks) < 128 + 16 * 2


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "*", "192.168.1.5", "some-name"])
def test_the_lab_does_not_open_to_the_network_unasked(address, monkeypatch, capsys, tmp_path):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    arguments = ["lab", f"--ip={address}", "--work", str(tmp_path), "--no-browser"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        opening.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "its token can run programs as you" in told and "ssh -L" in told and not started
    monkeypatch.setattr(sys, "argv", [*arguments, "--open-to-network"])
    opening.main()
    assert f"--ip={address}" in started[0]


def test_no_stored_notebook_has_a_token():
    for folder in ("lessons", "solutions"):
        notebooks = list((ROOT / folder).glob("*.ipynb"))
        assert notebooks
        for notebook in notebooks:
            assert "token=" not in notebook.read_text(encoding="utf-8"), notebook
