"""Measuring side by side: turns, honest arms, and the command."""
import json

import numpy as np
import pytest
from conftest import cramnb

from cramnb.bench import CASES, Case, Ratio, Timing, loader, measure, read_bench, side_by_side
from cramnb.recipe import CramError, compose


class Clock:
    "A clock that is wound by the work itself."
    now = 0.0
    def __call__(self): return self.now
    def work(self, seconds):
        def run(): self.now += seconds*self.load()
        return run
    def load(self): return 1.0


def test_arms_take_turns_and_the_first_round_does_not_count():
    calls, seen = [], []
    ratio = side_by_side(lambda: calls.append("a"), lambda: calls.append("b"), rounds=3, report=lambda *r: seen.append(r[0]))
    assert "".join(calls) == "abababab" and seen == [0, 1, 2, 3] and len(ratio.ours) == len(ratio.theirs) == 3
    assert len(side_by_side(lambda: None, lambda: None, rounds=2, warm=0).ours) == 2
    with pytest.raises(CramError, match="rounds=0"): side_by_side(lambda: None, lambda: None, rounds=0)


@pytest.mark.parametrize("seed", range(5))
def test_a_load_that_drifts_does_not_move_the_ratio(seed):
    rng, clock = np.random.default_rng(seed), Clock()
    phase = rng.uniform(0, 6)
    clock.load = lambda: (1.5 + np.sin(clock.now/40 + phase))*rng.lognormal(0, .02)*(1 + 5*(rng.random() < .05))
    ratio = side_by_side(clock.work(1.0), clock.work(3.0), rounds=15, clock=clock)
    assert abs(ratio.median - 3) < .35 and min(ratio.each) <= ratio.median <= max(ratio.each)


def test_rates_are_per_unit_of_each_arm():
    r = measure("x", Case(lambda: Timing(2.0, 10, 100), lambda: Timing(1.0, 30, 10), "the slow way"), rounds=2)
    assert (r["ours"], r["theirs"], r["ratio"], r["low"], r["high"], r["memory_ours"], r["memory_theirs"]) == (50, 10, 5, 5, 5, 10, 30)
    assert str(Ratio([1.0, 1.0, 1.0], [2.0, 4.0, 3.0])) == "3.00 (2.00 to 4.00)"


def test_arms_that_do_different_work_are_refused():
    with pytest.raises(CramError, match="did not do the same work"): measure("x", Case(lambda: 1, lambda: 2, "", amount=1, same=lambda a, b: a == b), rounds=1)


@pytest.mark.parametrize("words, told", [(["maskin"], "'masking'"), (["rounds=0"], "rounds=0"), (["rounds=x"], "rounds=x"), (["data.vocab=3"], "data.vocab_size"), (["data=fils"], "'files'")])
def test_mistakes_are_told_in_one_line(words, told):
    with pytest.raises(CramError, match=told): read_bench(words)


def test_words_become_cases_and_a_recipe():
    names, rounds, recipe = read_bench(["loader", "rounds=2", "train.mlm_probability=0.5"])
    assert names == ["loader"] and rounds == 2 and recipe.train.mlm_probability == .5 and recipe.data.max_megabytes == 4
    assert read_bench([])[0] == list(CASES) and read_bench(["data.max_megabytes=7"])[2].data.max_megabytes == 7


def test_the_loader_reads_every_row_once(tmp_path):
    case = loader(compose([]), tmp_path, n=2048)
    assert case.ours() == 2048*128 and case.theirs() == 128*128


def test_both_pipelines_make_the_same_rows(texts, tmp_path):
    "Same vocabulary apart from its order, same tokens but for the rest that the usual way drops."
    from cramnb.bench import data, with_cramnb, with_datasets
    from cramnb.recipe import Data
    recipe = compose(["data=files", f"data.files={texts}", "data.vocab_size=1000", "data.seq_length=64", "data.trash_cutoff=0.5"])
    case = data(recipe, tmp_path)
    d = Data(**json.loads((tmp_path/"text.json").read_text()))
    ours, theirs = (f(str(tmp_path/"text.jsonl"), d, tmp_path/f.__name__) for f in (with_cramnb, with_datasets))
    assert case.same(ours, theirs) and ours % 64 == theirs % 64 == 0
    vocab = lambda path: set(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"])
    a, b = vocab(next((tmp_path/"with_cramnb").glob("*/tokenizer/tokenizer.json"))), vocab(tmp_path/"with_datasets/tokenizer/tokenizer.json")
    assert len(a & b) > .9*len(a)


def test_the_command_writes_its_figures(tmp_path):
    done = cramnb("bench", "masking", "rounds=1", cwd=tmp_path)
    assert done.returncode == 0 and "masking" in done.stdout and "ratio" in done.stdout, done.stderr
    figures = json.loads((tmp_path/"bench.json").read_text())
    assert {"device", "device_name", "versions", "commit", "date", "cases"} <= set(figures) and figures["cases"][0]["rounds"] == 1
    wrong = cramnb("bench", "nosuch", cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith("cramnb: ") and "Traceback" not in wrong.stderr
    assert "Cases: masking, loader, data" in cramnb("bench", "--help", cwd=tmp_path).stdout


def test_an_arm_that_fails_is_named(tmp_path):
    from cramnb.bench import _arm
    (tmp_path/"text.json").write_text("{}")
    with pytest.raises(CramError, match="the arm 'ours' failed: .*text.jsonl"): _arm("ours", tmp_path/"text.jsonl", tmp_path)
