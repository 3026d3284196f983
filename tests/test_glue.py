"""What is asked, how it is counted, and a suite made from text."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from cramnb.core import CramError
from cramnb.glue import METRICS, TASKS, GlueMetric, baseline, local_suite, score, task_names


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
        got = GlueMetric(config_name="stsb").compute(predictions=v.tolist(), references=w.tolist())
        assert (
            abs(got["pearson"] - stats.pearsonr(v, w)[0]) < 1e-12
            and abs(got["spearman"] - stats.spearmanr(v, w)[0]) < 1e-12
        )
    assert GlueMetric(config_name="mrpc").compute(predictions=[1, 0], references=[1, 1]) == dict(
        accuracy=0.5, f1=pytest.approx(2 / 3)
    )
