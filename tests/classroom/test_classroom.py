"""`zerolab classroom` with real labs: who gets in, who gets GPUs, what is ended, and that nothing is left."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
from jupyter_client.blocking import BlockingKernelClient
from rich.console import Console
from test_launch import wait_until

from zerolab.classroom import board, labs, run, watch
from zerolab.classroom.broker import Entry
from zerolab.cli import main
from zerolab.lab.exercises.judge import digest
from zerolab.lab.ranks.rank import NAME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the classroom is for Linux"),
]
ROOT = Path(__file__).resolve().parents[2]


class Room:
    """A classroom in a process of its own, and all processes that were ever seen below it."""

    def __init__(self, folder: Path, *options: object) -> None:
        self.folder, self.log, self.seen = folder / "class", (folder / "log").open("w+"), {}
        command = [sys.executable, "-m", "zerolab.cli", "classroom", "--folder", str(self.folder), "--port", "18801"]
        self.process = subprocess.Popen(
            [*command, *map(str, options)],
            stdout=self.log,
            stderr=self.log,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "JUPYTER_TOKEN": "very-secret"},
            start_new_session=True,
        )

    def told(self) -> str:
        return Path(self.log.name).read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.told() or self.process.poll() is not None)
        assert text in self.told(), self.told()

    def handout(self) -> list[dict[str, str]]:
        lines = [line.split(",") for line in (self.folder / "handout.csv").read_text().splitlines()]
        return [dict(zip(lines[0], line)) for line in lines[1:]]

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[process.pid] = process
        return [process for process in self.seen.values() if _lives(process)]

    def end(self, how: int) -> list[psutil.Process]:
        """What still lives 20 seconds after the signal `how`."""
        self.processes()
        self.process.send_signal(how)
        try:
            self.process.wait(300.0)
            with suppress(AssertionError):
                wait_until(lambda: not self.processes())
            return self.processes()
        finally:
            for process in [self.process, *self.processes()]:
                process.kill()
            self.process.wait(120.0)
            self.log.close()


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def request(row: dict[str, str], path: str, token: str, method: str = "GET", body: object = None) -> object:
    """What a lab answers; its status where it refuses."""
    headers = {"Authorization": f"token {token}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{row['port']}/api/{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code


class Notebook:
    """A kernel that a student's lab has started, as JupyterLab would."""

    def __init__(self, room: Room, row: dict[str, str]) -> None:
        self.row, self.told = row, ""
        self.id = request(row, "kernels", row["token"], "POST", {"name": "python3"})["id"]
        file = room.folder / row["student"] / f".jupyter/runtime/kernel-{self.id}.json"
        self.client = BlockingKernelClient(connection_file=str(file))
        self.client.load_connection_file()
        self.client.start_channels(hb=False)  # a kernel that starts slowly has no heartbeat, and is not dead
        self.client.wait_for_ready(timeout=600)
        assert "without encryption" not in (room.folder / row["student"] / "log").read_text()

    def begin(self, code: str) -> None:
        self.told = ""
        self.cell = self.client.execute(code)

    def until(self, text: str) -> str:
        """Read what the cell shows until `text` is in it."""
        while text not in self.told:
            message = self.client.get_iopub_msg(timeout=600)
            content = message["content"]
            if message["parent_header"].get("msg_id") != self.cell:
                continue
            shown = content.get("data", {}).get("text/plain", "")  # the line of `lab.start`, where its progress was
            self.told += content.get("text", "") + shown + "\n".join(content.get("traceback", []))
            if "execution_state" in content:
                self.told += f"<{content['execution_state']}>"
        return self.told

    def close(self) -> None:
        """As closing the notebook does."""
        self.client.stop_channels()
        assert request(self.row, f"kernels/{self.id}", self.row["token"], "DELETE") is None


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    limits = ("--memory", 1.2, "--processes", 14)
    room = Room(tmp_path_factory.mktemp("room"), "--students", 3, "--gpus", 2, *limits)
    try:
        room.wait_for("ready: 3 of 3 labs")
        yield room
        left = room.end(signal.SIGTERM)
        assert not left and room.process.returncode == 0
        assert room.told().endswith("all labs, notebooks and ranks have ended\n")
    finally:
        if room.process.poll() is None:
            room.end(signal.SIGKILL)


