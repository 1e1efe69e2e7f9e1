"""How Sphinx builds the documentation; `nox -s docs` runs it, strictly."""

import importlib
import io
import os
import re
from contextlib import redirect_stdout, suppress
from typing import Any

from docutils import nodes
from numpy.typing import DTypeLike
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import stringify_annotation

import fastamp

os.environ |= {"COLUMNS": "88", "NO_COLOR": "1"}  # of the help that commands print

project, release = "fastamp", fastamp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "name"  # `name` in a docstring is code, and a link where it is a public name
nitpicky = True  # a public name leads somewhere; modules below a feature's are private
nitpick_ignore_regex = [
    (r"py:.*", r"(?!fastamp\.).*"),
    (r"py:class", r"fastamp\.\w+\.\w+\..*"),
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
pygments_style, pygments_dark_style = "default", "monokai"  # which colour both sides of a diff
html_title = f"fastamp {release}"
html_copy_source = html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # a browser may not read other pages of a folder for it


class CommandHelp(SphinxDirective):
    """`{command-help} MODULE WORDS` is what `python -m MODULE WORDS --help` prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return a block of text."""
        module, *words = self.arguments[0].split()
        printed = io.StringIO()
        with redirect_stdout(printed), suppress(SystemExit):
            importlib.import_module(f"{module}.__main__").main([*words, "--help"])
        text = printed.getvalue()
        return [nodes.literal_block(text, text, language="text")]


def find_public(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Lead from the module that defines a name, as types have it, to its public name."""
    target = node["reftarget"]
    _, _, name = target.rpartition(".")
    feature = ".".join(target.split(".")[:2])
    for public in (f"fastamp.{name}", f"{feature}.{name}"):
        found = target.startswith("fastamp.") and env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", public, node, content
        )
        if found:
            return found
    return None


def read_name(_name: str, raw: str, text: str, line: int, inliner: Any, *_: Any) -> Any:
    """Make code of what stands in backticks, and a link where it may be a name."""
    if re.fullmatch(r"[A-Za-z][\w.]*(\(\))?", text):
        return PyXRefRole()("py:obj", raw, text, line, inliner, {}, [])
    return [nodes.literal(raw, text)], []


def shorten(*event: Any) -> tuple[str | None, str | None]:
    """Call a type of NumPy by its name, which it has forgotten."""
    signature, returns = event[-2:]
    long = stringify_annotation(DTypeLike | None, "smart")
    return signature and signature.replace(long, "DTypeLike | None"), returns


def mend(*event: Any) -> None:
    """Drop the text that Python gives to fields of named tuples; let attributes' have colons."""
    what, lines = event[1], event[-1]
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()
    if what in {"attribute", "property"}:
        lines[:0] = ["..", ""]  # napoleon takes what stands before a colon there for a type


def setup(app: Sphinx) -> None:
    """Register what this file adds."""
    app.add_directive("command-help", CommandHelp)
    app.connect("missing-reference", find_public)
    app.add_role("name", read_name)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-process-docstring", mend, priority=400)  # before napoleon
