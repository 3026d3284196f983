"""Projects: the folded solutions pass the library's own tests, and an empty answer does not."""

import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT
from test_notebooks import solutions
from test_repository import PROJECTS, cells, source


def command(path) -> list[str]:
    "The words after `python -m pytest` in the notebook, as a reader would type them."
    text = "\n".join(source(c) for c in cells(path, "markdown"))
    found = re.search(r"^python -m pytest (.*--mine.*)$", text, re.M)
    assert found, f"{path.name} shows no command that grades"
    return shlex.split(found[1])


def grade(words, mine, answer) -> subprocess.CompletedProcess:
    "Run the command of the notebook on this answer."
    mine.write_text(answer, encoding="utf-8")
    words = [str(mine) if w.endswith(".py") and "/" not in w else w for w in words]
    call = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *words]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("path", PROJECTS, ids=lambda p: p.stem)
def test_the_folded_solution_passes_the_tests_of_the_library(path, tmp_path):
    answer = "\n\n".join(solutions(path))
    result = grade(command(path), tmp_path / "mine.py", answer)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert " passed" in result.stdout
    for name in re.findall(r"^(?:def|class) ([a-z]\w+|[A-Z]\w+)", answer, re.M):
        if not name.startswith("_"):
            assert name in result.stdout.splitlines()[0], f"{name} replaces nothing"


@pytest.mark.parametrize("path", PROJECTS, ids=lambda p: p.stem)
def test_each_function_of_a_project_is_judged(path, tmp_path):
    "Any one function that answers None fails the grading."
    answer = "\n\n".join(solutions(path))
    for name in re.findall(r"^def ([a-z]\w+)", answer, re.M):
        lost = f"@functools.wraps({name})\ndef {name}(*args, **kwargs):\n    return None\n"
        broken = f"{answer}\n\n\nimport functools\n\n\n{lost}"  # its arguments still name it
        result = grade(command(path), tmp_path / "mine.py", broken)
        assert result.returncode == 1, f"{name} is not judged"


@pytest.mark.parametrize("answer, told", [(None, "no such Python file"), ("x = 1", "nothing that")])
def test_a_mistyped_or_empty_file_is_not_passed(answer, told, tmp_path):
    mine = tmp_path / "mine.py"
    if answer:
        mine.write_text(answer)
    call = [sys.executable, "-m", "pytest", "--mine", str(mine), "tests/test_masking.py"]
    result = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 4 and told in result.stderr, result.stdout + result.stderr
