"""The figures of bench.load as a picture: horizontal bars, written as SVG."""

from __future__ import annotations

from html import escape

# How each part of a load is drawn: weights first, then what every way shares.
_PARTS = (
    ("weights", "#2a6f97", "reading the weights"),
    ("construct", "#a9c4d4", "constructing the model"),
    ("post", "#d5dfe5", "vLLM's post-load step"),
)
_MEMORY = "#b5651d"
_ROW, _GAP, _LABEL, _BARS, _TOP = 20, 34, 150, 300, 60
_GB = 1e9


def svg(found: dict[str, dict[str, dict[str, dict[str, float]]]], caption: str) -> str:
    """Seconds on the left, stacked, and peak memory on the right, for every way of reading."""
    shapes: list[str] = []
    y = _TOP
    for model, sources in found.items():
        for source, ways in sources.items():
            shapes.append(_text(10, y - 8, f"{model} from {source}", weight="bold"))
            y = _group(shapes, ways, y) + _GAP
    width, height = _LABEL + 2 * _BARS + 110, y
    legend = [
        shape
        for number, (_, color, name) in enumerate(
            (*_PARTS, ("anonymous", _MEMORY, "peak anonymous memory"))
        )
        for shape in (
            _bar(10 + 180 * number, 12, 12, color),
            _text(28 + 180 * number, 23, name),
        )
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *legend,
            *shapes,
            _text(10, height - 12, caption),
            "</svg>\n",
        )
    )


def _group(shapes: list[str], ways: dict[str, dict[str, float]], y: int) -> int:
    longest = max(one["load"] for one in ways.values())
    most = max(one["anonymous"] for one in ways.values())
    for way, one in sorted(ways.items(), key=lambda item: item[1]["load"]):
        shapes.append(_text(10, y + 13, way, weight="bold" if way == "ours" else "normal"))
        x = float(_LABEL)
        for name, color, _ in _PARTS:
            size = one[name] / longest * (_BARS - 50)
            shapes.append(_bar(x, y + 2, size, color))
            x += size
        shapes.append(_text(x + 5, y + 13, f"{one['load']:.2f} s"))
        left, size = _LABEL + _BARS + 20, one["anonymous"] / most * (_BARS - 60)
        shapes.append(_bar(left, y + 2, size, _MEMORY))
        shapes.append(_text(left + size + 5, y + 13, f"{one['anonymous'] / _GB:.2f} GB"))
        y += _ROW
    return y


def _bar(x: float, y: float, width: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="14" fill="{color}"/>'


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(text)}</text>'
