"""The course under a real JupyterHub and its proxy, as docs/administrators.md says: servers, ranks, leases, culling."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs_common import PYTHONPATH, ROOT
from ports import free_ports
from test_launch import wait_until

from zerolab.classroom import labs
from zerolab.lab.ranks import lease

pytest.importorskip("jupyterhub", reason="needs JupyterHub: pip install 'zerolab[hub]'")
pytest.importorskip("jupyterhub_idle_culler", reason="needs jupyterhub-idle-culler: pip install 'zerolab[hub]'")
websocket = pytest.importorskip("websocket", reason="needs websocket-client, which comes with JupyterLab")

PROXY = shutil.which("configurable-http-proxy")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="leases are for Linux"),
    pytest.mark.skipif(PROXY is None, reason="needs JupyterHub's proxy: npm install --global configurable-http-proxy"),
]
START = 120.0  # seconds until the hub or a server answers, on a busy machine

# Beside the page's lines: free ports, a teacher's token, and a culler that waits for the file `cull`.
OURS = """
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api_port}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.JupyterHub.authenticator_class = "null"
scopes = ["admin:users", "admin:servers", "tokens"]
c.JupyterHub.load_roles.append({{"name": "teacher", "services": ["teacher"], "scopes": scopes}})
(culler,) = [service for service in c.JupyterHub.services if "culler" in service["name"]]
wait = 'while [ ! -e cull ]; do sleep 0.2; done; exec "$@"'
culler["command"] = ["sh", "-c", wait, "sh", *culler["command"]]
"""
# As on the page, but all servers run as this user, and are idle after three seconds.
CONFIGURE = """
c.JupyterHub.services = [{{"name": "teacher", "api_token": {token!r}}}]
configure(c, gpus=2, accounts=False, cull_minutes=0.05)
"""


class Hub:
    """JupyterHub in a process of its own, and all processes that were ever seen below it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token, self.seen = folder, secrets.token_hex(16), {}
        self.port, hub_port, api_port = free_ports(3)
        page = (ROOT / "docs" / "administrators.md").read_text(encoding="utf-8")
        (config,) = re.findall(r"^```\n(from zerolab\.classroom\.hub.*?)^```$", page, re.DOTALL | re.MULTILINE)
        assert config.count("configure(c, gpus=2)") == 1
        config = config.replace("configure(c, gpus=2)", CONFIGURE.format(token=self.token))
        config += OURS.format(port=self.port, hub_port=hub_port, api_port=api_port, proxy=PROXY)
        (folder / "jupyterhub_config.py").write_text(config)
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterhub"],
            cwd=folder,
            stdout=self.log,
            stderr=self.log,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PYTHONPATH},
            start_new_session=True,
        )

    def told(self) -> str:
        return Path(self.log.name).read_text()

    def request(self, path: str, token: str, method: str = "GET", body: object = None) -> Any:
        """What is answered at `path`; the status where that is an error, 0 where nobody answers."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {token}"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", data, headers, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def teacher(self, path: str, method: str = "GET", body: object = None) -> Any:
        return self.request(f"hub/api/{path}", self.token, method, body)

    def wait(self) -> None:
        wait_until(lambda: self.process.poll() is not None or isinstance(self.teacher("users"), list))
        assert self.process.poll() is None, self.told()

    def user(self, name: str) -> str:
        """A token of the user `name`, who may log in and so exists."""
        return self.teacher(f"users/{name}/tokens", "POST", {})["token"]

    def ready(self, name: str) -> bool:
        return bool(self.teacher(f"users/{name}")["servers"].get("", {}).get("ready"))

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[process.pid] = process
        return [process for process in self.seen.values() if lives(process)]

    def end(self) -> list[psutil.Process]:
        """What still lives a while after SIGTERM."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60.0)
            with suppress(AssertionError):
                wait_until(lambda: not self.processes())
            return self.processes()
        finally:
            for process in [self.process, *self.processes()]:
                process.kill()
            self.process.wait(10.0)
            self.log.close()


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Notebook:
    """A kernel of a user's server, over the proxy, as JupyterLab has it."""

    def __init__(self, hub: Hub, user: str, token: str) -> None:
        self.told, self.cell = "", ""
        kernel = hub.request(f"user/{user}/api/kernels", token, "POST", {"name": "python3"})["id"]
        self.connection = websocket.create_connection(
            f"ws://127.0.0.1:{hub.port}/user/{user}/api/kernels/{kernel}/channels",
            header=[f"Authorization: token {token}"],
            timeout=START,
            http_no_proxy=["127.0.0.1"],
        )

    def begin(self, code: str) -> None:
        self.told, self.cell = "", secrets.token_hex(8)
        header = {
            "msg_id": self.cell,
            "msg_type": "execute_request",
            "session": "test",
            "username": "",
            "version": "5.3",
        }
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
        self.connection.send(json.dumps(message))

    def until(self, text: str, seconds: float = START) -> str:
        """Read what the cell shows until `text` is in it."""
        deadline = time.monotonic() + seconds
        while text not in self.told:
            assert time.monotonic() < deadline, self.told
            message = json.loads(self.connection.recv())
            content = message["content"]
            if message["parent_header"].get("msg_id") == self.cell:
                self.told += content.get("text", "") + "\n".join(content.get("traceback", []))
                if content.get("execution_state") == "idle":
                    assert text in self.told + "<idle>", self.told
                    self.told += "<idle>"
        return self.told


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    hub = Hub(tmp_path_factory.mktemp("hub"))
    try:
        yield hub
        assert not hub.end(), hub.told()
    finally:
        if hub.process.poll() is None:
            hub.end()


