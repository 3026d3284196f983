"""The committed data of the lab's tables of single ingredients, from what `bench/arms.py` wrote:
`python bench/log_ablations.py results.jsonl COMMIT > nbs/data/ablations.json`. LAB.md has the
jobs."""

import json
import re
import sys
from datetime import date
from pathlib import Path

PLACE = dict(
    device="one of two x86-64 cores with 16-bit products, bfloat16 and eager attention",
    vocab_size=8192,
    clock="processor time of one thread, inside updates only",
)
WIKIPEDIA = "13,211 articles of the English Wikipedia of 2015, 49.8 million tokens, 1 % held out"

SERIES = dict(  # of ablations: what their runs have in common
    modern=dict(shape="2 layers of 128", corpus=WIKIPEDIA),
    faithful=dict(shape="4 layers of 128", corpus=WIKIPEDIA),
    text=dict(
        shape="2 layers of 128",
        corpus="2,520 of these articles, 9.9 million tokens; 60 other articles are the judge",
    ),
    docstrings=dict(
        shape="2 layers of 128", corpus="docstrings of installed packages, as in `make cram`"
    ),
)


def together(rows: list[dict]) -> dict:
    "Rows that differ in their seed only."
    rows = sorted(rows, key=lambda r: r["seed"])
    return {k + "s" * (k == "seed"): [r[k] for r in rows] for k in SAME if k in rows[0]}


SAME = ("seed", "heldout", "per_character", "tokens_per_second")


def group(row: dict) -> str:
    "Which unchanged recipe a row is compared with."
    return row.get("group") or ("text" if "data.judge=" in " ".join(row["words"]) else row["side"])


def ablations(rows: list[dict], commit: str) -> dict:
    """One row for each setting; the unchanged recipe of a group is its base. The runs called
    `sweep` looked for the rate of an opponent."""
    kinds, sweep = {}, [row for row in rows if row["ingredient"] == "sweep"]
    for row in [row for row in rows if row["ingredient"] != "sweep"]:
        key = group(row), row["side"], row["ingredient"], " ".join(row["change"])
        kinds.setdefault(key, []).append(row)
    base = {
        base: together(found) | dict(SERIES[base], minutes=found[0]["minutes"])
        for (base, _, name, _), found in kinds.items()
        if name == "base"
    }
    return PLACE | dict(
        date=date.today().isoformat(),
        commit=commit,
        unigram=rows[0]["unigram"],
        base=base,
        rows=[
            dict(side=side, base=base, ingredient=name, change=change, **together(found))
            for (base, side, name, change), found in kinds.items()
            if name != "base"
        ],
        sweep=[
            dict(
                heldout=row["heldout"],
                tokens_per_second=row["tokens_per_second"],
                change=" ".join(row["change"]),
                lr=next((float(w[9:]) for w in row["change"] if w.startswith("train.lr=")), 1.6e-2),
            )
            for row in sweep
        ],
    )


if __name__ == "__main__":
    path, commit = sys.argv[1:]
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    text = json.dumps(ablations(rows, commit), indent=1)
    print(re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text))
