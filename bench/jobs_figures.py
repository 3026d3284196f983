"""The jobs of the lab's page on the paper's figures, for `bench/arms.py`, 17 processor minutes:
`python bench/jobs_figures.py WORDS > jobs.jsonl`, where WORDS name the text as in `jobs_fair.py`.
`python bench/log_fair.py results.jsonl COMMIT > nbs/data/figures.json` commits what they write."""

import json
import sys

TINY = "arch=tiny train=tiny"
SHAPES = (
    "wsd",
    "budget-triangle2",
    "budget-one-cycle",
    "budget-cosine-decay",
    "budget-linear",
    "budget-inverse-sqrt",
)
VARIANTS = {
    "three layers": "arch.num_hidden_layers=3",
    "gated MLP": "arch.hidden_act=gelu arch.intermediate_size=384",
    "norms after": "arch.norm_placement=post",
    "learned positions": "arch.position_embedding_type=learned",
    "RMSNorm": "arch.norm_type=RMSNorm",
}


def main(*given: str):
    jobs = [("shapes", shape, f"train.scheduler={shape}") for shape in SHAPES]
    jobs += [("variants", name, words) for name, words in VARIANTS.items()]
    for series, arm, change in jobs:
        words = [*TINY.split(), *change.split(), *given, "train.eval_rows=1024"]
        job = dict(series=series, arm=arm, seed=0, minutes=1.5, unseen=True, words=words)
        print(json.dumps(job))


if __name__ == "__main__":
    main(*sys.argv[1:])
