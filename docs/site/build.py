"""Builds the website from what is in the repository. Runs no notebook and imports no torch.

    python docs/site/build.py                   # into build/site (make site)
    python docs/site/build.py --out FOLDER

README gives the start page, below the ladder in motion; `docs/*.md`, `lessons/*.ipynb` and `solutions/*.ipynb` are a
page each, whatever their number; the reference comes from docstrings. `explorables/*.md` are pages too, each with the
script of its name, which a lesson may show as well. A link to a file of the repository becomes a link to its page, a
source file that is linked gets a page, and a link that leads nowhere ends the build.

`address.py` knows where the repository and the site are. Without the first there are no links to Colab and Kaggle. With
the second, the notebooks to download first try the wheel that stands beside the pages.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import address  # beside this file
import api
import notebook

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
EXPLORABLES = HERE / "explorables"
# The order of pages in the menu; a page that is not named here comes after these.
EXPLORE = ["step", "ring", "fits", "overlap", "allocator", "pipeline"]
COURSE = ["paths", "glossary", "formulas", "questions", "claims", "teachers", "administrators"]
PACKAGE = ["using", "habits", "measuring", "muon", "trial", "performance", "first-gpu-run", "tested"]
SCRIPTS = {  # what needs more than shared.js and a script of its name
    "step": ("shared", "recording", "step"),
    "ladder": ("shared", "recording", "step", "ladder"),
    "allocator": ("shared", "allocations", "allocator"),
}
IN_A_SENTENCE = (
    "Write data parallelism and the three stages of ZeRO yourself, on four real processes, and measure what each saves "
    "and costs."
)
# What the wheel is made of.
WHEEL = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "zerolab_command.py"]
WHEEL += ["zerolab", "lessons", "solutions", "docs"]
# Explorables that a lesson ends with.
SHOWN_IN = {"01": "ring", "02": "fits", "07": "step", "09": "overlap", "10": "allocator", "15": "pipeline"}
LINK = re.compile(r"(```.*?^ *```|`[^`\n]+`)|(?<=\]\()([^)\s]+)(?=\))", re.DOTALL | re.MULTILINE)


class Site:
    def __init__(self, folder: Path, repository: str, wheel: str = "") -> None:
        """wheel: its address, for notebooks that are downloaded."""
        self.folder, self.repository, self.wheel = folder, repository, wheel
        self.readme = (ROOT / "README.md").read_text()
        self.docs = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
        self.lessons = sorted((ROOT / "lessons").glob("*.ipynb"))
        self.explorables = [name for name in EXPLORE if (EXPLORABLES / f"{name}.md").exists()]
        self.sources: set[Path] = set()

    # ------------------------------------------------------------------ links

    def target(self, link: str, origin: str) -> str:
        """Where a link in the file `origin` leads on the site. Raises FileNotFoundError if it leads nowhere."""
        if re.match(r"[a-z]+:", link):
            return link
        path, _, anchor = link.partition("#")
        file = (ROOT / origin).parent.joinpath(path).resolve() if path else ROOT / origin
        if not file.exists():
            raise FileNotFoundError(f"{origin} links to {link}")
        name = file.relative_to(ROOT).as_posix()
        if name == "README.md":
            page = "index.md"
        elif name == "CONTRIBUTING.md":
            page = "contributing.md"
        elif name in ("lessons", "solutions"):
            page = f"{name}/index.md"
        elif name.endswith(".ipynb"):
            page = name.replace(".ipynb", ".md")
        elif file.parent == EXPLORABLES:
            page = f"explore/{file.name}"
        elif name.endswith(".md"):
            page = name
        elif name.endswith(".py"):
            page = self.source(file)
        else:
            copy = self.folder / "files" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
            page = f"files/{name}"
        return f"/{page}#{anchor}" if anchor else f"/{page}"

    def source(self, file: Path) -> str:
        self.sources.add(file)
        return f"source/{file.relative_to(ROOT).as_posix()}.md"

    def rewrite(self, text: str, origin: str) -> str:
        """The text with its links, pictures and the repository's address as they are on the site."""
        text = re.sub(r'<img src="([^"]+)"[^>]*alt="([^"]*)"[^>]*>', r"![\2](\1)", text)
        text = LINK.sub(lambda found: found[1] or self.target(found[2], origin), text)
        return text.replace("<this repository>", self.repository) if self.repository else text

    # ------------------------------------------------------------------ pages

    def write(self, name: str, text: str) -> Path:
        file = self.folder / f"{name}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.rstrip() + "\n")
        return file

    def write_all(self) -> None:
        self.write_readme()
        for stem in self.docs:
            origin = f"docs/{stem}.md"
            self.write(f"docs/{stem}", self.rewrite((ROOT / origin).read_text(), origin))
        for name in self.explorables:
            self.write_explorable(name)
        self.write("contributing", self.rewrite((ROOT / "CONTRIBUTING.md").read_text(), "CONTRIBUTING.md"))
        for number, lesson in enumerate(self.lessons):
            self.write_lesson(lesson, self.lessons[number + 1] if number + 1 < len(self.lessons) else None)
        self.write_lists()
        reference = api.pages(ROOT, lambda file: f"/{self.source(file)}")
        for name, text in reference.items():
            self.write(f"api/{name}", text)
        for file in sorted(self.sources):
            self.write_source(file)

    def write_readme(self) -> None:
        """What it is in a sentence, the ladder in motion, where to start; README comes below."""
        first = f"/{self.lessons[0].relative_to(ROOT).with_suffix('.md')}"
        actions = [f"[Start here: the first lesson]({first})"]
        if "step" in self.explorables:
            actions.append("[Move through a step](/explore/step.md)")
        if "paths" in self.docs:
            actions.append("[Choose a path](/docs/paths.md)")
        readme = re.sub(r"^\[!\[.*\n\n", "", self.readme, count=1, flags=re.MULTILINE)  # badges: the site has its own
        title, _, rest = self.rewrite(readme, "README.md").partition("\n")
        top = f"{title}\n\n{IN_A_SENTENCE}\n\n{explorable('ladder', '.')}\n\n{buttons(actions)}"
        self.write("index", f"{top}\n## What it is\n{rest}\n\n{self.menu()}")

    def menu(self) -> str:
        others = [stem for stem in self.docs if stem not in COURSE]
        groups = {
            "Explore": [f"explore/{name}" for name in self.explorables],
            "The course": ["lessons/index", *(f"docs/{stem}" for stem in COURSE if stem in self.docs)],
            "The package": [
                *(f"docs/{stem}" for stem in sorted(others, key=lambda s: (PACKAGE + [s]).index(s))),
                "contributing",
            ],
            "Reference": ["api/*"],
        }
        return "\n\n".join(toctree(pages, f":caption: {name}\n:hidden:") for name, pages in groups.items() if pages)

    def write_explorable(self, name: str) -> None:
        file = EXPLORABLES / f"{name}.md"
        text = self.rewrite(file.read_text(), file.relative_to(ROOT).as_posix())
        self.write(f"explore/{name}", text.replace("{{explorable}}", explorable(name, "..")))

    def write_lesson(self, lesson: Path, following: Path | None) -> None:
        origin, solved = f"lessons/{lesson.name}", ROOT / "solutions" / lesson.name
        minutes = re.search(rf"\({re.escape(origin)}\)[^|]*\| *(\d+) *\|", self.readme)
        actions = [f"{{download}}`Download the notebook </{self.copy(lesson)}>`"]
        hosted = address.hosted(self.repository, origin)
        actions += [f"[Open in {name}]({link})" for name, link in hosted.items()]
        how = "The lesson as it opens, before any exercise is solved. To work on it, run it with `make lab`"
        if hosted:
            how += ", or [in a browser](/docs/tested.md#a-notebook-alone), where its first cell installs zerolab"
        top = buttons(actions) + f"\n*{minutes[1] + ' minutes. ' if minutes else ''}{how}.*\n"
        page = self.folder / origin.replace(".ipynb", ".md")
        answers = notebook.references(solved) if solved.exists() else {}
        text = notebook.to_markdown(lesson, page, top, lambda text: self.rewrite(text, origin), answers)
        ending = []
        if (name := SHOWN_IN.get(lesson.stem[:2])) in self.explorables:
            more = f"It has [a page of its own](/explore/{name}.md), which says more."
            text += f"\n## See it move\n\n{explorable(name, '..')}\n\n{more}\n"
        if solved.exists():
            ending.append(f"[This lesson, solved](/solutions/{lesson.stem}.md): every answer, with its outputs.")
        if following:
            ending.append(f"Next: [{notebook.title(following)}](/lessons/{following.stem}.md).")
        elif "paths" in self.docs:
            ending.append("This was the last lesson; the [paths](/docs/paths.md) say what to do with it.")
        self.write(origin.removesuffix(".ipynb"), text + "\n:::{container} next\n" + "\n\n".join(ending) + "\n:::\n")
        if solved.exists():
            self.write_solution(solved)

    def write_solution(self, solved: Path) -> None:
        origin = f"solutions/{solved.name}"
        top = buttons([f"[Back to the lesson](/lessons/{solved.stem}.md)"]) + (
            "\n*Every answer is on this page, and every number that the lesson asks you to predict.*\n"
        )
        page = self.folder / origin.replace(".ipynb", ".md")
        text = notebook.to_markdown(solved, page, top, lambda text: self.rewrite(text, origin), {})
        self.write(origin.removesuffix(".ipynb"), f"---\norphan: true\nnosearch: true\n---\n{text}")

    def write_lists(self) -> None:
        table = self.rewrite(section(self.readme, "The lessons"), "README.md").replace("## ", "# ", 1)
        pages = [lesson.stem for lesson in self.lessons]
        self.write("lessons/index", f"{table}\n\n{toctree(pages, ':hidden:')}")
        solved = [path for path in self.lessons if (ROOT / "solutions" / path.name).exists()]
        lines = [f"- [{notebook.title(path)}](/solutions/{path.stem}.md)" for path in solved]
        self.write("solutions/index", "---\norphan: true\n---\n# Solutions\n\n" + "\n".join(lines))

    def write_source(self, file: Path) -> None:
        name = file.relative_to(ROOT).as_posix()
        code = notebook.fenced(":linenos:\n\n" + file.read_text(), "{code-block} python")
        self.write(f"source/{name}", f"---\norphan: true\nnosearch: true\n---\n# `{name}`\n\n{code}")

    def copy(self, file: Path) -> str:
        name = f"files/{file.relative_to(ROOT).as_posix()}"
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, self.folder / name)
        if self.wheel:
            content = json.loads(file.read_text())
            (cell,) = [cell for cell in content["cells"] if cell["id"] == "install"]
            place = cell["source"].index("    for source in [\n") + 1
            cell["source"].insert(place, f'        "zerolab[lab] @ {self.wheel}",\n')
            (self.folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return name


def explorable(name: str, root: str) -> str:
    """The place that a script fills, and the scripts; `root` leads from the page to the site's folder."""
    files = f"{root}/_static/explorables"
    scripts = "".join(
        f'<script defer src="{files}/{file}.js"></script>\n' for file in SCRIPTS.get(name, ("shared", name))
    )
    return notebook.fenced(
        f'<link rel="stylesheet" href="{files}/explorables.css">\n'
        f'<div class="explorable" data-explorable="{name}" data-page="{root}/explore/{name}.html">\n'
        f"<noscript>This picture moves, and needs JavaScript for it.</noscript>\n</div>\n{scripts}",
        "{raw} html",
    )


def copy_scripts(out: Path) -> None:
    """What the explorables load, as it is in the repository."""
    folder = out / "_static" / "explorables"
    folder.mkdir(parents=True)
    for file in [*EXPLORABLES.glob("*.js"), *EXPLORABLES.glob("*.css")]:
        shutil.copy(file, folder)
    sources = {
        f"{name}.py": (ROOT / "zerolab" / f"{name}.py").read_text() for name in ("ddp", "zero1", "zero2", "zero3")
    }
    recording = json.loads((EXPLORABLES / "step.json").read_text()) | {"sources": sources}
    (folder / "recording.js").write_text(f"zerolab.recording = {json.dumps(recording, separators=(',', ':'))};\n")
    allocations = (EXPLORABLES / "allocator.json").read_text()
    (folder / "allocations.js").write_text(f"zerolab.allocations = {allocations.strip()};\n")


def section(text: str, heading: str) -> str:
    """The section of that heading, of second order."""
    (found,) = re.findall(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found


def buttons(links: list[str]) -> str:
    return ":::{container} actions\n" + "\n".join(links) + "\n:::\n"


def toctree(pages: list[str], options: str) -> str:
    glob = ":glob:\n" if any("*" in page for page in pages) else ""
    return f"```{{toctree}}\n{glob}{options}\n\n" + "\n".join(pages) + "\n```"


def build_wheel(out: Path) -> Path:
    """The package as people would install it, into the folder `out`."""
    with tempfile.TemporaryDirectory(prefix="zerolab-wheel-") as folder:
        for name in WHEEL:  # elsewhere, since setuptools leaves things behind
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the wheel could not be built:\n{done.stdout}")
    (wheel,) = out.glob("*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description="build the website")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    out = parser.parse_args().out
    repository, site = address.addresses()
    with tempfile.TemporaryDirectory(prefix="zerolab-site-") as folder, tempfile.TemporaryDirectory() as built:
        try:
            wheel = build_wheel(Path(built))
            Site(Path(folder), repository, f"{site}/{wheel.name}" if site else "").write_all()
        except FileNotFoundError as error:
            print(f"a link leads nowhere: {error}", file=sys.stderr)
            return 1
        shutil.rmtree(out, ignore_errors=True)
        options = ["-b", "html", "-q", "-W", "--keep-going", "-j", "auto", "-c", str(HERE)]
        done = subprocess.run(
            [sys.executable, "-m", "sphinx", *options, "-d", f"{folder}/.doctrees", folder, str(out)], check=False
        )
        if done.returncode == 0:
            shutil.copy(wheel, out)
    if done.returncode == 0:
        copy_scripts(out)
        (out / ".nojekyll").touch()  # or GitHub Pages leaves out folders that begin with _
        print(f"open {out / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
