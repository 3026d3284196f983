"""`cramnb.mini` against the library's `tiny` at equal time, three seeds, one core each:
`python bench/log_mini.py COMMIT > nbs/data/mini.json`.

Both read the rows of one corpus (the built-in text) and are judged by mini's own `mean_loss` on
the same held-out rows. The cores are exchanged from seed to seed.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from cramnb import Corpus, Trainer, build_model, mini
from cramnb.recipe import tiny

SEEDS, BUDGET = (0, 1, 2), 180


def turn(side: str, seed: int) -> dict:
    "Train one side for the budget, and judge it."
    torch.set_num_threads(1)
    corpus = built_in()
    rows, heldout, size = corpus.rows[:], corpus.heldout[:], corpus.vocab_size
    torch.manual_seed(seed)
    small, run = mini.MaskedLM(size), dict(updates=0, elapsed=0.0, states={})
    if side == "mini":
        batches = lambda n: mini.batch_at(n, rows, size, seed=seed)  # noqa: E731
        for _ in mini.train(small, batches, BUDGET, run, bf16=torch.cpu._is_amx_tile_supported()):
            pass
        updates = run["updates"]
    else:
        with tempfile.TemporaryDirectory() as folder:
            model = build_model("tiny", corpus)
            trained = Trainer(
                model, corpus, "tiny", budget=f"{BUDGET}s", folder=folder, seed=seed
            ).fit()
            updates = trained.summary["updates"]
        small.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    loss = mini.mean_loss(small.float().eval(), mini.fixed_batches(heldout, size))
    return dict(side=side, seed=seed, updates=updates, heldout_loss=round(loss, 4))


def built_in() -> Corpus:
    return Corpus.build(tiny().data)


def pair(seed: int) -> list[dict]:
    "The two sides at once, each with a core of its own."
    me = [sys.executable, str(Path(__file__)), "turn"]
    parts = [
        subprocess.Popen(
            ["taskset", "-c", str((seed + place) % 2), *me, side, str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(OMP_NUM_THREADS="1"),
        )
        for place, side in enumerate(("mini", "tiny"))
    ]
    return [json.loads(p.communicate()[0].splitlines()[-1]) for p in parts]


if __name__ == "__main__":
    if sys.argv[1] == "turn":
        print(json.dumps(turn(sys.argv[2], int(sys.argv[3]))))
    else:
        built_in()
        runs = [row for seed in SEEDS for row in pair(seed)]
        told = dict(device="two x86-64 cores, one a side", date=date.today().isoformat())
        told |= dict(commit=sys.argv[1], seconds=BUDGET, runs=runs)
        print(json.dumps(told, indent=1))
