"""Boxes, text and arrows as SVG, for the tutorial's pictures."""

from collections.abc import Mapping
from html import escape

INK, OUTLINE, GREY, WHITE, RED = "#1f2328", "#57606a", "#eeeeee", "#ffffff", "#b3261e"
BLUE, ORANGE, GREEN, PURPLE = "#cfe3fa", "#fde0bd", "#d5ecd4", "#e6dcf8"
YELLOW, RUST = "#fff2b8", "#f6bd8b"  # beside orange, which is sending in all pictures
WIDTH, LEFT = 840, 24
BOLD = ' font-weight="bold"'


class Picture:
    """An SVG file: later parts are drawn above earlier ones. Lengths are in pixels, and y grows downwards."""

    def __init__(self, title: str, description: str, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-labelledby="title description" '
            'font-family="system-ui, sans-serif">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" '
            f'orient="auto"><path d="M0,0 L9,4 L0,8 Z" fill="{INK}"/></marker></defs>',
            # Without a white background, dark text would stand on a page's dark background.
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{WHITE}"/>',
        ]
        self.text(LEFT, 34, title, 17, style=BOLD)

    def text(
        self, x: float, y: float, text: str, size: int = 12, anchor: str = "start", style: str = ""
    ) -> None:
        """`y` is the base line's; `anchor` is the end of the text that is at `x`: start, middle or end."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}"{style}>'
            f"{escape(text)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *labels: str, dashed: bool = False
    ) -> None:
        """Draw a box with its labels in the middle, one below the other."""
        dashes = ' stroke-dasharray="5 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="{OUTLINE}"{dashes}/>'
        )
        first = y + height / 2 + 4 - 8 * (len(labels) - 1)
        for number, label in enumerate(labels):
            self.text(x + width / 2, first + 16 * number, label, anchor="middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = INK, style: str = "") -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="1.5"{style}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.line(x1, y1, x2, y2, style=' marker-end="url(#head)"')

    def legend(self, y: float, meanings: Mapping[str, str]) -> None:
        """Draw a row of squares, each in its colour and with its meaning."""
        x = LEFT
        for meaning, fill in meanings.items():
            self.box(x, y, 14, 14, fill)
            self.text(x + 20, y + 12, meaning)
            x += 44 + 7 * len(meaning)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])
