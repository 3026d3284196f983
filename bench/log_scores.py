"""Scores of kept models, as a log: `python -m bench.log_scores SERIES MODELS GLUE WORK COMMIT`.

SERIES is `exam` (scores.json), `vocabulary` (into figures.json) or `evening` (evening.json).
MODELS has a folder NAME_SEED for each model, as `bench/arms.py` saves them; for `evening` it is
the folder of the run, whose corpus lies where the run had it. GLUE has the six tasks. Pooling and
rate are chosen on training rows of MNLI that are held back. What is found in WORK is not computed
again.
"""

import gzip
import json
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bench.arms import unseen_loss
from cramnb.core import read_data
from cramnb.run.run import make_loop
from cramnb.run.runs import read_log, read_recipe
from cramnb.text.store import Corpus

ARMS = "untrained", "faithful", "quick"
VOCABULARIES = "4096", "8192", "16384", "32768"
SEEDS = 0, 1, 2
TASKS = "stsb", "sst2", "mrpc", "mnli", "cola", "rte"
SHORT = "mean", "1e-3"  # pooling and rate that models of minutes chose in the first exam
RATES = "1e-4", "3e-4", "1e-3", "3e-3", "1e-2"
HELD_BACK = 3000  # training rows of MNLI that judge the settings
MOST = 8551  # training rows of a task: as many as CoLA has


