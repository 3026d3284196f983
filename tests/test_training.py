"""The loop keeps its promises: budget, schedule, accumulation, non-finite updates."""
import itertools
from dataclasses import replace

import pytest
import torch

from cramnb.masking import mask_tokens, microbatch_generator
from cramnb.mlm import build_model
from cramnb.optim import decay_groups
from cramnb.recipe import Arch, CramError, preset
from cramnb.schedule import batch_size_at, lr_factor, microbatches
from cramnb.train import Trainer

X = (0, .05, .10, .25, .50, .60, .75, .90, 1.0)


@pytest.mark.parametrize("name, options, values", [
    ("budget-triangle2", {}, (.25, .30, .35, .50, .75, .85, 1.0, .40, 0)),
    ("budget-triangle1", {}, (.5, .5333, .5667, .6667, .8333, .9, 1.0, .4, 0)),
    ("budget-one-cycle", {}, (0, .1, .2, .5, 1, .8, .5, .2, 0)),
    ("budget-multi-cycle", {}, (0, .8, .4, 0, 0, .4, 0, .4, 0)),
    ("budget-linear", dict(warmup=.06), (0, .8333, .9574, .7979, .5319, .4255, .2660, .1064, 0)),
    ("budget-cosine-decay", dict(warmup=.06), (0, .8333, .9955, .9025, .5500, .3841, .1646, .0277, 0)),
    ("budget-cosine-decay", {}, (1, .9938, .9755, .8536, .5, .3455, .1464, .0245, 0)),
    ("budget-inverse-sqrt", dict(warmup=.06, cooldown=.1), (0, .8333, .7746, .4899, .3464, .3162, .2828, .2582, 0)),
    ("budget-constant", dict(warmup=.06, cooldown=.1), (0, .8333, 1, 1, 1, 1, 1, 1, 0)),
    ("budget-cosine-annealing", {}, (1, .9045, .6545, 1, 1, .6545, 1, .3455, 1)),
    ("budget-inv-cosine", dict(cooldown=.1), (0, .0062, .0245, .1464, .5, .6545, .8536, .9755, 0)),
    ("budget-ramp", dict(cooldown=.1), (0, .05, .1, .25, .5, .6, .75, .9, 0)),
])
def test_schedules_meet_the_original(name, options, values):
    assert [lr_factor(name, x, **options) for x in X] == pytest.approx(values, abs=1e-4)
    assert all(lr_factor(name, x, **options) >= 0 for x in (-1, 1.01, 5))


@pytest.mark.parametrize("m, sizes", [(512, (512, 1024, 1536, 3072, 4608, 5632, 7168, 8192, 8192)), (128, (128, 768, 1408, 2816, 4224, 5504, 6912, 8064, 8192))])
def test_batch_ramp_meets_the_original(m, sizes):
    assert tuple(batch_size_at(x, batch_size=8192, microbatch_size=m, ramp=.6) for x in (0, .05, .1, .2, .3, .4, .5, .59, .6)) == sizes


def test_microbatches_sum_to_the_batch():
    assert sum(microbatches(8192, 96)) == 8192 and len(microbatches(8192, 96)) == 86 and microbatches(64, 32) == [32, 32]


def test_decay_groups_of_crammed_bert():
    with torch.device("meta"): decayed, spared = decay_groups(build_model(Arch(), 32_768), .01)
    assert (len(decayed["params"]), sum(p.numel() for p in decayed["params"])) == (66, 119_537_665)
    assert (len(spared["params"]), sum(p.numel() for p in spared["params"])) == (68, 52_224)


# --- the loop

