"""Two loss curves as SVG, in light and dark: a broad line, and a thin one on it."""

from __future__ import annotations

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 56, 40, 16, 44

STYLE = """\
text { font: 13px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.paper { fill: #ffffff; } .line { stroke: #d1d9e0; }
.broad, .thin { fill: none; stroke-linejoin: round; }
.broad { stroke: #f2b36b; stroke-width: 7; } .thin { stroke: #1f4e8c; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .paper { fill: #0d1117; } .line { stroke: #3d444d; }
.broad { stroke: #8a5a1c; } .thin { stroke: #79b8ff; }
}"""


def plot(title: str, theirs: list[float], ours: list[float]) -> str:
    """The picture, of losses by step."""
    low, high = int(min(*theirs, *ours)), int(max(*theirs, *ours)) + 1
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(step: float) -> float:
        return LEFT + wide * step / max(len(theirs) - 1, 1)

    def y(loss: float) -> float:
        return TOP + tall * (high - loss) / (high - low)

    def curve(losses: list[float], kind: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
        return f'<polyline class="{kind}" points="{points}"/>'

    def text(left: float, top: float, words: str, anchor: str = "middle") -> str:
        return f'<text class="{anchor}" x="{left:.1f}" y="{top:.1f}">{words}</text>'

    parts = [f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>', text(LEFT, 22, title, "start")]
    for loss in range(low, high + 1):
        parts.append(f'<path class="line" d="M{LEFT} {y(loss):.1f}h{wide}"/>')
        parts.append(text(LEFT - 8, y(loss) + 4, str(loss), "end"))
    for part in range(5):
        step = (len(theirs) - 1) * part / 4
        parts.append(text(x(step), HEIGHT - BOTTOM + 18, f"{1 + step:.0f}"))
    parts.append(text(LEFT + wide / 2, HEIGHT - 8, "step"))
    parts += [curve(theirs, "broad"), curve(ours, "thin")]
    for line, (kind, words) in enumerate([("broad", "Megatron's all-to-all"), ("thin", "Sidelane")]):
        top = TOP + 16 + 20 * line
        parts.append(f'<path d="M{WIDTH - 200} {top - 4}h28" class="{kind}"/>')
        parts.append(text(WIDTH - 164, top, words, "start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">\n'
        f"<style>\n{STYLE}\n</style>\n{body}\n</svg>\n"
    )
