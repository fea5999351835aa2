"""Draws the diagrams of the documentation: docs/diagrams/*.svg, and the colours of the site.

python scripts/diagrams.py          # writes the files again

An SVG file has its colours in it and follows the reader's choice of light or dark. The site puts the drawing
into its pages, where the same classes get their colours from docs/diagrams/diagrams.css.
"""

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "diagrams"
_LIGHT = {
    "ink": "fill: #1f2430", "soft": "fill: #5b6472", "line": "stroke: #5b6472; fill: none",
    "box": "fill: #f4f6f9; stroke: #8a94a3", "one": "fill: #dbe8fb; stroke: #3f72bd",
    "two": "fill: #fdeadb; stroke: #c8712b", "three": "fill: #e0f2e4; stroke: #3d8b50",
    "wire": "stroke: #b2383f; fill: none", "head": "fill: #b2383f; stroke: none",
    "halo": "fill: none; stroke: #c8712b; stroke-dasharray: 4 3",
}  # fmt: skip
_DARK = {
    "ink": "fill: #e6e9ef", "soft": "fill: #a7b0bf", "line": "stroke: #a7b0bf; fill: none",
    "box": "fill: #262b36; stroke: #6c7687", "one": "fill: #1f3557; stroke: #7aa7e8",
    "two": "fill: #4a2f1b; stroke: #e39b5d", "three": "fill: #1d3b26; stroke: #6fbf83",
    "wire": "stroke: #ef7b82; fill: none", "head": "fill: #ef7b82; stroke: none",
    "halo": "fill: none; stroke: #e39b5d; stroke-dasharray: 4 3",
}  # fmt: skip
_FONT = "font-family: system-ui, sans-serif; font-size: 13px"


def _rules(colors: dict[str, str], scope: str = "") -> str:
    return "\n".join(f"{scope}.dx-{name} {{ {rule} }}" for name, rule in colors.items())