SUM = """
from zerolab import lab
live = lab.start(2)
live.run("import os, torch, torch.distributed as dist")
live.run("x = torch.tensor([rank + 1.0]); dist.all_reduce(x)")
live.run("found = x.item(), 'JUPYTERHUB_API_TOKEN' in os.environ")
print("found", live.pull("found"))
lab.stop()
"""


def answer(path: Path, *messages: bytes) -> dict[str, Any]:
    """What the broker says to these lines."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60.0)
        connection.connect(str(path))
        for message in messages:
            connection.sendall(message)
        return json.loads(connection.makefile().readline())


def test_two_users_compute_take_turns_with_the_gpus_and_are_culled(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.wait()
    tokens = {name: hub.user(name) for name in ("ada", "grace", "barbara")}
    for name in ("ada", "grace"):
        assert hub.request(f"hub/api/users/{name}/server", tokens[name], "POST") is None
    wait_until(lambda: all(map(hub.ready, ("ada", "grace"))))
    names = {entry["name"] for entry in hub.request("user/ada/api/contents", tokens["ada"])["content"]}
    assert "00_welcome.ipynb" in names and "solutions" in names
    page = hub.request("user/ada/api/contents/solutions/03_data_parallel.ipynb", tokens["ada"])["content"]
    assert [cell["source"] for cell in page["cells"]] == [labs.CLOSED]
    assert hub.request("user/ada/api/contents", tokens["grace"]) == 403
    ada, grace = (Notebook(hub, name, tokens[name]) for name in ("ada", "grace"))

    for notebook in (ada, grace):
        notebook.begin(SUM)
    for notebook in (ada, grace):
        told = notebook.until("<idle>")
        assert "found [(3.0, False), (3.0, False)]" in told, told  # nor do ranks have the token

    ada.begin("live = lab.start(2, device='cuda')")
    ada.until("(leased: GPUs 0, 1)")
    broker = hub.folder / "class" / "gpus"
    for first in (lease.line(want=1), lease.line(token="", student="ada"), lease.line(token="0" * 32), b"no JSON\n"):
        assert "does not know this notebook's token" in answer(broker, first)["refused"]
    assert "does not know" in answer(broker, lease.line(token=hub.token), lease.line(want=1))["refused"]  # no user's
    # With her own token grace is grace, whatever else she claims; ada's second notebook would be told of its own GPUs.
    claim = lease.line(token=tokens["grace"], student="ada", name="ada")
    assert answer(broker, claim, lease.line(want=1)) == {"place": 1}
    assert answer(broker, lease.line(token=tokens["ada"]), lease.line(want=1)) == {"own": ["0", "1"]}
    grace.begin("live = lab.start(1, device='cuda')")
    grace.until("waiting for a GPU: place 1 in the queue")
    ada.begin("lab.stop()")
    grace.until("(leased: GPU 0)")

    for process in hub.processes():  # nobody else reaches it, and no command line shows a token
        with suppress(psutil.NoSuchProcess):
            listening = {each.laddr.ip for each in process.net_connections("inet") if each.status == "LISTEN"}
            assert listening <= {"127.0.0.1", "::1"}, process
            words = " ".join(process.cmdline())
            assert not [token for token in [hub.token, *tokens.values()] if token in words], process

    # Idle servers are stopped, and what they had is lent to the next, who needs no server for that.
    monkeypatch.setenv(lease.SOCKET, str(broker))
    monkeypatch.setenv(lease.TOKEN, tokens["barbara"])
    told: list[str] = []
    (hub.folder / "cull").touch()
    lent = lease.ask(2, START, told.append)
    assert lent.gpus == ["0", "1"] and "waiting for 2 GPUs: place 1 in the queue" in told[0]
    lent.release()
    wait_until(lambda: not hub.ready("ada") and not hub.ready("grace"))
    for notebook in (ada, grace):
        notebook.connection.close()
