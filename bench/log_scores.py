"""The scores that the lab shows: `python bench/log_scores.py MODELS TEXTS GLUE WORK COMMIT`.

MODELS has a folder NAME_SEED for each model, as `bench/arms.py` saves them (the names are below),
TEXTS the same for each way to prepare the text, GLUE the six tasks. Each arm chooses pooling and
rate on training rows of MNLI that are held back, then all tasks are scored once for each seed.
What is found in WORK is not computed again. Prints the JSON.
"""

import gzip
import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ARMS = {  # what the lab's page on claims calls a model, and the name of its folders
    "untrained": "untrained",
    "faithful": "faithful",
    "modern": "modern",
    "modern, 20 min": "modern20",
}
TEXTS = {name: name for name in ("base", "deduplication", "filter", "order", "mixture")}
SEEDS = 0, 1, 2
TASKS = "stsb", "sst2", "mrpc", "mnli", "cola", "rte"
TEXT_TASKS = "stsb", "sst2"
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


def evaluate(work: Path, name: str, model: Path, tasks: str, glue: Path, *words: str) -> list:
    "Scores of one evaluation, a dict for each."
    command = f"cramnb eval eval=GLUE_sane name={name} base_dir={work} eval.checkpoint={model}"
    command += f" eval.tasks={tasks} eval.glue_dir={glue} eval.max_train_examples={MOST}"
    found = lambda: sorted((work / name / "eval").glob("*/glue.json"))
    if not found():
        subprocess.run([*command.split(), *words], check=True, stdout=subprocess.DEVNULL)
    return json.loads(found()[-1].read_text())["scores"]


def choose(work: Path, models: Path, name: str, glue: Path) -> tuple[tuple, dict]:
    "The best pooling and rate of a model, and all that was tried: (pooling, rate) -> accuracy."
    tried = {}

    def accuracy(pooling, place):
        if (pooling, RATES[place]) not in tried:
            words = f"eval.classifier_pooling={pooling}", f"eval.lr={RATES[place]}"
            run = f"choose_{name}_{pooling}_{RATES[place]}"
            scores = evaluate(work, run, models / f"{name}_0", "mnli", glue, *words)
            tried[pooling, RATES[place]] = scores[0]["values"][0]
        return tried[pooling, RATES[place]]

    best = max((1, 2), key=lambda place: accuracy("mean", place))
    for pooling in ("mean", "first"):  # the first vector only goes on where it is better
        while accuracy(pooling, best) == max(tried.values()):
            near = [place for place in (best - 1, best, best + 1) if place in range(len(RATES))]
            if (better := max(near, key=lambda place: accuracy(pooling, place))) == best:
                break
            best = better
    return max(tried, key=tried.get), tried


def score_all(work: Path, models: Path, names, tasks, glue: Path, setting: tuple) -> list[dict]:
    "Each model on each task, once for each seed. `names`: what to call it, and its folders' name."
    out = []
    for called, name in names.items():
        for seed in SEEDS:
            words = f"eval.classifier_pooling={setting[0]}", f"eval.lr={setting[1]}", f"seed={seed}"
            model = f"{name}_{seed}"
            for s in evaluate(work, model, models / model, ",".join(tasks), glue, *words):
                one = dict(task=s["name"], metric=s["metric"], baseline=round(s["baseline"], 4))
                out.append(dict(model=called, seed=seed, **one, value=round(s["values"][0], 4)))
    return out


def main(models: Path, texts: Path, glue: Path, work: Path, commit: str) -> dict:
    apart, chosen, scores, settings = hold_back(glue, work / "mnli_held_back"), [], [], {}
    for arm, name in ARMS.items():
        best, tried = choose(work, models, name, apart)
        for (pooling, rate), accuracy in tried.items():
            one = dict(arm=arm, pooling=pooling, lr=float(rate), accuracy=round(accuracy, 4))
            chosen.append(dict(one, chosen=best == (pooling, rate)))
        scores += score_all(work, models, {arm: name}, TASKS, glue, best)
        settings[arm] = best
    return dict(
        date=date.today().isoformat(),
        commit=commit,
        protocol="eval=GLUE_sane",
        train_rows=MOST,
        held_back=HELD_BACK,
        chosen=chosen,
        arms=scores,
        texts=score_all(work, texts, TEXTS, TEXT_TASKS, glue, settings["modern"]),
    )


if __name__ == "__main__":
    *folders, commit = sys.argv[1:]
    text = json.dumps(main(*map(Path, folders), commit), indent=1)
    print(re.sub(r"\{\s+([^][{}]*?)\s+\}", lambda m: f"{{{' '.join(m[1].split())}}}", text))
