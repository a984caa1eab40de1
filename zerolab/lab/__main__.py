"""`zerolab lab`, or `python -m zerolab.lab`, opens the lessons in JupyterLab, on the learner's own copies in work/.

An update of the course never costs an answer. A copy that the learner has not touched is replaced by the new lesson;
beside one that the learner has changed, the new lesson is put under another name.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import ipaddress
import json
import os
import re
import sys
import tempfile
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

DESCRIPTION = "Opens the lessons in JupyterLab, on copies in work/ that are your own. An update never costs an answer."

OPEN = (
    "others could reach JupyterLab there, over a connection that is not encrypted, and anyone with its token can run "
    "programs as you. To work from elsewhere without opening it: ssh -L 8888:127.0.0.1:8888 <this machine>. If you "
    "really mean it, add --open-to-network"
)
# Arguments of Python. What lies in the folder is not for JupyterLab to import. And jsonschema uses rfc3987_syntax where
# it finds it, for addresses that no notebook has, whose import builds 38 grammars: more than half of what JupyterLab
# computes before it shows a page. As what is imported stays, nobody looks for garbage meanwhile: a fifth of the time.
JUPYTERLAB = (
    "-c",
    "import gc, sys; sys.path[:] = filter(None, sys.path); sys.modules['rfc3987_syntax'] = None; "
    "gc.disable(); from jupyterlab.labapp import main; gc.freeze(); gc.enable(); sys.exit(main())",
)
SETTINGS = ".jupyterlab"  # in work/: how this JupyterLab differs from others; your own settings stay as they are
OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": True},  # else a page without its kernel shows an error
}
HIDDEN = {"ipyparallel-labextension": True}  # its tab belongs to clusters, which no lesson starts from there
STYLE = """\
/* Sentences break between words. */
.jp-OutputArea-output.jp-RenderedText pre { word-break: normal; }
/* Pictures are drawn on white. In a dark theme: dark where they are light, and every colour in its own hue. */
[data-jp-theme-light="false"] .jp-OutputArea-output img,
[data-jp-theme-light="false"] .jp-RenderedMarkdown img { filter: invert(0.93) hue-rotate(180deg); }
"""
INSTALL = "install"  # the id of the cell that installs zerolab: whoever is given copies has it
REMEMBERED = ".copied.json"  # in work/: the digest of each lesson as it was copied


def find_course() -> Path:
    """The folder of lessons/ and solutions/: in the installed package, which a wheel brings, else the checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "course"
    return inside if inside.is_dir() else package.parent


def copy_lessons(lessons: Path, work: Path) -> list[str]:
    """Bring the copies in `work` up to date. Returns a line for each changed lesson whose copy was left alone.

    A copy of what is no longer a lesson goes, if nobody has changed it.
    """
    return copy_notebooks({lesson.name: lesson.read_bytes() for lesson in sorted(lessons.glob("*.ipynb"))}, work)


def copy_notebooks(
    notebooks: dict[str, bytes], work: Path, ours: Callable[[bytes], bool] = lambda notebook: False
) -> list[str]:
    """As `copy_lessons`, for notebooks by name. ours: whether a changed copy is to be replaced all the same."""
    work.mkdir(parents=True, exist_ok=True)
    memory = work / REMEMBERED
    copied: dict[str, str] = {}
    with suppress(FileNotFoundError, ValueError):  # cut off by a full disk, say: then each copy is the learner's own
        copied = json.loads(memory.read_text())
    if not isinstance(copied, dict):  # whose folder it is may write anything there
        copied = {}
    lines = []
    for name, new in notebooks.items():
        new = _with_links_as_here(_without_install(new))
        mine = work / name
        if copied.get(name) == _digest(new) and mine.exists():
            continue  # nothing new
        there = mine.read_bytes() if mine.exists() else new
        if there == new or _digest(there) == copied.get(name) or ours(there):
            _write(mine, new)
            copied[name] = _digest(new)
            continue
        beside = mine.with_suffix(".new.ipynb")
        if not beside.exists() or beside.read_bytes() != new:
            _write(beside, new)
        lines.append(f"{name} has changed in the course. Your copy was left alone; the new one is {beside}")
    for name in sorted(copied.keys() - notebooks.keys()):
        mine, digest = work / name, copied.pop(name)
        if not re.fullmatch(r"\w+\.ipynb", name) or mine.is_symlink() or not mine.is_file():
            continue  # no name of ours, or no copy
        there = mine.read_bytes()
        if _digest(there) == digest or ours(there):
            mine.unlink()
        else:
            lines.append(f"{name} is no longer in the course, under this name at least. Your copy was left alone")
    _write(memory, (json.dumps(copied, indent=1) + "\n").encode())
    return lines


