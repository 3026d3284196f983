"""Chapter 20: the rule of its verdicts, its readers where data is missing, sources, numbers."""

import ast
import json
import math
import re
import statistics

import pytest
from conftest import ROOT
from test_repository import cells, source

PAGE = ROOT / "nbs/20_claims.ipynb"
DATA = ROOT / "nbs/data"
CLAIMS = json.loads((DATA / "claims.json").read_text(encoding="utf-8"))
NOT = "not measured"
SIDES = ("faithful", "modern")


def stored(name):
    path = DATA / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@pytest.fixture(scope="module")
def page():
    "The functions of the page, without its runs: imports and definitions only."
    space = dict(NOT=NOT)
    for cell in cells(PAGE, "code"):
        for node in ast.parse(source(cell)).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
                exec(compile(ast.Module([node], []), "page", "exec"), space)
    return space


def log(side="faithful", before=(4.0, 4.02), after=(3.5, 3.52), change="x=on", ingredient="x"):
    speed = dict(tokens_per_second=[100, 100])
    row = dict(side=side, base=side, ingredient=ingredient, change=change)
    base = {side: dict(heldout=list(before)) | speed}
    rows = [row | dict(heldout=list(after)) | speed]
    return dict(base=base, rows=rows, unigram=7.0)


CLAIM = dict(ingredient="x", on=["x=on"], off=["x=off"], side="faithful", says="helps")


# --- the rule


def test_twice_the_error_decides_and_a_tie_does_not_count(page):
    judge = page["judge"]
    assert [judge(g, 1.0) for g in (-2.1, -2.0, 0.0, 2.0, 2.1)] == [
        "hurts",
        "no gain",
        "no gain",
        "no gain",
        "helps",
    ]
    assert judge(5.0, math.inf) == "no gain"
    assert judge(0.0, 0.0) == "no gain" and judge(1e-9, 0.0) == "helps"


def test_noise_is_pooled_over_settings_and_ignores_single_runs(page):
    noise = page["noise_of"]
    assert noise([[1.0, 3.0], [10.0, 12.0], [7.0]]) == pytest.approx(math.sqrt(2))
    assert noise([]) == noise([[1.0]]) == math.inf
    assert noise([[1.0, 2.0, 3.0], [5.0, 5.0]]) == pytest.approx(math.sqrt(2 / 3))


def test_error_falls_with_the_number_of_runs_of_both_arms(page):
    gain, error = page["gain_of"]([3.0, 5.0], [3.0] * 8, 0.1)
    assert gain == 1.0 and error == pytest.approx(0.1 * math.sqrt(1 / 2 + 1 / 8))


@pytest.mark.parametrize(
    "says, after, expected",
    [
        ("helps", (3.5, 3.5), "agrees"),
        ("helps", (4.0, 4.02), "not seen"),
        ("helps", (4.5, 4.5), "differs"),
        ("hurts", (4.5, 4.5), "agrees"),
        ("hurts", (4.0, 4.02), "not seen"),
        ("no gain", (4.0, 4.02), "agrees"),
        ("no gain", (4.5, 4.5), "agrees"),
        ("no gain", (3.5, 3.5), "differs"),
    ],
)
def test_verdict(page, says, after, expected):
    claim = CLAIM | dict(says=says)
    assert page["verdict"](claim, log(after=after)) == expected
    off = log(before=after, after=(4.0, 4.02), change="x=off")
    assert page["verdict"](claim, off) == expected, "taking it away must mean the same"


def test_a_claim_is_judged_on_its_own_side_first(page):
    both = log("faithful", after=(3.5, 3.5))
    other = log("modern", after=(4.5, 4.5))
    both["base"] |= other["base"]
    both["rows"] += other["rows"]
    assert page["verdict"](CLAIM, both) == "agrees"
    assert page["verdict"](CLAIM | dict(side="modern"), both) == "differs"
    assert page["verdict"](CLAIM | dict(side="modern"), log()) == "agrees", "the other side, then"


def test_a_side_that_stays_on_the_plateau_gives_way_to_the_other(page):
    both = log("faithful", before=(6.4, 6.42), after=(6.3, 6.3))
    assert page["effect"](CLAIM, both, "faithful").plateau
    assert "plateau" in str(page["effect"](CLAIM, both, "faithful"))
    assert page["verdict"](CLAIM, both) == NOT, "and there is no other side"
    other = log("modern", after=(4.5, 4.5))
    both["base"] |= other["base"]
    both["rows"] += other["rows"]
    assert page["verdict"](CLAIM, both) == "differs"


