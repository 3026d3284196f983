"""What the choice of number format, attention and memory is worth, whole updates in turns:
`python bench/log_ways.py COMMIT WORDS > nbs/data/ways.json`, where WORDS name a text.

A process of its own for each turn, because memory that is kept stays kept. Plain is float32 with
sdpa, and chosen is what a processor with 16-bit products chooses; both have one thread and its
processor time.
"""

import json
import statistics
import subprocess
import sys
import time
from datetime import date

import torch

from cramnb.train.device import keep_memory
from cramnb.recipe import compose
from cramnb.run.run import make_loop, new_model
from cramnb.text.store import Corpus

SHAPES = {
    "tiny, 2 layers of 128": [],
    "small, 4 layers of 256": [
        "arch.num_hidden_layers=4",
        "arch.hidden_size=256",
        "arch.intermediate_size=1024",
    ],
}
WAYS = {
    "plain": ["impl.precision=float32", "impl.attn_implementation=sdpa"],
    "chosen": ["impl.precision=bfloat16", "impl.attn_implementation=eager"],
}
ROUNDS, UPDATES = 3, 8


def turn(way: str, words: list[str]) -> float:
    "Tokens a second of processor time, over whole updates."
    torch.set_num_threads(1)
    recipe = compose(["arch=tiny", "train=tiny", "impl.microbatch_size=32", *WAYS[way], *words])
    corpus = Corpus.build(recipe.data, recipe.impl.path)
    trainer = make_loop(recipe, new_model(recipe, corpus), corpus)
    updates = trainer.updates()
    for _ in range(5):
        next(updates)
    began, read = time.process_time(), trainer.state.tokens
    for _ in range(UPDATES):
        next(updates)
    return (trainer.state.tokens - read) / (time.process_time() - began)


def one(way: str, words: list[str]) -> float:
    "The same in a fresh process."
    told = subprocess.run(
        [sys.executable, __file__, "turn", way, *words], capture_output=True, text=True, check=True
    )
    return float(told.stdout.split()[-1])


def main(commit: str, words: list[str]) -> dict:
    cases = []
    for shape, more in SHAPES.items():
        pairs = [[one(way, words + more) for way in WAYS] for _ in range(ROUNDS)]
        ratios = [chosen / plain for plain, chosen in pairs]
        speeds = dict(zip(WAYS, (round(statistics.median(x)) for x in zip(*pairs))))
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        cases.append(
            dict(shape=shape, **speeds, ratio=round(middle, 3), low=round(low, 3))
            | dict(high=round(high, 3))
        )
    device = "one of two x86-64 cores with 16-bit products"
    return dict(device=device, date=date.today().isoformat(), commit=commit, cases=cases)


if __name__ == "__main__":
    if sys.argv[1] == "turn":
        kept = sys.argv[2] == "chosen"
        with keep_memory(torch.device("cpu" if kept else "meta")):
            print(turn(sys.argv[2], sys.argv[3:]))
    else:
        print(json.dumps(main(sys.argv[1], sys.argv[2:]), indent=1))
