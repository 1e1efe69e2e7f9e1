"""One self-contained page of a record: no script, nothing from elsewhere, light and dark."""

import json
from html import escape
from typing import Any

from fastamp.bench.pictures import INKS, draw_record
from fastamp.bench.record import is_judged

LIGHT, DARK = ("; ".join(f"--{ink}: {pair[i]}" for ink, pair in INKS.items()) for i in (0, 1))
STYLE = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}"""
STYLE += """
body { margin: 0 auto; max-width: 1100px; padding: 16px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem }
p { margin: .3rem 0 } p, th { color: var(--soft) }
.lead { color: var(--ink); font-size: 1.2rem; margin: 1rem 0 }
.verdict { border-left: 4px solid var(--soft); padding-left: 12px; color: var(--ink) }
.pass, .faster { border-color: var(--good) } .fail, .slower { border-color: var(--bad) }
svg { display: block; width: 100%; min-width: 720px; stroke-linejoin: round }
svg text { font-family: system-ui, sans-serif !important }
.key { margin-right: 8px; white-space: nowrap }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left } td:first-child { font-weight: 600 }
.scroll { overflow-x: auto } .results { width: 100%; overflow-wrap: normal }
.facts { display: flex; flex-wrap: wrap; gap: 0 40px }
.facts section { flex: 1 1 320px } .facts table { width: 100% }
.facts th { width: 8.5rem; font-weight: 400; vertical-align: top }
.facts th, .facts td { padding: 3px 10px 3px 0; text-align: left; font-weight: 400 }
"""
UNITS = {"batch_size": "samples", "memory_batch_size": "samples", "block_size": "bytes"}


def make(record: dict[str, Any]) -> str:
    """Return the page of a record; what is not text in the name of a file becomes "?"."""
    record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    title = escape(f"fastamp bench: {record['command']}")
    environment = {"measured": _say_time(record["created"]), **record["environment"]}
    facts = _facts("Environment", environment) + _facts("Job", record["job"])
    judged = [each for each in record["measurements"] if is_judged(each)]
    body = [
        f"<h1>{title}</h1>",
        *(_paragraph(text, "lead") for text in _leads(record) if text),
        *(_paragraph(each["text"], f"verdict {each['verdict']}") for each in judged),
        draw_record(record),
        "<h2>Results</h2>",
        _table(record["table"]),
        *(_paragraph(note) for note in record["notes"] + record["closing"]),
        f'<div class="facts">{facts}</div>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _leads(record: dict[str, Any]) -> list[str]:
    return [record["noise"], *record["failures"], record["sentence"]]


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def _table(rows: list[dict[str, str]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row.values()) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="results">\n<tr>{heads}</tr>\n{body}\n</table></div>'


def _facts(title: str, values: dict[str, Any]) -> str:
    """Return a table of two columns, in words; what is None is left out."""
    rows = "\n".join(
        f"<tr><th>{escape(_say_name(name))}</th><td>{escape(_say(value, name))}</td></tr>"
        for name, value in values.items()
        if value is not None
    )
    return f"<section><h2>{title}</h2>\n<table>\n{rows}\n</table></section>" if rows else ""


def _say_name(name: str) -> str:
    return name.replace("nbytes", "size").replace("_", " ")


def _say_time(text: str) -> str:
    return text.replace("T", " ").replace("+00:00", " UTC")


def _say(value: Any, name: str = "") -> str:
    """Return a value of a record in words, with the unit that its name implies."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [f"{_say_name(key)} {_say(each, key)}" for key, each in value.items()]
    if isinstance(value, list):
        return ", ".join(map(_say, value)) or "none"
    if name.endswith("nbytes"):
        power = min(max(int(value).bit_length() - 1, 0) // 10, 3)
        return f"{value / 1024**power:.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(["none" if value is None else str(value), *filter(None, [UNITS.get(name)])])