@pytest.mark.parametrize("before, after", [((6.4, 6.4), (5.9, 6.4)), ((5.9, 6.4), (6.4, 6.4))])
def test_one_run_below_the_plateau_is_enough(page, before, after):
    found = page["effect"](CLAIM, log(before=before, after=after), "faithful")
    assert not found.plateau


def test_losses_of_other_tokens_are_not_compared(page):
    claim = CLAIM | dict(on=["data.vocab_size="], off=[])
    small = log(change="data.vocab_size=4096")
    with pytest.raises(KeyError):
        page["verdict"](claim, small)
    small["rows"][0]["per_character"], small["base"]["faithful"]["per_character"] = [1.2], [1.0]
    gain = page["effect"](claim, small, "faithful").gain
    assert gain == pytest.approx(4.01 - 1.2 * 4.0), "four characters a token of the base"


def test_a_word_is_met_exactly_or_up_to_its_equals_sign(page):
    claim = dict(on=["a.rate_end="], off=["a.rate_end=0"])
    told = [page["switches_on"](c, claim) for c in ("a.rate_end=0.15", "a.rate_end=0", "a.rate=1")]
    assert told == [True, False, None]


def test_the_longest_runs_within_a_time(page):
    runs = [dict(arm="a", minutes=m, heldout=float(m)) for m in (0.5, 0.5, 2.5, 20)]
    for minutes, longest in ((0.5, 0.5), (2, 0.5), (5, 2.5), (20, 20)):
        found = [m for m in (0.5, 0.5, 2.5, 20) if m == longest]
        assert page["longest_within"](dict(runs=runs), "a", minutes) == (longest, found)


def test_a_change_that_switches_off_is_turned_round(page):
    off = log(change="x=off", after=(4.4, 4.42))
    off["rows"][0]["tokens_per_second"] = [50, 200, 50]
    found = page["effect"](CLAIM, off, "faithful")
    assert found.gain == pytest.approx(0.4) and found.speed == 2.0 and found.base == "faithful"
    assert str(found).startswith("+0.400 ± ") and str(found).endswith("(helps)")


def test_a_sweep_is_inside_only_if_both_neighbours_of_each_rate_were_tried(page):
    inside, best = page["is_inside"], page["best_of"]
    assert inside({(1,): 3, (2,): 1, (4,): 2}) and not inside({(1,): 1, (2,): 2})
    cross = {(2, 2): 1, (1, 2): 2, (4, 2): 2, (2, 1): 2, (2, 4): 2}
    assert best(cross) == (2, 2) and inside(cross)
    del cross[2, 4]
    assert not inside(cross), "no larger second rate"
    assert not inside(cross | {(4, 4): 2}), "a corner is not a neighbour"


def test_time_to_a_loss(page):
    to, curve = page["seconds_to"], [(0, 0, 4.0), (10, 1, 3.0), (20, 2, 3.5), (30, 3, 2.0)]
    assert to(curve, 3.5) == 5.0 and to(curve, 3.0) == 10.0 and to(curve, 5.0) == 0
    assert to(curve, 2.75) == 25.0 and to(curve, 1.9) == math.inf
    assert page["loss_at"](curve, 25) == 2.75


def test_what_was_not_measured_has_no_verdict(page):
    assert page["verdict"](CLAIM, dict(base={}, rows=[])) == NOT
    assert page["verdict"](CLAIM | dict(ingredient=""), log()) == NOT
    one = log(before=(4.0,), after=(3.5,))
    assert page["verdict"](CLAIM, one) == NOT, "no noise, no verdict"


def test_a_score_is_better_only_beyond_the_wider_range(page):
    row = dict(old=[50.0, 52.0, 51.0], new=[53.0, 53.5, 53.2])
    assert page["against"](row, "new", "old") == "better"
    assert page["against"](row, "old", "new") == "worse"
    assert page["against"](row | dict(new=[50, 54, 53]), "new", "old") == "not seen"
    tie = dict(old=[51.62, 47.65, 49.82], new=[51.26, 53.79, 54.15])  # 3.97 beside a range of 3.97
    assert page["against"](tie, "new", "old") == "not seen"
    assert page["against"](tie, "old", "new") == "not seen"


# --- sources


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


def test_what_was_measured_is_found_by_a_claim(page):
    "A row is read by a claim that knows on from off, or it stands in the table as a change."
    known, ablations = {}, stored("ablations.json")
    for c in CLAIMS["claims"]:
        known.setdefault(c["ingredient"], []).append(c)
    listed = page["ingredients"](CLAIMS, ablations)
    for row in ablations.get("rows", []):
        there = known.get(row["ingredient"])
        if there:
            told = [page["switches_on"](row["change"], c) for c in there]
            assert any(on is not None for on in told), f"on or off? {row['change']}"
        same = [both for name, both in listed.items() if name.split(" (")[0] == row["ingredient"]]
        assert any(both[row["side"]] for both in same), f"{row['ingredient']} is lost"


