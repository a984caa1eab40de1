"""Sphinx's settings. The pages are written by build.py, which also calls Sphinx."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml import converter
from pygments.lexer import inherit
from pygments.lexers.python import PythonLexer
from pygments.token import Comment

HERE = Path(__file__).parent

project = "zerolab"
html_title = "zerolab"
language = "en"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_dmath_allow_digits = False  # else "$5 and $6" is a formula
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a lesson may go from ## to ####
highlight_language = "none"  # a block that names no language is text or a shell's
html_theme = "furo"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
templates_path = [str(HERE / "templates")]
html_copy_source = False
html_show_sourcelink = False
html_use_index = False
html_domain_indices = False
html_math_renderer = "mathml"
python_maximum_signature_line_length = 72
toc_object_entries_show_parents = "hide"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
colours = {"color-brand-primary": "#0062a3", "color-brand-content": "#0062a3"}
dark = {"color-brand-primary": "#6cb8ee", "color-brand-content": "#6cb8ee"}
html_theme_options = {"light_css_variables": colours, "dark_css_variables": dark, "top_of_page_buttons": []}


class CellLexer(PythonLexer):
    """Python whose first line may be %%ranks."""

    name = "Notebook cell"
    aliases = ["cell"]
    tokens = {"root": [(r"^[ \t]*[%!].*$", Comment.Preproc), inherit]}


def _inline(writer: Any, node: Any) -> None:
    writer.body.append(converter.convert(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: Any) -> None:
    for line in re.split(r"\n\s*\n", node.astext().strip()):
        writer.body.append(f'<div class="math">{converter.convert(line, display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_lexer("cell", CellLexer)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
