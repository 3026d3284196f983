"""The planner: counts against models, memory against a tracker, a law that finds itself again."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, cramnb

from cramnb.core import CramError
from cramnb.mlm import build_model, count_parameters, flops_per_token
from cramnb.options import Train
from cramnb.recipe import PRESETS, crammed, preset, tiny
from cramnb.scaling import (
    Card,
    Law,
    describe,
    find_card,
    fit_law,
    kept_bytes,
    activation_bytes,
    memory_needed,
    parameters_by_part,
    plan_run,
)
from cramnb.cards import MEMORY


@pytest.mark.parametrize("name", ["tiny", "tiny-crammed", "hf-bert-tiny", "crammed-bert"])
def test_parts_add_up_to_the_model(name):
    arch = preset("arch", name)
    with torch.device("meta"):
        whole = count_parameters(build_model(arch, 4096))
    assert sum(parameters_by_part(arch, 4096).values()) == whole


@pytest.mark.parametrize("name", [n for n in PRESETS["arch"] if "tiny" in n])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_what_a_pass_keeps_is_predicted_from_smaller_passes(name, precision):
    torch.manual_seed(0)
    arch = replace(preset("arch", name), num_hidden_layers=5)
    fixed, row = activation_bytes(arch, 512, 64, 0.25, precision)
    real = kept_bytes(build_model(arch, 512).train(), 7, 64, 0.25, precision)
    assert fixed + 7 * row == pytest.approx(real, rel=0.01)


def test_a_pass_that_fits_fits_and_twice_as_many_rows_do_not():
    recipe = crammed()
    need = memory_needed(recipe.arch, 32_768, recipe.train)
    for memory in (3e9, 8e9, 24e9):
        rows = need.largest(memory)
        assert need.total(rows) <= 0.9 * memory < need.total(2 * rows)
    assert need.largest(1e9) == 0, "not even the weights"
    assert need.largest(1e15) == 1024


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
    for name in MEMORY:
        assert find_card(name).peak > 0
        assert find_card(name.lower().replace(" ", "")).name == name
        assert find_card("NVIDIA GeForce " + name).name == name
    with pytest.raises(CramError, match="Did you mean 'rtx3090'"):
        find_card("rtx3091")


def test_a_plan_says_three_lines_and_a_day_is_the_published_day():
    plan = plan_run(crammed(), find_card("RTX A6000"))
    assert plan.tokens == pytest.approx(8.9e9, rel=0.01) and not plan.measured
    lines = describe(plan)
    assert len(lines) == 3 and "119.6 million parameters" in lines[0]
    assert "not measured" in lines[1] and "24 hours" in lines[2]
    small = replace(find_card("RTX A6000"), memory=1e9)
    assert "not even one row fits" in describe(plan_run(crammed(), small))[0]
    half = plan_run(crammed("budget=12"), find_card("RTX A6000"))
    assert half.tokens == pytest.approx(plan.tokens / 2)


def test_epochs_are_tokens_over_the_corpus():
    plan = plan_run(tiny(), Card("made up", 0.0, 8e9, ""), rate=1280.0, rows=1000)
    assert plan.epochs == pytest.approx(1280 * 180 / (1000 * 128))
    assert plan.flops == flops_per_token(tiny().arch, tiny().data.vocab_size, 128, 0.25)


@pytest.mark.parametrize("seed", range(3))
def test_the_law_guesses_a_run_that_it_has_not_seen(seed):
    rng = np.random.default_rng(seed)
    true = Law(2.0, 0.5, 0.3, 1.0, 0.4)
    N, D = (x.ravel() for x in np.meshgrid([1e5, 3e5, 1e6, 3e6], [3e5, 1e6, 3e6, 1e7]))
    law = fit_law(N, D, true(N, D) + rng.normal(0, 0.003, N.shape))
    assert law(6e6, 6e6) == pytest.approx(true(6e6, 6e6), abs=0.03)
    with pytest.raises(CramError, match="five numbers"):
        fit_law(N[:4], D[:4], N[:4])


def test_committed_runs_are_whole():
    log = json.loads((ROOT / "nbs/data/scaling_runs.json").read_text(encoding="utf-8"))
    fitted = [r for r in log["runs"] if not r["held_back"] and r["seed"] == 0]
    assert len({r["layers"] for r in fitted}) >= 5 and any(r["held_back"] for r in log["runs"])
    assert max(r["layers"] for r in fitted) < max(r["layers"] for r in log["runs"])


def test_the_verb_plans_for_a_card_and_says_a_wrong_name(tmp_path):
    done = cramnb("plan", "gpu=rtx4090", "budget=24", cwd=tmp_path)
    assert done.returncode == 0 and "RTX 4090" in done.stdout, done.stderr
    assert "119.6 million parameters" in done.stdout and "24 hours" in done.stdout
    wrong = cramnb("plan", "gpu=rtx4091", cwd=tmp_path)
    assert wrong.returncode == 2 and "rtx4090" in wrong.stderr and "Traceback" not in wrong.stderr
    here = cramnb("plan", cwd=tmp_path)
    assert here.returncode == 0 and "measured" in here.stdout and not list(tmp_path.iterdir())
