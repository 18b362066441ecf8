"""Draws what the studies found on one page, nbs/images/summary.pdf, from the stored outputs of their
pages: what was measured is read from them, and none of it is computed or typed here.

python .ci/summary.py [FILE.pdf]
"""
import base64
import hashlib
import io
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from altgrad.basics import INK, figure_style, write_atomic
from altgrad.evidence.instrument import Task

NBS = Path(__file__).resolve().parent.parent / "nbs"
PAGE = 8.27, 11.69  # inches: A4
LEFT, RIGHT = 0.07, 0.93  # of the page
LINE = 0.0118  # of the page's height
SIZE = 7.1  # of letters, points
WIDTH = 126  # characters of a line


def outputs(study: str, kind: str) -> list[str]:
    "What a study's page computed: texts (text/markdown) or pictures (image/png)."
    page = json.loads((NBS / f"studies/{study}.ipynb").read_text(encoding="utf-8"))
    data = [o["data"] for c in page["cells"] for o in c.get("outputs", []) if "data" in o]
    return ["".join(d[kind]).strip() for d in data if kind in d]


def told(study: str) -> list[str]: return outputs(study, "text/markdown")


def found(study: str, pattern: str) -> re.Match:
    "The first place in a study's texts; LookupError where a page no longer says it."
    for text in told(study):
        if match := re.search(pattern, text.replace("\n", " ")): return match
    raise LookupError(f"{study} says nothing like {pattern!r}")


def table(study: str, head: str, after: str = "") -> list[list[str]]:
    "A table of a study by how its head begins, as cells; the one after a text, if one is given."
    for text in told(study):
        start = text.find(head, text.find(after) if after in text else len(text))
        if start < 0: continue
        lines = text[start:].split("\n\n")[0].splitlines()
        cells = [[c.strip().replace("*", "") for c in line.strip()[1:-1].split("|")] for line in lines]
        return [cells[0], *cells[2:]]
    raise LookupError(f"{study} has no table that begins with {head!r}")


def brief(text: str) -> str:
    "A text with means alone, and a word where an interval holds zero."
    def mean(m: re.Match) -> str: return m[1] + " (not shown)" * (float(m[2]) < 0 < float(m[3]))
    return re.sub(r"(\S+) \[([-+.\d]+), ([-+.\d]+)\]", mean, text)


def verdicts(study: str, head: str) -> str:
    "Claims of a study's table that were refuted, in words; where it was not everywhere, in which formats."
    (_, *heads), *rows = table(study, head)
    where = {claim: [h for h, c in zip(heads, cells) if "refuted" in c] for claim, *cells in rows}
    named = {claim: f" ({', '.join(w)})" if w not in (heads, ["verdict"]) else "" for claim, w in where.items() if w}
    return "; ".join(claim + formats for claim, formats in named.items())


def steps(cells: list[list[str]]) -> list[list[str]]:
    "A table of advice, less the rows that say the same as the row above, but for the number of bits."
    head, *rows = cells
    same = lambda row: (row[0], *row[2:])
    kept = [row for above, row in zip([head, *rows], rows) if same(above) != same(row)]
    return [["format", "bits, from", *head[2:]], *kept]


