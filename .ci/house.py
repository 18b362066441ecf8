"""Reads who imports whom in the package, and draws its floors: python .ci/house.py writes
nbs/images/house.svg (tests/test_house.py holds the drawing and the floors to the code)."""
import ast
from pathlib import Path

from altgrad.basics import COLORS

ROOT = Path(__file__).resolve().parent.parent
DRAWING = ROOT / "nbs/images/house.svg"
# from the ground
FLOORS = (
    "basics", "numbers", "geometry", "model", "watching", "training", "evidence", "views", "cli"
)
ALONE = {  # floors of one module
    "basics": "errors, atomic writes, small pictures, colours",
    "cli": "the command line",
}
FILES = sorted(p for p in (ROOT / "altgrad").rglob("*.py") if not p.name.startswith("_"))


def name_of(path: Path) -> str:
    "A module's name within the package, e.g. numbers.formats."
    return ".".join(path.relative_to(ROOT / "altgrad").with_suffix("").parts)


MODULES = [name_of(path) for path in FILES]


def floor(module: str) -> int:
    "The floor on which a module stands, from the ground."
    return FLOORS.index(module.partition(".")[0])


def notebook_of(path: Path) -> str:
    "The notebook that a module is exported from, e.g. numbers/00_formats."
    place = path.read_text(encoding="utf-8").split("File to edit: ")[1].split()[0]
    return place.split("nbs/")[1].removesuffix(".ipynb.")


def targets(node: ast.AST, module: str) -> list[str]:
    "The modules of this package that an import statement names."
    if isinstance(node, ast.Import): found = [a.name for a in node.names]
    elif isinstance(node, ast.ImportFrom):
        above = ["altgrad", *module.split(".")][: -node.level] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        found = [base, *(f"{base}.{a.name}" for a in node.names)]
    else: return []
    return [name for f in found if (name := f.removeprefix("altgrad.")) in MODULES]


def imports(path: Path, everywhere: bool = True) -> set[str]:
    "What a module imports: anywhere, or only when it is loaded itself."
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        found |= set(targets(node, name_of(path)))
    return found


def rooms() -> dict[str, list[str]]:
    "The modules of each floor in the order in which one reads; a folder within is one room."
    found: dict[str, list[str]] = {name: [] for name in FLOORS}
    for path in sorted(FILES, key=notebook_of):
        name, *rest = name_of(path).split(".")
        if rest and rest[0] not in found[name]: found[name].append(rest[0])
    return found


def uses() -> dict[str, set[str]]:
    "The lower floors from which each floor imports."
    found: dict[str, set[str]] = {name: set() for name in FLOORS}
    for path in FILES:
        here = name_of(path).partition(".")[0]
        found[here] |= {name.partition(".")[0] for name in imports(path)} - {here}
    return found


# the drawing

# of the picture, its heading, and a floor with and without the gap beneath it
WIDTH, TOP, ROW, BOX = 1080, 66, 72, 58
# where boxes begin and end, their rooms begin, and from one riser to the next
LEFT, RIGHT, ROOMS, STEP = 24, 800, 184, 30
RISERS = tuple(COLORS.values())
STYLE = (
    "text{font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
    ".name{font-size:23px;font-weight:600}.rooms{font-size:19px}.head{font-size:21px}"
)


def lines_of(names: list[str], most: int = 58) -> list[str]:
    "Names with commas, in lines of at most so many characters."
    lines = [""]
    for word in ", ".join(names).split():
        if lines[-1] and len(lines[-1]) + len(word) >= most: lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def box(name: str, texts: list[str], middle: int) -> list[str]:
    "A floor: its name, its rooms in one line or two, and a thread to its dots."
    found = [
        f'<path d="M{RIGHT} {middle}H{WIDTH - 24}" stroke="#dfe5ea" stroke-width="2"/>',
        f'<rect class="floor" x="{LEFT}" y="{middle - BOX // 2}" width="{RIGHT - LEFT}" '
        f'height="{BOX}" rx="7" fill="#e9eef3" stroke="#b6c2cd"/>',
        f'<text class="name" x="{LEFT + 18}" y="{middle + 8}">{name}</text>',
    ]
    first = middle + 7 - 12 * (len(texts) - 1)
    for i, text in enumerate(texts):
        found.append(f'<text class="rooms" x="{ROOMS}" y="{first + 24 * i}">{text}</text>')
    return found


def riser(name: str, middles: dict[str, int], users: list[str]) -> list[str]:
    "What rises from a floor: a line to the highest floor that uses it, a dot at each."
    number = FLOORS.index(name)
    x, color = RIGHT + 32 + STEP * (len(RISERS) - 1 - number), RISERS[number]
    way = f"M{RIGHT} {middles[name]}H{x}V{middles[users[-1]]}"
    found = [f'<path d="{way}" fill="none" stroke="{color}" stroke-width="3"/>']
    for user in users:
        found.append(f'<circle cx="{x}" cy="{middles[user]}" r="8" fill="{color}"/>')
    return found


def svg() -> str:
    "The floors from the ground up, and beside each the lower floors that it uses."
    inside, below = rooms(), uses()
    height = TOP + ROW * len(FLOORS) + 8
    middles = {name: height - 8 - ROW * i - ROW // 2 for i, name in enumerate(FLOORS)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The floors of the package, and what each uses of those below</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fbfcfd"/>',
        f'<text class="head" x="{LEFT}" y="42">A floor imports only from floors below it; '
        "a dot marks each that it uses</text>",
    ]
    for name in FLOORS:
        texts = lines_of(inside[name]) if inside[name] else [ALONE[name]]
        parts += box(name, texts, middles[name])
    for name in FLOORS:
        users = [user for user in FLOORS if name in below[user]]
        if users: parts += riser(name, middles, users)
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    DRAWING.write_text(svg(), encoding="utf-8")
