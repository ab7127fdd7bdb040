"""Draw nbs/images/gti.svg, the picture on the first screen: `python tools/picture.py`.

It has a background of its own, so it reads on light and dark pages alike; levels differ in shape as well as in colour."""

import math
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "nbs" / "images" / "gti.svg"
INK, SOFT, LINE = "#1f2328", "#57606a", "#afb8c1"
LEVELS = {"a": "#4269d0", "b": "#c2410c", "c": "#2f7d3b"}


def text(x, y, words, size=13, color=INK, anchor="middle", weight="normal", family="sans-serif"):
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return (f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}" '
            f'font-family="{family}">{words}</text>')


def box(x, y, width, height, fill="#ffffff", line=LINE, dash=""):
    return (f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{line}"'
            + (f' stroke-dasharray="{dash}"' if dash else "") + "/>")


def arrow(x1, y1, x2, y2):
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{SOFT}" stroke-width="1.6" marker-end="url(#head)"/>'


def name(x, y, codes, size=13):
    "The semantic ID of an item, a chip per code, centred on `x`."
    width, parts = 4.3 * size, []
    for k, (level, code) in enumerate(zip("abc", codes)):
        left = round(x + (k - 1.5) * (width + 4) + 2, 1)
        parts += [f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{1.9 * size:.1f}" rx="5" fill="{LEVELS[level]}"/>',
                  text(round(left + width / 2, 1), round(y + 1.32 * size, 1), f"<{level}_{code}>", size, "#ffffff", family="monospace")]
    return "".join(parts)


def token(x, y, level):
    "A new token in space: a disc, a square or a triangle, by level."
    color = f'fill="{LEVELS[level]}" fill-opacity="0.85" stroke="#ffffff"'
    if level == "a":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {color}/>'
    if level == "b":
        return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" {color}/>'
    return f'<path d="M{x:.1f} {y - 6:.1f} l6 10 l-12 0 z" {color}/>'


def cloud(x, y, turn):
    "Five tokens around a point."
    places = [(x + 19 * math.cos(turn + k * 2 * math.pi / 5), y + 17 * math.sin(turn + k * 2 * math.pi / 5)) for k in range(5)]
    return "".join(token(*place, "abcab"[k]) for k, place in enumerate(places))


def names_panel():
    return [text(160, 42, "1  Every item gets a name", 15, weight="bold"), box(40, 62, 240, 62),
            text(160, 87, "Toy Story", 14, weight="bold"), text(160, 109, "A 1995 film. Animation, Comedy.", 12, SOFT),
            arrow(160, 130, 160, 164), text(172, 152, "its text, quantized", 12, SOFT, "start"), name(160, 172, (3, 14, 7)),
            text(160, 222, "coarse  →  fine: alike items share", 12, SOFT), text(160, 239, "the first codes", 12, SOFT),
            name(160, 256, (3, 14, 2), 11), text(160, 297, "Aladdin", 12, SOFT)]


def start_panel():
    parts = [text(480, 42, "2  Where do its new tokens start?", 15, weight="bold"), box(325, 62, 310, 92, "#f6f8fa"),
             text(337, 82, "usual: all at the mean of the old tokens", 12, anchor="start"), box(325, 190, 310, 112, "#f6f8fa"),
             text(337, 210, "grounded: near what they mean", 12, anchor="start")]
    parts += [text(x, y, word, 11, SOFT) for x, y, word in [(370, 128, "crime"), (430, 108, "space"), (545, 110, "comedy"), (598, 142, "romance")]]
    parts += ["".join(token(487, 127, level) for level in "abc"), text(500, 131, "all of them", 11, SOFT, "start")]
    for k, (x, word) in enumerate([(372, "crime"), (444, "space"), (518, "comedy"), (590, "romance")]):
        parts += [cloud(x, 250, 0.7 * k), text(x, 290, word, 11, SOFT)]
    return parts + [arrow(480, 157, 480, 186), text(490, 176, "train only them: text ⇄ name", 11.5, anchor="start", weight="bold"),
                    text(468, 176, "model frozen", 12, SOFT, "end")]


def recommend_panel():
    return [text(800, 42, "3  Then learn to recommend", 15, weight="bold"), name(800, 62, (3, 14, 7), 12), name(800, 89, (9, 2, 11), 12),
            text(800, 132, "what somebody watched", 12, SOFT), arrow(800, 138, 800, 160), box(715, 164, 170, 46, "#eaeef2", SOFT),
            text(800, 192, "language model", 14), arrow(800, 213, 800, 238), name(800, 244, (3, 5, 1)),
            text(800, 290, "what comes next: only names", 12, SOFT), text(800, 306, "that exist can be said", 12, SOFT)]


def picture() -> str:
    head = ('<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker></defs>')
    parts = [head, box(1, 1, 958, 322), *names_panel(), *start_panel(), *recommend_panel()]
    alt = ("Three steps. An item's text is quantized to a name of three codes. Its new tokens start either all on one point, the "
           "mean, or, grounded, near what they mean. The model then learns to answer a history of names with the next one.")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 324" width="960" height="324" role="img">\n<title>{alt}</title>\n'
            + "\n".join(parts) + "\n</svg>\n")


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(picture(), encoding="utf-8")