def content() -> list[tuple[str, Any]]:
    "What the page says, piece by piece: head, text, table or picture."
    law = found("the_answer", r"\$R\^2\$ = \*\*([\d.]+)\*\* in the logarithm")[1]
    blocks = found("narrow_formats", r"(Under the scales of blocks.*?\(R² [\d.]+\))")[1]
    averaged = found("the_answer", r"ends \+([\d.]+) \[[^]]*\] nats above AdamW, and S\^-1 ends\s+\+([\d.]+)")
    madam = found("the_answer", r"(Madam's step is a share of the weight .*)$")[1]
    twelve = found("the_answer", r"where \d+ comparisons were tuned\s+anew \((.*?)\), S\^-1")[1]
    scratch = found("the_answer", r"Trained from scratch\s+its gain is (.*?)\. ")[1]
    holm = found("the_answer", r"With Holm's correction for all (\d+), .*? first tuning: (.*?); and with more tuning, "
                               r"where it was run: (.*?)\.")
    stronger = found("the_answer", r"S\^-1 under stochastic rounding ends \+(\S+ \[.*?\]) below that")[1]
    large = found("the_answer", r"S\^-1 in E7M0 wins ([-+][\d.]+ \[[^]]*\]) nats, where we had said 0.01")[1]
    missed = found("narrow_formats", r"(What missed is .*?\(a factor of [\d.]+\))")[1]
    return [
        ("head", "Which format gains most"),
        ("table", [[c.partition(";")[0] for c in row] for row in table("the_answer", "| the weights are kept as")]),
        ("picture", outputs("the_answer", "image/png")[0]),
        ("text", (
            "A gain is how far the best rule ends below tuned AdamW, the weights being kept in the same way, in "
            "nats for each byte of text. S is the distance from a weight to the next number of its format; "
            f"S^p multiplies AdamW's step by S to the power p and keeps the step's length; S counts as no smaller than "
            f"2^-8 of its largest value, and with 2^-16 S^-1 in E7M0 ends above AdamW. {madam} "
            f"Corrected for all {holm[1]} gains that were looked at (Holm), these stay: {holm[2]} by the first tuning, "
            f"{holm[3]} with more. In E7M0 AdamW does better with nearest rounding; S^-1 ends {stronger} below that."
        )),
        ("head", "Why"),
        ("text", (
            "Under stochastic rounding a format pays for its rounding noise: noise times one constant for each rate "
            f"predicts what a format costs that was left out (R² of the logarithm {law}). Foretold for "
            f"formats of four and six bits: {blocks[0].lower()}{blocks[1:]}. "
            f"{missed}. "
            "Under nearest rounding a format pays for the weights that no longer move; a line that says how much, "
            "found after looking, was then foretold for other rules and refuted."
        )),
        ("head", "What to do: the way to keep a weight that ends lowest, by AdamW"),
        ("table", steps(table("loss_against_bits", "| format |", after="By AdamW"))),
        ("text", (
            "Nats above AdamW with FP32 master weights (96 bits in all with its moments), in fine-tuning. Residual b: "
            "b bits beside a code keep what rounding dropped; ECO puts it into the momentum. At zero or below, a few "
            "bits that remember do the work of a master copy. From scratch ECO was run with nearest rounding only, and "
            "ended far above master weights."
        )),
        ("head", "What was expected and did not happen"),
        ("text", (
            "D is the slope of the loss in the power p, less that in FP32. Among what was refuted: "
            f"{verdicts('the_answer', '| hypothesis')}. Of loss against bits, whose page has the predictions in full: "
            f"{verdicts('loss_against_bits', '| prediction')}."
        )),
        ("head", "The strongest objections"),
        ("text", (
            f"That an average of AdamW's weights would do as well in E7M0: one, tuned in its rate alone, ends "
            f"{averaged[1]} nats above AdamW, and S^-1 ends {averaged[2]} below the average. That all this is one "
            f"model of 0.1M weights, fine-tuned for {Task().steps} updates on one text, then with the texts exchanged: "
            f"conceded, though comparisons were tuned anew on twelve other checkpoints ({twelve}), and from "
            f"scratch the gain in E7M0 is {brief(scratch)}. At ten million weights, from scratch and at rates that "
            f"were not tuned, it is {large}: nothing. There stochastic rounding ends below master weights in E4M3 "
            "and E7M0. First weights, rates, decay, schedule, layers and context differ there from those of the sizes."
        )),
    ]


def draw_table(fig: Figure, y: float, cells: list[list[str]]) -> float:
    "Draws a table below `y`; where it ends."
    # the head is bold, and wider
    widths = [max(1.2 * len(cells[0][k]), *(len(row[k]) for row in cells)) + 4 for k in range(len(cells[0]))]
    for n, row in enumerate(cells):
        x = LEFT
        for text, width in zip(row, widths, strict=True):
            fig.text(x, y, text, va="top", fontsize=SIZE, weight="bold" if not n else "normal")
            x += (RIGHT - LEFT) * width / max(sum(widths), WIDTH)
        y -= LINE
    return y - 0.4 * LINE


def draw_picture(fig: Figure, y: float, png: str) -> float:
    "Draws a PNG below `y`, somewhat narrower than the text; where it ends."
    image, wide = plt.imread(io.BytesIO(base64.b64decode(png))), 0.8 * (RIGHT - LEFT)
    height = wide * PAGE[0] / PAGE[1] * image.shape[0] / image.shape[1]
    ax = fig.add_axes((LEFT, y - height, wide, height))
    ax.imshow(image, interpolation="none")
    ax.axis("off")
    return y - height - 0.6 * LINE


def draw(parts: list[tuple[str, Any]]) -> Figure:
    "The page."
    fig = Figure(figsize=PAGE)
    FigureCanvasPdf(fig)
    fig.text(LEFT, 0.965, "AltGrad on one page", va="top", fontsize=15, weight="bold")
    asked = "Which 8-bit floating-point format benefits most from geometry-aware updates, and why?"
    fig.text(LEFT, 0.941, asked, va="top", fontsize=9, color=INK)
    y = 0.918
    for kind, what in parts:
        if kind == "picture": y = draw_picture(fig, y, what)
        if kind == "table": y = draw_table(fig, y, what)
        if kind == "head":
            fig.text(LEFT, y, what, va="top", fontsize=9.5, weight="bold")
            y -= 1.4 * LINE
        if kind == "text":
            lines = textwrap.wrap(what, WIDTH)
            fig.text(LEFT, y, "\n".join(lines), va="top", fontsize=SIZE, linespacing=1.35)
            y -= LINE * (len(lines) + 0.55)
    if y < 0.02: raise ValueError("the page is too full")
    return fig


def hash_of(parts: list[tuple[str, Any]]) -> str:
    "A hash of all that the page shows."
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def main(target: Path) -> None:
    parts, file = content(), io.BytesIO()
    with plt.rc_context(figure_style()):
        facts = {"Title": "AltGrad on one page", "Keywords": hash_of(parts), "CreationDate": None}
        draw(parts).savefig(file, format="pdf", metadata=facts)
    write_atomic(target, file.getvalue())


if __name__ == "__main__": main(Path(sys.argv[1]) if sys.argv[1:] else NBS / "images/summary.pdf")
