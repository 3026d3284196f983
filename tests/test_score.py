"""Many trials: protocols, medians, what is kept and what is run again."""

# ruff: noqa: F811
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exam import EV, checkpoint, rows_of, tokenizer, write  # noqa: F401
from safetensors.torch import load_file, save_file
from scipy import stats

from cramnb.core import CramError
from cramnb import cram
from cramnb.cram import adopt, text_of
from cramnb.run import run as rooms
from cramnb.judge.tasks import hold_out, load_folder, load_tasks
from folders import SUMMARY
from cramnb.judge.finetune import Trial, run_trial
from cramnb.judge.tasks import TASKS
from cramnb.recipe import preset, tiny
from cramnb.run.run import Checkpoint, _check_text, plot_scores
from cramnb.run.runs import make_folder
from cramnb.judge.score import (
    _median_answers,
    _plan_trials,
    evaluate_checkpoint,
    mean_score,
    score_table,
    summarise,
    within_rules,
)
from cramnb.text.store import store_folder


def judge(checkpoint, ev, folder, **more):
    "As the command does: load the exams, then run what is missing."
    return evaluate_checkpoint(checkpoint, load_tasks(ev), ev, folder, **more)


def test_protocols_of_the_reference_and_the_rules():
    sane = preset("eval", "GLUE_sane")
    found = sane.lr, sane.betas, sane.eps, sane.weight_decay, sane.batch_size, sane.epochs
    assert found == (4e-5, [0.9, 0.98], 1e-6, 0, 16, 5)
    assert (sane.warmup, sane.max_seq_length, sane.classifier_pooling) == (0.1, 128, "first")
    assert within_rules(sane) == within_rules(preset("eval", "local")) == "within the rules"
    assert "10 epochs" in within_rules(preset("eval", "GLUE"))
    assert "best of 4 learning rates" in within_rules(preset("eval", "bert-sweep"))


def test_a_sweep_takes_each_tasks_best_and_says_so(checkpoint, tmp_path):
    tasks = [(TASKS["rte"], dict(train=rows_of("rte", 32), dev=rows_of("rte", 16, 1)), "")]
    ev = replace(EV, tasks="rte", sweep_lr=[1e-5, 2e-3], trials=2, epochs=1)
    trials = evaluate_checkpoint(checkpoint, tasks, ev, tmp_path)
    tuned = {"lr 1e-05": [], "lr 0.002": []}
    for trial in trials:
        tuned[trial.setting].append(trial.metrics["accuracy_tune"])
    best = summarise(trials)[0].setting
    assert len(trials) == 4 and np.median(tuned[best]) == max(map(np.median, tuned.values()))
    table = score_table(trials, ev)
    assert "not within the rules" in table and f"training rows: rte {best}" in table


def test_interrupted_trials_are_run_again_and_others_are_not(checkpoint, tmp_path):
    write(tmp_path / "glue/rte", dict(train=rows_of("rte", 32), dev=rows_of("rte", 16, 1)))
    ev = replace(EV, tasks="rte", glue_dir=str(tmp_path / "glue"), trials=3, epochs=1)
    ran, lefts = [], []

    def stop(stage, done, total, **notes):
        ran.append(stage)
        lefts.append(notes['seconds_left'])
        if "trial 2" in stage and ran.count(stage) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(checkpoint, ev, tmp_path / "eval", progress=stop)
    assert all(s > 0 for s in lefts) and len(list((tmp_path / "eval").glob("*.json"))) == 1
    again = []
    trials = judge(
        checkpoint, ev, tmp_path / "eval", progress=lambda stage, *_, **__: again.append(stage)
    )
    assert not any("trial 1" in s for s in again) and [t.seed for t in trials] == [0, 1, 2]
    alone = run_trial(checkpoint, TASKS["rte"], load_folder("rte", tmp_path / "glue"), ev, 1)[0]
    assert trials[1].metrics == alone.metrics


def test_predictions_in_glues_submission_format(checkpoint, tmp_path):
    test = [{k: v for k, v in r.items() if k != "label"} for r in rows_of("mnli", 5)]
    rows = {name: rows_of("mnli", 6) for name in ("train", "dev_matched", "dev_mismatched")}
    write(tmp_path / "mnli", rows | dict(test_matched=test, test_mismatched=test))
    write(tmp_path / "stsb", dict(train=rows_of("stsb", 12), dev=rows_of("stsb", 6)))
    ev = replace(EV, tasks="mnli,stsb", glue_dir=str(tmp_path), epochs=1)
    judge(checkpoint, ev, tmp_path / "eval")
    where = tmp_path / "eval/predictions"
    read = lambda name: [line.split("\t")[1] for line in (where / name).read_text().splitlines()]
    assert sorted(p.name for p in where.iterdir()) == ["MNLI-m.tsv", "MNLI-mm.tsv", "STS-B.dev.tsv"]
    head, *answers = read("MNLI-mm.tsv")
    assert head == "prediction" and len(answers) == 5 and set(answers) <= set(TASKS["mnli"].labels)
    assert all(0 <= float(value) <= 5 for value in read("STS-B.dev.tsv")[1:])


