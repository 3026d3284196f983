"""The home run: a table with sources, and a log that says whence it is."""

import json

from cramnb.book.show import read_data
from cramnb.judge.tasks import PUBLISHED_TASKS
from cramnb.recipe import preset


def test_the_table_of_compute_has_sources_and_its_averages_are_possible():
    stored = read_data("compute.json")
    assert stored["glue"]["tasks"] == list(PUBLISHED_TASKS)
    for model in (stored["glue"]["home"], stored["glue"]["bert"]):
        apart = abs(sum(model["scores"]) / 9 - model["average"])
        assert len(model["scores"]) == 9 and apart <= 0.1 and model["source"]
    for t in stored["trainings"]:
        assert all(t[key] for key in ("source", "glue_source", "peak_source", "hours", "glue"))
        assert "recalled" not in json.dumps(t) and preset("arch", t["arch"])
        assert t["source"].startswith("planned") == (t["tokens"] is None)
    home = stored["home"]
    assert stored["trainings"][1]["tokens"] == [[home["chunks"] * home["tokens_a_chunk"], 126]]
    bert, asked = stored["bert"], stored["trainings"][0]["tokens"]
    whole = bert["updates"] * bert["rows"]
    assert asked == [[round(share * whole * length), length] for share, length in bert["split"]]


def test_the_comparison_says_where_and_when_it_was_made():
    log = read_data("consumer.json")
    assert all(log[key] for key in ("device", "date", "commit", "torch", "transformers", "text"))
    arms = {r["arm"] for r in log["runs"]}
    assert arms == {"trainer_chunks", "trainer_rows", "ours_same", "ours_own"}
    assert all(r["spent"] < 1.05 * log["seconds"] for r in log["runs"])