def test_each_lab_takes_its_own_token_alone(room: Room) -> None:
    rows = room.handout()
    assert len({row["port"] for row in rows}) == len({row["token"] for row in rows}) == 3
    assert b"\r" not in (room.folder / "handout.csv").read_bytes()  # curl would take it for a part of the address
    for row in rows:
        assert row["address"] == f"http://127.0.0.1:{row['port']}/lab/tree/00_welcome.ipynb?token={row['token']}"
        taken = [request(row, "contents", token) for token in ["", *(other["token"] for other in rows)]]
        assert taken[: 1 + rows.index(row)] + taken[2 + rows.index(row) :] == [403] * 3
        names = {entry["name"] for entry in taken[1 + rows.index(row)]["content"]}
        assert "00_welcome.ipynb" in names and "my" not in names
        assert "before.py" in request(row, "kernelspecs/python3", row["token"])["spec"]["argv"][-1]  # it knows %%ranks
    assert {os.stat(room.folder / name).st_mode & 0o077 for name in ("", "handout.csv", rows[0]["student"])} == {0}
    secrets = [row["token"] for row in rows]
    for process in room.processes():
        shown, connections = "", []
        with suppress(psutil.NoSuchProcess):  # a lab's helpers come and go
            shown = " ".join(process.cmdline()) + str(process.environ())
            connections = process.net_connections("inet")
        assert not [token for token in [*secrets, "very-secret"] if token in shown], process
        addresses = {each.laddr.ip for each in connections if each.status == "LISTEN"}
        assert addresses <= {"127.0.0.1", "::1"}
    logs = "".join((room.folder / row["student"] / "log").read_text() for row in rows) + room.told()
    assert "ServerApp" in logs and not [token for token in secrets if token in logs]


