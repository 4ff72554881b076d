"""One HTML file that needs nothing else: no script, no network; for screens, phones and paper."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ridgeline.report.style import STYLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure that is read first: what it is, the figure, and what must be known of it."""

    name: str
    value: str
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Page:
    """A report in the making: parts in the order in which they are added.

    ``data`` is embedded as JSON, for programs that read the file.
    """

    title: str
    verdict: str
    subtitle: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)

    def add_tiles(self, tiles: Sequence[Tile]) -> None:
        """Figures side by side."""
        cells = "".join(
            f'<div class="tile"><span>{escape(tile.name)}</span><strong>{escape(tile.value)}'
            f"</strong><small>{escape(tile.note)}</small></div>"
            for tile in tiles
        )
        self.parts.append(f'<div class="tiles">{cells}</div>')

    def add_heading(self, text: str, explanation: str = "") -> None:
        """A section begins."""
        says = f"<p>{escape(explanation)}</p>" if explanation else ""
        self.parts.append(f"<h2>{escape(text)}</h2>{says}")

    def add_figures(self, *figures: tuple[str, str]) -> None:
        """Charts side by side where there is room: (what it shows, its SVG) each."""
        cells = "".join(
            f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
            for caption, svg in figures
            if svg
        )
        if cells:
            self.parts.append(f'<div class="figures">{cells}</div>')

    def add_table(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        strong: Sequence[int] = (),
    ) -> None:
        """Texts; all columns but the first are figures, to the right. ``strong`` rows stand out."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join(
            f"<tr{' class=strong' if number in strong else ''}>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in row)
            + "</tr>"
            for number, row in enumerate(rows)
        )
        self.parts.append(
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
            "</div>"
        )

    def add_list(self, items: Sequence[str]) -> None:
        """Sentences, one below another."""
        if items:
            lines = "".join(f"<li>{escape(item)}</li>" for item in items)
            self.parts.append(f"<ul>{lines}</ul>")

    def add_code(self, text: str) -> None:
        """Something to copy."""
        self.parts.append(f"<pre>{escape(text)}</pre>")

    def to_html(self) -> str:
        """The whole file."""
        # A "<" could end the element that the data is in.
        data = json.dumps(self.data).replace("<", "\\u003c")
        subtitle = f'<p class="subtitle">{escape(self.subtitle)}</p>' if self.subtitle else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1>{subtitle}<p class="verdict">{escape(self.verdict)}</p>'
            + "\n".join(self.parts)
            + f'</main><script type="application/json" id="data">{data}</script></body></html>\n'
        )
