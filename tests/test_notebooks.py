"""Each notebook runs once, in a process of its own; solutions take the place of their stubs."""

import os
import re
import traceback

import pytest
from conftest import ROOT, server
from test_repository import NOTEBOOKS, cells, source

LONGEST = 300  # seconds for a notebook on a busy machine; most take under twenty


def solutions(path) -> list[str]:
    "The Python of all folded solutions."
    block = r"<summary>Solution</summary>\s*```python\n(.*?)```"
    return [m[1] for c in cells(path, "markdown") for m in re.finditer(block, source(c), re.S)]


def solve(shell, block, checks) -> str:
    "Put a solution in the place of its stub and ask the checker of that exercise again."
    shell.run(block)
    names = re.findall(r"^(?:def|class) (\w+)", block, re.M)
    mine = [c for c in checks if any(re.search(rf"check_exercise\(\s*{n}\b", c) for n in names)]
    if not mine:
        return f"no checker for {names}"
    said = str(shell.run(mine[-1]))
    return "" if "solved" in said else f"the solution of {names[-1]} does not solve it: {said}"


def play(path, folder, answer):
    "Run all cells, then all solutions, in an empty folder; send what went wrong, or nothing."
    from execnb.shell import CaptureShell

    os.chdir(folder)
    shell, checks, wrong = CaptureShell(mpl_format=None), [], []
    for i, cell in enumerate(cells(path, "code")):
        code = source(cell)
        if re.search(r"#\|\s*eval:\s*false", code):
            continue
        shell.run(code)
        if shell.exc:
            where = "".join(traceback.format_exception(shell.exc))[-1500:]
            answer.send(f"code cell {i}: {code[:300]}\n{where}")
            return
        if "check_exercise(" in code and "def check_exercise" not in code:
            checks.append(code)
    for block in solutions(path):
        if told := solve(shell, block, checks):
            wrong.append(told)
    answer.send("\n".join(wrong))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_and_its_solutions_solve(path, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "agg")
    context = server()
    ours, theirs = context.Pipe()
    folder = path.parent if path.stem == "index" else tmp_path  # the map reads its neighbours
    process = context.Process(target=play, args=(path, folder, theirs))
    process.start()
    theirs.close()
    try:
        told = ours.recv() if ours.poll(LONGEST) else f"not finished after {LONGEST} seconds"
    except EOFError:
        told = "the process ended without a word"
    process.terminate() if told.startswith("not finished") else process.join(30)
    assert not told, f"{path.relative_to(ROOT)}: {told}"