def test_answers_that_are_no_numbers_count_as_nothing_and_are_said(checkpoint):
    wild = replace(EV, epochs=1, batch_size=2)
    wild.lr = 1e30  # which no recipe may say
    rows = dict(train=rows_of("stsb", 16), dev=rows_of("stsb", 8))
    trial, _ = run_trial(checkpoint, TASKS["stsb"], rows, wild, 0)
    assert trial.metrics == dict(pearson=0.0, spearman=0.0) and "not numbers" in trial.remark


def test_picture_of_scores():
    trials = [Trial("rte", i, dict(accuracy=0.5 + i / 50), 0.53, 0.0) for i in range(3)]
    trials.append(Trial("cola", 0, dict(matthews=-0.05), 0.0, 0.0))
    figure = plot_scores(summarise(trials))
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert sum("published" in w for w in words) == 4 and figure.axes[0].get_ylim()[0] <= -5


def test_a_training_set_that_is_cut_is_said_and_each_half_of_mnli_has_its_baseline(
    checkpoint, tmp_path
):
    rows = lambda n, kind: [r | dict(label=kind) for r in rows_of("mnli", n)]
    halves = dict(dev_matched=rows(3, 0) + rows(1, 1), dev_mismatched=rows(1, 0) + rows(1, 1))
    write(tmp_path / "mnli", dict(train=rows_of("mnli", 60)) | halves)
    ev = replace(EV, tasks="mnli", glue_dir=str(tmp_path), max_train_examples=20, epochs=1)
    trials = judge(checkpoint, ev, tmp_path / "out")
    assert "trained on the first 20 of 60 rows" in trials[0].remark
    assert "60 of 392,702 training rows" in score_table(trials, EV)
    assert [s.baseline for s in summarise(trials)] == [0.75, 0.5]


CARD = dict(sst2=0.92, stsb=0.874, rte=0.585, qnli=0.902, qqp=0.875, mrpc=0.889, cola=0.533)


def test_the_mean_is_over_nine_numbers_as_published():
    card = {name: {TASKS[name].target: value} for name, value in (CARD | dict(wnli=0.563)).items()}
    card["mnli"] = dict(accuracy=0.841, accuracy_mm=0.846)
    scores = summarise([Trial(n, 0, m, 0.0, 0.0) for n, m in card.items()])
    mean, harmonic = mean_score(scores)
    assert f"{100 * mean:.1f}" == "80.7" and sum(s.in_mean for s in scores) == 9
    assert harmonic == pytest.approx(stats.hmean([s.median for s in scores if s.in_mean]))


def stages(checkpoint, ev, folder, **more):
    "The trials that are run, as progress names them."
    ran = []
    judge(checkpoint, ev, folder, progress=lambda stage, *_, **__: ran.append(stage), **more)
    return list(dict.fromkeys(ran))


def test_trials_of_other_weights_rows_or_protocols_are_never_reused(checkpoint, tmp_path):
    write(tmp_path / "glue/rte", dict(train=rows_of("rte", 16), dev=rows_of("rte", 8, 1)))
    ev = replace(EV, tasks="rte", glue_dir=str(tmp_path / "glue"), epochs=1)
    own, out = shutil.copytree(checkpoint, tmp_path / "own"), tmp_path / "out"
    assert len(stages(own, ev, out)) == 1 and stages(own, ev, out) == []
    moved = shutil.copytree(tmp_path / "glue", tmp_path / "moved")
    assert stages(own, replace(ev, glue_dir=str(moved)), out) == [], "a path is no content"
    assert len(stages(own, replace(ev, trials=2), out)) == 1, "the first trial is still good"
    assert len(stages(own, replace(ev, lr=1e-3), out)) == 1
    assert len(stages(own, ev, out, precision=torch.bfloat16)) == 1
    assert len(stages(own, replace(ev, checkpoint="untrained"), out)) == 1
    assert len(stages(own, ev, out)) == 1
    write(tmp_path / "glue/rte", dict(dev=rows_of("rte", 8, 2)))
    assert len(stages(own, ev, out)) == 1, "other rows, other answers"
    weights = load_file(own / "model.safetensors")
    name = next(n for n in weights if "mlp" in n)
    save_file(weights | {name: weights[name] + 1}, own / "model.safetensors", {"format": "pt"})
    assert len(stages(own, ev, out)) == 1 and stages(own, ev, out) == []
    named = dict(weights="of a hub name that is a folder here")
    assert len(stages(str(own), ev, tmp_path / "named", **named)) == 1
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    assert len(stages(str(own), ev, tmp_path / "named", **named)) == 1


def damaged(path):
    "A trial file in several broken forms, and one that is whole but not what was measured."
    good = json.loads(path.read_text())
    yield from (b"", b"[]", b"\xff\xfe", b"[" * 100_000)
    yield json.dumps(good | dict(metrics=[])).encode()
    yield json.dumps({k: v for k, v in good.items() if k != "predictions"}).encode()
    yield json.dumps(good | dict(metrics=dict(accuracy=1.0))).encode()


