"""A plain Markdown twin beside each page of the site, at the address that module docstrings name
(`masking.html.md`): text and code without outputs; and llms.txt, which lists them in the order of
the sidebars. `make docs` calls it."""

import re
import sys
from pathlib import Path

import nbformat
import yaml
from conftest import ROOT
from nbconvert import MarkdownExporter
from traitlets.config import Config

NOTEBOOKS = ROOT / "nbs"
UNSEEN = re.compile(r"^#\|\s*(hide|echo:\s*false|include:\s*false)\s*$", re.M)
DIRECTIVE = re.compile(r"^#\|.*\n?", re.M)


def address(path: Path) -> str:
    "Where nbdev puts the page of a notebook: numbers in front of a name are dropped."
    from nbdev.doclinks import nbpath2html

    return nbpath2html(path.relative_to(NOTEBOOKS)).as_posix()


def twin(path: Path) -> str:
    "The cells that the page shows, without words for tools."
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.cells = [c for c in notebook.cells if not UNSEEN.search(c.source)]
    for cell in notebook.cells:
        cell.source = DIRECTIVE.sub("", cell.source)
    notebook.cells = [c for c in notebook.cells if c.source.strip()]
    export = MarkdownExporter(config=Config({"TemplateExporter": {"exclude_output": True}}))
    return export.from_notebook_node(notebook)[0]


def contents(site: dict, texts: dict[str, str]) -> str:
    "llms.txt: the start page, then each part in its order, a line a page."
    start = "https://cramnb.github.io/cramnb/"
    lines = [f"# {site['title']}", "", f"> {site['description']}", ""]
    lines += [f"Start with [the home page]({start}index.html.md), then the book in this order."]
    for sidebar in site["sidebar"]:
        lines += ["", f"## {sidebar['title']}", ""]
        for entry in sidebar["contents"]:
            for page in entry.get("contents", [entry]):
                where = address(NOTEBOOKS / page["href"])
                summary = re.search(r"\A# .+\n\n(?:> )?(.+)$", texts[where], re.M)[1]
                lines.append(f"- [{page['text']}]({start}{where}.md): {summary}")
    return "\n".join(lines) + "\n"


def main(site: Path) -> list[Path]:
    "Write the twins and llms.txt below a folder."
    hidden = {".ipynb_checkpoints", "_proc"}
    paths = [p for p in sorted(NOTEBOOKS.rglob("*.ipynb")) if not hidden & set(p.parts)]
    texts = {address(path): twin(path) for path in paths}
    texts["lab/log.html"] = (ROOT / "LAB.md").read_text(encoding="utf-8")
    for where, text in texts.items():
        (site / where).parent.mkdir(parents=True, exist_ok=True)
        (site / f"{where}.md").write_text(text, encoding="utf-8")
    website = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    (site / "llms.txt").write_text(contents(website, texts), encoding="utf-8")
    return [site / f"{where}.md" for where in texts]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
