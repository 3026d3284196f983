"""A plain Markdown twin beside each page of the site, at the address that llms.txt and the module
docstrings name (`masking.html.md`): text and code without outputs. `make docs` calls it."""

import sys
from pathlib import Path

from conftest import ROOT
from nbconvert import MarkdownExporter
from traitlets.config import Config


def address(path: Path) -> str:
    "Where nbdev puts the page of a notebook: numbers in front of a name are dropped."
    from nbdev.doclinks import nbpath2html

    return nbpath2html(path.relative_to(ROOT / "nbs")).as_posix()


def main(site: Path) -> list[Path]:
    export = MarkdownExporter(config=Config({"TemplateExporter": {"exclude_output": True}}))
    made = []
    hidden = {".ipynb_checkpoints", "_proc"}
    for notebook in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if hidden & set(notebook.parts):
            continue
        twin = site / f"{address(notebook)}.md"
        twin.parent.mkdir(parents=True, exist_ok=True)
        text, _ = export.from_filename(str(notebook))
        twin.write_text(text, encoding="utf-8")
        made.append(twin)
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]))
