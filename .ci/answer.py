"""Copies the first figure of the_answer's stored outputs to nbs/images/the_answer.png, where
README.md and the index show it."""
import base64
import json
from pathlib import Path

from altgrad.basics import write_atomic

NBS = Path(__file__).resolve().parent.parent / "nbs"


def first_figure() -> bytes:
    "The first PNG among the page's outputs."
    cells = json.loads((NBS / "studies/the_answer.ipynb").read_text(encoding="utf-8"))["cells"]
    return base64.b64decode(
        next(
            o["data"]["image/png"]
            for c in cells
            for o in c.get("outputs", [])
            if "image/png" in o.get("data", {})
        )
    )


if __name__ == "__main__":
    write_atomic(NBS / "images/the_answer.png", lambda file: file.write(first_figure()))
