"""Measuring side by side: turns, honest arms, and the command."""

import json
import os

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
from cramnb.rivals import beside_transformers, run_arm
from cramnb.run.plan import random_batch
from cramnb.steps import Side, Way, best_way, check_equal, original_code, own_words
from cramnb.steps import step_recipe
from cramnb.throughput import matmul_rate


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
    (["stepp"], "'step'"),
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
        read_bench([])[0] == [*CASES, "step"]
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


# --- a step of training

TOY = "arch=tiny-crammed data.vocab_size=300 data.seq_length=32 impl.microbatch_size=4".split()
NONE = dict(compiled="none")


def test_words_of_the_bench_are_told_apart():
    own, rest = own_words(["step", "bench.original=here", "rounds=2", "bench.lend=True"])
    assert own == dict(original="here", lend="True") and rest == ["step", "rounds=2"]
    with pytest.raises(CramError, match="bench.origin is not an option of the bench"):
        own_words(["bench.origin=here"])
    for wrong in ("bench.compiled=sometimes", "bench.lend=perhaps"):
        with pytest.raises(CramError, match=f"{wrong} is not possible"):
            own_words([wrong])


def test_a_step_has_small_sizes_unless_others_are_named():
    assert step_recipe(["step"], small=True).arch.hidden_size == 256
    full = step_recipe(["step", "arch=crammed-bert"], small=True)
    assert full.arch.hidden_size == 768 and full.train.optimizer == "adamw"
    assert step_recipe(["gpu"], small=False).arch.hidden_size == 768


@pytest.mark.parametrize("heads, layers", [(2, 1), (4, 3)])
def test_our_bert_and_theirs_are_one_function(heads, layers):
    words = [*TOY, f"arch.num_attention_heads={heads}", f"arch.num_hidden_layers={layers}"]
    recipe = compose(words)
    torch.manual_seed(layers)
    ours, theirs, translate = beside_transformers(recipe.arch, 300, compiled=False)
    with torch.no_grad():
        for p in theirs.model.parameters():
            p += 0.05 * torch.randn_like(p)
    batch = random_batch(4, 300, 0.25, 32)
    assert check_equal(ours, theirs, translate, batch) > 1 - 1e-6
    longer = lambda tensors, values: {
        name: tensor if values else 1.01 * tensor
        for name, tensor in translate(tensors, values).items()
    }
    with pytest.raises(CramError, match="0.9901 times as long"):
        check_equal(ours, theirs, longer, batch)
    with torch.no_grad():
        theirs.model.bert.encoder.layer[0].output.dense.weight *= 1.5
    broken = lambda tensors, values: {} if values else translate(tensors, values)
    with pytest.raises(CramError, match="not the same work"):
        check_equal(ours, theirs, broken, batch)


@pytest.mark.parametrize("lazy_first", [True, False])
def test_a_weight_without_a_gradient_is_refused_on_either_side(lazy_first):
    model = lambda: torch.nn.ParameterDict(dict(u=torch.ones(1), v=torch.ones(1)))
    lazy = Side(model(), lambda m, batch: (m["u"].detach() * m["v"] - 3).square().sum(), [])
    honest = Side(model(), lambda m, batch: (m["u"] * m["v"] - 3).square().sum(), [])
    sides = (lazy, honest) if lazy_first else (honest, lazy)
    with pytest.raises(CramError, match="gradients of u have a cosine of 0"):
        check_equal(*sides, lambda tensors, values: tensors, None)


def test_a_step_reports_ways_and_shares(tmp_path):
    out = bench(
        ["step", "rounds=1", "bench.compiled=none", *TOY], tmp_path / "b.json", lambda line: None
    )
    (record,) = out["cases"]
    assert record["cosine"] > 1 - 1e-6 and record["amount"] == 4 * 32
    assert 0 < record["share_theirs"] and record["way_ours"] and record["way_theirs"]
    assert json.loads((tmp_path / "b.json").read_text())["cases"] == [record]


def test_a_way_with_a_wrong_loss_is_not_taken():
    recipe = compose(TOY)
    clock = Clock()

    def loss(model, batch):
        fast = model.config._attn_implementation == "eager"
        clock.now += 1.0 if fast else 5.0
        out = model(batch.input_ids, labels=batch.labels, masked_positions=batch.positions).loss
        return out + 1.0 if fast and wrong else out

    for wrong, expected in ((False, "eager"), (True, "sdpa")):
        model = beside_transformers(recipe.arch, 300, compiled=False)[0].model
        side = Side(model, loss, [Way(attention="sdpa"), Way(attention="eager")])
        before = {n: p.clone() for n, p in model.named_parameters()}
        way = best_way(side, random_batch(2, 300, 0.25, 32), recipe.train, clock)
        assert way.attention == expected
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, before[name], atol=1e-6, rtol=0)


def test_the_original_is_read_from_a_folder_and_leaves_nothing(tmp_path):
    import sys

    with pytest.raises(CramError, match="bench.original=FOLDER"):
        bench(["original", *TOY], tmp_path / "b.json", lambda line: None)
    with pytest.raises(CramError, match="holds no cramming/architectures/crammed_bert.py"):
        with original_code(tmp_path):
            pass
    place = tmp_path / "cramming/architectures"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("from ..utils import is_main_process\n")
    (place / "crammed_bert.py").write_text(
        "from einops.layers.torch import Rearrange\nfrom omegaconf import OmegaConf\n"
        "keys = OmegaConf.create(dict(a=dict(b=3)))\n"
    )
    with original_code(tmp_path) as code:
        assert code.keys.a.b == 3
    assert not [name for name in sys.modules if name.startswith("cramming")]


@pytest.mark.skipif("CRAMNB_ORIGINAL" not in os.environ, reason="no copy of the original's code")
def test_the_original_and_ours_are_one_function(tmp_path):
    words = ["original", "rounds=1", "bench.compiled=none", *TOY]
    given = f"bench.original={os.environ['CRAMNB_ORIGINAL']}"
    (record,) = bench([*words, given], tmp_path / "b.json", lambda line: None)["cases"]
    assert record["cosine"] > 1 - 1e-6


# --- the whole loop


def test_the_whole_loop_at_toy_size(tmp_path):
    words = ["gpu", "rounds=2", "arch=tiny", "train=tiny", "train.batch_size=32", "impl.device=cpu"]
    said = []
    out = bench(
        [*words, "data.vocab_size=300", "data.seq_length=16"], tmp_path / "b.json", said.append
    )
    gpu = out["gpu"]
    assert out["cases"] == [] and gpu["updates"] == 2 and "compiled" not in gpu
    assert 0 < gpu["eager"]["loader_share"] < 1 and gpu["eager"]["memory"] is None
    assert [rows for rows, *_ in gpu["memory_by_rows"]] == [16, 32]
    assert any("of the matrix rate" in line for line in said)


def test_the_clock_of_the_matrix_rate_is_given():
    times = iter([0.0, 0.0, 2.0, 3.0])
    rate = matmul_rate(torch.device("cpu"), torch.float32, 10, 1.0, lambda: next(times))
    assert rate == 2 * 10**3 / 2.0
