"""One HTML file that needs nothing else: its pieces, each a string of markup.

Whatever comes from outside goes through `text`, and is escaped. Pictures are data URIs, in the ink of a light and of a
dark page. The page's own security policy forbids scripts and every request.
"""

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from string import Template

from matplotlib.figure import Figure

from namm.report.figures import Theme, png

NONE = "–"
LONG = 28  # letters that need not stand in one line
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | Markup


def text(content: Content) -> Markup:
    """`content`, escaped unless it is markup."""
    return content if isinstance(content, Markup) else Markup(escape(content))


def joined(parts: Iterable[Content], separator: str = "") -> Markup:
    """Parts one after another."""
    return Markup(escape(separator).join(text(part) for part in parts))


def element(tag: str, *content: Content, **attributes: str) -> Markup:
    """An element; `class_` stands for `class`."""
    given = "".join(f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items())
    return Markup(f"<{tag}{given}>{joined(content)}</{tag}>")


def paragraph(*content: Content) -> Markup:
    """A paragraph."""
    return element("p", *content)


def section(title: str, *content: Content) -> Markup:
    """A section under its heading."""
    return element("section", element("h2", title), *content)


def details(summary: str, *content: Content) -> Markup:
    """What opens on demand."""
    return element("details", element("summary", summary), *content)


def code(content: str) -> Markup:
    """A block of code."""
    return element("pre", element("code", content))


# Numbers


def number(value: float | None, digits: int = 3) -> Markup:
    """A number for people; the page keeps it in full as the value of a <data> element."""
    if value is None:
        return Markup(NONE)
    return element("data", plain_number(value, digits), value=repr(float(value)))


def plain_number(value: float, digits: int = 3) -> str:
    """`value` to so many digits: 0.0123, 1234, 4.68·10⁻⁸."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded == 0 or 1e-3 <= abs(rounded) < 1e4:
        places = digits - 1 - (math.floor(math.log10(abs(rounded))) if rounded else 0)
        return f"{rounded:.{max(0, places)}f}" if rounded else "0"
    mantissa, exponent = f"{rounded:.{digits - 1}e}".split("e")
    return f"{mantissa}·10{str(int(exponent)).translate(SUPERSCRIPTS)}"


def as_given(value: float | None) -> Markup:
    """A number of somebody else's, with the digits that it came with."""
    return Markup(NONE) if value is None else element("data", f"{value:g}", value=repr(float(value)))


def pair(mean_and_std: tuple[float, float] | None) -> Markup:
    """Mean, and below it ± the standard deviation."""
    if mean_and_std is None:
        return Markup(NONE)
    return joined([number(mean_and_std[0]), element("small", "± ", number(mean_and_std[1], 2))])


# Blocks


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]], caption: Content = "") -> Markup:
    """A table whose first column heads its rows, in a frame of its own that scrolls where the page is narrow."""
    header = element("tr", *(element("th", cell, scope="col") for cell in head))
    lines = (
        element("tr", element("th", first, scope="row"), *(element("td", cell, class_=_length(cell)) for cell in rest))
        for first, *rest in rows
    )
    inner = element("table", element("thead", header), element("tbody", *lines))
    frame = element("div", inner, class_="scroll", tabindex="0")
    return joined([frame, element("p", caption, class_="soft")]) if caption else frame


def picture(draw: Callable[[], Figure], title: str, caption: Content, description: str) -> Markup:
    """A figure in both inks, its title and what there is to see; `description` is for those who cannot see it."""
    uris = {theme: _data_uri(png(draw, theme)) for theme in _THEMES}
    dark = f'<source srcset="{uris["dark"]}" media="(prefers-color-scheme: dark)">'
    image = f'<img src="{uris["light"]}" alt="{escape(description)}">'
    both = element("picture", Markup(dark + image))
    return element("figure", both, element("figcaption", element("strong", title), " ", caption))


def bars(parts: Sequence[tuple[int, float]], whole: float) -> Markup:
    """Numbers side by side as lengths of one bar, each in that colour, of `keyed`."""
    spans = (element("span", class_=f"bar b{k}", style=f"width:{100 * value / whole:.2f}%") for k, value in parts)
    return element("div", *spans, class_="bars")


def keyed(colour: int, content: Content) -> Markup:
    """Text after a spot of the colour that a part of a bar has."""
    return element("span", element("i", class_=f"key b{colour}"), element("span", content), class_="keyed")


