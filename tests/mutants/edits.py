"""Tries every small edit of an exercise's reference, and prints those that pass: what the scenes do not notice.

    python -m tests.mutants.edits 03.2         # those that pass
    python -m tests.mutants.edits 03.2 --all   # and what a learner would read for each of the others

An edit that passes is right too, or a scene is missing. No list of them is kept: which are right is seen at a glance.
"""

from __future__ import annotations

import argparse
import ast
import copy
import textwrap
from collections.abc import Iterator

from tqdm import tqdm

from zerolab.lab.exercises import judge
from zerolab.lab.exercises.catalogue import EXERCISES

OTHERS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Div,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "zeros": "ones", "sum": "mean"}


def edits(source: str) -> dict[str, str]:
    """Every small edit of `source`, and what it is: an operator, a number, a call, an argument, a line."""
    found: dict[str, str] = {}
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        for what, changed in [*_of_expression(node), *_of_lines(node)]:
            edited = copy.deepcopy(tree)
            place = list(ast.walk(edited))[number]
            place.__class__, place.__dict__ = changed.__class__, changed.__dict__
            line = f"line {node.lineno}, " if hasattr(node, "lineno") else ""
            found.setdefault(ast.unparse(edited), f"{line}{what}")
    found.pop(ast.unparse(tree), None)
    return found


def _of_expression(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    operator = getattr(node, "op", None) or next(iter(getattr(node, "ops", ())), None)
    for other in OTHERS.get(type(operator), ()):  # in what has it: all `+` of a tree are one object
        edited = copy.copy(node)
        edited.__dict__ = node.__dict__ | (
            {"op": other()} if hasattr(node, "op") else {"ops": [other(), *node.ops[1:]]}
        )
        yield f"{type(operator).__name__} -> {other.__name__} in {ast.unparse(node)}", edited
    match node:
        case ast.Constant(value=bool() as value):
            yield f"{value} -> {not value}", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield from ((f"{value} -> {value + more}", ast.Constant(value + more)) for more in (1, -1))
        case ast.Name(id=name) if name in NAMES:
            yield f"{name} -> {NAMES[name]}", ast.Name(NAMES[name])
        case ast.Attribute(value=value, attr=name) if name in NAMES:
            yield f"{name} -> {NAMES[name]}", ast.Attribute(value, NAMES[name])
        case ast.BinOp(left=left, right=right):
            yield from ((f"only {ast.unparse(side)} of {ast.unparse(node)}", side) for side in (left, right))
        case ast.BoolOp(values=values):
            yield from ((f"only {ast.unparse(value)} of {ast.unparse(node)}", value) for value in values)
        case ast.IfExp(body=body, orelse=orelse):
            yield from ((f"only {ast.unparse(value)} of {ast.unparse(node)}", value) for value in (body, orelse))
        case ast.UnaryOp(operand=operand):
            yield f"only {ast.unparse(operand)} of {ast.unparse(node)}", operand
        case ast.Call(func=func, args=args, keywords=keywords):
            if isinstance(func, ast.Attribute):
                yield f"{ast.unparse(func.value)} for {ast.unparse(node)}", func.value
            if args:
                yield f"{ast.unparse(args[0])} for {ast.unparse(node)}", args[0]
            if len(args) > 1:
                yield (
                    f"arguments of {ast.unparse(node)} swapped",
                    ast.Call(func, [args[1], args[0], *args[2:]], keywords),
                )
            for keyword in keywords:
                fewer = [other for other in keywords if other is not keyword]
                yield f"{ast.unparse(node)} without {keyword.arg}=", ast.Call(func, args, fewer)
        case ast.Slice(lower=lower, upper=upper, step=step):
            yield from ((f"{ast.unparse(node)} from the start", ast.Slice(None, upper, step)),) if lower else ()
            yield from ((f"{ast.unparse(node)} to the end", ast.Slice(lower, None, step)),) if upper else ()


def _of_lines(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """A statement left out, its block without its first line, or two of them swapped."""
    for name in ("body", "orelse"):
        lines = getattr(node, name, None)
        if not isinstance(lines, list) or isinstance(node, (ast.Module, ast.ClassDef)):
            continue
        for at, line in enumerate(lines):
            first = ast.unparse(line).splitlines()[0]
            instead = {f"without `{first}`": [*lines[:at], *lines[at + 1 :]]}
            if isinstance(line, (ast.If, ast.With)):
                instead[f"always what follows `{first}`"] = [*lines[:at], *line.body, *lines[at + 1 :]]
            if at + 1 < len(lines):
                instead[f"`{first}` a line later"] = [*lines[:at], lines[at + 1], line, *lines[at + 2 :]]
            for what, changed in instead.items():
                edited = copy.copy(node)
                edited.__dict__ = node.__dict__ | {name: changed or [ast.Pass()]}
                yield what, edited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="+", choices=EXERCISES, metavar="exercise")
    parser.add_argument("--all", action="store_true", help="what a learner would read for the others, too")
    options = parser.parse_args()
    for id in options.ids:
        for source, what in tqdm(edits(EXERCISES[id].reference).items(), id, leave=False, disable=None):
            verdict = judge.try_answer(id, source)
            if verdict.passed or options.all:
                told = "passes" if verdict.passed else f"{verdict.seen}\n{verdict.likely}"
                tqdm.write(f"{id} {what}\n{textwrap.indent(told, '    ')}")
    judge.close()


if __name__ == "__main__":
    main()