@dataclass
class Drawing:
    """An SVG drawing of ``width`` by ``height`` pixels with a ``title`` for readers who do not see it."""

    title: str
    width: int
    height: int
    _parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "middle") -> None:
        """Write lines of text, each 17 pixels below the one before."""
        for number, line in enumerate(text.split("\n")):
            place = f'x="{x:g}" y="{y + 17 * number:g}" text-anchor="{anchor}"'
            self._parts.append(f'<text class="dx-{kind}" {place}>{html.escape(line)}</text>')

    def box(self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "box") -> None:
        """Draw a box with text in its middle."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect class="dx-{kind}" {size} rx="6"/>')
        if text:
            lines = text.count("\n")
            self.text(x + width / 2, y + height / 2 + 4.5 - 8.5 * lines, text)

    def node(self, x: float, y: float, text: str = "", kind: str = "one") -> None:
        """Draw a node of a graph."""
        self._parts.append(f'<circle class="dx-{kind}" cx="{x:g}" cy="{y:g}" r="13"/>')
        self.text(x, y + 4.5, text)

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="dx-{kind}" stroke-width="1.5" points="{path}"/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
        """Draw an arrow for what crosses a network, with text above it."""
        (x, y), (to_x, to_y) = start, end
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        along, across = (to_x - x) / length, (to_y - y) / length
        self.line(start, (to_x - 8 * along, to_y - 8 * across), kind="wire")
        back = (to_x - 10 * along, to_y - 10 * across)
        left = (back[0] - 4 * across, back[1] + 4 * along)
        right = (back[0] + 4 * across, back[1] - 4 * along)
        corners = " ".join(f"{a:g},{b:g}" for a, b in (end, left, right))
        self._parts.append(f'<polygon class="dx-head" points="{corners}"/>')
        if text:
            lines = text.count("\n")
            self.text((x + to_x) / 2, (y + to_y) / 2 - 7 - 17 * lines, text)

    def place(self, other: "Drawing", x: float, y: float) -> None:
        """Put another drawing at a place of this one."""
        inner = "\n".join(other._parts)
        self._parts.append(f'<g transform="translate({x:g} {y:g})">\n{inner}\n</g>')

    def render(self) -> str:
        """Return the SVG text."""
        dark = f"@media (prefers-color-scheme: dark) {{\n{_rules(_DARK)}\n}}"
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg class="dx-diagram" xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        style = f"<style>\n.dx-diagram {{ {_FONT} }}\n{_rules(_LIGHT)}\n{dark}\n</style>"
        return "\n".join([head, f"<title>{html.escape(self.title)}</title>", style, *self._parts, "</svg>\n"])


def _two_servers(title: str, holds: Iterable[str], sends: Iterable[str], note: str = "") -> Drawing:
    """Draw two servers that hold the same kinds of things, and the arrows between them from top to bottom."""
    drawing = Drawing(title, 640, 190)
    for x, number, kind in ((10, 0, "one"), (430, 1, "two")):
        drawing.box(x, 10, 200, 150)
        drawing.text(x + 100, 30, f"server {number}")
        lines = [text.replace("#", str(number)) for text in holds]
        height = 112 / len(lines)
        for place, text in enumerate(lines):
            drawing.box(x + 12, 42 + place * height, 176, height - 8, text, kind)
    labels = list(sends)
    for place, text in enumerate(labels):
        y = 60 + place * 88 / max(1, len(labels) - 1) if len(labels) > 1 else 92
        drawing.arrow((212, y), (428, y), text)
        drawing.arrow((428, y + 8), (212, y + 8))
    drawing.text(320, 182, note, "soft")
    return drawing


def draw_data_parallel() -> Drawing:
    """Draw what moves under data_parallel."""
    return _two_servers(
        "Under data_parallel, ranks fetch feature rows of remote nodes and sum gradients.",
        ["part #: features", "batch #, whole model"],
        ["feature rows", "gradients"],
        "each rank trains on its own mini-batch",
    )


def draw_push_pull() -> Drawing:
    """Draw what moves under push_pull."""
    return _two_servers(
        "Under push_pull, servers exchange partial results of layer 1 and never features.",
        ["columns # of features\nand of layer 1", "batch #, layers 2, 3, ..."],
        ["partial sums of layer 1", "gradients of layers 2, 3, ..."],
        "features never move",
    )


def draw_full_graph() -> Drawing:
    """Draw what moves under full_graph."""
    return _two_servers(
        "Under full_graph, servers exchange rows of border nodes in every layer.",
        ["all nodes of part #", "whole model"],
        ["border rows, every layer", "gradients"],
        "a step trains on the whole graph",
    )


def draw_shared_preload() -> Drawing:
    """Draw what moves under shared_preload."""
    return _two_servers(
        "Under shared_preload, servers hold copies of their neighbourhood and exchange gradients only.",
        ["part # and a copy of\nits neighbourhood", "whole model"],
        ["gradients"],
        "copies are computed again, so rows stay at home",
    )


def draw_lambda() -> Drawing:
    """Draw what moves under lambda."""
    drawing = Drawing("Under lambda, graph servers gather rows and stateless workers multiply.", 640, 190)
    for x, number, kind in ((10, 0, "one"), (430, 1, "two")):
        drawing.box(x, 10, 200, 70)
        drawing.text(x + 100, 30, f"graph server {number}")
        drawing.box(x + 12, 40, 176, 30, f"part {number}: gather, scatter", kind)
    drawing.arrow((212, 42), (428, 42), "border rows")
    drawing.arrow((428, 50), (212, 50))
    for x in (120, 270, 420):
        drawing.box(x, 128, 100, 32, "worker", "three")
    drawing.arrow((110, 84), (165, 126))
    drawing.arrow((530, 84), (475, 126))
    drawing.text(320, 108, "rows and weights down, results up")
    drawing.text(320, 182, "workers are functions without state", "soft")
    return drawing


def draw_placement() -> Drawing:
    """Draw servers, ranks and parts."""
    drawing = Drawing("A job of two servers with two ranks each, on a graph of two parts.", 640, 190)
    for x, number, kind in ((10, 0, "one"), (340, 1, "two")):
        drawing.box(x, 10, 290, 160)
        drawing.text(x + 145, 30, f"server {number}: a machine, shared memory")
        drawing.box(x + 15, 44, 260, 44, f"part {number}: its nodes, in-edges, features", kind)
        for rank in (0, 1):
            drawing.box(x + 15 + 135 * rank, 104, 125, 50, f"rank {2 * number + rank}\na process", "three")
    return drawing


def draw_halo() -> Drawing:
    """Draw two parts of a graph, the cut and the halo."""
    drawing = Drawing("Part 0 owns nodes a, b and c. Nodes d and e of part 1 are its halo.", 640, 190)
    drawing.box(10, 10, 270, 150)
    drawing.box(360, 10, 270, 150)
    drawing.text(145, 180, "part 0", "soft")
    drawing.text(495, 180, "part 1", "soft")
    places = {"a": (70, 60), "b": (70, 120), "c": (200, 90), "d": (430, 50), "e": (430, 120), "f": (560, 90)}
    for start, end in ("ac", "bc", "dc", "ec", "df", "ef", "ab"):
        drawing.line(places[start], places[end])
    for name, (x, y) in places.items():
        drawing.node(x, y, name, "one" if name in "abc" else "two")
    for x, y in (places["d"], places["e"]):
        drawing.box(x - 20, y - 20, 40, 40, kind="halo")
    drawing.text(320, 30, "cut edges")
    drawing.text(430, 95, "halo of part 0", "soft")
    return drawing


def draw_ledger() -> Drawing:
    """Draw how the ledger counts messages."""
    drawing = Drawing(
        "Each message is a row of the ledger: phase, layer, source, destination, bytes.", 640, 170
    )
    drawing.box(10, 40, 110, 50, "rank 0", "one")
    drawing.box(240, 40, 110, 50, "rank 2", "two")
    drawing.arrow((122, 65), (238, 65), "180 rows")
    rows = ("phase     features", "from, to   0, 2", "inside     no", "bytes      72,000")
    drawing.box(420, 10, 210, 110)
    for number, row in enumerate(rows):
        drawing.text(436, 36 + 24 * number, row, anchor="start")
    drawing.line((352, 65), (418, 65))
    drawing.text(320, 152, "the sum over all ranks has each byte once", "soft")
    return drawing


def draw_keys() -> Drawing:
    """Draw that draws do not depend on the number of ranks."""
    drawing = Drawing("A draw depends on seed, epoch, hop and node, and not on the rank.", 640, 170)
    drawing.box(10, 50, 200, 60, "seed 0, epoch 3,\nhop 1, node 42")
    drawing.box(270, 50, 110, 60, "hash", "three")
    drawing.line((210, 80), (270, 80))
    drawing.line((380, 80), (440, 50))
    drawing.line((380, 80), (440, 110))
    drawing.box(440, 25, 190, 46, "1 rank: neighbours 7, 9", "one")
    drawing.box(440, 92, 190, 46, "4 ranks: neighbours 7, 9", "two")
    return drawing


def draw_gradients() -> Drawing:
    """Draw the gradient rule."""
    drawing = Drawing(
        "The gradient of one process is the weighted sum of the gradients of the ranks.", 640, 170
    )
    drawing.box(10, 20, 150, 46, "rank 0: 5 targets", "one")
    drawing.box(10, 92, 150, 46, "rank 1: 3 targets", "two")
    drawing.arrow((162, 43), (318, 70))
    drawing.text(240, 36, "5/8 of its mean")
    drawing.arrow((162, 115), (318, 88))
    drawing.text(240, 128, "3/8 of its mean")
    drawing.box(320, 50, 100, 58, "sum", "three")
    drawing.line((420, 79), (460, 79))
    drawing.box(460, 50, 170, 58, "gradient of one process\non all 8 targets")
    return drawing


def draw_ids() -> Drawing:
    """Draw the three kinds of ids."""
    drawing = Drawing(
        "A node has a user id in your tables, an old id in your graph and a new id here.", 640, 150
    )
    drawing.box(10, 30, 170, 50, 'user id\n"berlin"')
    drawing.box(235, 30, 170, 50, "old id\n17", "one")
    drawing.box(460, 30, 170, 50, "new id\n4203, in part 1", "two")
    drawing.line((180, 55), (235, 55))
    drawing.line((405, 55), (460, 55))
    for x, text in ((95, "your tables"), (320, "your graph"), (545, "DistGraph")):
        drawing.text(x, 20, text, "soft")
    drawing.text(320, 112, "g.new_ids(old) -> new      g.orig_ids(new) -> old      g.user_ids(new) -> user")
    return drawing


def draw_overview() -> Drawing:
    """Draw what moves under each strategy, one below the other."""
    strategies = {
        "data_parallel": draw_data_parallel, "push_pull": draw_push_pull, "full_graph": draw_full_graph,
        "shared_preload, cooperative": draw_shared_preload, "lambda": draw_lambda,
    }  # fmt: skip
    drawing = Drawing("What moves between two servers under each strategy.", 640, 225 * len(strategies))
    for number, (name, draw) in enumerate(strategies.items()):
        drawing.text(10, 225 * number + 20, name, anchor="start")
        drawing.place(draw(), 0, 225 * number + 25)
    return drawing


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "placement": draw_placement, "halo": draw_halo, "ids": draw_ids, "ledger": draw_ledger, "keys": draw_keys,
    "gradients": draw_gradients, "data_parallel": draw_data_parallel, "push_pull": draw_push_pull,
    "full_graph": draw_full_graph, "shared_preload": draw_shared_preload, "lambda": draw_lambda,
    "strategies": draw_overview,
}  # fmt: skip


def make_files() -> dict[str, str]:
    """Return the text of each file by its name."""
    files = {f"{name}.svg": draw().render() for name, draw in DIAGRAMS.items()}
    size = f".dx-diagram {{ {_FONT}; max-width: 100%; height: auto }}"
    dark = _rules(_DARK, '[data-md-color-scheme="slate"] ')
    return {**files, "diagrams.css": "\n".join([size, _rules(_LIGHT), dark]) + "\n"}


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in make_files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"written to {FOLDER}")


if __name__ == "__main__":
    main()