def read_rows(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        return list(lines)


def hold_back(glue: Path, folder: Path) -> Path:
    "A folder whose MNLI is judged on training rows, without a premise that is trained on."
    rows = read_rows(next((glue / "mnli").glob("train*.jsonl.gz")))
    judged = rows[-HELD_BACK:]
    known = {json.loads(row)["premise"] for row in judged}
    files = dict.fromkeys(("dev_matched", "dev_mismatched"), judged)
    files["train"] = [row for row in rows if json.loads(row)["premise"] not in known]
    (folder / "mnli").mkdir(parents=True, exist_ok=True)
    for name, part in files.items():
        with gzip.open(folder / f"mnli/{name}.jsonl.gz", "wt", encoding="utf-8") as out:
            out.writelines(part)
    return folder


def untrain(models: Path, seed: int):
    "The model of `quick` with fresh weights; its vocabulary stays."
    target, source = models / f"untrained_{seed}", models / f"quick_{seed}"
    if not target.exists():
        torch.manual_seed(seed)
        model = AutoModelForMaskedLM.from_pretrained(source)
        AutoTokenizer.from_pretrained(source).save_pretrained(target)
        type(model)(model.config).save_pretrained(target)


def evaluate(work: Path, name: str, model: Path, tasks, glue: Path, most: int, *words: str):
    "Scores of one evaluation, a dict for each."
    command = f"cramnb eval eval=GLUE_sane name={name} base_dir={work} eval.checkpoint={model}"
    command += f" eval.tasks={','.join(tasks)} eval.glue_dir={glue} eval.max_train_examples={most}"
    found = lambda: sorted((work / name / "eval").glob("*/glue.json"))
    if not found():
        subprocess.run([*command.split(), *words], check=True, stdout=subprocess.DEVNULL)
    return json.loads(found()[-1].read_text())["scores"]


def choose(work: Path, model: Path, glue: Path, most: int = MOST) -> tuple[tuple, list[dict]]:
    "The best pooling and rate of a model, and all that was tried."
    tried = {}

    def accuracy(pooling, place):
        if (pooling, RATES[place]) not in tried:
            words = f"eval.classifier_pooling={pooling}", f"eval.lr={RATES[place]}", "eval.trials=1"
            run = f"choose_{model.name}_{pooling}_{RATES[place]}"
            scores = evaluate(work, run, model, ["mnli"], glue, most, *words)
            tried[pooling, RATES[place]] = scores[0]["values"][0]
        return tried[pooling, RATES[place]]

    best = max((1, 2), key=lambda place: accuracy("mean", place))
    for pooling in ("mean", "first"):  # the first vector only goes on where it is better
        while accuracy(pooling, best) == max(tried.values()):
            near = [place for place in (best - 1, best, best + 1) if place in range(len(RATES))]
            if (better := max(near, key=lambda place: accuracy(pooling, place))) == best:
                break
            best = better
    chosen = max(tried, key=tried.get)
    return chosen, [
        dict(pooling=p, lr=float(rate), accuracy=round(a, 4), chosen=chosen == (p, rate))
        for (p, rate), a in tried.items()
    ]


def words_of(setting: tuple, seed: int, trials: int) -> list[str]:
    pooling, rate = setting
    words = f"eval.classifier_pooling={pooling} eval.lr={rate} seed={seed} eval.trials={trials}"
    return words.split()


def one(score: dict) -> dict:
    "What is logged of a task."
    values = [round(v, 4) for v in score["values"]]
    baseline = round(score["baseline"], 4)
    return dict(task=score["name"], metric=score["metric"], baseline=baseline, values=values)


def exam(models: Path, glue: Path, work: Path, commit: str) -> dict:
    "Each arm on each task, one fine-tuning for each of its pretrainings."
    apart, chosen, tasks = hold_back(glue, work / "mnli_held_back"), [], {}
    for seed in SEEDS:
        untrain(models, seed)
    for arm in ARMS:
        best, tried = choose(work, models / f"{arm}_0", apart)
        chosen += [dict(arm=arm, **row) for row in tried]
        for seed in SEEDS:
            name, words = f"{arm}_{seed}", words_of(best, seed, 1)
            for score in map(one, evaluate(work, name, models / name, TASKS, glue, MOST, *words)):
                value = score.pop("values")
                tasks.setdefault(score.pop("task"), score).setdefault(arm, []).extend(value)
    runs = map(json.loads, models.with_suffix(".jsonl").read_text().splitlines())
    kept = "arm seed minutes unseen tokens tokens_per_second parameters curve".split()
    return dict(
        date=date.today().isoformat(),
        commit=commit,
        protocol="eval=GLUE_sane",
        train_rows=MOST,
        held_back=HELD_BACK,
        pretraining=[{key: run[key] for key in kept} for run in runs],
        chosen=chosen,
        tasks=tasks,
    )


def vocabulary(models: Path, glue: Path, work: Path, commit: str) -> dict:
    "MNLI with each vocabulary, three trials."
    log = read_data("figures.json")
    scores = [
        dict(vocab_size=int(n), **one(score))
        for n in VOCABULARIES
        for score in evaluate(
            work, n, models / f"{n}_0", ["mnli"], glue, MOST, *words_of(SHORT, 0, 3)
        )
    ]
    return log | dict(scores=scores, scores_commit=commit)


def pretraining(run: Path) -> dict:
    "What a finished run took, and how it went; `unseen` is its loss on rows that chose nothing."
    ended, recipe = json.loads((run / "pretrain.json").read_text()), read_recipe(run)
    rows, corpus = read_log(run / "metrics.jsonl"), Corpus.build(recipe.data, recipe.impl.path)
    if corpus.fingerprint != ended["corpus"]:
        sys.exit(f"{corpus.folder} is not the corpus of {run}.")
    trainer = make_loop(recipe, AutoModelForMaskedLM.from_pretrained(run / "model"), corpus)
    held = [row for row in rows if "heldout" in row]
    steps = [rows[i : i + 100] for i in range(0, len(rows), 100)]
    mean = lambda part: round(sum(r["loss"] for r in part) / len(part), 4)
    kept = "updates tokens seconds epochs tokens_per_second parameters flops torch".split()
    return dict(
        {key: ended[key] for key in kept},
        **{key: round(ended[key], 4) for key in ("heldout", "unigram")},
        unseen=unseen_loss(trainer, corpus),
        curve=[[round(r["elapsed"]), r["tokens"], round(r["heldout"], 4)] for r in held],
        training=[[round(part[-1]["elapsed"]), mean(part)] for part in steps],
    )


def evening(run: Path, glue: Path, work: Path, commit: str) -> dict:
    "Five trials of six tasks."
    best, tried = choose(work, run / "model", hold_back(glue, work / "mnli_held_back"))
    scores = [
        one(score)
        for task in TASKS
        for score in evaluate(work, task, run / "model", [task], glue, MOST, *words_of(best, 0, 5))
    ]
    middle = {score["task"]: statistics.median(score["values"]) for score in scores}
    middle["mnli"] = (middle["mnli"] + middle.pop("mnli_mm")) / 2  # two sets, one task
    mean = round(statistics.fmean(middle.values()), 4)
    log = read_data("evening.json") | dict(run=pretraining(run), chosen=tried)
    return log | dict(scores=scores, mean=mean, scores_commit=commit)


if __name__ == "__main__":
    series, *folders, commit = sys.argv[1:]
    log = dict(exam=exam, vocabulary=vocabulary, evening=evening)[series](
        *map(Path, folders), commit
    )
    in_one_line = lambda found: " ".join(found[0].split())
    print(re.sub(r"\{[^][{}]*\}|\[[^][{}]*\]", in_one_line, json.dumps(log, indent=1)))
