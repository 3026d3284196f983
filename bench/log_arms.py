"""The committed data of the lab's page on claims, from what `bench/arms.py` wrote:
`python bench/log_arms.py arms results.jsonl COMMIT > nbs/data/arms.json` and
`python bench/log_arms.py ablations results.jsonl COMMIT > nbs/data/ablations.json`.
LAB.md has the jobs."""

import json
import re
import sys
from datetime import date
from pathlib import Path

POSITIONS = "arch.position_embedding_type=rotary arch.qk_norm=True arch.zero_init_residual=True"
FAITHFUL = "arch=tiny-crammed train=bert-o4 train.batch_size=32 train.batch_size_ramp=0"
SHALLOW = "arch.num_hidden_layers=2"
ARMS = {
    "faithful": ("crammed-BERT and its AdamW, small: 4 layers of 128", FAITHFUL),
    "positions": (
        "faithful with rotary positions, norms of queries and keys, and blocks that start at zero",
        f"{FAITHFUL} {POSITIONS}",
    ),
    "shallow": ("positions with 2 layers in place of 4", f"{FAITHFUL} {POSITIONS} {SHALLOW}"),
    "modern": (
        "shallow with neighbours, Muon, and a rate that stays level before it falls",
        "arch=tiny train=tiny",
    ),
    "retuned": (
        "modern with settings of a longer run: 35 % masks, and rates about half as large",
        "arch=tiny train=tiny",
    ),
    "positions35": ("positions with 35 % masks, as `retuned` has", f"{FAITHFUL} {POSITIONS}"),
}
PLACE = dict(
    device="one of two x86-64 cores with 16-bit products, bfloat16 and eager attention",
    corpus="13,211 articles of the English Wikipedia of 2015, 49.8 million tokens, 1 % held out",
    vocab_size=8192,
    shape="rows of 128 tokens, 32 rows an update",
    clock="processor time of one thread, inside updates only",
)

SERIES = dict(  # of ablations: what their runs have in common
    modern=dict(shape="2 layers of 128", corpus=PLACE["corpus"]),
    faithful=dict(shape="4 layers of 128", corpus=PLACE["corpus"]),
    text=dict(
        shape="2 layers of 128",
        corpus="2,520 of these articles, 9.9 million tokens; 60 other articles are the judge",
    ),
    docstrings=dict(
        shape="2 layers of 128", corpus="docstrings of installed packages, as in `make cram`"
    ),
)


def head(rows: list[dict], commit: str) -> dict:
    return dict(PLACE, date=date.today().isoformat(), commit=commit, unigram=rows[0]["unigram"])


def rates(row: dict) -> dict:
    said = dict(word.split("=") for word in row["change"])
    preset = 1.6e-2 if row["arm"] == "modern" else 1e-3
    muon = said.get("train.muon_lr", 0.02) if row["arm"] == "modern" else None
    return dict(lr=float(said.get("train.lr", preset)), muon_lr=muon and float(muon))


def pick(row: dict, *names: str) -> dict:
    return {name: row[name] for name in names}


def arms(rows: list[dict], commit: str) -> dict:
    """Complete runs of the chosen settings (`main` and `short`), of others for as long (`check`),
    and the `sweep` of rates."""
    kinds = {kind: [r for r in rows if r["kind"] == kind] for kind in ("sweep", "check", "main")}
    kinds["main"] += [r for r in rows if r["kind"] == "short"]
    kinds["main"].sort(key=lambda r: (-r["minutes"], list(ARMS).index(r["arm"]), r["seed"]))
    first = {a: next(r for r in kinds["main"] if r["arm"] == a) for a in ARMS}
    columns = "arm minutes seed tokens seconds tokens_per_second heldout few".split()
    sweep = [dict(pick(r, *columns[:-1]), **rates(r)) for r in kinds["sweep"]]
    check = [dict(pick(r, *columns[:-1]), change=" ".join(r["change"])) for r in kinds["check"]]
    return dict(
        head(rows, commit),
        parameters={a: first[a]["parameters"] for a in ARMS},
        arms=[
            dict(arm=a, what=what, command=f"{words} {' '.join(first[a]['change'])}".strip())
            for a, (what, words) in ARMS.items()
        ],
        sweep=sorted(sweep, key=lambda r: (r["arm"], r["muon_lr"] or 0, r["lr"])),
        check=check,
        runs=[
            pick(r, *columns)
            | {key: r[key] for key in ["unseen"] if r.get(key)}
            | dict(curve=[*r["curve"], [r["seconds"], r["tokens"], r["few"]]] if r["curve"] else [])
            for r in kinds["main"]
        ],
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
    place = head(rows, commit)
    return {key: place[key] for key in place if key not in ("corpus", "shape")} | dict(
        base=base,
        rows=[
            dict(side=side, base=base, ingredient=name, change=change, **together(found))
            for (base, side, name, change), found in kinds.items()
            if name != "base"
        ],
        sweep=[
            dict(
                pick(row, "heldout", "tokens_per_second"),
                change=" ".join(row["change"]),
                lr=rates(row)["lr"],
            )
            for row in sweep
        ],
    )


if __name__ == "__main__":
    kind, path, commit = sys.argv[1:]
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    alone = kind == "ablations"
    result = globals()[kind]([r for r in rows if ("ingredient" in r) == alone], commit)
    text = json.dumps(result, indent=1)
    print(re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text))
