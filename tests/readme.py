"""Make README.md from nbs/index.ipynb: outputs without code, links as seen from the top.

Cells with `#| readme: false` are the site's; those with `#| hide` are the README's.
"""

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).parent.parent


def readme() -> dict[str, bytes]:
    "Paths below the repository's top and what they should hold."
    notebook = nbformat.read(ROOT / "nbs/index.ipynb", as_version=4)
    cells = [c for c in notebook.cells if "#| readme: false" not in c.source]
    cells[0].source = re.sub(r"\n- \w+: .*", "", cells[0].source)  # words for Quarto
    (alt,) = [m[1] for c in cells if (m := re.search(r'#\| fig-alt: "(.*)"', c.source))]
    names = "README_files/{cell_index}_{index}{extension}"
    config = Config(
        {
            "TemplateExporter": {"exclude_input": True},
            "ExtractOutputPreprocessor": {"output_filename_template": names},
        }
    )
    notebook.cells = cells
    body, resources = MarkdownExporter(config=config).from_notebook_node(notebook)
    body = re.sub(r"\]\(([\w/]+\.ipynb)(#[\w-]+)?\)", r"](nbs/\1\2)", body)
    body = body.replace("![svg](", f"![{alt}](")
    body = re.sub(r"[ ]+\n", "\n", body)
    body = re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"
    return {"README.md": body.encode(), **resources["outputs"]}


if __name__ == "__main__":
    for name, content in readme().items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_bytes(content)
