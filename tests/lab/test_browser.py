"""Lesson 00 as a learner meets it: JupyterLab in headless Chromium, until a control moves a picture."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from test_launch import wait_until

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).resolve().parents[2]
FIRST_OUTPUT = 20.0  # seconds from the command to the first output of %%ranks, on an idle machine
SLOW = 10  # how many times longer a busy machine may take

# Without these Chromium looks for hosts of its maker's at every start.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"),
    pytest.mark.skipif(not any((ROOT / "lessons").glob("00_*.ipynb")), reason="needs the lessons: make lessons"),
    pytest.mark.slow,
]


@pytest.fixture
def server(tmp_path, clock):
    """The address that `python -m zerolab.lab --no-browser` prints, and when it was started."""
    log = (tmp_path / "log").open("w+")
    command = [sys.executable, "-m", "zerolab.lab", "--no-browser", "--work", str(tmp_path / "work"), "--port", "8765"]
    runtime = {"JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    env = os.environ | runtime | {"ZEROLAB_MY": ""}
    begin = clock()
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env, start_new_session=True)
    try:
        yield wait_for_address(process, log), begin
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        _, left = psutil.wait_procs(children, timeout=100)
        for child in left:
            child.kill()
        log.seek(0)
        told = log.read()
        log.close()
        assert not left, f"left behind: {left}"
        assert "without encryption" not in told


def wait_for_address(process, log):
    deadline = time.monotonic() + 60 * SLOW
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/\S*\?token=\w+", log.read()):
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(found[1])), timeout=10):
                return found[0]  # JupyterLab tells its address a moment before it listens there
        time.sleep(0.1)
    log.seek(0)
    pytest.fail(f"nobody listens within {60 * SLOW} s:\n{log.read()}")


def test_lesson_00_in_a_browser(server, tmp_path, clock):
    address, begin = server
    base = address.split("/lab")[0]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{base}/api/contents", timeout=600)  # without the token nobody gets in

    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(60_000 * SLOW)
        try:
            page.goto(address)
            lesson = tmp_path / "work" / "00_welcome.ipynb"
            scroll_through(page, lesson)
            run_all_cells(page)
            said = page.get_by_text("rank 3: I am rank 3 of 4").first
            said.wait_for()
            assert said.evaluate("said => getComputedStyle(said).wordBreak") == "normal"  # no line ends inside a word
            seconds = clock() - begin
            print(f"{seconds:.1f} s from the command to the first output of %%ranks")
            assert seconds < 3 * FIRST_OUTPUT

            control = page.get_by_label("ranks").locator("visible=true").last
            control.wait_for()
            page.get_by_text(re.compile(r"0 of \d+ predictions")).first.wait_for()  # the last cell has run
            assert page.get_by_text("LostRank").count() >= 1  # the cell that breaks it on purpose
            page.locator("div[style*='border-left: 5px']").first.wait_for()  # predictions are cards
            expect(page.get_by_text("Would you like to get notified about official Jupyter news?")).to_have_count(0)
            settings = page.locator("#jupyter-config-data").text_content()
            assert "ipyparallel-labextension" in str(json.loads(settings)["disabledExtensions"])  # no foreign tab
            control.scroll_into_view_if_needed()
            expect.set_options(timeout=10_000 * SLOW)
            picture = page.locator(".jupyter-widgets.widget-image").last
            before = picture.get_attribute("src")
            control.fill("4")
            control.press("Enter")
            page.get_by_text("Zero3 36.2 GB").first.wait_for()  # 10 + 14 x 7.5 / 4
            expect(picture).not_to_have_attribute("src", before)
            expect(picture).to_have_css("filter", "none")
            page.evaluate("document.body.setAttribute('data-jp-theme-light', 'false')")  # as a dark theme does
            expect(picture).to_have_css("filter", re.compile(r"invert\("))
            # Not by a key: the widget has the focus and keeps it to itself, and the next autosave is minutes away.
            page.locator("[data-command='docmanager:save']").locator("visible=true").first.click()
            wait_until(lambda: "widget-state" in lesson.read_text())
            follow_links(page)
            restart_kernels(address)
            page.goto(address)  # anew: the page has only what was saved
            scroll_through(page, lesson)
            expect(page.locator(".jupyter-widgets.widget-image").last).to_be_visible()
            expect(page.get_by_text("Error displaying widget")).to_have_count(0)
            page.screenshot(path=str(tmp_path / "good.png"))
        except Exception:
            page.screenshot(path=str(tmp_path / "page.png"))
            print(f"the page: {tmp_path / 'page.png'}")
            raise
        finally:
            browser.close()


def restart_kernels(address):
    base, token = re.fullmatch(r"(.*?)/lab.*token=(\w+)", address).groups()
    headers = {"Authorization": f"token {token}"}
    with urllib.request.urlopen(urllib.request.Request(f"{base}/api/kernels", headers=headers), timeout=600) as found:
        kernels = json.load(found)
    for kernel in kernels:
        again = f"{base}/api/kernels/{kernel['id']}/restart"
        urllib.request.urlopen(urllib.request.Request(again, method="POST", headers=headers), timeout=600).close()


def scroll_through(page, lesson):
    """As a learner does: on a slow machine JupyterLab attaches a cell far below only when somebody gets there."""
    notebook = page.locator(".jp-Notebook").locator("visible=true")
    cells = len(json.loads(lesson.read_text())["cells"])
    notebook.hover()

    def is_attached():
        page.mouse.wheel(0, 1000)
        return notebook.locator(".jp-Cell").count() == cells

    wait_until(is_attached)


def run_all_cells(page):
    """From the menu, as a learner would, once the kernel is there."""
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.get_by_text("Python 3 (ipykernel) | Idle").first.wait_for()  # without a kernel, Run asks for one
    page.get_by_role("menuitem", name="Edit", exact=True).click()
    page.get_by_role("menuitem", name="Clear Outputs of All Cells", exact=True).click()  # those it was stored with
    expect(page.get_by_text("rank 3: I am rank 3 of 4")).to_have_count(0)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def follow_links(page):
    """From the lesson to the entry of the glossary, from there to another lesson, and from that to its solution."""
    page.locator(".jp-Notebook a").get_by_text("rank", exact=True).first.click()
    expect(page.locator(".jp-MarkdownViewer h2[data-jupyter-id='Rank']")).to_be_in_viewport()
    page.locator(".jp-MarkdownViewer a").get_by_text("lesson 01", exact=True).first.click()
    page.locator("h1").get_by_text("01 · ").locator("visible=true").wait_for()
    page.locator(".jp-Notebook a").get_by_text("The solution of this lesson").locator("visible=true").click()
    page.locator("h1").get_by_text("(solved)").locator("visible=true").wait_for()
