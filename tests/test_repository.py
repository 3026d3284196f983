"""The repository itself: one source for each fact, storeys, notebooks in step, the site."""

import ast
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import twins
import yaml
from conftest import ROOT
from minutes import both, lessons, line
from readme import readme

SITE = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
PAGES = {  # three sidebars; a sidebar lists pages, or sections of pages
    page["href"]: page["text"]
    for sidebar in SITE["website"]["sidebar"]
    for entry in sidebar["contents"]
    for page in entry.get("contents", [entry])
}
NOTEBOOKS = [ROOT / "nbs/index.ipynb"]
NOTEBOOKS += [ROOT / "nbs" / href for href in PAGES if href.endswith(".ipynb")]
LESSONS = [p for p in NOTEBOOKS if p.name[:2].isdigit()]
LIBRARY = [p for p in NOTEBOOKS if "library" in p.parts]
FLOORS = ("", "text", "model", "train", "judge", "run", "book")  # imports go to the left only
DOORS = ("cli", "cram")  # beside the floor, and above all folders


def cells(path: Path, kind: str = "") -> list[dict]:
    every = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c for c in every if not kind or c["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def title(path: Path) -> str:
    return source(cells(path, "markdown")[0]).splitlines()[0].removeprefix("# ")


def copy(to: Path) -> Path:
    left = (
        ".git",
        ".venv",
        "runs",
        "corpora",
        "*.egg-info",
        "__pycache__",
        "build",
        "dist",
        ".pytest_cache",
        ".ruff_cache",
        "_proc",
        "_docs",
    )
    return Path(shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*left), symlinks=True))


def metadata(folder: Path) -> subprocess.CompletedProcess:
    "Ask the build for the package's metadata."
    code = (
        "from setuptools import build_meta as b; import sys; f = sys.argv[1]; "
        "print(open(f + '/' + b.prepare_metadata_for_build_wheel(f) + '/METADATA').read())"
    )
    words = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(words, cwd=folder, text=True, capture_output=True)


# --- facts


def test_settings_and_setup_are_alive(tmp_path):
    text = metadata(copy(tmp_path / "whole")).stdout
    assert "Name: cramnb" in text and "Requires-Python: >=3.10" in text and "License" in text
    assert {"flash", "track", "dev"} <= set(re.findall(r"Provides-Extra: (\w+)", text))
    for name in ("settings.ini", "setup.py"):
        part = copy(tmp_path / name)
        (part / name).unlink()
        assert metadata(part).returncode != 0, f"the build does not need {name}"


def test_no_fact_stands_in_two_files():
    ini = ConfigParser(delimiters=["="], interpolation=None)
    ini.read(ROOT / "settings.ini")
    setup, project = (ROOT / "setup.py").read_text(), (ROOT / "pyproject.toml").read_text()
    for key, value in ini["DEFAULT"].items():
        whole = key in ("description", "version", "author", "author_email")
        for word in [value] if whole else value.split():
            if len(word) < 4 or word == "nbdev":
                continue  # a keyword and a tool
            assert word not in setup, f"{key} of settings.ini ({word}) is repeated in setup.py"
            again = re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])", project)
            assert not again, f"{key} ({word}) is repeated in pyproject.toml"
    static = re.findall(r"^(\w[\w-]*) = ", project.split("[project]")[1].split("[")[0], re.M)
    assert set(static) - {"dynamic"} == {"name"}, "pyproject.toml states what settings.ini should"


FACTS = json.loads((ROOT / "nbs/data/facts.json").read_text(encoding="utf-8"))


def test_facts_have_a_source_and_a_status():
    for key, fact in FACTS.items():
        assert set(fact) - {"rows"} == {"value", "unit", "what", "source", "status"}, key
        assert fact["status"] in ("published", "calculated", "recalled"), key
        assert all(str(fact[k]).strip() for k in fact if k != "rows"), key
        if rows := fact.get("rows"):
            assert abs(sum(rows) / len(rows) - fact["value"]) < 0.06, key
    assert FACTS["tokens_per_day"]["value"] == FACTS["tokens_per_second"]["value"] * 86_400
    assert FACTS["checkpoint_bytes"]["value"] == 12 * FACTS["parameters_crammed"]["value"]


# --- storeys


