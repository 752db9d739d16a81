"""Two loss curves as SVG: a broad line, and a thin one on it."""

from __future__ import annotations

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 56, 40, 16, 44


def plot(title: str, theirs: list[float], ours: list[float]) -> str:
    """The picture, of losses by step."""
    low, high = int(min(*theirs, *ours)), int(max(*theirs, *ours)) + 1
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(step: float) -> float:
        return LEFT + wide * step / max(len(theirs) - 1, 1)

    def y(loss: float) -> float:
        return TOP + tall * (high - loss) / (high - low)

    def curve(losses: list[float], style: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
        return f'<polyline points="{points}" fill="none" stroke-linejoin="round" {style}/>'

    def text(left: float, top: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{words}</text>'

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', text(LEFT, 22, title, "start")]
    for loss in range(low, high + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}h{wide}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y(loss) + 4, str(loss), "end"))
    for part in range(5):
        step = (len(theirs) - 1) * part / 4
        parts.append(text(x(step), HEIGHT - BOTTOM + 18, f"{1 + step:.0f}"))
    parts.append(text(LEFT + wide / 2, HEIGHT - 8, "step"))
    broad, thin = 'stroke="#f2b36b" stroke-width="7"', 'stroke="#1f4e8c" stroke-width="1.5"'
    parts += [curve(theirs, broad), curve(ours, thin)]
    for line, (style, words) in enumerate([(broad, "Megatron's all-to-all"), (thin, "Sidelane")]):
        top = TOP + 16 + 20 * line
        parts.append(f'<path d="M{WIDTH - 200} {top - 4}h28" {style}/>')
        parts.append(text(WIDTH - 164, top, words, "start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">\n'
        f"{body}\n</svg>\n"
    )
