"""A chart as plain SVG: one panel per text, tokens per second over depth, adaptive depth beside the fixed ones."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN, GAP = 210, 170, 44, 26  # of a panel, in pixels
FIXED, ADAPTIVE = "#4477aa", "#cc6633"


def write(path: Path, title: str, panels: Mapping[str, tuple[Sequence[tuple[int, float]], float]], note: str) -> None:
    """`panels`: name -> ((depth, tokens/s) of each fixed depth, tokens/s of adaptive depth)."""
    width = MARGIN + len(panels) * (WIDTH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT + 118}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{HEIGHT + 118}" fill="white"/>',
        f'<text x="{MARGIN}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for place, (name, (fixed, adaptive)) in enumerate(panels.items()):
        parts.append(
            f'<g transform="translate({MARGIN + place * (WIDTH + GAP)},52)">{_panel(name, fixed, adaptive)}</g>'
        )
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT + 108}" fill="#666">{escape(note)}</text></svg>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _panel(name: str, fixed: Sequence[tuple[int, float]], adaptive: float) -> str:
    deepest = max(depth for depth, _ in fixed) or 1
    top = 1.15 * max([adaptive, *(speed for _, speed in fixed)])

    def at(depth: float, speed: float) -> tuple[float, float]:
        return depth / deepest * WIDTH, HEIGHT * (1 - speed / top)

    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in fixed))
    _, line = at(0, adaptive)
    best = max(speed for _, speed in fixed)
    parts = [
        f'<text y="-8" font-weight="bold">{escape(name)}</text>',
        f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#999"/>',
        f'<polyline points="{points}" fill="none" stroke="{FIXED}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{FIXED}"/>' for x, y in (at(*point) for point in fixed)),
        f'<path d="M0 {line:.1f}H{WIDTH}" stroke="{ADAPTIVE}" stroke-width="2" stroke-dasharray="6 4"/>',
        f'<text x="{WIDTH}" y="{line - 5:.1f}" text-anchor="end" fill="{ADAPTIVE}">adaptive {adaptive:.1f}, '
        f"{adaptive / best:.2f} x best fixed</text>",
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 30}" text-anchor="middle">drafts per step</text>',
        *(f'<text x="{at(d, 0)[0]:.1f}" y="{HEIGHT + 14}" text-anchor="middle">{d}</text>' for d, _ in fixed),
        *(
            f'<text x="-5" y="{at(0, speed)[1] + 4:.1f}" text-anchor="end">{speed:.0f}</text>'
            for speed in (top * 0.25, top * 0.5, top * 0.75)
        ),
    ]
    return "\n".join(parts)
