"""Where zerolab is, and the files that say so. `[project.urls]` of pyproject.toml is the only place to set it.

    python docs/site/address.py            # writes the addresses into README.md, CITATION.cff and docs/tested.md
    python docs/site/address.py --check    # writes nothing: are they there?

`Repository` is where one clones from, and on GitHub where Colab and Kaggle open notebooks; `Documentation` is the
website. Either may be missing: then README says `<this repository>`, and docs/tested.md what does not work without it.
`make lessons ARGS=--text` puts the repository into the cell that installs, and `make site` reads both.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = "<this repository>"
HOSTED = {
    "Colab": "https://colab.research.google.com/github/{}/blob/main/{}",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/{}/blob/main/{}",
}
BADGES = {
    "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
    "Kaggle": "https://kaggle.com/static/images/open-in-kaggle.svg",
}
BEGIN, END = "<!-- where zerolab is: python docs/site/address.py writes it -->", "<!-- the end of it -->"


def addresses(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The repository's and the website's, or "". ZEROLAB_REPOSITORY and ZEROLAB_SITE go before pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    repository = environment.get("ZEROLAB_REPOSITORY") or urls.get("Repository", "")
    site = environment.get("ZEROLAB_SITE") or urls.get("Documentation", "")
    return repository.rstrip("/").removesuffix(".git"), site.rstrip("/")


def hosted(repository: str, notebook: str) -> dict[str, str]:
    """Links that open a notebook in somebody's browser. Colab and Kaggle open those of GitHub only."""
    name = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)", repository)
    return {host: link.format(name[1], notebook) for host, link in HOSTED.items()} if name else {}


def cloned(text: str, repository: str) -> str:
    return re.sub(r"git clone (<[^>]*>|\S+)", f"git clone {repository or HERE}", text)


def readme(text: str, repository: str, site: str) -> str:
    """With the address to clone from, and a line of badges below the title."""
    text = cloned(text, repository)
    text = re.sub(r"^\[(colab|kaggle|site)\S*\]: .*\n", "", text, flags=re.MULTILINE).rstrip() + "\n"
    text = re.sub(r"\A(# .*\n\n)\[[!A-Z].*\]\[\w+\]\n\n", r"\1", text)
    links = hosted(repository, "lessons/00_welcome.ipynb")
    line = [f"[![Open in {host}][{host.lower()}-badge]][{host.lower()}]" for host in links]
    ends = [f"[{host.lower()}]: {link}\n[{host.lower()}-badge]: {BADGES[host]}" for host, link in links.items()]
    if site:
        line.append("[The website][site]")
        ends.append(f"[site]: {site}")
    if not line:
        return text
    return text.replace("\n\n", f"\n\n{' '.join(line)}\n\n", 1) + "\n" + "\n".join(ends) + "\n"


def citation(text: str, repository: str, site: str, version: str) -> str:
    text = re.sub(r"^version: .*$", f"version: {version}", text, flags=re.MULTILINE)
    text = re.sub(r"^(repository-code|url): .*\n", "", text, flags=re.MULTILINE)
    more = [f"{key}: {value}" for key, value in (("repository-code", repository), ("url", site)) if value]
    return re.sub(r"^(license: .*\n)", "\\1" + "".join(f"{line}\n" for line in more), text, flags=re.MULTILINE)


def tested(text: str, repository: str, site: str) -> str:
    """What the first cell of a notebook tries where zerolab is missing, in its order."""
    tries = ["the package index"]
    if repository:
        tries.insert(0, f"the repository, {repository}, at this version's tag")
    if site:
        tries.insert(0, f"the wheel of the website, {site}, if the notebook comes from there")
    said = f"It tries {'; then '.join(tries)}, and says what it did."
    if missing := [name for name, value in (("repository", repository), ("website", site)) if not value]:
        said += f" This copy of zerolab knows of no {' and no '.join(missing)} (`[project.urls]` in pyproject.toml)."
    before, _, rest = cloned(text, repository).partition(BEGIN)
    return f"{before}{BEGIN}\n\n{textwrap.fill(said, 120)}\n\n{END}{rest.partition(END)[2]}"


def written() -> dict[Path, str]:
    """Each file as it should be."""
    repository, site = addresses({})
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "zerolab" / "__init__.py").read_text(), re.MULTILINE)
    files = [ROOT / name for name in ("README.md", "CITATION.cff", "docs/tested.md")]
    page, cited, told = (file.read_text(encoding="utf-8") for file in files)
    texts = [
        readme(page, repository, site),
        citation(cited, repository, site, version),
        tested(told, repository, site),
    ]
    return dict(zip(files, texts))


def main() -> int:
    late = {file: text for file, text in written().items() if file.read_text(encoding="utf-8") != text}
    if sys.argv[1:] == ["--check"]:
        print("".join(f"{file.relative_to(ROOT)} is not as docs/site/address.py writes it\n" for file in late), end="")
        return 1 if late else 0
    for file, text in late.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
