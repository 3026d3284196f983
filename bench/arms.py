"""Recipes side by side on one processor: `python bench/arms.py jobs.jsonl results.jsonl`.

A job is a line such as {"arm": "modern", "seed": 0, "minutes": 3, "words": ["arch=tiny", …]}.
The budget counts processor time of one thread, inside updates only, so that other jobs on the
machine take nothing from a recipe. Recipes that filter text need one judge that no filter touches
(`data.judge=FILE` among their words) and `per_character`, because their tokens differ.
Several of these commands may share one file of jobs: each job is done once, and a job added to
the file while they run is done as well.
"""

import hashlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from cramnb.train.device import keep_memory
from cramnb.recipe import compose
from cramnb.run.run import make_loop, new_model
from cramnb.text.store import Corpus
from cramnb.train.loop import heldout_batches, heldout_loss, spread_rows, unigram_entropy

FASTEST = ["impl.precision=bfloat16", "impl.attn_implementation=eager", "impl.microbatch_size=32"]
MARKS = [0.02, 0.05, *(n / 20 for n in range(2, 6)), *(n / 10 for n in range(3, 10))]


def unseen_loss(trainer, corpus: Corpus) -> float | None:
    "Loss on the held-out rows that `train.eval_rows` leaves: no choice of a setting saw them."
    judging = spread_rows(len(corpus.heldout), trainer.train.eval_rows)
    rest = np.delete(corpus.heldout[:], judging, axis=0)
    if not len(rest):
        return None
    every_row = replace(trainer.train, eval_rows=len(rest))
    batches = heldout_batches(replace(corpus, heldout=rest), every_row)
    return round(heldout_loss(trainer.model, batches, trainer.precision), 4)


def learn(job: dict, folder: Path) -> dict:
    words = FASTEST + [f"seed={job['seed']}", f"budget={job['minutes']}m"] + job["words"]
    recipe = compose(words)
    corpus = Corpus.build(recipe.data, recipe.impl.path)
    characters = sum(map(len, corpus.heldout_documents()))
    trainer = make_loop(recipe, new_model(recipe, corpus), corpus)
    trainer.clock = time.process_time
    held = heldout_batches(corpus, recipe.train)
    few, marks, curve = held[:4], list(MARKS) if job.get("curve", True) else [], []
    for row in trainer.updates():
        share = trainer.progress()
        if marks and share >= marks[0]:
            marks = [m for m in marks if m > share]
            loss = heldout_loss(trainer.model, few, trainer.precision)
            curve.append([round(row["elapsed"], 1), row["tokens"], round(loss, 4)])
    state = trainer.state
    loss, last = (heldout_loss(trainer.model, b, trainer.precision) for b in (held, few))
    if "save" in job:
        trainer.model.save_pretrained(folder / job["save"])
        corpus.tokenizer.save_pretrained(folder / job["save"])
    return dict(
        job,
        heldout=round(loss, 4),
        per_character=round(loss * corpus.heldout[:].size / characters, 4),
        few=round(last, 4),
        unseen=unseen_loss(trainer, corpus) if job.get("unseen") else None,
        tokens=state.tokens,
        updates=state.update,
        seconds=round(state.elapsed, 1),
        tokens_per_second=round(state.tokens / state.elapsed),
        skipped=state.skipped,
        unigram=round(unigram_entropy(corpus.token_counts, held), 4),
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        curve=curve,
    )


def claim(folder: Path, line: str) -> bool:
    "Only one process takes a job."
    name = hashlib.sha256(line.encode()).hexdigest()[:16]
    try:
        os.close(os.open(folder / f"{name}.taken", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main(jobs: Path, results: Path):
    torch.set_num_threads(1)
    folder = results.with_suffix("")
    folder.mkdir(exist_ok=True)
    idle = 0
    while idle < 2:
        lines = [line for line in jobs.read_text().splitlines() if line.strip()]
        mine = next((line for line in lines if claim(folder, line)), None)
        if mine is None:
            idle += 1
            time.sleep(1)
            continue
        idle = 0
        with keep_memory(torch.device("cpu")):
            result = learn(json.loads(mine), folder)
        with results.open("a") as out:
            out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
