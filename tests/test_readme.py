"""README and the pages that it leads to: their programs run as written, and what they name is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import zerolab
from zerolab import cli
from zerolab.tasks.models import GPT, Block

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: str, language: str = "python") -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [block for kind, block in fenced if kind == language]


def program() -> str:
    return blocks("README.md")[0]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the programs ---


@pytest.mark.slow
def test_the_program_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(program())
    losses = eval(run(str(script)))
    assert len(losses) == 4 and all(2 < loss < 6 for loss in losses)


@pytest.mark.exhaustive
def test_the_same_function_runs_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    (end,) = [block for block in blocks("docs/using.md") if block.startswith("if __name__")]
    script.write_text(program().partition("if __name__")[0] + end)
    said = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert len(re.findall(r"\d\.\d{4}", said)) == 2  # a loss on each rank, perhaps on one line


@pytest.mark.exhaustive
def test_the_trainer_runs(tmp_path):
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    (trainer,) = [block for block in blocks("docs/using.md") if "TrainingArguments" in block]
    script.write_text(
        trainer.replace('"out"', repr(str(tmp_path / "out"))).replace('"final"', repr(str(tmp_path / "final")))
    )
    said = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert said.count("eval_loss") >= 2
    assert (tmp_path / "final" / "model.safetensors").is_file()


def measured_as_on_the_page(*programs):
    zero = zerolab.Zero3(GPT(layers=2, width=64, context=16), units=[Block])
    optimizer = torch.optim.AdamW(zero.model.parameters())

    def step():
        x = torch.zeros(2, 16, dtype=torch.long)
        zero.model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    names = {"zero": zero, "optimizer": optimizer, "step": step}
    for program in programs:
        exec(program, names)
    overlaps = names["record"].overlap, names["predicted"].overlap
    return names["book"].moved, names["line"].peak, overlaps, names["sentence"]


@pytest.mark.slow
def test_the_measurements_run(ranks):
    for moved, peak, overlaps, sentence in ranks.run(measured_as_on_the_page, *blocks("docs/measuring.md"), ranks=2):
        assert moved > 0 and peak > 0 and all(0 <= overlap <= 1 for overlap in overlaps)
        assert "stage 3" in sentence


# --- the commands ---


@pytest.mark.parametrize("page", NAMES)
def test_make_targets_exist(page):
    """What a page tells to type, the Makefile has."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", (ROOT / page).read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def commands(page: str) -> list[list[str]]:
    """The arguments of `zerolab` on that page, in blocks and in lines; `-m zerolab.train` is `zerolab train`."""
    typed = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
    typed += re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    found = [re.search(r"^zerolab ([a-z].*)|-m zerolab\.(train .*)", line) for line in typed]
    return [shlex.split(match[1] or match[2], comments=True) for match in found if match]


def command_line() -> tuple[cli.Parser, set[str]]:
    """The parser of `zerolab`, and its commands."""
    parser = cli.Parser(prog="zerolab")
    subparsers = parser.add_subparsers(required=True)
    for add in cli.COMMANDS:
        add(subparsers)
    return parser, set(subparsers.choices)


@pytest.mark.parametrize("page", NAMES)
def test_commands_are_understood(page):
    """What a page tells to type, the command line takes: every command, option and value."""
    parser, _ = command_line()
    for arguments in commands(page):
        try:
            parser.parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{page}: zerolab {' '.join(arguments)}")


def test_using_lists_every_command():
    table = (ROOT / "docs" / "using.md").read_text().partition("## The commands\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `zerolab (\w+)", table, re.MULTILINE)
    assert len(listed) == len(set(listed)) and set(listed) == command_line()[1]


# --- what the pages name ---


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], target


@pytest.mark.parametrize("page", NAMES)
def test_files_that_are_named_exist(page):
    for path in re.findall(r"`((?:zerolab|tests|docs)/[\w./]*)`", (ROOT / page).read_text()):
        assert "NN" in path or (ROOT / path).exists(), path  # NN: any lesson's number


def test_readme_has_every_lesson_in_order():
    linked = re.findall(r"\]\((lessons/[^)]+)\)", (ROOT / "README.md").read_text())
    assert linked == [str(path.relative_to(ROOT)) for path in sorted((ROOT / "lessons").glob("*.ipynb"))]


def test_readme_leads_to_every_page():
    linked = re.findall(r"\]\(([^)#]+\.md)\)", (ROOT / "README.md").read_text())
    assert set(linked) == set(NAMES) - {"README.md"}


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120


def test_half_a_day_is_the_same_for_learners_and_teachers():
    paths = (ROOT / "docs" / "paths.md").read_text().partition("## Half a day\n")[2].partition("\n## ")[0]
    table = (ROOT / "docs" / "teachers.md").read_text().partition("| half a day |")[2].partition("\n\n")[0]
    assert re.findall(r"\[(\d\d) ", paths) == re.findall(r"^\| \d:\d\d \| (\d\d) ", table, re.MULTILINE)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for key, value in {"title": project["name"], "version": zerolab.__version__, "license": project["license"]}.items():
        assert citation[key] == value
    assert citation["authors"] == project["authors"]
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