def modules() -> list[str]:
    "'core', 'text.packing', …: every module of the package but the generated index."
    top = ROOT / "cramnb"
    paths = [p.relative_to(top).with_suffix("") for p in top.rglob("[a-z]*.py")]
    return sorted(".".join(p.parts) for p in paths)


def imports(module: str) -> set[str]:
    "Modules of ours that a module names, wherever it does."
    path = ROOT / "cramnb" / (module.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    here = ["cramnb", *module.split(".")]
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        named |= {n.removeprefix("cramnb.") for n in names if n.startswith("cramnb.")}
    return named & set(modules())


@pytest.mark.parametrize("module", modules())
def test_imports_run_one_way_folder_by_folder(module):
    if module in DOORS:
        return
    if module == "mini":
        assert not imports(module), "the book's program imports nothing of ours"
    mine = FLOORS.index(module.rpartition(".")[0])
    wrong = {m for m in imports(module) if FLOORS.index(m.rpartition(".")[0]) > mine}
    assert not wrong | imports(module) & set(DOORS), f"{module} imports {wrong}: above it"


def test_imports_have_no_circle():
    left = {m: imports(m) - {m} for m in modules()}
    while free := [m for m, named in left.items() if not named & set(left)]:
        for m in free:
            del left[m]
    assert not left, f"a circle among {', '.join(sorted(left))}"


def test_no_import_hides_in_a_string():
    for path in (ROOT / "cramnb").rglob("[a-z]*.py"):
        found = re.findall(r"\b(?:import_module|__import__)\(", path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} imports by a string"


# --- notebooks and modules


def test_notebooks_and_modules_are_in_step_and_clean(tmp_path):
    fresh = copy(tmp_path / "fresh")
    for module in (fresh / "cramnb").rglob("*.py"):
        if "AUTOGENERATED" in module.read_text(encoding="utf-8"):
            module.unlink()
    for tool in ("nbdev-export", "nbdev-clean"):
        words = [Path(sys.executable).parent / tool]
        subprocess.run(words, cwd=fresh, check=True, capture_output=True)
    for now in [*(ROOT / "cramnb").rglob("*.py"), *NOTEBOOKS]:
        made = (fresh / now.relative_to(ROOT)).read_text(encoding="utf-8")
        assert made == now.read_text(encoding="utf-8"), f"{now.name} is out of step: make ready"


def test_a_library_notebook_is_a_module_and_no_other_is():
    made = []
    for path in NOTEBOOKS:
        found = re.findall(r"#\|\s*default_exp ([\w.]+)", "\n".join(map(source, cells(path))))
        name = ".".join(path.relative_to(ROOT / "nbs").with_suffix("").parts)
        wanted = [name.removeprefix("library.")] if path in LIBRARY else []
        assert [x for x in found if x != "mini"] == wanted, path  # lessons write mini
        made += found
    by_hand = {"mini", "__main__"}  # mini is written by the lessons
    assert set(made) | by_hand == set(modules()) | by_hand


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if cells(p, "code")], ids=lambda p: p.stem)
def test_outputs_are_stored_and_sound(path):
    outputs = [o for c in cells(path, "code") for o in c["outputs"]]
    assert outputs, "no stored outputs"
    told = [c for c in cells(path, "code") if "code-summary: From the log" in "".join(c["source"])]
    assert all(c["outputs"] for c in told), "a table is announced and not shown"
    assert not [o for o in outputs if o["output_type"] == "error"], "a stored error"
    assert not [o for o in outputs if o.get("name") == "stderr"], "a stored warning"
    assert "widgets" not in json.loads(path.read_text(encoding="utf-8"))["metadata"]
    text = json.dumps([o for o in outputs], ensure_ascii=False)
    machine = r"/home/|/root/|/tmp/|site-packages|0x[0-9a-f]{8}"
    assert not re.search(machine, text), "a path or an address of one machine is stored"


