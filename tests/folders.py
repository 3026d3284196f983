"""Folders of runs without a run, for tests that only look at them."""

from pathlib import Path

from cramnb.core import write_json, write_text
from cramnb.run.watch import Log


def fake_run(base: Path, name: str, rows: int = 5, **files):
    folder = base / name
    folder.mkdir(parents=True)
    write_json(folder / "recipe.json", dict(train=dict(lr=1)))
    log = Log(folder / "metrics.jsonl")
    for u in range(1, rows + 1):
        log.write(
            dict(
                update=u,
                progress=u / 10,
                elapsed=60.0 * u,
                tokens=1000 * u,
                loss=7.0 - u / 10,
                tokens_per_second=10.0,
                **({"heldout": 6.5} if u == rows else {}),
            )
        )
    for k, v in files.items():
        if isinstance(v, str):
            write_text(folder / f"{k}.json", v)
        else:
            write_json(folder / f"{k}.json", v)
    return folder
