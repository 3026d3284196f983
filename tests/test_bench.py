"""The jobs of `bench/`: arms that do the same work, and numbers that come out."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from bench.cases import Case, bench, data, loader, measure, side_by_side
from bench.rivals import beside_transformers
from bench.steps import Side, check_equal
from cramnb.core import CramError
from cramnb.run.plan import random_batch
from cramnb.recipe import compose

TOY = "arch=tiny-crammed data.vocab_size=300 data.seq_length=32 impl.microbatch_size=4".split()


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


def test_arms_that_do_different_work_are_refused():
    with pytest.raises(CramError, match="did not do the same work"):
        measure("x", Case(lambda: 1, lambda: 2, "", amount=1, same=lambda a, b: a == b), rounds=1)


def test_the_loader_reads_every_row_once(tmp_path):
    case = loader(compose([]), tmp_path, n=2048)
    assert case.ours() == 2048 * 128 and case.theirs() == 128 * 128


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


@pytest.mark.skipif("CRAMNB_ORIGINAL" not in os.environ, reason="no copy of the original's code")
def test_the_original_and_ours_are_one_function(tmp_path):
    words = ["original", "rounds=1", "bench.compiled=none", *TOY]
    given = f"bench.original={os.environ['CRAMNB_ORIGINAL']}"
    (record,) = bench([*words, given], tmp_path / "b.json", lambda line: None)["cases"]
    assert record["cosine"] > 1 - 1e-6


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


def test_the_command_writes_its_figures_and_tells_a_mistake_in_one_line(tmp_path):
    def call(*words):
        command = [sys.executable, "-m", "bench", *words]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True)

    out = tmp_path / "bench.json"
    done = call("masking", "rounds=1", f"out={out}")
    assert done.returncode == 0 and "masking" in done.stdout, done.stderr
    assert json.loads(out.read_text())["cases"][0]["rounds"] == 1
    wrong = call("maskin")
    assert wrong.returncode and len(wrong.stderr.splitlines()) == 1 and "'masking'" in wrong.stderr