def _without_install(notebook: bytes) -> bytes:
    """The notebook without the cell that installs zerolab; as it is, if it has none."""
    if f'"id": "{INSTALL}"'.encode() not in notebook:
        return notebook
    content = json.loads(notebook)
    content["cells"] = [cell for cell in content["cells"] if cell.get("id") != INSTALL]
    return (json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode()


def copy_docs(work: Path) -> None:
    """The pages that lessons link to, as work/docs: there lessons are one folder up."""
    docs = find_course() / "docs"
    for page in sorted([*docs.glob("*.md"), *docs.glob("*.png")]):
        new = page.read_bytes()
        if page.suffix == ".md":
            new = _with_links_as_here(new.replace(b"](../lessons/", b"](../"), page.name)
        mine = work / "docs" / page.name
        mine.parent.mkdir(parents=True, exist_ok=True)
        if not mine.exists() or mine.read_bytes() != new:
            _write(mine, new)


def _with_links_as_here(text: bytes, page: str = "") -> bytes:
    """What is not here is no link, and what is glossary.md#all-reduce elsewhere is #All-reduce in JupyterLab."""
    text = re.sub(rb"\[([^\[\]]*)\]\(\.\./(?:[A-Z]+\.md|zerolab/)[^)]*\)", rb"\1", text)
    named = _headings()
    return re.sub(
        rb"(\w[\w-]*\.md)?#([\w-]+)(?=\))",
        lambda link: b"%s#%s" % (link[1] or b"", named.get((link[1] or page.encode(), link[2]), link[2])),
        text,
    )


@functools.cache
def _headings() -> dict[tuple[bytes, bytes], bytes]:
    """For each page of docs/ and each name that GitHub gives to a heading of it, JupyterLab's name."""
    named = {}
    for page in (find_course() / "docs").glob("*.md"):
        for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            text = heading.replace("`", "").replace(" ", "-")
            usual = re.sub(r"[^\w-]", "", text.lower())
            named[page.name.encode(), usual.encode()] = urllib.parse.quote(text).encode()
    return named


def write_settings(folder: Path) -> list[str]:
    """The options for a JupyterLab that asks for nothing, shows no foreign tab, and darkens pictures with its theme."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "custom.css", STYLE.encode())
    _write(folder / "overrides.json", (json.dumps(OVERRIDES) + "\n").encode())
    _write(folder / "page_config.json", (json.dumps({"disabledExtensions": HIDDEN}) + "\n").encode())
    folder = folder.resolve()
    return [
        f"--LabApp.app_settings_dir={folder}",
        "--LabApp.custom_css=True",
        f"--ServerApp.tornado_settings=static_custom_path={folder}",
    ]


def write_kernel(folder: Path) -> str:
    """A kernel that knows `%%ranks` before any cell (ranks/before.py). Returns the JUPYTER_PATH that leads to it."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict

    first = Path(__file__).resolve().parent / "ranks" / "before.py"
    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True, exist_ok=True)
    for logo in Path(RESOURCES).glob("logo-*"):
        _write(kernel / logo.name, logo.read_bytes())
    about = get_kernel_dict(extra_arguments=[f"--IPKernelApp.exec_files={first}"])
    _write(kernel / "kernel.json", (json.dumps(about, indent=1) + "\n").encode())
    return os.pathsep.join([str(folder.resolve()), *filter(None, [os.environ.get("JUPYTER_PATH")])])


def kernel_options() -> list[str]:
    """Have the notebooks' kernels encrypt what they say, where this Jupyter can; ipykernel warns if they do not."""
    try:
        import zmq
        from jupyter_client import KernelManager
    except ModuleNotFoundError:
        return []
    can = "transport_encryption" in KernelManager.class_trait_names() and zmq.has("curve")
    return ["--KernelManager.transport_encryption=auto"] * can


def only_here(address: str) -> bool:
    """Whether only this machine can reach the address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, an interface or "*", which may mean anything
        return False


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Write all of it or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def add_arguments(parser: argparse.ArgumentParser, port: Callable[[str], int] = int) -> None:
    parser.add_argument("--work", type=Path, default=Path("work"), help="where the copies are (default: work)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--port", type=port, default=8888, help="for JupyterLab, or the next free one (default: 8888)")
    parser.add_argument("--ip", default="127.0.0.1", help="where JupyterLab listens (default: this machine alone)")
    parser.add_argument("--open-to-network", action="store_true", help="needed for an --ip that others can reach")


def main() -> int:
    """`python -m zerolab.lab`, for where `zerolab lab` is not on the path."""
    parser = argparse.ArgumentParser(prog="python -m zerolab.lab", description=DESCRIPTION)
    add_arguments(parser)
    return open_lab(parser.parse_args(), parser)


def open_lab(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Copy the lessons, and become JupyterLab. Returns only if it cannot."""
    if not options.open_to_network and not only_here(options.ip):
        parser.error(f"--ip {options.ip}: {OPEN}")
    from jupyter_core.paths import jupyter_runtime_dir

    course = find_course()
    lessons, solutions = course / "lessons", course / "solutions"
    if not any(lessons.glob("*.ipynb")):
        print(f"there are no lessons in {lessons}: install zerolab, or run this in a checkout", file=sys.stderr)
        return 1
    told = copy_lessons(lessons, options.work)
    if any(solutions.glob("*.ipynb")):
        # Lessons link to ../solutions and ../docs. JupyterLab shows nothing above its root: there `..` leads to work/.
        told += copy_lessons(solutions, options.work / "solutions")
    copy_docs(options.work)
    for line in told:
        print(line, flush=True)
    first = next(iter(sorted(options.work.glob("00_*.ipynb"))), None)
    command = [sys.executable, *JUPYTERLAB, f"--ip={options.ip}", f"--port={options.port}"]
    command += [f"--ServerApp.root_dir={options.work.resolve()}"]
    command += [*write_settings(options.work / SETTINGS), "--log-level=ERROR", "--LabApp.log_level=ERROR"]
    command += kernel_options()
    runtime = jupyter_runtime_dir()  # in your home, if nothing says otherwise; JupyterLab's own error is a traceback
    os.makedirs(runtime, exist_ok=True)
    tempfile.TemporaryFile(dir=runtime).close()
    os.environ["JUPYTER_PATH"] = write_kernel(options.work / SETTINGS)
    if first is not None:
        command.append(f"--LabApp.default_url=/lab/tree/{first.name}")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # usual in a container; the token and the loopback address still protect it
    if options.no_browser:
        command.append("--no-browser")
    os.execv(sys.executable, command)  # so that Control-C reaches JupyterLab as if you had started it by hand


if __name__ == "__main__":
    sys.exit(main())
