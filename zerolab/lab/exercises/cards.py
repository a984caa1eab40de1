"""How a verdict or a prediction looks: a coloured card in a notebook, the same text everywhere else."""

from __future__ import annotations

import re
import sys
from html import escape
from typing import Any

# As in the pictures: from the palette of Okabe and Ito. The sign in the text says the same as the colour.
COLOURS = {"right": "#009E73", "wrong": "#D55E00", "open": "#888888", "prediction": "#0072B2"}

_ROW = re.compile(r"  (\w+) {2,}(.*)")  # "  likely   summed, not averaged"
_LINE = re.compile(r" · (line \d+): (.+)$")  # the learner's own line, at the end of what was seen


def say(text: str, kind: str) -> None:
    """Show `text` as a card of this kind (a key of COLOURS); print it where nothing can show HTML."""
    if _kernel() is None:
        print(text)
        return
    from IPython.display import display

    display({"text/plain": text, "text/html": as_html(text, kind)}, raw=True)


class Status:
    """What goes on in a cell that takes a while, if a person watches: each call replaces what the last one showed."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, text: str) -> None:
        if somebody_watches():
            self._show(text, "open")

    def end(self, text: str, kind: str) -> None:
        """The outcome, in place of what was shown on the way."""
        if self._handle is None:
            say(text, kind)
        else:
            self._show(text, kind)

    def print(self, text: str) -> None:
        """Print `text`; if something was shown on the way, in its place."""
        if self._handle is None:
            print(text)
        else:
            self._handle.update({"text/plain": text}, raw=True)

    def _show(self, text: str, kind: str) -> None:
        from IPython.display import display

        shown = {"text/plain": text, "text/html": as_html(text, kind)}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def somebody_watches() -> bool:
    """Whether a person may be watching: not when nbval or nbclient runs the cells and records their output."""
    return bool(getattr(_kernel(), "_allow_stdin", False))


def shell_here() -> Any:
    """The IPython shell this runs in, or None."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def _kernel() -> Any:
    """The kernel that shows what this process displays, or None."""
    return getattr(shell_here(), "kernel", None)


def as_html(text: str, kind: str) -> str:
    """`text` as a card: a verdict in bold, and lines such as "  seen     rank 1, ..." as a table."""
    colour = COLOURS[kind]
    first, *lines = text.splitlines()
    inside = [f"<b>{_sentence(first)}</b>" if first[0] in "✓✗○" else _sentence(first)]
    rows: list[tuple[str, str]] = []
    for line in lines:
        if row := _ROW.fullmatch(line):
            rows.append((row[1], row[2]))
        else:
            rows.append(("", line))
    if rows:
        cell = "text-align: left; vertical-align: top; padding: 1px 12px 1px 0; background: none; border: none"
        inside.append('<table style="margin: 4px 0 0 0; border: none; font-size: inherit">')
        for label, said in rows:
            inside.append(
                f'<tr style="background: none"><td style="{cell}; color: {colour}">{label}</td>'
                f'<td style="{cell}">{_sentence(said)}</td></tr>'
            )
        inside.append("</table>")
    frame = (
        f"border-left: 5px solid {colour}; background: {colour}14; padding: 6px 12px; margin: 2px 0; max-width: 60em"
    )
    return f'<div style="{frame}; line-height: 1.45">{"".join(inside)}</div>'


def _sentence(text: str) -> str:
    """`text` in HTML; the learner's own line at its end stands out as code."""
    if found := _LINE.search(text):
        return f"{_spaced(text[: found.start()])} · {found[1]}: <code>{_spaced(found[2])}</code>"
    return _spaced(text)


def _spaced(text: str) -> str:
    return re.sub(r" {2,}", lambda spaces: "&nbsp;" * len(spaces[0]), escape(text))
