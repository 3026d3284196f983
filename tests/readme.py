"""Make README.md from nbs/index.ipynb: outputs without code, links as seen from the top."""

import re
from pathlib import Path

from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).parent.parent


def readme() -> dict[str, bytes]:
    "Paths below the repository's top and what they should hold."
    names = "README_files/{cell_index}_{index}{extension}"
    config = Config(
        {
            "TemplateExporter": {"exclude_input": True},
            "ExtractOutputPreprocessor": {"output_filename_template": names},
        }
    )
    body, resources = MarkdownExporter(config=config).from_filename(str(ROOT / "nbs/index.ipynb"))
    body = re.sub(r"\]\(([\w/]+\.ipynb)(#[\w-]+)?\)", r"](nbs/\1\2)", body)
    what = "The pipeline from raw text to score, with the lessons of each stage"
    body = body.replace("![svg](", f"![{what}](")
    body = re.sub(r"[ ]+\n", "\n", body)
    body = re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"
    return {"README.md": body.encode(), **resources["outputs"]}


if __name__ == "__main__":
    for name, content in readme().items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_bytes(content)
