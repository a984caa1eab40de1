"""Writes docs/trial.md: how to put an engine on trial, and what the trial said of those that are known.

python docs/trial/write.py                  # the page, from results.json and reasons.json
python docs/trial/write.py --run fsdp2      # try this engine first, and store what was seen; no name: all of them
python docs/trial/write.py --run fsdp2 --only hybrid   # the same of some cases; of the others what is stored stays
python docs/trial/write.py --check          # writes nothing: is the page as it would be written?
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE, RESULTS, REASONS = HERE.parent / "trial.md", HERE / "results.json", HERE / "reasons.json"
OURS = ("ddp", "zero1", "zero2", "zero3")
SIGNS = {"holds": "✓", "unsupported": "–", "wrong": "✗", "refused": "E", "hangs": "H", "dies": "D"}
PROMISED = "o"  # the engine promises something else


def run(engine: str, only: list[str] | None) -> dict[str, Any]:
    """What `zerolab trial` says of it: of ours on 1 to 4 ranks, of the others on 2. only: of these cases."""
    from zerolab.apps import trial

    ranks = [1, 2, 3, 4] if engine in OURS else [2]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "said.json")
        trial.run(engine, ranks, only, str(file))
        said = json.loads(file.read_text())
    cases: dict[str, Any] = {}
    for v in said.pop("verdicts"):
        cases.setdefault(v["case"], []).append([v["ranks"], v["verdict"], v["what"], v["otherwise"]])
    for name, found in cases.items():
        if all(verdict == "holds" for _, verdict, _, _ in found):
            cases[name] = "holds"
    return said | {"ranks": ranks, "cases": cases}


def as_json(results: dict[str, Any]) -> str:
    """One line for each case, so that a change can be read."""
    engines = []
    for engine, one in results.items():
        head = json.dumps({key: value for key, value in one.items() if key != "cases"}, ensure_ascii=False)
        each = ((json.dumps(name), json.dumps(found, ensure_ascii=False)) for name, found in one["cases"].items())
        cases = [f"{name}: {found}" for name, found in each]
        engines.append(f'"{engine}": {head[:-1]}, "cases": {{\n' + ",\n".join(cases) + "\n}}")
    return "{\n" + ",\n".join(engines) + "\n}\n"


def sign(found: Any) -> str:
    """One sign for a case on all numbers of ranks: the worst."""
    if found == "holds":
        return SIGNS["holds"]
    bad = [row for row in found if row[1] not in ("holds", "unsupported")]
    if not bad:
        return SIGNS["holds" if any(row[1] == "holds" for row in found) else "unsupported"]
    return PROMISED if all(row[3] for row in bad) else SIGNS[next(row[1] for row in bad if not row[3])]


def lines(results: dict[str, Any], reasons: dict[str, dict[str, str]]) -> Iterator[str]:
    from zerolab.apps.trial import families
    from zerolab.trial.cases import CASES

    text = (HERE / "page.md").read_text()
    example = (HERE / "fsdp2.py").read_text().split('"""\n\n', 1)[1].strip()
    yield text.replace("EXAMPLE", example).strip()
    yield "\n## What the trial says\n"
    for engine, one in results.items():
        versions = ", ".join(f"{name} {one[name]}" for name in one if name not in ("engine", "ranks", "cases"))
        counts = [sign(found) for found in one["cases"].values()]
        told = ", ".join(f"{counts.count(mark)} {mark}" for mark in (*SIGNS.values(), PROMISED) if mark in counts)
        ranks = "1 to 4" if len(one["ranks"]) > 1 else one["ranks"][0]
        yield f"- `{engine}` ({versions}; {ranks} ranks): {told}"
    yield "\n✓ holds; – is not offered, or was not tried: DeepSpeed's bf16 and checkpoints, and hybrid cases, which"
    yield "need 4 ranks, where there were 2. ✗ is wrong, E is refused with an error, H hangs, D ends a process; o: it"
    yield "promises something else, and says where. With several numbers of ranks the worst counts.\n"
    for family, names in families().items():
        yield f"### {family[0].upper()}{family[1:]}\n"
        yield f"| case | promise | {' | '.join(f'`{engine}`' for engine in results)} |"
        yield f"|---|---|{'---|' * len(results)}"
        for name in names:
            signs = [sign(one["cases"][name]) if name in one["cases"] else "" for one in results.values()]
            yield f"| {name} | {CASES[name].promise}{broken_in(CASES[name].broke)} | {' | '.join(signs)} |"
        yield ""
    yield from not_held(results, reasons)
    yield "### Where the promises are written\n"
    for source in dict.fromkeys(case.source for case in CASES.values()):
        yield f"- {source}: {'; '.join(name for name, case in CASES.items() if case.source == source)}"


def broken_in(issues: str) -> str:
    """Links to the issues, which are `owner/repository#number`."""
    address = "https://github.com/"
    links = (f"[{i.partition('/')[2]}]({address}{i.replace('#', '/issues/')})" for i in issues.split(", "))
    return f" Once broken in {', '.join(links)}." if issues else ""


def not_held(results: dict[str, Any], reasons: dict[str, dict[str, str]]) -> Iterator[str]:
    """What engines do not keep: all that has one reason together. Where it is refused, the error is the reason.

    reasons: for one engine, or several with spaces between, or "all"; for each case.
    """
    seen: dict[str, tuple[dict[str, None], dict[str, None], str]] = {}  # engines, cases, what was seen first
    for engine, one in results.items():
        mine = [of for names, of in reasons.items() if {engine, "all"} & {*names.split()}]
        why = {name: text for of in mine for name, text in of.items()}
        for name, found in one["cases"].items():
            if sign(found) in (SIGNS["holds"], SIGNS["unsupported"]):
                continue
            _, verdict, what, otherwise = next(row for row in found if row[1] not in ("holds", "unsupported"))
            reason = otherwise or why.get(name, "")
            if not reason and verdict != "refused":
                sys.exit(f"reasons.json does not say why {engine} does not keep {name!r}: {verdict}, {what}")
            engines, cases, _ = seen.setdefault(reason or what, ({}, {}, f"{verdict}: {what}"))
            engines[engine], cases[name] = None, None
    yield "### What is not kept, and why\n"
    yield "In italics: what was seen of the first case, in the first engine.\n"
    for reason, (engines, cases, first) in seen.items():
        what = first.replace("<", "&lt;").rstrip(".")
        said = f" {reason}." if not what.endswith(reason) else ""
        yield f"- **{'; '.join(cases)}** ({', '.join(f'`{engine}`' for engine in engines)}).{said} *{what}*"
    yield ""


def main() -> None:
    from zerolab.trial.adapters import ENGINES
    from zerolab.trial.cases import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", metavar="ENGINE", choices=[*ENGINES, []])
    parser.add_argument("--only", nargs="+", metavar="CASE", help="keep what is stored of the other cases")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for engine in ENGINES if asked.run == [] else asked.run or ():
        said = run(engine, asked.only)
        if asked.only:
            said["cases"] = {**results[engine]["cases"], **said["cases"]}
        said["cases"] = {name: said["cases"][name] for name in CASES if name in said["cases"]}
        results[engine] = said
        results = {name: results[name] for name in ENGINES if name in results}
        RESULTS.write_text(as_json(results))
    page = "\n".join(lines(results, json.loads(REASONS.read_text()))).rstrip() + "\n"
    if asked.check:
        sys.exit(0 if PAGE.read_text() == page else f"{PAGE.name} is not as it would be: python docs/trial/write.py")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
