"""An evening on two cores: `python bench/evening.py data.files=wiki.jsonl.gz impl.path=corpora`.

Trains as `cramnb pretrain` does, and goes on where it was stopped. An hour and a quarter is
counted inside updates only. Set OMP_WAIT_POLICY=PASSIVE, or threads that wait for a busy core spin.
The size is the law's (LAB.md, 25 November 2026); `python -m bench.evening forecast` prints it.
"""

import sys
from dataclasses import replace

import numpy as np

from cramnb.cli import main
from cramnb.core import read_data
from cramnb.recipe import preset
from cramnb.run.plan import fit_law, parameters_by_part

TEXT = "data=files data.vocab_size=8192 data.heldout=0.01"
RECIPE = (
    "arch=tiny train=tiny train.mlm_probability=0.35 train.muon_lr=0.012 train.lr=8e-3 "
    "train.batch_size=64 train.eval_rows=1024"
)
MACHINE = (
    "impl.threads=2 impl.precision=float32 impl.attn_implementation=sdpa "
    "impl.microbatch_size=64 impl.save_every=2"
)


def shape(depth: int, width: int) -> dict:
    "Heads of 64, an MLP of four times the width."
    sizes = dict(num_hidden_layers=depth, hidden_size=width, intermediate_size=4 * width)
    return sizes | dict(num_attention_heads=width // 64, classifier_hidden_size=width)


def layers(depth: int, width: int) -> int:
    "Parameters in the layers."
    arch = replace(preset("arch", "tiny"), **shape(depth, width))
    return parameters_by_part(arch, 8192)["layers"]


def forecast(runs: list[dict], depth: int, width: int, tokens: float) -> tuple[float, float, float]:
    "Loss by a law of the short runs; least and most with one run left out."
    n, d, y = (np.array([r[k] for r in runs], float) for k in ("layers", "tokens", "unseen"))
    N = layers(depth, width)
    left = [fit_law(*(np.delete(x, i) for x in (n, d, y)))(N, tokens) for i in range(len(runs))]
    return float(fit_law(n, d, y)(N, tokens)), float(min(left)), float(max(left))


def train(*words: str) -> int:
    size = [f"arch.{k}={v}" for k, v in shape(2, 128).items()]
    given = f"name=evening budget=75m seed=0 {TEXT} {RECIPE} {MACHINE}".split()
    return main(["pretrain", *given, *size, *words])


if __name__ == "__main__":
    if sys.argv[1:] != ["forecast"]:
        sys.exit(train(*sys.argv[1:]))
    log = read_data("evening.json")
    for size in log["sizes"]:
        guess = forecast(log["law"], size["depth"], size["width"], size["tokens"])
        print(size, *(f"{x:.3f}" for x in guess))