# --- numbers


def outputs():
    "All text that the page shows."
    text = []
    for cell in cells(PAGE, "code"):
        for out in cell["outputs"]:
            data = out.get("data", {})
            text += ["".join(data.get("text/markdown") or data.get("text/plain") or "")]
    return "\n".join(text)


def test_the_page_shows_what_the_data_says(page):
    shown, arms = outputs(), stored("arms.json")
    for arm in [a["arm"] for a in arms["arms"]]:
        for minutes in (20, 8):
            if losses := page["final_losses"](arms, arm, minutes):
                assert f"| {statistics.fmean(losses):.3f} |" in shown, (arm, minutes)
    ablations = stored("ablations.json")
    for claim in CLAIMS["claims"]:
        line = next(x for x in shown.splitlines() if x.startswith(f"| {claim['claim']} |"))
        assert line.endswith(f"| {page['verdict'](claim, ablations)} |"), claim["key"]
        assert claim["where"] in line


def test_what_the_text_says_of_the_retuned_arm(page):
    log, ends = stored("arms.json"), page["final_losses"]
    names = [a["arm"] for a in log["arms"]]
    of = {(arm, m): ends(log, arm, m) for arm in names for m in (8, 20)}
    noise = page["noise_of"](of.values())
    lead, error = page["gain_of"](of["positions35", 20], of["retuned", 20], noise)
    assert 0.15 < lead < min(0.30, 0.15 + 2 * error), "reached by less than the number after ±"
    half, error = page["gain_of"](of["positions35", 20], ends(log, "retuned", 10), noise)
    assert -2 * error < half < 0, "a little above, by less than the number after ±"
    won = page["gain_of"](of["modern", 20], of["retuned", 20], noise)
    taken = page["gain_of"](of["positions", 20], of["positions35", 20], noise)
    assert page["judge"](*won) == page["judge"](*taken) == "no gain"
    assert 0.4 < taken[0] / won[0] < 0.6, "about half"
    assert page["gain_of"](of["positions", 20], of["retuned", 20], noise)[0] > 0.20
    assert all(new < old for new, old in zip(of["retuned", 20], of["modern", 20]))
    own = page["noise_of"]([of["retuned", 20], of["modern", 20]])
    assert page["judge"](won[0], own * math.sqrt(2 / 3)) == "helps", "with their own noise"
    read = lambda arm: statistics.fmean(r["tokens"] for r in page["runs_of"](log, arm, 20))
    for arm, older in (("retuned", "modern"), ("positions35", "positions")):
        assert 0.06 < 1 - read(arm) / read(older) < 0.08, "about 7 % fewer tokens"
    spreads = {arm: max(of[arm, 20]) - min(of[arm, 20]) for arm in names if of[arm, 20]}
    assert {arm for arm, s in spreads.items() if s > 0.05} == {"positions", "positions35"}


def test_what_the_text_says_of_unseen_rows(page):
    log = stored("arms.json")
    runs = [run for run in log["runs"] if run["minutes"] == 20]
    assert all(run["unseen"] > run["heldout"] for run in runs), "all are worse there"
    mean = lambda arm, key: statistics.fmean(run[key] for run in runs if run["arm"] == arm)
    unseen, judged = ({r["arm"]: mean(r["arm"], k) for r in runs} for k in ("unseen", "heldout"))
    assert sorted(unseen, key=unseen.get) == sorted(judged, key=judged.get), "the same order"
    assert unseen["positions"] - unseen["modern"] < 0.15
    assert unseen["positions35"] - unseen["retuned"] > 0.15


def test_what_the_text_says_of_the_search(page):
    log = stored("arms.json")
    names = [a["arm"] for a in log["arms"]]
    noise = page["noise_of"](page["final_losses"](log, arm, m) for arm in names for m in (8, 20))
    late = {(r["arm"], r["change"]): r["heldout"] for r in log["check"] if r["minutes"] == 8}
    usual, masks = late["modern", ""], "train.mlm_probability=0.35"
    gained = [usual - loss for (arm, change), loss in late.items() if arm == "modern" and change]
    assert max(gained) < 2 * noise * math.sqrt(2), "luck explains it"
    assert sum(g > 0 for g in gained) == 2
    before = page["final_losses"](log, "positions", 8)
    masked = late["positions", f"train.lr=8e-3 {masks}"]
    assert masked < min(before)
    assert before[0] - masked > usual - late["modern", masks] > 0


