"""The planner: counts against models, memory against a tracker, a law that finds itself again."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cramnb.cli import main
from cramnb.core import CramError
from cramnb.text.masking import mask_tokens
from cramnb.model.mlm import build_model
from cramnb.options import Train
from cramnb.recipe import crammed, preset, tiny
from cramnb.run.plan import (
    Law,
    activation_bytes,
    bert_flops,
    corpus_rows,
    describe,
    disk_needed,
    fit_law,
    fit_memory,
    kept_bytes,
    memory_needed,
    parameters_by_part,
    plan_lines,
    plan_run,
)
from cramnb.train.device import CARDS, card_key, find_card
from cramnb.train.loop import mlm_loss


def really_kept(arch, vocab_size, rows, T, precision):
    "The same with tensors that have a content."
    torch.manual_seed(0)
    model, kept = build_model(arch, vocab_size).train(), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.randint(0, vocab_size, (rows, T))
    batch = mask_tokens(ids, mlm_probability=0.25, mask_token_id=0, vocab_size=vocab_size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            mlm_loss(model, batch)
    for p in model.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    "name, precision",
    [("tiny", torch.float32), ("tiny-crammed", torch.bfloat16), ("hf-bert-tiny", torch.bfloat16)],
)
def test_what_a_pass_keeps_is_predicted_from_smaller_passes(name, precision):
    arch = replace(preset("arch", name), num_hidden_layers=5)
    parts = activation_bytes(arch, 512, 64, 0.25, precision)
    fixed, row = (end + 5 * layer for end, layer in zip(parts["ends"], parts["layer"]))
    real = really_kept(arch, 512, 7, 64, precision)
    assert fixed + 7 * row == pytest.approx(real, rel=0.01)
    assert kept_bytes(arch, 512, 7, 64, 0.25, precision) == pytest.approx(real, rel=0.001)


def test_counting_draws_nothing_and_holds_nothing():
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    wide = replace(preset("arch", "crammed-bert"), hidden_size=65536, num_attention_heads=64)
    assert memory_needed(wide, 2**20, Train()).total(1) > 1e12
    assert torch.equal(torch.rand(1), want)


def test_a_limit_becomes_a_pass_or_one_message():
    gb = lambda n, *words: fit_memory(crammed(*words), n * 1e9)
    fits = [gb(n) for n in (2.5, 3, 4, 8, 24, 48)]
    assert all(fit.needed <= 0.9 * n * 1e9 for fit, n in zip(fits, (2.5, 3, 4, 8, 24, 48)))
    assert [fit.recompute for fit in fits] == [True, True, False, False, False, False]
    assert gb(8).microbatch == 32 and sum(gb(8).memory.parts(32).values()) == gb(8).needed
    assert gb(8, "impl.microbatch_size=16").microbatch == 16
    assert fit_memory(crammed(), 80e9, most=32).microbatch == 32
    with pytest.raises(CramError, match="at most impl.microbatch_size=256"):
        gb(8, "impl.microbatch_size=512")
    with pytest.raises(CramError, match="adamw8bit would fit"):
        gb(2)
    with pytest.raises(CramError, match="give a smaller model"):
        gb(0.5)
    assert gb(2, "train.optimizer=adamw8bit").microbatch >= 1


def test_optimizers_differ_in_their_averages():
    arch = preset("arch", "tiny")
    n = sum(parameters_by_part(arch, 4096).values())
    state = {
        name: memory_needed(arch, 4096, Train(optimizer=name)).fixed["optimizer"]
        for name in ("adamw", "adamw8bit", "sgd", "muon")
    }
    assert state["adamw"] == 8 * n and state["adamw8bit"] == 2 * n and state["sgd"] == 4 * n
    assert 4 * n < state["muon"] < 8 * n


def test_every_card_has_a_peak_and_every_spelling_is_read():
    for name in CARDS:
        assert find_card(name).peak > 0
        for written in (name.lower().replace(" ", ""), "NVIDIA GeForce " + name, name.lower()):
            assert find_card(written).name == name
    assert card_key("rtx_3060-ti") == card_key("3060 Ti") == "RTX 3060 TI"
    assert card_key("RTX 4090 Laptop") is None and card_key("") is None
    with pytest.raises(CramError, match="Did you mean 'rtx3090'"):
        find_card("rtx3091")


def test_a_plan_says_three_lines_and_a_day_is_the_published_day():
    plan = plan_run(crammed(), find_card("RTX A6000"))
    assert plan.tokens == pytest.approx(8.9e9, rel=0.01) and not plan.how
    lines = describe(plan)
    assert len(lines) == 3 and "119.6 million parameters" in lines[0]
    assert "not measured" in lines[1] and "24 hours" in lines[2]
    small = replace(find_card("RTX A6000"), memory=1e9)
    assert (
        "a pass of 1 row needs 2 GB, and the limit is 1 GB"
        in describe(plan_run(crammed(), small))[0]
    )
    half = plan_run(crammed("budget=12"), find_card("RTX A6000"))
    assert half.tokens == pytest.approx(plan.tokens / 2)


def test_a_budget_in_tokens_or_updates_speaks_of_them():
    words = "train.progress=tokens", "train.max_tokens=1000000000"
    plan = plan_run(crammed(*words), find_card("a6000"))
    assert plan.tokens == 1e9 and plan.hours == pytest.approx(1e9 / plan.rate / 3600)
    assert describe(plan)[2].startswith("train.max_tokens=1000000000, about 2.69 hours: 1.0 bil")
    words = "train.progress=updates", "train.max_updates=100", "train.batch_size_ramp=0"
    plan = plan_run(tiny(*words), find_card("a6000"))
    assert plan.tokens == 100 * 32 * 128 and "train.max_updates=100" in describe(plan)[2]
    ramp = "train.batch_size_ramp=0.5", "train.batch_size=512", "impl.microbatch_size=32"
    assert plan_run(tiny(*words, *ramp), find_card("a6000")).tokens < 0.8 * 100 * 512 * 128


def test_epochs_disk_and_share_of_bert_are_in_the_lines(tmp_path):
    assert corpus_rows(crammed()) == 85_000_000, "published rows"
    assert corpus_rows(tiny(f"impl.path={tmp_path}")) == 0
    plan = plan_run(crammed(), find_card("a6000"), rows=85_000_000)
    lines = dict(plan_lines(plan))
    assert lines["epochs"] == "0.82 times 85.0 million rows" and "peak 154.8" in lines["machine"]
    assert bert_flops() == pytest.approx(23.8e18, rel=0.01) and "23.3 % of" in lines["arithmetic"]
    disk = disk_needed(plan)
    assert disk["rows"] == 2 * 128 * 85_000_000 and disk["model"] == 4 * 119_589_889
    assert "no forecast" in lines["held-out loss"]


def test_the_law_guesses_a_run_that_it_has_not_seen():
    rng = np.random.default_rng(0)
    true = Law(2.0, 0.5, 0.3, 1.0, 0.4)
    N, D = (x.ravel() for x in np.meshgrid([1e5, 3e5, 1e6, 3e6], [3e5, 1e6, 3e6, 1e7]))
    law = fit_law(N, D, true(N, D) + rng.normal(0, 0.003, N.shape))
    assert law(6e6, 6e6) == pytest.approx(true(6e6, 6e6), abs=0.03)
    with pytest.raises(CramError, match="five numbers"):
        fit_law(N[:4], D[:4], N[:4])


def test_the_verb_plans_for_a_card_and_says_a_wrong_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "gpu=rtx4090", "budget=24"]) == 0
    told = capsys.readouterr().out
    assert all(w in told for w in ("RTX 4090, 24 GB", "119.6 million", "24 hours", "not measured"))
    assert main(["plan", "gpu=rtx4091"]) == 2 and "rtx4090" in capsys.readouterr().err
    assert main(["plan", "impl.device=cpu"]) == 0 and not list(tmp_path.iterdir())
    told = capsys.readouterr().out
    assert "measured with" in told and "this processor" in told
