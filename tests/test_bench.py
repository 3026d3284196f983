"""Measuring side by side: turns, honest arms, and the command."""

import json

import numpy as np
import datasets
import pytest
import torch
from conftest import cramnb

from cramnb.bench import (
    CASES,
    Case,
    Ratio,
    Timing,
    bench,
    data,
    loader,
    measure,
    read_bench,
    side_by_side,
)
from cramnb.core import CramError
from cramnb.recipe import compose
from cramnb.rivals import run_arm


class Clock:
    "A clock that is wound by the work itself."

    now = 0.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        def run():
            self.now += seconds * self.load()

        return run

    def load(self):
        return 1.0


def test_arms_take_turns_and_the_first_round_does_not_count():
    calls = []
    ratio = side_by_side(lambda: calls.append("a"), lambda: calls.append("b"), rounds=3)
    assert (
        "".join(calls) == "abababab"
        and len(ratio.ours) == len(ratio.theirs) == len(ratio.runs) == 3
    )
    assert len(side_by_side(lambda: None, lambda: None, rounds=2, warm=0).ours) == 2
    with pytest.raises(CramError, match="rounds=0"):
        side_by_side(lambda: None, lambda: None, rounds=0)


@pytest.mark.parametrize("seed", range(5))
def test_a_load_that_drifts_does_not_move_the_ratio(seed):
    rng, clock = np.random.default_rng(seed), Clock()
    phase = rng.uniform(0, 6)
    clock.load = lambda: (
        (1.5 + np.sin(clock.now / 40 + phase))
        * rng.lognormal(0, 0.02)
        * (1 + 5 * (rng.random() < 0.05))
    )
    ratio = side_by_side(clock.work(1.0), clock.work(3.0), rounds=15, clock=clock)
    assert abs(ratio.median - 3) < 0.35 and min(ratio.each) <= ratio.median <= max(ratio.each)


def test_rates_are_per_unit_of_each_arm():
    r = measure(
        "x",
        Case(lambda: Timing(2.0, 10, 100), lambda: Timing(1.0, 30, 10), "the slow way"),
        rounds=2,
    )
    assert (
        r["ours"],
        r["theirs"],
        r["ratio"],
        r["low"],
        r["high"],
        r["memory_ours"],
        r["memory_theirs"],
    ) == (50, 10, 5, 5, 5, 10, 30)
    assert str(Ratio([1.0, 1.0, 1.0], [2.0, 4.0, 3.0])) == "3.00 (2.00 to 4.00)"


def test_arms_that_do_different_work_are_refused():
    with pytest.raises(CramError, match="did not do the same work"):
        measure("x", Case(lambda: 1, lambda: 2, "", amount=1, same=lambda a, b: a == b), rounds=1)


MISTAKES = [
    (["maskin"], "'masking'"),
    (["rounds=0"], "rounds=0"),
    (["rounds=x"], "rounds=x"),
    (["rounds=²"], "rounds=²"),
    (["data.vocab=3"], "data.vocab_size"),
    (["data=fils"], "'files'"),
]


@pytest.mark.parametrize("words, told", MISTAKES)
def test_mistakes_are_told_in_one_line(words, told):
    with pytest.raises(CramError, match=told):
        read_bench(words)


def test_words_become_cases_and_a_recipe():
    names, rounds, recipe = read_bench(["loader", "rounds=2", "train.mlm_probability=0.5"])
    assert (
        names == ["loader"]
        and rounds == 2
        and recipe.train.mlm_probability == 0.5
        and recipe.data.max_megabytes == 4
    )
    assert (
        read_bench([])[0] == list(CASES)
        and read_bench(["data.max_megabytes=7"])[2].data.max_megabytes == 7
    )


def test_the_loader_reads_every_row_once(tmp_path):
    case = loader(compose([]), tmp_path, n=2048)
    assert case.ours() == 2048 * 128 and case.theirs() == 128 * 128


@pytest.mark.parametrize("off", [False, True])
def test_progress_bars_are_as_they_were(off, tmp_path):
    before = datasets.are_progress_bars_disabled()
    turn = {False: datasets.enable_progress_bars, True: datasets.disable_progress_bars}
    turn[off]()
    try:
        loader(compose([]), tmp_path, n=1024).theirs()
        assert datasets.are_progress_bars_disabled() == off
    finally:
        turn[before]()


def arms(text, tmp_path, *words):
    "Both arms of the case `data`, made by their commands, and the case."
    case = data(compose(["data=files", f"data.files={text}", *words]), tmp_path)
    return case, case.ours().result, case.theirs().result


def test_both_pipelines_make_the_same_rows(texts, tmp_path):
    "Nearly as many tokens, and the same ones as frequent."
    words = ("data.vocab_size=1000", "data.seq_length=64", "data.trash_cutoff=0.5")
    case, ours, theirs = arms(texts, tmp_path, *words)
    assert case.same(ours, theirs) and ours["tokens"] % 64 == theirs["tokens"] % 64 == 0
    assert not case.same(ours, theirs | dict(tokens=2 * theirs["tokens"]))
    assert not case.same(
        ours, theirs | dict(share={f"x{k}": v for k, v in theirs["share"].items()})
    )


def test_few_long_documents_work(texts, tmp_path):
    docs = [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]
    long = tmp_path / "long.jsonl"
    each = [" ".join(docs[i::3]) for i in range(3)]
    long.write_text("".join(json.dumps(dict(text=t)) + "\n" for t in each), encoding="utf-8")
    case, ours, theirs = arms(long, tmp_path, "data.vocab_size=1000", "data.seq_length=64")
    assert case.same(ours, theirs)


def test_the_number_of_threads_comes_back(tmp_path):
    before = torch.get_num_threads()
    bench(["masking", "rounds=1"], tmp_path / "bench.json", say=lambda line: None)
    assert torch.get_num_threads() == before


def test_the_command_writes_its_figures(tmp_path):
    done = cramnb("bench", "masking", "rounds=1", cwd=tmp_path)
    assert done.returncode == 0 and "masking" in done.stdout and "ratio" in done.stdout, done.stderr
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert {"device", "device_name", "versions", "commit", "date", "cases"} <= set(
        figures
    ) and figures["cases"][0]["rounds"] == 1
    wrong = cramnb("bench", "nosuch", cwd=tmp_path)
    assert (
        wrong.returncode == 2
        and wrong.stderr.startswith("cramnb: ")
        and "Traceback" not in wrong.stderr
    )
    assert "choose from masking, loader, data" in wrong.stderr


def test_an_arm_that_fails_is_named(tmp_path):
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(CramError, match="the arm 'ours' failed: .*text.jsonl"):
        run_arm("ours", tmp_path / "text.jsonl", tmp_path)
