"""The committed comparison of lesson 20: `python -m bench.log_consumer TEXT > consumer.json`.

TEXT is a JSON-lines file; parts of it are read. Four ways to train a small model for the same
seconds of one processor, in turns, with two seeds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from .consumer import Chunks, StopAfter, cut_chunks, home_arguments, home_trainer
from cramnb.core import quiet
from cramnb.model.mlm import count_parameters
from cramnb.options import Data
from cramnb.recipe import compose
from cramnb.run.run import make_loop, new_model
from cramnb.text.sources import documents
from cramnb.text.store import Corpus
from cramnb.train.loop import heldout_batches, heldout_loss, unigram_entropy

SECONDS, ROWS, PILOT, VOCAB = 120.0, 16, 10.0, 4096
SIZES = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
HOME = dict(  # the training of the home run in our words
    lr=1e-3,
    betas="[0.9,0.98]",
    eps=1e-9,
    weight_decay=0.01,
    gradient_clipping=0.5,
    scheduler="budget-linear",
    warmup=0.5,
    cooldown=0.5,
    batch_size=ROWS,
    batch_size_ramp=0.0,
    mlm_probability=0.15,
    use_80_20_rule=True,
    dropout=False,
)
clock = time.process_time


def words(group: str, values: dict) -> list[str]:
    return [f"{group}.{key}={value}" for key, value in values.items()]


def same_words(seconds: float) -> list[str]:
    "Our engine, the model and the training of the home run."
    train = words("train", HOME) + ["impl.precision=float32", f"impl.microbatch_size={ROWS}"]
    return ["arch=hf-bert-base", *words("arch", SIZES), *train, f"budget={seconds / 3600}"]


def own_words(seconds: float) -> list[str]:
    "Our engine, its own small model at the same size, and its own training."
    return [
        "arch=tiny",
        *words("arch", SIZES),
        "train=tiny",
        f"train.batch_size={ROWS}",
        f"budget={seconds / 3600}",
    ]


def with_ours(words, corpus, seed, folder) -> dict:
    recipe = replace(compose(words), seed=seed, data=corpus.data_options)
    trainer = make_loop(recipe, new_model(recipe, corpus), corpus)
    trainer.clock = clock
    for _ in trainer.updates():
        pass
    s = trainer.state
    return dict(model=trainer.model, tokens=s.tokens, updates=s.update, spent=s.elapsed)


def bert(vocab_size: int):
    "The model of the home run, smaller."
    none = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    shape = dict(vocab_size=vocab_size, max_position_embeddings=128, **SIZES, **none)
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **shape))


def with_trainer(rows, corpus, seed, folder, seconds=SECONDS, updates=0) -> dict:
    "A pilot finds the number of updates, as the schedule must know it; then the run itself."
    if not updates:
        pilot = with_trainer(rows, corpus, seed, folder, PILOT, 10**6)
        updates = round(pilot["updates"] * SECONDS / PILOT)
    torch.manual_seed(seed)
    how = dict(rows=ROWS, passes=1, seed=seed, use_cpu=True, save_steps=10**9, logging_steps=1000)
    more = dict(include_num_input_tokens_seen="non_padding", save_strategy="no")
    options = home_arguments(folder, updates, **how | more)
    tokenizer = corpus.tokenizer
    trainer = home_trainer(
        bert(len(tokenizer)), rows, tokenizer, options, StopAfter(seconds, clock)
    )
    began = clock()
    trainer.train()
    s, spent = trainer.state, clock() - began
    done = dict(tokens=int(s.num_input_tokens_seen), updates=s.global_step, planned=updates)
    return dict(model=trainer.model, spent=spent, **done)


class Packed(torch.utils.data.Dataset):
    "The rows of our corpus for their Loop."

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return dict(input_ids=self.rows[[i]][0].astype("int64"))


def chunk_batches(corpus, heldout, train):
    "Held-out rows as the home run's: one chunk each, from [CLS] to [SEP]."
    how = dict(truncation=True, max_length=128, padding="max_length", return_tensors="np")
    ids = corpus.tokenizer(heldout, **how)["input_ids"]
    full = ids[(ids != corpus.tokenizer.pad_token_id).all(1)]
    return heldout_batches(replace(corpus, heldout=full), replace(train, eval_rows=len(full)))


def side_by_side(text: Path, folder: Path, seeds=(0, 1)) -> dict:
    given = dict(source="files", files=str(text), max_megabytes=60, vocab_size=VOCAB)
    given |= dict(deduplicate=False, trash_cutoff=0.0, heldout=0.01, include_cls=True)
    data = Data(**given)
    corpus = Corpus.build(data, folder / "data")
    corpus.data_options = data
    train, held = [], []
    for document, out in documents(data):
        (held if out else train).append(document)
    chunks = Chunks(list(cut_chunks(train)), corpus.tokenizer, 128)
    judged = compose([]).train
    packed = heldout_batches(corpus, replace(judged, eval_rows=512))
    plain = chunk_batches(corpus, list(cut_chunks(held))[:600], judged)
    arms = dict(
        trainer_chunks=lambda seed: with_trainer(chunks, corpus, seed, folder / "t"),
        trainer_rows=lambda seed: with_trainer(Packed(corpus.rows), corpus, seed, folder / "t"),
        ours_same=lambda seed: with_ours(same_words(SECONDS), corpus, seed, folder),
        ours_own=lambda seed: with_ours(own_words(SECONDS), corpus, seed, folder),
    )
    runs = []
    for seed in seeds:
        for name, arm in arms.items():
            began = clock()
            with quiet():
                done = arm(seed)
            model = done.pop("model")
            losses = dict(rows=heldout_loss(model, packed), chunks=heldout_loss(model, plain))
            losses = {f"heldout_{k}": round(v, 4) for k, v in losses.items()}
            done["spent"] = round(done["spent"], 1)
            rate = round(done["tokens"] / done["spent"])
            run = dict(arm=name, seed=seed, tokens_per_second=rate, **done, **losses)
            runs.append(run | dict(parameters=count_parameters(model)))
            print(run, round(clock() - began), file=sys.stderr)
            if seed == seeds[0]:
                model.save_pretrained(folder / name)
                corpus.tokenizer.save_pretrained(folder / name)
    unigram = round(unigram_entropy(corpus.token_counts, packed), 4)
    about = dict(seconds=SECONDS, rows=ROWS, sizes=SIZES, vocab_size=VOCAB, unigram=unigram)
    return about | dict(runs=runs)


def main(text: Path) -> dict:
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(os.environ.get("CONSUMER_WORK") or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    about = dict(
        device="one core of two, x86-64, AVX-512 with bfloat16 products",
        date=date.today().isoformat(),
        commit=commit,
        **versions,
        text="English Wikipedia of 2015",
        same=" ".join(same_words(SECONDS)),
        own=" ".join(own_words(SECONDS)),
    )
    return about | side_by_side(text, folder)


if __name__ == "__main__":
    result = main(Path(sys.argv[1]))
    runs = ",\n  ".join(map(json.dumps, result.pop("runs")))
    head = json.dumps(result, indent=1)[:-2]
    print(f'{head},\n "runs": [\n  {runs}\n ]\n}}')