def test_a_second_classroom_does_not_start_in_the_same_folder(room: Room, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerolab.cli", "classroom", "--folder", str(room.folder), "--students", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and f"another classroom is running in {room.folder}" in done.stderr


def test_packages_are_read_only_and_other_students_out_of_sight(room: Room) -> None:
    if "unshare" in room.told():
        pytest.skip(f"no mount namespaces here: {room.told()}")
    notebook = Notebook(room, room.handout()[0])
    notebook.begin(READ_ONLY)
    told = notebook.until("<idle>").splitlines()
    assert told[:3] == ["<busy>Read-only file system", "Read-only file system", "['student-01']"]
    assert "not permitted" in told[3] or "superuser" in told[3] or "denied" in told[3]
    notebook.close()


READ_ONLY = """
import os, subprocess, sys
import zerolab
for folder in (sys.prefix, os.path.dirname(zerolab.__file__)):
    try:
        open(os.path.join(folder, "written"), "w")
    except OSError as error:
        print(error.strerror)
print(os.listdir("../.."))
print(subprocess.run(["umount", sys.prefix], capture_output=True, text=True).stderr)
"""


def test_the_page_for_teachers_names_what_a_cell_can_do(room: Room) -> None:
    """Whoever closes one of these gaps takes it from docs/teachers.md."""
    (other,) = [process for process in room.processes() if "student-02" in _cwd(process)][:1]
    notebook = Notebook(room, room.handout()[0])
    secret = f"/proc/{other.pid}/root{room.folder}/student-02/.jupyter/jupyter_server_config.json"
    notebook.begin(GAPS.format(secret=secret, solution=str(ROOT / "solutions/04_zero1.py"), other=other.pid))
    told = notebook.until("<idle>")
    hidden = os.geteuid() != 0 and "unshare" not in room.told()  # an ordinary user's labs have user namespaces
    assert f"another's token: {not hidden}" in told
    assert "solutions: True" in told and "signals: True" in told
    notebook.close()
    page = (ROOT / "docs" / "teachers.md").read_text(encoding="utf-8")
    gaps = page.partition("## What the classroom does not stop\n")[2].partition("\n## ")[0]
    assert all(
        word in gaps for word in ("everybody's token", "if you start it as root", "`solutions/`", "End anybody's")
    )


def _cwd(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.cwd()
    return ""


GAPS = """
import os
def can(what):
    try:
        what()
    except OSError:
        return False
    return True
print("another's token:", can(lambda: open({secret!r}).read()))
print("solutions:", can(lambda: open({solution!r}).read()))
print("signals:", can(lambda: os.kill({other}, 0)))
"""


@pytest.mark.exhaustive
def test_closed_notebooks_leave_nothing_and_their_gpus_go_to_the_next(room: Room) -> None:
    first, second = (Notebook(room, row) for row in room.handout()[:2])
    first.begin("from zerolab import lab\nlive = lab.start(1, device='cuda')")
    assert "GPU 0 for 10 minutes" in first.until(
        "1 rank on the CPU, because this classroom is a rehearsal without GPUs (leased: GPU 0)"
    )
    second.begin("from zerolab import lab\nlive = lab.start(2, device='cuda')")
    second.until("waiting for 2 GPUs: place 1 in the queue")
    ranks = [process for process in room.processes() if _name(process) == NAME]
    assert len(ranks) == 1
    # What is no child of the notebook any more is ended too, and what has put its environment off.
    disguised = "" if "unshare" in room.told() else "env -i setsid sleep 321 & echo $!; "
    first.begin(LEAVES.format(script=f"setsid sleep 321 & echo $!; {disguised}echo; read line"))
    pids = [int(word) for word in first.until("<idle>").split() if word.isdecimal()]
    assert len(pids) == 1 + bool(disguised) and all(map(psutil.pid_exists, pids)), first.told
    left = [*map(psutil.Process, pids)]
    wait_until(lambda: all("321" in _words(each) for each in left))
    first.begin("keeper.stdin.close()\nkeeper.wait()")
    wait_until(lambda: not [each for each in left if _lives(each)])
    first.close()
    wait_until(lambda: not _lives(ranks[0]))
    second.until("(leased: GPUs 0, 1)")
    # Too much memory: the rank that holds it is ended, the notebook is told why.
    second.begin("live.run('import time, torch; many = rank and (torch.ones(400_000_000), time.sleep(20))')")
    told = second.until("<idle>")
    assert "rank 1 was ended: the classroom ended this rank, which held" in told, told
    assert "each student may hold 1.20 GB, and you held" in told
    # Too many processes: the notebook and all that it started.
    second.begin("import subprocess\nmany = [subprocess.Popen(['sleep', '321']) for _ in range(12)]")
    room.wait_for("each student may have 14 processes, and you had")
    wait_until(lambda: not [each for each in room.processes() if "321" in _words(each)])
    second.client.stop_channels()
    third = Notebook(room, room.handout()[1])
    third.begin("from zerolab.lab.ranks import notices\nnotices.show()")
    third.until("and all that it had started: each student may have 14 processes")
    third.close()


LEAVES = """
import subprocess
keeper = subprocess.Popen(["sh", "-c", {script!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print("left behind:", *iter(keeper.stdout.readline, "\\n"))
"""


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_the_teacher_opens_and_closes_solutions(room: Room) -> None:
    """The link at the end of a lesson leads to the solution, or to a page that says that it is not open."""
    rows, name = room.handout(), "03_data_parallel.ipynb"
    lesson = request(rows[0], f"contents/{name}", rows[0]["token"])["content"]
    assert any(f"(../solutions/{name})" in cell["source"] for cell in lesson["cells"])

    def shown(row: dict[str, str], name: str = name) -> str:
        return str(request(row, f"contents/solutions/{name}", row["token"])["content"]["cells"])

    assert all(labs.CLOSED in shown(row) for row in rows)
    # JupyterLab saves a page with other metadata than it was written with; a student may write into one.
    page = room.folder / "student-01/work/solutions" / name
    page.write_text(json.dumps(json.loads(page.read_text()), indent=3))
    written = room.folder / "student-02/work/solutions" / name
    written.write_text(page.read_text().replace(labs.CLOSED, "my notes"))

    shutil.copy(ROOT / "solutions" / name, room.folder / "solutions")
    wait_until(lambda: all("Weight each rank's loss" in shown(row) for row in (rows[0], rows[2])))
    assert "my notes" in shown(rows[1]) and "Weight each" in shown(rows[1], name.replace(".ipynb", ".new.ipynb"))
    assert all(labs.CLOSED in shown(row, "04_zero1.ipynb") for row in rows)
    (room.folder / "solutions" / name).unlink()
    wait_until(lambda: all(labs.CLOSED in shown(row) for row in (rows[0], rows[2])))


def test_a_lab_that_dies_comes_back_where_it_was(room: Room) -> None:
    row = room.handout()[2]
    notebook = Notebook(room, row)
    kernel = [each for each in room.processes() if any(notebook.id in word for word in _words(each))]
    server = [each for each in room.processes() if f"--port={row['port']}" in _words(each)]
    assert len(kernel) == len(server) == 1
    for folder in (".jupyter", "work"):  # nor does it matter what the student has deleted
        shutil.rmtree(room.folder / "student-03" / folder)
    server[0].kill()
    room.wait_for("student-03: JupyterLab ended with -9; starting it again")
    wait_until(lambda: not _lives(kernel[0]))

    def answers() -> bool:
        with suppress(OSError):
            return isinstance(request(row, "status", row["token"]), dict)
        return False

    wait_until(answers)
    notebook.client.stop_channels()
    assert room.handout()[2] == row and (room.folder / "student-03/work/00_welcome.ipynb").exists()


def all_solutions_are_open(work: Path) -> None:
    for solution in (ROOT / "solutions").glob("*.ipynb"):
        cells = nbformat.read(solution, as_version=4).cells
        copy = nbformat.read(work / "solutions" / solution.name, as_version=4).cells
        kept = [cell for cell in cells if cell.id != "install"]
        assert [cell.id for cell in copy] == [cell.id for cell in kept]
        assert [c for c in copy if c.cell_type == "code"] == [c for c in kept if c.cell_type == "code"]
        lesson = (work / solution.name).read_text()
        assert labs.NO_ANSWERS in lesson and "<details>" not in lesson
        assert "<details>" in (ROOT / "lessons" / solution.name).read_text()


def test_nothing_outlives_a_classroom_that_is_killed_and_tokens_stay(tmp_path: Path) -> None:
    killed = Room(tmp_path, "--students", 1, "--solutions", "--no-answers")
    killed.wait_for("ready: 1 of 1 labs")
    all_solutions_are_open(killed.folder / "student-01/work")
    row = killed.handout()[0]
    Notebook(killed, row).client.stop_channels()
    assert len(killed.processes()) >= 2
    assert not killed.end(signal.SIGKILL)
    again = Room(tmp_path, "--students", 2)
    try:
        wait_until(lambda: len(again.handout()) == 2)
        assert again.handout()[0] == row
    finally:
        assert not again.end(signal.SIGINT)


def test_the_board_trusts_nothing_that_a_student_may_write(tmp_path: Path) -> None:
    source = "print('answer')\n"
    good = {"passed": {"01.1": digest(source), "01.2": digest(source)}}
    good |= {"predictions": {"01.1": 48, "05.2": "small", "02.1": None}}
    odd = {
        "passed": {"01.1": 3},
        "predictions": {"01.1": [float("inf")], "05.2": "\x1b[2J[red]$", "x": 1, "01.2": 10**400},
    }
    contents = [json.dumps(good), json.dumps(odd), "[" * 100_000, "{}", "[]", '{"passed": 3, "predictions": "x"}']
    for number, content in enumerate(contents):
        my = tmp_path / f"student-{number}/work/my"
        my.mkdir(parents=True)
        (my / "progress.json").write_text(content)
        (my / "ex_01_1.py").write_text(source)
    (my / "progress.json").unlink()
    (my / "progress.json").symlink_to("/dev/zero")
    room = board.rooms(tmp_path)
    assert room["student-0"].passed == {"01.1"}  # the answer to 01.2 is not there
    assert [one.passed for one in list(room.values())[1:]] == [set()] * 5
    counts = board.predictions(room.values())
    assert list(counts) == ["01.1", "01.2", "02.1", "05.2"]
    assert board.spread(counts["01.1"]) == "48 (1), [inf] (1)"
    assert board.spread(counts["05.2"]) == "small (1), ?[2J[red]$ (1)" and board.spread(counts["02.1"]) == "skipped (1)"
    with (console := Console(file=io.StringIO(), width=100)).capture() as shown:
        console.print(*board.room_view(room))
    assert "[red]$" in shown.get() and "\x1b" not in shown.get() and "student-" not in shown.get()
    figure = board.picture(room)
    assert "5 predictions by 6 students" in " ".join(text.get_text() for text in figure.texts)  # one was skipped
    figure.savefig(io.BytesIO())


def test_the_board_of_a_class_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "student-01/work/my").mkdir(parents=True)
    said = ["No exercise passes yet (1 student).", "Nothing has been predicted yet."]
    assert board.room_view(board.rooms(tmp_path)) == said
    (tmp_path / "student-01/work/my/progress.json").write_text('{"predictions": {"01.1": 48}}')
    passed, predicted = board.room_view(board.rooms(tmp_path))
    assert passed == said[0]
    assert [column.header for column in predicted.columns] == ["", "answers", "students", "median"]


def test_the_teachers_table_fits_on_a_terminal_of_80_columns() -> None:
    everything, some = tuple("01234567"), ("0", "2", "3", "5", "6", "10")
    uuid = f"GPU-{'8932f937-' * 4}"
    entries = [
        Entry("", everything, 599.9),
        Entry("", some, 0.0),
        Entry("", (), 0.0, 12),
        Entry("", (uuid,), 61.0),
        None,
    ]
    lent = [run._lent(entry) for entry in entries]
    assert lent == [("0-7", "9:59"), ("0,2-3,5-6,10", "0:00"), ("place 12", ""), (uuid, "1:01"), ("", "")]
    rows = [["student-20", "starting", *words, "12", "64", "12.3 GB", "14", "40"] for words in lent]
    console = Console(file=io.StringIO(), width=80)
    console.print(board.teacher_view(rows, "20 students"))
    told = console.file.getvalue()
    assert max(map(len, told.splitlines())) <= 80 and "…" not in told, told
    words = ["student", "port", "GPUs", "left", "notebooks", "ranks", "memory", "pass", "predicted", "12.3 GB", "0-7"]
    assert not [word for word in words if f"{word} " not in told.replace("\n", " \n")]


@pytest.mark.parametrize("shielded", [True, False])
def test_an_orphan_belongs_to_the_lab_whose_view_it_has(shielded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment, which a student may put off or change, counts only where its view is no lab's."""
    ours, views = 100, {}
    processes: list[subprocess.Popen] = []

    def begin(view: int, **environment: str) -> subprocess.Popen:
        process = subprocess.Popen(["sleep", "321"], env=environment)
        processes.append(process)
        views[process.pid] = view if shielded else ours
        return process

    try:
        servers = {name: begin(view) for name, view in (("one", 1), ("two", 2), ("three", 0))}  # 0: it cannot be seen
        rooms = [SimpleNamespace(student=name, process=server) for name, server in servers.items()]
        bare, renamed = begin(1), begin(1, **{labs.STUDENT: "two"})
        named, _, _ = begin(ours, **{labs.STUDENT: "two"}), begin(ours), begin(0)  # and two that are nobody's
        monkeypatch.setattr(watch, "view_of", lambda pid: views.get(pid, ours))
        usage = watch.Watch(rooms, 1e12, 1000)._measure()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = {name: {each.process.pid: each.branch for each in mine.found} for name, mine in usage.items()}
    expected = {name: {server.pid: 0} for name, server in servers.items()}
    expected["one" if shielded else "two"][renamed.pid] = expected["two"][named.pid] = -1
    if shielded:
        expected["one"][bare.pid] = -1
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ip", "0.0.0.0", "--port", "9100"], "ssh -L 9100:127.0.0.1:9100 <this machine>"),
        (["--ip", "::", "--port", "9100"], "its token can run programs as you"),
        (["--students", "0"], "--students must be from 1"),
        (["--memory", "0.2"], "--memory must be 0.5 or more, in GB, not 0.2"),
        (["--memory", "4GB"], "--memory: must be a number above 0, not 4GB"),
        (["--port", "80"], "--port must be"),
    ],
)
def test_what_is_refused_is_one_line_and_makes_nothing(arguments, why, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["classroom", "--folder", str(tmp_path / "class"), *arguments])
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == "" and why in told.err and len(told.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
