"""The committed log of a real run:
`python bench/log_run.py runs/cram "two CPU cores" > nbs/data/cram_cpu.json`.

Chapters read it where a run of three minutes would be too long. It holds the figures of the run,
its scores, and guesses for the same hidden words before and after.
"""

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

import cramnb  # noqa: F401  (registers the model classes)
from cramnb.judge.probe import fill_blank

SENTENCES = (
    "Return the [MASK] of the array.",
    "Raises an error if the file does not [MASK].",
    "The default value is [MASK].",
    "This function is used to [MASK] the data.",
    "A list of [MASK] to be used by the model.",
)


def guesses(model, tokenizer) -> list:
    found = [fill_blank(model, tokenizer, text, 5)[0] for text in SENTENCES]
    return [[[token, round(p, 4)] for token, p in five] for five in found]


def main(run: Path, device: str) -> dict:
    ended, told = (json.loads((run / f"{name}.json").read_text()) for name in ("pretrain", "glue"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    torch.manual_seed(0)
    before = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(run / "model"))
    after = AutoModelForMaskedLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    pairs = zip(SENTENCES, guesses(before, tokenizer), guesses(after, tokenizer))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    figures = "device_name torch tokens updates flops parameters"
    losses = "first_heldout loss heldout unigram"
    return {
        "device": device,
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
        "recipe": "tiny",
        "seconds": round(ended["seconds"], 1),
        "tokens_per_second": round(ended["tokens_per_second"]),
        **{name: ended[name] for name in figures.split()},
        **{name: round(ended[name], 4) for name in losses.split()},
        "epochs": round(ended["epochs"], 3),
        "curve": [[round(r["elapsed"], 1), r["tokens"], round(r["loss"], 3)] for r in rows[::10]],
        "mean": round(told["mean"], 4),
        "scores": [
            dict(name=x["name"], metric=x["metric"], median=x["median"], baseline=x["baseline"])
            for x in told["scores"]
        ],
        "fill_mask": [dict(sentence=s, before=b, after=a) for s, b, a in pairs],
    }


if __name__ == "__main__":
    text = json.dumps(main(Path(sys.argv[1]), sys.argv[2]), indent=1)
    print(re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text))
