"""A trace as a picture: `python -m tests.e2e.waterfall PICTURE.svg` asks a server of its own for a streamed chat,
with a prompt in chunks, and draws the spans that a collector got of it. The README shows one.
"""

from __future__ import annotations

import sys
import tempfile
from html import escape
from pathlib import Path

from tests.e2e.collector import Span, collecting
from tests.e2e.server import serving
from tests.e2e.test_tracing import Ask, has

COLORS = {"api": "#2f6fde", "tokenizer": "#1a9a6c", "scheduler": "#c47a12", "executor": "#b0416b"}
WIDTH, ROW, TOP, LABEL = 960, 22, 44, 250  # pixels
LONG = "Tell me of a river that carries water through a long pipe to a mill, and of who lives there. " * 4
OPTIONS = ("--device", "cpu", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--trace-tokens", "16")


def order(spans: list[Span]) -> list[tuple[int, Span]]:
    """Depth and span, children behind their parents in the order of their beginnings."""
    by_parent: dict[str, list[Span]] = {}
    ids = {span["id"] for span in spans}
    for span in sorted(spans, key=lambda span: (span["start"], span["end"])):
        by_parent.setdefault(span["parent"] if span["parent"] in ids else "", []).append(span)

    def below(parent: str, depth: int) -> list[tuple[int, Span]]:
        found = []
        for span in by_parent.get(parent, []):
            found += [(depth, span), *below(span["id"], depth + 1)]
        return found

    return below("", 0)


def svg(spans: list[Span]) -> str:
    """The waterfall: a bar for each span, a mark for each event."""
    rows = order(spans)
    begin, end = min(span["start"] for span in spans), max(span["end"] for span in spans)
    scale = (WIDTH - LABEL - 90) / (end - begin)
    height = TOP + ROW * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (role, color) in enumerate(COLORS.items()):
        x = 12 + 150 * number
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="22" fill="#333">penstock-{role}</text>')
    for row, (depth, span) in enumerate(rows):
        y = TOP + ROW * row
        x, width = LABEL + (span["start"] - begin) * scale, max(1.5, (span["end"] - span["start"]) * scale)
        color = COLORS[span["resource"]["service.name"].removeprefix("penstock-")]
        if row % 2 == 0:
            parts.append(f'<rect x="0" y="{y}" width="{WIDTH}" height="{ROW}" fill="#f5f6f8"/>')
        parts.append(f'<text x="{12 + 14 * depth}" y="{y + 15}" fill="#222">{escape(span["name"])}</text>')
        parts.append(f'<rect x="{x:.1f}" y="{y + 5}" width="{width:.1f}" height="12" rx="2" fill="{color}"/>')
        for event in span["events"]:
            at = LABEL + (event["time"] - begin) * scale
            parts.append(f'<path d="M{at:.1f} {y + 3}v16" stroke="#111" stroke-width="1.2"/>')
        milliseconds = (span["end"] - span["start"]) / 1e6
        parts.append(f'<text x="{x + width + 5:.1f}" y="{y + 15}" fill="#555">{milliseconds:.1f} ms</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    with (
        collecting() as sink,
        tempfile.TemporaryDirectory() as place,
        serving(Path(place), "--otlp-endpoint", sink.url, *OPTIONS) as server,
    ):
        for tokens in (4, 60):  # the first one warms up
            said = [{"role": "user", "content": LONG[tokens:]}]
            body = {"messages": said, "max_tokens": tokens, "stream": True, "ignore_eos": True}
            ask = Ask(server, "/v1/chat/completions", body)
            ask.read()
        spans = sink.trace(ask.trace, has("decode", "execute decode", "detokenize", "stream"))
    Path(sys.argv[1]).write_text(svg(spans))
    return 0


if __name__ == "__main__":
    sys.exit(main())
