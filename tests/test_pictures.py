"Pictures of the book: one width of text, letters that can be read, a caption."

import json
import re
from pathlib import Path

import pytest

NBS = Path(__file__).parent.parent / "nbs"
DRAWN = re.compile(r"\b(flow|show_curve|show_matrix|subplots)\(")


def pictures(path):
    "The SVGs of a notebook, each with the source of its cell."
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            if svg := "".join(output.get("data", {}).get("image/svg+xml", [])):
                yield svg, "".join(cell["source"])


@pytest.mark.parametrize("path", sorted(NBS.rglob("*.ipynb")), ids=lambda p: p.stem)
def test_pictures_fit_the_text_and_are_readable(path):
    "At 96 pixels an inch: no wider than 44 rem, no taller than a screen, letters of 8 points."
    for svg, source in pictures(path):
        width, unit = re.search(r'<svg [^>]*width="([\d.]+)(pt)?"', svg).groups()
        height = re.search(r'viewBox="[-\d.]+ [-\d.]+ [\d.]+ ([\d.]+)"', svg)[1]
        point = 1 if unit else 0.75  # matplotlib counts in points, a diagram in pixels
        assert float(width) * point <= 704 * 0.75 and float(height) * point <= 6.5 * 72, source
        sizes = set(re.findall(r'font-size(?:="|: )([\d.]+)', svg)) - {"6.3"}  # a power of ten
        assert all(point * float(size) >= 8 for size in sizes), source
        if DRAWN.search(source):
            assert "#| fig-cap: " in source, source
