"""What is asked, how it is counted, and a suite made from text."""

from dataclasses import replace

import numpy as np
import pytest

from cramnb.core import CramError
from cramnb.judge.tasks import LOCAL, METRICS, load_tasks, local_suite, score
from cramnb.recipe import preset


@pytest.mark.parametrize("name", METRICS)
def test_answers_that_cannot_be_scored_count_as_nothing(name, recwarn):
    r = np.array([0, 1, 0, 1])
    assert score(name, np.full(4, np.nan), r) == score(name, r, r + np.nan) == 0
    assert name not in ("matthews", "pearson", "spearman") or score(name, np.zeros(4), r) == 0
    assert not recwarn.list
    with pytest.raises(CramError, match="one for each row"):
        score(name, [1], [1, 0])


def test_a_suite_from_text_parts_documents():
    story = "The {0} went to the market in the morning. The {0} came back with bread and a fish."
    texts = [story.format(f"Person{i}") for i in range(60)]
    suite = local_suite(texts, seed=3)
    assert suite == local_suite(texts, seed=3) != local_suite(texts, seed=4)
    people = []
    for rows in suite["acceptability"].values():
        people.append({w for r in rows for w in r["sentence"].split() if "Person" in w})
    assert people[0] and people[0].isdisjoint(people[1])


def test_few_long_documents_make_a_suite_too():
    line = "The {} near the old {} was quiet on day {}."
    books = [
        " ".join(line.format("mill barn".split()[i % 2], i, k) for i in range(170)) for k in "ab"
    ]
    suite = local_suite(books)
    for task in LOCAL:
        assert len(suite[task]["train"]) >= 20 and len(suite[task]["dev"]) >= 5


def test_a_local_task_without_enough_rows_is_left_out():
    lone = [f"Person{i} went to the market in the morning." for i in range(60)]
    suite = local_suite(lone)  # no document has two sentences, so none has an order
    local = preset("eval", "local")
    loaded = load_tasks(local, suite)
    assert [task.name for task, _, _ in loaded] == ["acceptability", "similarity"]
    assert ["held-out prose for order" in remark for *_, remark in loaded] == [True, False]
    assert all("each counts" in remark for *_, remark in loaded)
    with pytest.raises(CramError, match="for order: raise data.heldout"):
        load_tasks(replace(local, tasks="order"), suite)