def test_what_the_text_says_of_changes_that_no_claim_asked_for(page):
    ablations = stored("ablations.json")
    base, noise = ablations["base"]["modern"], page["base_noise"](ablations, "modern")
    rows = {row["ingredient"]: row for row in ablations["rows"] if row["base"] == "modern"}
    for row in rows.values():
        assert len(row["heldout"]) == 3, "every change has three seeds"
    for name in ("learning rate", "heads", "rotary base"):
        row = rows[name]
        alone = page["gain_of"](base["heldout"], row["heldout"][:1], noise)
        assert alone[0] >= 0.07 and page["judge"](*alone) == "helps", name
        assert page["gain_of"](base["heldout"], row["heldout"], noise)[0] < alone[0] / 2, name
        assert row["tokens_per_second"][0] > base["tokens_per_second"][0], "a quiet hour"
    assert page["judge"](*page["effect_of_change"](ablations, rows["depth"])[:2]) == "hurts"
    assert page["judge"](*page["effect_of_change"](ablations, rows["mask rate"])[:2]) == "hurts"


def test_what_the_text_says_of_the_faithful_side(page):
    ablations = stored("ablations.json")
    effects = page["ingredients"](CLAIMS, ablations)
    rows = [row for row in ablations["rows"] if row["side"] == "faithful"]
    assert {tuple(row["seeds"]) for row in rows} == {(0, 1, 2)}, "three seeds for every setting"
    assert {base["minutes"] for base in ablations["base"].values()} == {1.5}, "ninety seconds"
    left = {name for name, both in effects.items() if both["faithful"]}
    left = {name for name in left if not effects[name]["faithful"].plateau}
    assert (left, len(rows)) == ({"rotary", "neighbours"}, 19)
    known = [e for both in effects.values() for e in both.values() if e]
    largest = sorted(known, key=lambda e: e.gain, reverse=True)[:2]
    assert {e.base for e in largest} == {"faithful"}, "the two largest gains of the table"
    for name in left:
        assert 0 < effects[name]["modern"].gain < effects[name]["faithful"].gain / 3, "a fraction"


def test_ninety_seconds_read_two_million_tokens():
    base = stored("ablations.json")["base"]["text"]
    read = statistics.fmean(base["tokens_per_second"]) * 60 * base["minutes"]
    assert 1.9e6 < read < 2.1e6 and "9.9 million tokens" in base["corpus"]


def test_what_the_text_says_of_muon(page):
    ablations = stored("ablations.json")
    usual = ablations["base"]["modern"]["heldout"][0]
    gains = {run["change"]: run["heldout"] - usual for run in ablations["sweep"]}
    assert len(gains) == 7 and gains["train.optimizer=adamw"] > 1, "the rate of the preset"
    clipped = [gain for change, gain in gains.items() if "clipping" in change]
    alone = [gain for change, gain in gains.items() if "clipping" not in change]
    assert len(clipped) == 3 and min(clipped) == min(gains.values())
    assert 0.30 < min(alone) < 0.37, "a third of a nat"
    assert 0.4 < min(clipped) / min(alone) < 0.6, "half of that"
    row = next(r for r in ablations["rows"] if r["ingredient"] == "muon" and r["side"] == "modern")
    assert gains[row["change"]] == min(clipped), "the row is the best of the seven"


def test_what_the_text_says_of_the_exam_after_twenty_minutes(page):
    tasks = page["by_task"](stored("scores.json")["arms"])
    told = {
        (task, other): page["against"](row, "modern, 20 min", other)
        for task, row in tasks.items()
        for other in ("untrained", "modern")
    }
    better = {pair for pair, verdict in told.items() if verdict == "better"}
    assert better == {("sst2", "modern")} | {
        (task, "untrained") for task in ("stsb", "sst2", "mnli", "mnli_mm")
    }
    assert "worse" not in told.values()
    middle = lambda row, model: statistics.median(row[model])
    rises = {t: middle(row, "modern, 20 min") - middle(row, "modern") for t, row in tasks.items()}
    assert {task for task, rise in rises.items() if rise <= 0} == {"cola"}
    assert 0.5 < statistics.fmean(rises.values()) < 1.5, "about a point"


def test_six_green_dots_only_saw_nothing(page):
    ablations, green, silent = stored("ablations.json"), 0, 0
    for claim in CLAIMS["claims"]:
        if page["verdict"](claim, ablations) == "agrees":
            green += 1
            effect = page["judged_effect"](claim, ablations)
            silent += page["judge"](effect.gain, effect.error) == "no gain"
    assert (green, silent) == (15, 6)


def test_measured_numbers_stand_in_outputs_and_not_in_prose():
    "A loss or a gain with three digits after the point is computed, never typed."
    for cell in cells(PAGE, "markdown"):
        assert not re.search(r"\d\.\d{3}\b", source(cell)), source(cell)[:80]