ARCH = replace(preset("arch", "tiny"), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
DATA = 5 + (torch.arange(256)[:, None] + torch.arange(16)) % 12     # rows that count up: easy to learn


def batches(start, n, number):
    rows = DATA[torch.arange(start, start+n) % len(DATA)]
    return mask_tokens(rows, mlm_probability=.25, mask_token_id=4, vocab_size=100, generator=microbatch_generator(0, number))


def trainer(seed=0, microbatch_size=8, seconds=0.0, should_stop=lambda: False, **changes) -> Trainer:
    torch.manual_seed(seed)
    train = replace(preset("train", "tiny"), **dict(batch_size=16, progress="updates", max_updates=20) | changes)
    ticks = itertools.count()
    return Trainer(build_model(ARCH, 100), train, batches, budget=1.0, microbatch_size=microbatch_size, clock=lambda: next(ticks)*seconds, should_stop=should_stop)


def weights(t) -> torch.Tensor: return torch.cat([p.detach().flatten() for p in t.model.parameters()])


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "lion", "radam", "adam", "adafactor"])
def test_every_optimizer_learns(optimizer):
    rate = dict(sgd=.05, lion=1e-3, adafactor=3e-2).get(optimizer, 4e-3)
    losses = [row["loss"] for row in trainer(optimizer=optimizer, lr=rate).updates()]
    assert losses[-1] < losses[0] - .05


def test_accumulation_equals_the_big_batch():
    fixed = batches(0, 16, 0)
    def gradient(size):
        t = trainer(microbatch_size=size)
        t.batches = lambda start, n, number: type(fixed)(*(x[start:start+n] for x in fixed))
        t.accumulate(16)
        return torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None])
    for size in (8, 5, 1): torch.testing.assert_close(gradient(size), gradient(16), atol=1e-5, rtol=1e-5)


def test_the_clock_stops_the_run_on_the_first_update_past_the_budget():
    t = trainer(progress="time", seconds=700.0, scheduler="budget-triangle2")     # each update takes 700 s of an hour
    rows = list(t.updates())
    assert len(rows) == 6 and rows[-1]["elapsed"] == 4200 and t.progress() >= 1
    peaks = [g["peak_lr"] for g in t.optimizer.param_groups]
    assert rows[-1]["lr"] == pytest.approx(peaks[-1]*lr_factor("budget-triangle2", 3500/3600))


def test_progress_by_tokens():
    t = trainer(progress="tokens", max_tokens=16*16*5)
    assert len(list(t.updates())) == 5 and t.state.tokens == 16*16*5


def test_non_finite_updates_are_left_out_counted_and_end_the_run():
    t = trainer(max_skipped=3)
    def spoilt(start, n, number):
        if t.state.update == 2: t.model.model.layers[0].mlp.input.weight.register_hook(lambda g: g*float("inf"))
        return batches(start, n, number)
    t.batches = spoilt
    seen = []
    with pytest.raises(CramError, match="not finite"):
        for row in t.updates():
            seen.append(row["skipped"])
            if row["update"] == 2: good = weights(t)
    assert seen == [0, 0, 1, 2, 3] and torch.equal(weights(t), good)


def test_a_stop_between_passes_leaves_no_trace():
    asked = iter([False]*5 + [True])
    t = trainer(should_stop=lambda: next(asked))
    from cramnb.train import Stopped
    with pytest.raises(Stopped):
        for row in t.updates(): after = weights(t)
    assert t.state.update == 2 and t.state.sequences == 32 and t.state.microbatch == 4 and torch.equal(weights(t), after)


def test_a_loop_driven_by_hand_is_plain_adamw():
    "Given weights, given batches, a constant rate: what a replay of another engine's trajectory needs."
    train = replace(preset("train", "bert-o4"), scheduler="constant", batch_size=16, batch_size_ramp=0.0, progress="updates", max_updates=6, lr=1e-3, gradient_clipping=.5)
    torch.manual_seed(0)
    model = build_model(ARCH, 100)
    twin = build_model(ARCH, 100)
    twin.load_state_dict(model.state_dict())
    losses = [row["loss"] for row in Trainer(model, train, batches, budget=1, microbatch_size=8).updates()]
    optimizer = torch.optim.AdamW(decay_groups(twin, .01), lr=1e-3, betas=(.9, .98), eps=1e-12)
    twin.eval()
    for n in range(6):
        optimizer.zero_grad()
        total = 0.0
        for half in range(2):
            b = batches(n*16 + half*8, 8, 2*n + half)
            loss = twin(b.input_ids, labels=b.labels).loss/2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), .5)
        optimizer.step()
        assert losses[n] == pytest.approx(total, abs=1e-5)
