"""The house in figures: lines, density, guards of the library; size and share of each notebook.

Called by `make figures`. Definitions: a node is an expression or statement of the syntax tree; a
guard is a node inside a raise, an except, or an if that only raises; density counts nodes for each
line of code; a line is wide above 100 characters. The goals are those of issue 11.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
GOALS = dict(formatted=9000, wide=0, density=5.5, guards=6.0, largest=350)


def nodes(tree):
    return sum(isinstance(n, (ast.expr, ast.stmt)) for n in ast.walk(tree))


def guards(tree):
    "Nodes that only serve to refuse."
    refuses = isinstance(tree, (ast.Raise, ast.ExceptHandler))
    if isinstance(tree, ast.If) and not tree.orelse:
        refuses = len(tree.body) == 1 and isinstance(tree.body[0], ast.Raise)
    return nodes(tree) if refuses else sum(map(guards, ast.iter_child_nodes(tree)))


def code_lines(text):
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def formatted(folder):
    "Lines of each module after `ruff format` at 100 columns."
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(folder, Path(scratch) / "c"))
        (copy / "_modidx.py").unlink(missing_ok=True)
        words = ["format", "-q", "--isolated", "--line-length", "100", str(copy)]
        subprocess.run([sys.executable, "-m", "ruff", *words], check=True)
        return {p.stem: len(p.read_text(encoding="utf-8").splitlines()) for p in copy.glob("*.py")}


def library(root=ROOT):
    "Figures of all modules together; nbdev's index does not count."
    paths = [p for p in sorted((root / "cramnb").glob("*.py")) if p.name != "_modidx.py"]
    texts = {p.stem: p.read_text(encoding="utf-8") for p in paths}
    lines = [line for text in texts.values() for line in text.splitlines()]
    trees = [ast.parse(text) for text in texts.values()]
    whole, each = sum(map(nodes, trees)), formatted(root / "cramnb")
    big = {k: len(text.splitlines()) for k, text in texts.items()}
    return dict(
        lines=len(lines),
        formatted=sum(each.values()),
        wide=sum(len(line) > 100 for line in lines),
        density=round(whole / sum(map(code_lines, texts.values())), 2),
        guards=round(100 * sum(map(guards, trees)) / whole, 1),
        largest=max(big.values()),
        over=", ".join(f"{k} {n}" for k, n in big.items() if n > GOALS["largest"]),
    )


def notebook(path):
    "Cells, lines of code, exported lines, their share in percent, words of prose, wide lines."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    prose = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    out = sum(code_lines(s) for s in code if re.search(r"#\|\s*exports?\b", s))
    whole = sum(map(code_lines, code))
    wide = sum(len(line) > 100 for s in code for line in s.splitlines())
    words = sum(len(p.split()) for p in prose)
    return len(cells), whole, out, round(100 * out / max(whole, 1)), words, wide


if __name__ == "__main__":
    print(f"{'notebook':30}{'cells':>7}{'code':>7}{'exported':>10}", end="")
    print(f"{'share':>8}{'words':>8}{'wide':>6}")
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        cells, code, out, share, words, wide = notebook(path)
        name = str(path.relative_to(ROOT / "nbs"))
        print(f"{name:30}{cells:7}{code:7}{out:10}{share:6} %{words:8}{wide:6}")
    figures = library()
    print()
    for key, value in figures.items():
        goal = GOALS.get(key)
        print(f"{key:10} {value}", "" if goal is None else f"   (goal: at most {goal})")
