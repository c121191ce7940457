"""The little HTML that the report needs: escaping, tables, folded parts and the page around them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from string import Template


class Markup(str):
    """Text that is HTML already; every other value is escaped on its way into the page."""


def safe(value: object) -> str:
    """Return ``value`` as HTML, escaped unless it is ``Markup``.

    >>> safe("<b>"), safe(Markup("<b>"))
    ('&lt;b&gt;', '<b>')
    """
    return value if isinstance(value, Markup) else html.escape(str(value))


def element(tag: str, *inner: object, **attributes: str) -> Markup:
    """Return one element; ``class_`` gives its class.

    >>> element("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    written = "".join(f' {key.rstrip("_")}="{html.escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{tag}{written}>{''.join(map(safe, inner))}</{tag}>")


def join(parts: Sequence[object], between: str = "") -> Markup:
    """Return the parts as one piece of HTML."""
    return Markup(safe(between).join(map(safe, parts)))


def table(headings: Sequence[object], rows: Sequence[Sequence[object]], words: int = 1) -> Markup:
    """Return a table; its first ``words`` columns hold words and stand left, the others numbers and stand right."""
    sides = ["word" if column < words else "figure" for column in range(len(headings))]
    head = join([element("th", cell, class_=side) for cell, side in zip(headings, sides, strict=True)])
    body = [
        element("tr", *(element("td", cell, class_=side) for cell, side in zip(row, sides, strict=True)))
        for row in rows
    ]
    return element(
        "div",
        element("table", element("thead", element("tr", head)), element("tbody", *body)),
        class_="scroll",
    )


def folded(title: str, *inner: object) -> Markup:
    """Return a part that the reader opens with a click."""
    return element("details", element("summary", title), *inner)


def section(title: str, *inner: object) -> Markup:
    """Return a section under a heading, or nothing where it would be empty."""
    return element("section", element("h2", title), *inner) if any(map(str, inner)) else Markup("")


def drawing(svg: str, description: str) -> Markup:
    """Return an SVG as a figure that a screen reader can name; nothing for no SVG."""
    if not svg:
        return Markup("")
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(description)}"', 1)
    return element("figure", Markup(labelled))


def page(title: str, body: str) -> str:
    """Return the whole page."""
    return _PAGE.substitute(title=html.escape(title), body=body, style=_STYLE)


_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: #1f2933;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 28px 20px 48px; }
header { margin-bottom: 20px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 10px; }
h3 { font-size: 15px; margin: 22px 0 8px; }
p { margin: 6px 0; }
section { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; padding: 18px 20px; margin: 0 0 18px; }
.note, .quiet { color: #52606d; }
.note { font-size: 13.5px; }
.sentence { overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-bottom: 18px; }
.tile { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; padding: 12px 14px; }
.over { font-size: 13px; letter-spacing: .04em; text-transform: uppercase; color: #7b8794; margin: 0 0 2px; }
.tile .name { font-size: 13px; color: #52606d; }
.tile .value { font-size: 23px; font-weight: 600; line-height: 1.3; white-space: nowrap; }
.tile .under { font-size: 12.5px; color: #52606d; }
.missing { background: #fff8e6; border-color: #f0d58c; }
.missing ul { margin: 0; padding-left: 20px; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0 0 10px; font-size: 14px; }
.key { white-space: nowrap; }
.key svg { vertical-align: middle; margin-right: 7px; }
.alert { color: #b34700; font-weight: 600; }
p.alert { font-size: 14px; }
figure { margin: 0 0 6px; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 620px; height: auto; }
svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { font-weight: 600; line-height: 1.3; color: #52606d; border-bottom: 1px solid #cbd2d9; vertical-align: bottom; }
th, td { padding: 5px 7px; }
td { white-space: nowrap; }
td { border-bottom: 1px solid #eef1f4; }
tr:last-child td { border-bottom: 0; }
.word { text-align: left; }
.figure { text-align: right; }
details { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; padding: 10px 20px; margin: 0 0 10px; }
summary { cursor: pointer; font-weight: 600; }
details table { margin: 8px 0; }
details td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
footer { color: #7b8794; font-size: 13px; margin-top: 18px; }
@media print { body { background: #fff; } section, .tile, details { break-inside: avoid; } }
"""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")