@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda p: p.stem)
def test_a_notebook_opens_with_a_title_and_one_line(path):
    first = source(cells(path, "markdown")[0])
    assert re.match(r"# .+\n\n> .+$", first), "more than title and one line"
    code = [source(c) for c in cells(path, "code")]
    assert not any(re.search(r"^\s*from \S+ import \*", c, re.M) for c in code), "a star import"


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_colab_installs_before_the_first_import(path):
    "One guarded, hidden cell, before anything of ours is imported."
    code = [source(c) for c in cells(path, "code")]
    places = [i for i, c in enumerate(code) if "google.colab" in c and "pip install" in c]
    assert len(places) == 1, "one install cell is needed"
    cell = code[places[0]]
    assert "#| eval: false" in cell and "#| hide" in cell
    ours = [i for i, c in enumerate(code) if re.search(r"^\s*(from|import) cramnb", c, re.M)]
    assert not ours or places[0] < ours[0], "imported before it is installed"


# --- the site


def test_the_sidebar_is_the_order():
    there = {
        str(p.relative_to(ROOT / "nbs"))
        for p in (ROOT / "nbs").rglob("*")
        if p.suffix in (".ipynb", ".qmd") and not {".ipynb_checkpoints", "_proc"} & set(p.parts)
    }
    assert there == {"index.ipynb", "404.qmd", *PAGES}, "the sidebar lists each page once"
    assert [p.name[:2] for p in LESSONS] == [f"{i:02}" for i in range(len(LESSONS))], "gaps"
    for path in LESSONS:
        assert PAGES[path.name] == f"{path.name[:2]} {title(path)}", "another title"
    for path in LIBRARY:
        href = str(path.relative_to(ROOT / "nbs"))
        assert PAGES[href] == f"{path.stem} · {title(path)}"
    assert (ROOT / "nbs/_quarto.yml").resolve() == ROOT / "_quarto.yml"
    html = SITE["format"]
    assert "commonmark" not in html and html["html"]["html-math-method"] == "mathml"


