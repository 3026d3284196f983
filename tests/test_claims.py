"""The lab's claims: each has a source, and its numbers are outputs, not prose."""

import json
import re

from conftest import ROOT
from test_repository import cells, source

PAGE = ROOT / "nbs/lab/claims.ipynb"
CLAIMS = json.loads((ROOT / "nbs/data/claims.json").read_text(encoding="utf-8"))
SIDES = ("faithful", "modern")


def test_every_claim_has_a_source_and_says_something():
    assert len({c["key"] for c in CLAIMS["claims"]}) == len(CLAIMS["claims"])
    for c in [*CLAIMS["claims"], *CLAIMS["groups"], CLAIMS["glue_spread"]]:
        assert c["where"].strip() and c["url"].startswith("https://"), c
    for c in CLAIMS["claims"]:
        assert c["claim"].strip() and c["published"].strip(), c["key"]
        assert c["says"] in ("helps", "hurts", "no gain") and c["side"] in SIDES, c["key"]
        assert not re.search(r"recall|not checked", json.dumps(c)), c["key"]


ASKED = (
    "muon, schedule, mask schedule, rotary, qk norm, zero init, geglu, relu2, rmsnorm, batch ramp, "
    "weight decay, sep, cls, document isolation, filter, deduplication, vocabulary, dropout, "
    "pre norm, biases, order"
)


def test_every_ingredient_has_a_row_measured_or_not():
    assert {c["ingredient"] for c in CLAIMS["claims"]} >= set(ASKED.split(", "))
    assert [g["points"] for g in CLAIMS["groups"]] == [2.0, 1.0, 0.5], "table 5"


def test_measured_numbers_stand_in_outputs_and_not_in_prose():
    "A loss or a gain with three digits after the point is computed, never typed."
    for cell in cells(PAGE, "markdown"):
        assert not re.search(r"\d\.\d{3}\b", source(cell)), source(cell)[:80]
