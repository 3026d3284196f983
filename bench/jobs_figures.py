"""The jobs of the lab's page on the paper's figures, for `bench/arms.py`, 23 processor minutes:
`python bench/jobs_figures.py WORDS > jobs.jsonl`, where WORDS name the text as in `jobs_fair.py`.
`python bench/log_fair.py results.jsonl COMMIT > nbs/data/figures.json` commits what they write;
`python -m bench.log_scores vocabulary MODELS GLUE WORK` adds the scores."""

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
    "plain MLP": "arch.hidden_act=gelu arch.intermediate_size=384",
    "norms after": "arch.norm_placement=post",
    "learned positions": "arch.position_embedding_type=learned",
    "RMSNorm": "arch.norm_type=RMSNorm",
}
VOCABULARIES = 4096, 8192, 16384, 32768


def main(*given: str):
    jobs = [("shapes", shape, f"train.scheduler={shape}") for shape in SHAPES]
    jobs += [("variants", name, words) for name, words in VARIANTS.items()]
    jobs += [("vocabulary", f"{n}", f"data.vocab_size={n}") for n in VOCABULARIES]
    for series, arm, change in jobs:
        words = [*TINY.split(), *given, *change.split(), "train.eval_rows=1024"]
        job = dict(series=series, arm=arm, seed=0, minutes=1.5, unseen=True, words=words)
        print(json.dumps(job | (dict(save=f"{arm}_0") if series == "vocabulary" else {})))


if __name__ == "__main__":
    main(*sys.argv[1:])