def test_a_damaged_trial_is_run_again(checkpoint, tmp_path):
    write(tmp_path / "rte", dict(train=rows_of("rte", 4), dev=rows_of("rte", 4, 1)))
    ev = replace(EV, tasks="rte", glue_dir=str(tmp_path), epochs=1)
    want = judge(checkpoint, ev, tmp_path / "out")
    path = tmp_path / "out/rte.seed0.json"
    for content in damaged(path):
        path.write_bytes(content)
        assert judge(checkpoint, ev, tmp_path / "out") == want


def test_a_sweep_never_looks_at_the_rows_that_judge(checkpoint, tmp_path):
    rows = dict(train=rows_of("rte", 40), dev=rows_of("rte", 16, 1))
    ev = replace(EV, tasks="rte", sweep_lr=[1e-5, 2e-3], epochs=1)
    found = {}
    for flip in (0, 1):
        dev = [r | dict(label=abs(r["label"] - flip)) for r in rows["dev"]]
        tasks = [(TASKS["rte"], rows | dict(dev=dev), "")]
        trials = evaluate_checkpoint(checkpoint, tasks, ev, tmp_path / str(flip))
        found[flip] = summarise(trials)[0]
    assert found[0].setting == found[1].setting
    assert found[0].median == pytest.approx(1 - found[1].median)
    kept = hold_out(rows)
    assert len(kept["tune"]) == 4 and len(kept["train"]) == 36
    assert sorted(r["idx"] for r in kept["train"] + kept["tune"]) == list(range(40))


def test_a_leaking_warm_up_counts_the_rows_that_are_used(checkpoint, tmp_path):
    "Both counts of updates, the first task's and this task's own, are those of the rows in use."
    tasks = [
        (TASKS[name], dict(train=rows_of(name, n), dev=rows_of(name, 4, 1)), "")
        for name, n in (("cola", 96), ("rte", 48))
    ]
    plan = partial(_plan_trials, tasks=tasks, folder=tmp_path, seed=0, identity=())
    leaky = replace(EV, warmup_leak=True, batch_size=16, epochs=5)
    assert [p.protocol.warmup for p in plan(leaky)] == pytest.approx([0.1, 0.2])
    few = replace(leaky, max_train_examples=32)
    assert [p.protocol.warmup for p in plan(few)] == pytest.approx([0.1, 0.1])
    between = replace(leaky, max_train_examples=64)
    assert [p.protocol.warmup for p in plan(between)] == pytest.approx([2 / 20, 2 / 15])


@pytest.mark.parametrize("value", ["latest", "best", "first"])
def test_local_tasks_are_made_of_the_text_that_the_weights_did_not_read(
    value, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first = make_folder(tiny("name=first", "data.seq_length=64"))
    (first / "pretrain.json").write_text(json.dumps(SUMMARY | dict(corpus="the text of first")))
    asked = tiny(f"name={'second' if value == 'first' else 'first'}")
    checkpoint = Checkpoint(first / "model", Path("runs/first"), own=value == "latest")
    recipe = adopt(asked, checkpoint.run)
    assert recipe.data.seq_length == 64 and recipe.name == asked.name
    corpus = SimpleNamespace(fingerprint="another text", folder=Path("corpora/another"))
    with pytest.raises(CramError, match="not the corpus that runs/first was trained on"):
        _check_text(checkpoint, corpus, recipe.eval)
    corpus.fingerprint = "the text of first"
    _check_text(checkpoint, corpus, recipe.eval)


def test_a_corpus_is_opened_only_where_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = []
    for room in (cram, rooms):
        monkeypatch.setattr(
            room, "open_corpus", lambda recipe, *_: opened.append(recipe.eval.tasks)
        )
    glue, local = tiny("name=one", "eval=GLUE_sane"), tiny("name=one")
    text_of(glue, None)
    assert not opened and not list(tmp_path.iterdir())
    text_of(local, None)
    folder = store_folder(glue.data, Path(glue.impl.path).expanduser())
    folder.mkdir(parents=True)
    (folder / "card.json").write_text("{}")
    text_of(glue, None)
    assert opened == [local.eval.tasks, glue.eval.tasks]


def test_a_mean_where_nothing_counts_and_one_with_a_zero():
    def scores(**values):
        return summarise([Trial(n, 0, {TASKS[n].target: v}, 0.0, 0.0) for n, v in values.items()])

    assert mean_score([]) == mean_score(scores(wnli=0.9)) == (0.0, 0.0)
    assert mean_score(scores(rte=0.5, cola=0.0)) == (0.25, 0.0)
    assert mean_score(scores(rte=0.5, cola=-0.1))[1] == 0.0


def test_the_answers_that_are_written_are_those_of_the_median_trial():
    values = (0.9, 0.5, 0.7)
    found = [(Trial("rte", i, dict(accuracy=v), 0.5, 0.0), v) for i, v in enumerate(values)]
    assert _median_answers(TASKS["rte"], found) == 0.7
    assert _median_answers(TASKS["rte"], found[:2]) == 0.5, "the lower of two in the middle"
