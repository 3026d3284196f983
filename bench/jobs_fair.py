"""The jobs of the fair fight (LAB.md, 23 November 2026), for `bench/arms.py`:
`python bench/jobs_fair.py SERIES [train.lr=RATE] WORDS > jobs.jsonl`.

WORDS name the text, such as `data=files data.files=wiki.jsonl.gz data.vocab_size=8192
data.heldout=0.01`. SERIES is a-rate, a, b, beat, c, d or scores; a, b and beat need the rate that
a-rate has found.
"""

import json
import sys

FAITHFUL = "arch=tiny-crammed train=bert-o4 train.batch_size=32 train.batch_size_ramp=0"
MODEL = "arch.position_embedding_type=rotary arch.qk_norm=True arch.zero_init_residual=True"
FAIR = (
    f"{FAITHFUL} {MODEL} arch.num_hidden_layers=2 arch.neighbours=True train.mlm_probability=0.35"
)
TINY = "arch=tiny train=tiny"
RETUNED = f"{TINY} train.mlm_probability=0.35 train.muon_lr=0.012 train.lr=8e-3"
QUICK = f"{RETUNED} arch.num_attention_heads=2"
ADAMW, MUON = ("8e-3", "16e-3", "32e-3"), ("0.01", "0.02", "0.04")


def fight(series: str, minutes: float, rate: str, *other: str) -> list[dict]:
    "Two recipes in turns: who begins changes with the seed. Other than Muon, if it is named."
    pair = [("fair", f"{FAIR} {rate}"), other or ("retuned", RETUNED)]
    return [
        dict(series=series, arm=arm, seed=seed, minutes=minutes, words=words)
        for seed in range(3)
        for arm, words in (pair[::-1] if seed % 2 else pair)
    ]


def rates() -> list[dict]:
    "Which rate suits the opponent?"
    one = dict(series="a-rate", arm="fair", seed=3, minutes=8)
    return [dict(one, words=f"{FAIR} train.lr={rate}") for rate in ADAMW]


def orders() -> list[dict]:
    "The paper's order of rows against the unchanged recipe."
    arms = {"tiny": TINY, "paper-order": f"{TINY} data.ordering=reverse-unigram-curriculum"}
    return [
        dict(series="c", arm=arm, seed=seed, minutes=1.5, words=words, curve=False)
        for seed in range(3)
        for arm, words in arms.items()
    ]


def optimizers() -> list[dict]:
    "Muon and AdamW, each with two schedules and three rates."
    swept = [("muon", f"muon_lr={m}") for m in MUON] + [("adamw", f"lr={a}") for a in ADAMW]
    one = dict(series="d", seed=3, minutes=2.5, curve=False)
    return [
        dict(
            one,
            arm=f"{name}-{schedule}",
            words=f"{TINY} train.optimizer={name} train.scheduler={schedule} train.{rate}",
        )
        for schedule in ("wsd", "budget-triangle2")
        for name, rate in swept
    ]


def examined() -> list[dict]:
    "Models that are kept, for `bench/log_scores.py`."
    arms = dict(quick=QUICK, faithful=f"{FAITHFUL} train.lr=4e-3")
    return [
        dict(series="scores", arm=arm, seed=seed, minutes=20, words=words, save=f"{arm}_{seed}")
        for seed in range(3)
        for arm, words in arms.items()
    ]


def main(series: str, *words: str):
    rated = series in ("a", "b", "beat")
    rate = words[0] if rated else ""
    given = words[1:] if rated else words
    if rated and not rate.startswith("train.lr="):
        sys.exit("a, b and beat need the rate of `fair` first, such as train.lr=16e-3.")
    jobs = {
        "a-rate": rates,
        "a": lambda: fight("a", 20, rate),
        "b": lambda: fight("b", 40, rate),
        "beat": lambda: fight("beat", 20, rate, "quick", QUICK),
        "c": orders,
        "d": optimizers,
        "scores": examined,
    }[series]()
    for job in jobs:
        words = job["words"].split() + [*given, "train.eval_rows=1024"]
        print(json.dumps(job | dict(unseen=True, words=words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
