"""Minutes of reading on the first line of each lesson: `python tests/minutes.py` writes them.

Words at 150 a minute, 3 seconds a line of code, 5 seconds a cell; folded code is not read.
"""

import json
import re
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[1] / "nbs"
LINE = re.compile(r"First pass \*\*[^*]*\*\*, both passes \*\*[^*]*\*\*")
BORDER = "go on to the next lesson"  # the first pass ends there


def minutes(cells: list[dict]) -> float:
    "How long it takes to read some cells."
    seconds = 5.0 * len(cells)
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            seconds += 60 / 150 * len(text.split())
        elif "code-fold" not in text:
            lines = [line.strip() for line in text.splitlines()]
            seconds += 3 * sum(bool(line) and not line.startswith("#") for line in lines)
    return seconds / 60


def both(path: Path) -> tuple[float, float]:
    "First pass and whole lesson; they are equal where there is no border."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    border = next((i for i, text in enumerate(texts) if BORDER in text), len(cells))
    return minutes(cells[:border]), minutes(cells)


def line(first: float, whole: float) -> str:
    "The first line of a lesson."
    return f"First pass **{first:.0f} min**, both passes **{whole:.0f} min**"


def lessons() -> list[Path]:
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


if __name__ == "__main__":
    total = [0.0, 0.0]
    for path in lessons():
        first, whole = both(path)
        text = path.read_text(encoding="utf-8")
        path.write_text(LINE.sub(line(first, whole), text, count=1), encoding="utf-8")
        total = [total[0] + first * (path.name < "16"), total[1] + whole]
        print(f"{path.stem:15} {first:5.1f} {whole:5.1f}")
    print(f"first passes of 00 to 15 {total[0] / 60:.1f} hours, the book {total[1] / 60:.1f}")