def test_every_notebook_becomes_a_page(tmp_path):
    "What nbdev stages for Quarto, without Quarto."
    fresh = copy(tmp_path / "fresh")
    stage = "from nbdev.serve import proc_nbs; proc_nbs('nbs', n_workers=0)"
    subprocess.run([sys.executable, "-c", stage], cwd=fresh, check=True, capture_output=True)
    for path in NOTEBOOKS:
        front = source(cells(fresh / "_proc" / path.relative_to(ROOT / "nbs"))[0])
        assert "title: " in front and "description: " in front, f"{path.name} has no front matter"
    site = yaml.safe_load((fresh / "_proc/_quarto.yml").read_text(encoding="utf-8"))
    assert site["project"]["type"] == "website" and site["metadata-files"] == ["nbdev.yml"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_markdown_reads_well_everywhere(path):
    for cell in cells(path, "markdown"):
        text = source(cell)
        assert ":::" not in text and "```mermaid" not in text, f"only for Quarto: {text[:60]}"
        assert text.count("```") % 2 == 0 and text.count("<details>") == text.count("</details>")
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            known = re.match(r"https?:|mailto:", link) or (path.parent / link).exists()
            assert known, f"{path.name} links to {link}"
        badge = r"colab\.research\.google\.com/github/[^)\"\s]*/blob/main/([^)\"\s]+)"
        colab = re.search(badge, text)
        if colab:
            assert colab[1] == str(path.relative_to(ROOT)), f"the badge opens {colab[1]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_pictures_are_described_and_no_page_loads_a_script(path):
    "Each picture has a text for those who do not see it; HTML output would bring remote scripts."
    for cell in cells(path, "code"):
        shown = {kind for o in cell["outputs"] for kind in o.get("data", {})}
        assert "text/html" not in shown, f"HTML output: {source(cell)[:80]}"
        if shown & {"image/png", "image/svg+xml"}:
            assert "#| fig-alt: " in source(cell), f"no fig-alt: {source(cell)[:80]}"


def test_the_site_asks_no_other_server_and_has_a_face():
    "Local fonts in light and dark, one picture for shared links, an icon, a page for lost readers."
    html, website = SITE["format"]["html"], SITE["website"]
    assert set(html["theme"]) == {"light", "dark"} and html["respect-user-color-scheme"]
    for theme in html["theme"].values():
        assert "fonts.scss" in theme
    fonts = (ROOT / "nbs/fonts.scss").read_text(encoding="utf-8")
    assert "$web-font-path: false;" in fonts and "http" not in fonts
    for kind in ("image", "favicon"):
        assert (ROOT / "nbs" / website[kind]).exists()
    assert (ROOT / "nbs/404.qmd").exists() and (ROOT / "nbs" / html["css"]).exists()
    assert website["repo-subdir"] == "nbs" and set(website["repo-actions"]) == {"issue", "source"}


def test_plain_pages_are_where_the_docstrings_say(tmp_path):
    "Each address in llms.txt and in a module's docstring gets a plain page, and no page is huge."
    made = {str(p.relative_to(tmp_path)) for p in twins.main(tmp_path)}
    assert "#|" not in "".join(p.read_text(encoding="utf-8") for p in tmp_path.rglob("*.md"))
    text = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    places = [text.index(f"[{PAGES[p.name]}]") for p in LESSONS]
    assert places == sorted(places) and "index.html.md" in text[: places[0]], "start, then order"
    text += "".join(p.read_text(encoding="utf-8")[:2000] for p in (ROOT / "cramnb").rglob("*.py"))
    named = set(re.findall(r"https://cramnb\.github\.io/cramnb/([\w./]+\.md)", text))
    assert len(named) > 30 and named <= made, named - made
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.md")) < 4_000_000


@pytest.mark.parametrize("path", lessons(), ids=lambda p: p.stem)
def test_the_first_line_of_a_lesson_tells_its_minutes(path):
    assert line(*both(path)) in path.read_text(encoding="utf-8"), "make readme"


def test_the_hours_that_lesson_00_tells_are_those_of_the_lessons():
    words = "zero one two three four five six seven eight nine ten eleven".split()
    minutes = [both(path) for path in lessons()]
    spine, book = sum(m[0] for m in minutes[:16]) / 60, sum(m[1] for m in minutes) / 60
    text = "".join(map(source, cells(lessons()[0], "markdown")))
    assert f"**{words[round(spine)].capitalize()} hours.**" in text
    assert f"about {words[round(book)]} hours of reading" in text


def test_readme_is_the_index():
    for name, content in readme().items():
        assert (ROOT / name).read_bytes() == content, f"{name} is out of step: make readme"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in LESSONS:
        line = f"[{path.name[:2]} {title(path)}](nbs/{path.name})"
        assert line in text, f"the map of chapters lacks {line}"
    assert text.index("make cram") < text.index("make test") < 1500
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if not link.startswith("http"):
            assert (ROOT / link).exists(), link


def test_wheel_works_outside_the_repository(tmp_path):
    "Build the sdist from a clean copy, the wheel from the sdist; install, import, call elsewhere."
    import site

    clean = copy(tmp_path / "clean")

    def run(*words, **options):
        done = subprocess.run([str(w) for w in words], text=True, capture_output=True, **options)
        assert not done.returncode, done.stderr[-2000:]
        return done.stdout

    run(sys.executable, "-m", "build", "--no-isolation", "-o", tmp_path, clean)  # wheel from sdist
    wheel = next(tmp_path.glob("cramnb-*.whl"))
    assert wheel.stat().st_size < 400_000
    run(sys.executable, "-m", "twine", "check", "--strict", *tmp_path.glob("cramnb-*"))
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    libraries = Path(run(python, "-c", purelib).strip())
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", libraries, wheel)
    others = "\n".join(site.getsitepackages())  # torch is not installed twice
    (libraries / "others.pth").write_text(others)
    assert {p.name for p in (libraries / "cramnb/data").iterdir()} >= {
        "facts.json",
        "cram_cpu.json",
    }
    text = next(libraries.glob("cramnb-*.dist-info/METADATA")).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert link.startswith("http"), f"dead on the page of the package index: {link}"
    entry = next(libraries.glob("cramnb-*.dist-info")) / "entry_points.txt"
    assert "cramnb=cramnb._modidx:d" in entry.read_text().replace(" ", "")
    code = (
        "import cramnb; from transformers import AutoConfig; from cramnb.book.show import fact; "
        "size = AutoConfig.for_model('crammed_bert').hidden_size; "
        "print(cramnb.__file__, size, fact('glue_crammed').value)"
    )
    where, size, score = run(python, "-I", "-c", code, cwd=tmp_path).split()
    assert where.startswith(str(tmp_path)) and (size, score) == ("768", "80.4")
    usage = run(python, "-I", "-m", "cramnb", "--help", cwd=tmp_path)
    assert all(f"\n  {verb} " in usage for verb in ("cram", "pretrain", "eval", "data"))