def tile(label: Content, ours: Content, baseline: Content, floor: Content) -> Markup:
    """One figure of merit at a glance."""
    lines = (("ours", ours), ("baseline", baseline), ("data", floor))
    return element(
        "div",
        element("h3", label),
        *(element("div", element("span", name), element("b", value), class_=name) for name, value in lines),
        class_="tile",
    )


def page(title: str, *content: Content) -> str:
    """The whole document."""
    return _PAGE.substitute(title=escape(title), style=_STYLE, body=joined(content, "\n"))


_THEMES: tuple[Theme, Theme] = ("light", "dark")


def _length(cell: Content) -> str:
    """Whether a cell's text may be broken into lines."""
    return "long" if len(cell) > LONG and not isinstance(cell, Markup) else "short"


def _data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
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

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5a6675; --ground: #fbfbf9; --card: #ffffff; --line: #dfe2e6;
  --ours: #15795b; --baseline: #b34e00; --data: #666; --warn: #fff3d6; --warn-line: #d9a400;
  --good: #e3f3ec; --bad: #fbe3e0; --bad-line: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9fabb9; --ground: #14181d; --card: #1b2027;
  --line: #333b45; --ours: #43c79c; --baseline: #f0914a; --data: #a5a5a5; --warn: #3a3013; --warn-line: #d9a400;
  --good: #12302a; --bad: #3d1a17; --bad-line: #e06a5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.2rem 0 0.4rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 0.6rem; padding-top: 0.6rem; border-top: 1px solid var(--line); }
h3 { font-size: 0.85rem; margin: 0 0 0.3rem; color: var(--soft); font-weight: 600; }
p { margin: 0.6rem 0; max-width: 46rem; }
.lead { font-size: 1.12rem; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
figcaption strong { color: var(--ink); }
.note { background: var(--warn); border-left: 4px solid var(--warn-line); padding: 0.6rem 0.9rem; margin: 1rem 0;
  border-radius: 0 6px 6px 0; }
.note p { margin: 0.2rem 0; }
.verdict { border-left: 6px solid var(--warn-line); background: var(--warn); padding: 0.4rem 0.9rem; margin: 1rem 0;
  border-radius: 0 8px 8px 0; }
.verdict.works { border-color: var(--ours); background: var(--good); }
.verdict.collapsed { border-color: var(--bad-line); background: var(--bad); }
.verdict ul { margin: 0.3rem 0; padding-left: 1.2rem; } .verdict p { margin: 0.3rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 0.8rem; margin: 1rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 0.7rem 0.9rem; }
.tile div { display: flex; justify-content: space-between; align-items: baseline; color: var(--soft); }
.tile b { font-variant-numeric: tabular-nums; font-weight: 600; }
.tile .ours b { color: var(--ours); font-size: 1.25rem; } .tile .baseline b { color: var(--baseline); }
.tile .data b { color: var(--data); }
.scroll, figure, pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.scroll { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 0.88rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.55rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; } tbody th { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
tbody small { display: block; font-weight: 400; color: var(--soft); }
tbody th small { white-space: normal; min-width: 7.5rem; }
.wide td { white-space: normal; text-align: left; } .wide thead th { text-align: left; }
.wide td.long { min-width: 15rem; } .wide td.short { white-space: nowrap; }
.figures { columns: 26rem; column-gap: 1rem; }
figure { margin: 0 0 1rem; padding: 0.8rem; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 34rem; height: auto; margin: 0 auto 0.6rem; }
pre { overflow-x: auto; padding: 0.7rem 0.9rem; font-size: 0.82rem; line-height: 1.45; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
details { margin: 0.8rem 0; } summary { cursor: pointer; color: var(--soft); }
.bars { display: flex; height: 1.1rem; border-radius: 4px; overflow: hidden; background: var(--line);
  margin: 0.2rem 0 0.5rem; }
.bar { display: block; height: 100%; }
.b0 { background: #1b9e77; } .b1 { background: #57b897; } .b2 { background: #8fd0ba; }
.b3 { background: #0f6b50; } .b4 { background: #d95f02; }
.keyed { display: flex; align-items: baseline; }
.key { flex: none; width: 0.7rem; height: 0.7rem; border-radius: 2px; margin-right: 0.5rem; }
@media (max-width: 40rem) { main { padding: 1rem 0.8rem 3rem; } figure { padding: 0.5rem; margin: 0 -0.4rem 1rem; }
  tbody th, thead th { white-space: normal; } tbody th { max-width: 45vw; overflow-wrap: break-word; } }
"""
