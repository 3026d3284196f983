"""What is asked, how it is counted, and a suite made from text."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from cramnb.core import CramError
from cramnb.judge.tasks import LOCAL, METRICS, TASKS, baseline, load_tasks, local_suite, score
from cramnb.judge.tasks import task_names
from cramnb.recipe import preset


@pytest.mark.parametrize("name", METRICS)
def test_constant_and_broken_predictions_are_no_surprise(name, recwarn):
    r = np.array([0, 1, 0, 1])
    assert score(name, np.full(4, np.nan), r) == 0
    assert name not in ("matthews", "pearson", "spearman") or score(name, np.zeros(4), r) == 0
    assert not recwarn.list


@pytest.mark.parametrize("name", METRICS)
def test_numbers_that_cannot_be_scored(name):
    assert score(name, [0.0, 1.0, 1.0], [0.0, 1.0, float("nan")]) == 0
    for p, r in (([1], [1, 0]), ([], [])):
        with pytest.raises(CramError, match="one for each row"):
            score(name, p, r)


def test_names_of_tasks():
    assert task_names(" cola, rte ,") == ["cola", "rte"]
    with pytest.raises(CramError, match="Did you mean 'rte'"):
        task_names("cola,ret")
    with pytest.raises(CramError, match="eval.tasks= is empty"):
        task_names(" , ")


def test_the_baseline_is_the_best_constant_answer():
    labels = np.array([1] * 37 + [0] * 63)
    assert baseline(TASKS["qqp"], labels) == pytest.approx(2 * 0.37 / 1.37)
    assert baseline(TASKS["rte"], labels) == 0.63 and baseline(TASKS["stsb"], labels) == 0


def test_a_suite_from_text_parts_documents():
    story = (
        "The {0} went to the market in the morning. The {0} came back with some bread and a fish."
    )
    texts = [story.format(f"Person{i}") for i in range(60)]
    suite = local_suite(texts, seed=3)
    assert suite == local_suite(texts, seed=3) != local_suite(texts, seed=4)
    people = {
        split: {
            w for r in suite["acceptability"][split] for w in r["sentence"].split() if "Person" in w
        }
        for split in ("train", "dev")
    }
    assert people["train"] and people["train"].isdisjoint(people["dev"])
    with pytest.raises(CramError, match="raise data.heldout"):
        local_suite(texts[:3])


def test_metrics_equal_sklearn_and_scipy():
    rng = np.random.default_rng(0)
    for _ in range(5):
        p, r, v, w = (
            rng.integers(0, 2, 200),
            rng.integers(0, 2, 200),
            rng.random(200) * 5,
            rng.random(200) * 5,
        )
        known = dict(
            accuracy=sk.accuracy_score(r, p),
            f1=sk.f1_score(r, p),
            macro_f1=sk.f1_score(r, p, average="macro"),
            matthews=sk.matthews_corrcoef(r, p),
        )
        for name, value in known.items():
            assert abs(score(name, p, r) - value) < 1e-12
        for name, f in dict(pearson=stats.pearsonr, spearman=stats.spearmanr).items():
            assert abs(score(name, v, w) - f(v, w)[0]) < 1e-12


def test_few_long_documents_make_a_suite_too():
    words = "market river garden kitchen harbour mountain library station".split()
    line = "The {0} near the old {1} was quiet on day {2}."
    books = [
        " ".join(
            line.format(words[i % 8], words[(i // 8 + k) % 8], "one two".split()[k])
            for i in range(170)
        )
        for k in range(2)
    ]
    assert all(len(b) > 7000 for b in books)
    suite = local_suite(books)
    for task in LOCAL:
        assert len(suite[task]["train"]) >= 20 and len(suite[task]["dev"]) >= 5
    assert local_suite(books) == suite


def test_a_local_task_without_enough_rows_is_left_out():
    lone = [f"Person{i} went to the market in the morning." for i in range(60)]
    suite = local_suite(lone)  # no document has two sentences, so none has an order
    assert sorted(suite) == ["acceptability", "similarity"]
    local = preset("eval", "local")
    loaded = load_tasks(local, suite)
    assert [task.name for task, _, _ in loaded] == ["acceptability", "similarity"]
    assert sum("too little held-out prose for order" in remark for *_, remark in loaded) == 1
    assert all("judged on" in remark and "rows, one row is" in remark for *_, remark in loaded)
    with pytest.raises(CramError, match="for order: raise data.heldout"):
        load_tasks(replace(local, tasks="order"), suite)
