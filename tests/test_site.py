"""The website: every lesson is there, links lead somewhere, and opening a page asks no other host for anything."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import zerolab

pytest.importorskip("sphinx")
pytest.importorskip("griffe")

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "docs" / "site" / "build.py"
REPOSITORY = "https://github.com/someone/zerolab"
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("*.ipynb"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}  # on opening a page

pytestmark = [pytest.mark.exhaustive]


@dataclass
class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors it has."""

    text: str
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    folded: list[str] = field(default_factory=list)
    inside: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "details":
            assert "open" not in found, "an answer that nobody asked for"
            self.inside += 1
        if tag in LOADED and LOADED[tag] in found:
            self.loads.append(found[LOADED[tag]])
        self.loads += re.findall(r"url\((.*?)\)", found.get("style", ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag == "details"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.folded.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site") / "out"
    command = [sys.executable, str(BUILD), "--out", str(out)]
    done = subprocess.run(
        command, env=os.environ | {"ZEROLAB_REPOSITORY": REPOSITORY}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {path.relative_to(site).as_posix(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_there(pages):
    docs = {f"docs/{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    notebooks = {f"{kind}/{stem}.html" for kind in ("lessons", "solutions") for stem in LESSONS}
    reference = {f"api/{name}.html" for name in ("zerolab", "zerolab.lab", "zerolab.lab.plots", "zerolab.measure")}
    explorables = {f"explore/{path.stem}.html" for path in (BUILD.parent / "explorables").glob("*.md")}
    assert pages.keys() >= {"index.html", "contributing.html", *docs, *notebooks, *reference, *explorables}


def test_every_link_leads_somewhere(site, pages):
    broken, internal = [], 0
    for name, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            internal += 1
            target = unquote(urlsplit(urljoin(f"/{name}", parts.path)).path.lstrip("/")) if parts.path else name
            if target.endswith("/") or not target:
                target += "index.html"
            if not (site / target).is_file():
                broken.append(f"{name}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                broken.append(f"{name}: {link} (no such place on the page)")
    assert internal > 1000
    assert broken == []


def test_no_page_loads_from_another_host(site, pages):
    foreign = [f"{n}: {u}" for n, page in pages.items() for u in page.loads if re.match(r"(\w+:)?//", u)]
    for style in site.rglob("*.css"):
        urls = re.findall(r"url\(\s*['\"]?([^)'\"]+)|@import\s+['\"]([^'\"]+)", style.read_text())
        foreign += [f"{style.name}: {u or i}" for u, i in urls if re.match(r"(\w+:)?//", u or i)]
    assert foreign == []


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson(lesson, site, pages):
    page = pages[f"lessons/{lesson}.html"]
    (download,) = [link for link in page.links if link.endswith(f"{lesson}.ipynb") and "_downloads" in link]
    assert (site / "lessons" / download).resolve().read_bytes() == (ROOT / "lessons" / f"{lesson}.ipynb").read_bytes()
    for opens in (
        "https://colab.research.google.com/github/",
        "https://kaggle.com/kernels/welcome?src=https://github.com/",
    ):
        assert f"{opens}someone/zerolab/blob/main/lessons/{lesson}.ipynb" in page.links
    assert f"../solutions/{lesson}.html" in page.links
    following = LESSONS[LESSONS.index(lesson) + 1 :][:1] or ["../docs/paths"]
    ending = page.text[page.text.index('class="next ') :]
    assert f'href="{following[0]}.html"' in ending


def shown(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("lesson", LESSONS)
def test_solutions_are_behind_a_click(lesson, pages):
    """Each reference is on the page, and it is folded."""
    page = pages[f"lessons/{lesson}.html"]
    cells = json.loads((ROOT / "solutions" / f"{lesson}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    answers = [source.partition("\n")[2] for source in sources if source.startswith("%%exercise")]
    folded = shown("".join(page.folded))
    assert all(shown(answer) in folded for answer in answers)
    whole = shown(re.sub(r"<details.*?</details>", "", page.text, flags=re.DOTALL))
    whole = re.sub(r"<[^>]*>", "", whole)
    assert not [answer for answer in answers if shown(answer) in whole]


def test_the_front_page_is_light(site, pages):
    """At 1.5 Mbit/s the page and its styles, for which the first paint waits, take 0.8 s, and all of it 2.4 s."""
    files = {name: (site / urlsplit(name).path).stat().st_size for name in set(pages["index.html"].loads)}
    awaited = (site / "index.html").stat().st_size + sum(size for name, size in files.items() if ".css" in name)
    assert awaited < 150_000
    assert sum(files.values()) < 450_000


def test_the_wheel_is_beside_the_pages(site):
    (wheel,) = site.glob("*.whl")
    assert wheel.name == f"zerolab-{zerolab.__version__}-py3-none-any.whl"


def test_the_tools_leave_no_mark(pages):
    for name, page in pages.items():
        for mark in ("Made with", "Read the Docs", "documentation</title>", "@pradyunsg"):
            assert mark not in page.text, name


def run(program: str) -> list[str]:
    env = os.environ | {"PYTHONPATH": str(BUILD.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_colab_and_kaggle_need_a_repository_on_github():
    said = run("""
import address
for repository in ("https://github.com/a/b", "https://gitlab.com/a/b", ""):
    print(*address.hosted(repository, "lessons/c.ipynb").values())
""")
    lesson = "a/b/blob/main/lessons/c.ipynb"
    colab = f"https://colab.research.google.com/github/{lesson}"
    assert said == [f"{colab} https://kaggle.com/kernels/welcome?src=https://github.com/{lesson}", "", ""]


def test_a_link_that_leads_nowhere_ends_the_build():
    said = run("""
import pathlib, build
site = build.Site(pathlib.Path("unused"), "")
print(site.rewrite("[a](using.md#errors-instead-of-wrong-numbers) `x[0](nowhere)`", "docs/habits.md"))
print(site.rewrite("[a](../README.md#the-lessons) [b](../CONTRIBUTING.md#the-house)", "docs/habits.md"))
try:
    site.rewrite("[a](nowhere.md)", "docs/habits.md")
except FileNotFoundError as error:
    print(error)
""")
    assert said == [
        "[a](/docs/using.md#errors-instead-of-wrong-numbers) `x[0](nowhere)`",
        "[a](/index.md#the-lessons) [b](/contributing.md#the-house)",
        "docs/habits.md links to nowhere.md",
    ]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)")
@pytest.mark.exhaustive
def test_in_a_browser(site, pages):
    """Every page in Chromium, as wide as a phone: it asks no other host for anything, and nothing sticks out."""
    playwright = pytest.importorskip("playwright.sync_api")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    foreign: list[str] = []
    missing: list[str] = []
    wide: list[str] = []
    # Without these Chromium looks for hosts of its maker's at every start.
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    try:
        with playwright.sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=quiet)
            page = browser.new_page(viewport={"width": 390, "height": 800})
            page.on("request", lambda r: r.url.startswith((home, "data:")) or foreign.append(f"{page.url}: {r.url}"))
            page.on("response", lambda r: r.status < 400 or missing.append(f"{page.url}: {r.url}"))
            page.route(lambda url: not url.startswith((home, "data:")), lambda route: route.abort())
            for name in pages:
                page.goto(home + name)
                if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    wide.append(name)
            page.goto(f"{home}search.html?q=bucket")
            page.locator("#search-results li").first.wait_for()
            found = page.locator("#search-results li a").evaluate_all("links => links.map(link => link.href)")
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
    assert (foreign, missing, wide) == ([], [], [])
    assert found


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)")
def test_explorables_work_from_files(site, pages):
    """On pages that are opened as files, on a small phone: no complaint, nothing sticks out, light and dark."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = [name for name, page in pages.items() if "data-explorable=" in page.text]
    assert {"index.html", "explore/fits.html", "explore/ring.html", "explore/step.html"} < set(names)
    complaints: list[str] = []
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=quiet)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 360, "height": 700}, color_scheme=scheme)
            page.on("console", lambda said: complaints.append(said.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda r: r.url.startswith(("file:", "data:")) or complaints.append(f"asks for {r.url}"))
            for name in names:
                page.goto((site / name).as_uri())
                for skip in page.get_by_role("button", name="Skip", exact=True).all():
                    skip.click()
                    page.locator(".opened").wait_for()
                if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    complaints.append(f"{name} is too wide")
        browser.close()
    assert complaints == []
