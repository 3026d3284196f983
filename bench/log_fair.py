"""The committed data of the fair fight, from what `bench/arms.py` wrote:
`python bench/log_fair.py results.jsonl … COMMIT > nbs/data/fair.json`. `bench/jobs_fair.py` has
the jobs, LAB.md the test, named before the first run."""

import json
import re
import statistics
import sys
from datetime import date
from pathlib import Path

from scipy.stats import ttest_ind

PLACE = dict(
    device="one of two x86-64 cores with 16-bit products, bfloat16 and eager attention; other jobs"
    " beside it",
    corpus="13,211 articles of the English Wikipedia of 2015, 1 % held out",
    vocab_size=8192,
    shape="rows of 128 tokens, 32 rows an update, 2 layers of 128",
    clock="processor time of one thread, inside updates only",
    judge="`unseen`: the held-out rows that chose nothing; `heldout`: 1,024 rows, spread evenly",
)
PAIRS = dict(
    a=("retuned", "fair"),
    b=("retuned", "fair"),
    beat=("quick", "fair"),
    c=("paper-order", "tiny"),
)
COLUMNS = "series arm seed minutes heldout unseen tokens tokens_per_second parameters".split()


def change(row: dict) -> str:
    "The words that make the recipe, without those of the text and of the judge."
    text = ("data=", "data.files", "data.vocab_size", "data.heldout", "data.mix", "train.eval_rows")
    return " ".join(word for word in row["words"] if not word.startswith(text))


def text_of(row: dict) -> str:
    "Which text a run read."
    return "docstrings" if "data=docstrings" in row["words"] else "Wikipedia"


def compare(series: str, minutes: float, text: str, rows: list[dict]) -> dict | None:
    "How far the first arm leads on unseen rows, with Welch's 95 % interval; None without seeds."
    runs = [r for r in rows if (r["minutes"], text_of(r)) == (minutes, text)]
    arm, against = PAIRS[series]
    losses = [[r["unseen"] for r in runs if r["arm"] == name] for name in PAIRS[series]]
    if min(map(len, losses)) < 2:
        return None
    ours, theirs = map(statistics.fmean, losses)
    low, high = ttest_ind(losses[1], losses[0], equal_var=False).confidence_interval(0.95)
    verdict = "tie" if low <= 0 <= high else "lead" if low > 0 else "behind"
    return dict(
        series=series,
        minutes=minutes,
        text=text,
        arm=arm,
        against=against,
        losses=losses,
        lead=round(theirs - ours, 4),
        low=round(float(low), 4),
        high=round(float(high), 4),
        verdict=verdict,
    )


def fair(rows: list[dict], commit: str) -> dict:
    rows = sorted(rows, key=lambda r: (r["series"], r["minutes"], r["arm"], r["seed"]))
    found = dict.fromkeys((r["series"], r["minutes"], text_of(r)) for r in rows)
    pairs = [compare(*key, rows) for key in found if key[0] in PAIRS]
    runs = [{c: r[c] for c in COLUMNS} | dict(text=text_of(r), change=change(r)) for r in rows]
    return PLACE | dict(
        date=date.today().isoformat(),
        commit=commit,
        unigram=rows[0]["unigram"],
        pairs=[pair for pair in pairs if pair],
        runs=[run | dict(curve=row["curve"]) for run, row in zip(runs, rows)],
    )


if __name__ == "__main__":
    *paths, commit = sys.argv[1:]
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    text = json.dumps(fair(rows, commit), indent=1)
    print(re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text))
