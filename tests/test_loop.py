"""The loop keeps its promises: accumulation, budget, precision, compiling, waiting, broken updates, replay, determinism."""
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cramnb.train
from cramnb.masking import Masked
from cramnb.mlm import build_model
from cramnb.optim import decay_groups
from cramnb.recipe import CramError, Impl, preset
from cramnb.schedule import lr_factor
from cramnb.train import Stopped, TrainState, heldout_loss, pick_device, pick_precision, precision_for, probe_microbatch, replay
from toy import ARCH, batches, gradient, model, recipe, trainer, weights

FIXED = batches(0, 16, 0)


def rows_of(batch):
    "A source that serves these rows, whatever the passes."
    return lambda start, n, number: Masked(*(t if t is None else t[start:start+n] for t in batch))


def unequal(positions=True):
    "Rows that are asked different numbers of tokens, and some nothing."
    labels = FIXED.labels.clone()
    labels[3] = -100
    labels[8:12] = torch.where(torch.arange(16) < 6, labels[8:12], -100)
    return Masked(FIXED.input_ids, labels, FIXED.positions if positions else None)


# --- accumulation

@pytest.mark.parametrize("batch", [FIXED, FIXED._replace(positions=None), unequal(), unequal(positions=False)], ids=["sparse", "dense", "unequal", "unequal-dense"])
def test_accumulation_equals_the_big_batch(batch):
    def run(size):
        t = trainer(microbatch_size=size, source=rows_of(batch))
        return t.accumulate(16), gradient(t)
    loss, big = run(16)
    for size in (8, 5, 1):
        small_loss, small = run(size)
        torch.testing.assert_close(small, big, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(small_loss, loss, atol=1e-5, rtol=1e-5)


def test_accumulation_of_transformers_own_bert():
    torch.manual_seed(0)
    bert = build_model(replace(preset("arch", "hf-bert-tiny"), hidden_size=32, intermediate_size=64), 100)
    def run(size):
        t = cramnb.train.Trainer(bert, recipe(optimizer="adamw"), rows_of(unequal()), budget=1, microbatch_size=size)
        t.accumulate(16)
        found = gradient(t).clone()
        t.optimizer.zero_grad()
        return found
    torch.testing.assert_close(run(3), run(16), atol=1e-5, rtol=1e-5)


def test_average_over_passes_is_the_originals():
    t = trainer(microbatch_size=4, source=rows_of(unequal()), average="passes")
    loss, twin = t.accumulate(16), model().eval()
    parts = [twin(b.input_ids, labels=b.labels).loss/4 for b in (rows_of(unequal())(i, 4, 0) for i in range(0, 16, 4))]
    sum(parts).backward()
    torch.testing.assert_close(loss, sum(parts).detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient(t), torch.cat([p.grad.flatten() for p in twin.parameters()]), atol=1e-6, rtol=1e-5)


def test_a_microbatch_that_does_not_divide_the_batch_is_said_once_and_every_row_is_used():
    told, seen = [], []
    def source(start, n, number): seen.append((start, n)); return batches(start, n, number)
    t = trainer(microbatch_size=6, max_updates=2, source=source, options=dict(say=told.append))
    assert [row["batch_size"] for row in t.updates()] == [16, 16]
    assert seen == [(0, 6), (6, 6), (12, 4), (16, 6), (22, 6), (28, 4)]
    assert len(told) == 1 and "batch_size=16" in told[0] and "microbatch 6" in told[0] and "3 passes" in told[0]
    told.clear()
    for row in trainer(microbatch_size=8, max_updates=1, options=dict(say=told.append)).updates(): pass
    assert told == []


def eager(f, **options):
    "Stands in for torch.compile: notes the shapes it meets."
    def compiled(model, batch):
        compiled.shapes.append(tuple(batch.input_ids.shape))
        return f(model, batch)
    compiled.shapes = []
    return compiled


def test_a_compiled_model_meets_one_shape_only(monkeypatch):
    monkeypatch.setattr(torch, "compile", eager)
    plain = trainer(microbatch_size=6, max_updates=3, batch_size_ramp=.5)
    for row in plain.updates(): pass
    t = trainer(microbatch_size=6, max_updates=3, batch_size_ramp=.5, options=dict(compile_torch=True))
    for row in t.updates(): pass
    assert set(t.loss.now.shapes) == {(6, 16)} and t.state == replace(plain.state, elapsed=t.state.elapsed)
    torch.testing.assert_close(weights(t), weights(plain), atol=1e-5, rtol=1e-5)


# --- the budget

def test_the_clock_stops_the_run_on_the_first_update_past_the_budget():
    t = trainer(progress="time", seconds=700.0, scheduler="budget-triangle2")     # each update takes 700 s of an hour
    rows = list(t.updates())
    assert len(rows) == 6 and rows[-1]["elapsed"] == 4200 and t.progress() >= 1
    peaks = [g["peak_lr"] for g in t.optimizer.param_groups]
    assert rows[-1]["lr"] == pytest.approx(peaks[-1]*lr_factor("budget-triangle2", 3500/3600))


def test_progress_by_tokens():
    t = trainer(progress="tokens", max_tokens=16*16*5)
    assert len(list(t.updates())) == 5 and t.state.tokens == 16*16*5


def test_a_budget_that_is_not_given_is_asked_for():
    with pytest.raises(CramError, match="train.max_tokens"): list(trainer(progress="tokens").updates())


def test_there_is_no_cap_on_passes():
    "The original ended after 900,000 passes, whatever the clock said."
    t = trainer(progress="time", seconds=1000.0, options=dict(state=TrainState(update=2_000_000, microbatch=5_000_000)))
    assert len(list(t.updates())) == 4


def test_progress_is_read_once_an_update_and_never_goes_back():
    class Counting(cramnb.train.Trainer):
        read = 0
        def progress(self): Counting.read += 1; return super().progress()
    readings = iter([0, 900, 900, 100, 100, 2000, 2000, 3700])      # a clock that is set back by a quarter of an hour in the third reading
    told = []
    def source(start, n, number, x): told.append(x); return batches(start, n, number)
    t = Counting(model(), recipe(progress="time", max_updates=0, batch_size_ramp=.0), source, budget=1.0, microbatch_size=8, clock=lambda: next(readings))
    rows = list(t.updates())
    shares = [row["progress"] for row in rows]
    assert shares == sorted(shares) and Counting.read == len(rows) + 1
    assert told == [x for x in shares for _ in range(2)], "the source is told the share of the update, the same for all its passes"


def test_a_resumed_run_reads_the_same_share():
    whole = trainer(progress="updates", max_updates=6)
    shares = [row["progress"] for row in whole.updates()]
    again = trainer(progress="updates", max_updates=6, options=dict(state=TrainState(update=3, sequences=48, microbatch=6)))
    assert [row["progress"] for row in again.updates()] == shares[3:]


def slow_compiler(clock):
    def compile(f, **options):
        def compiled(model, batch):
            clock.now += 600*compiled.first
            compiled.first = False
            return f(model, batch)
        compiled.first = True
        return compiled
    return compile


@pytest.mark.parametrize("counts, updates", [(True, 2), (False, 8)])
def test_compiling_counts_or_not_as_the_recipe_says(counts, updates, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(torch, "compile", slow_compiler(clock))
    def source(start, n, number): clock.now += 50; return batches(start, n, number)
    t = cramnb.train.Trainer(model(), recipe(progress="time", count_compile=counts), source, budget=800/3600, microbatch_size=8, clock=lambda: clock.now, compile_torch=True)
    before = weights(t)
    rows = list(t.updates())
    assert len(rows) == updates and t.state.sequences == 16*updates and t.state.elapsed == 100*updates + 600*counts
    assert not torch.equal(before, weights(t))


def test_compiling_ahead_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(torch, "compile", eager)
    plain, ahead = trainer(max_updates=4, dropout=True), trainer(max_updates=4, dropout=True, count_compile=False, options=dict(compile_torch=True))
    for t in (plain, ahead):
        torch.manual_seed(5)
        for row in t.updates(): pass
    assert torch.equal(weights(plain), weights(ahead)) and plain.state == ahead.state


# --- where and how to compute

@pytest.mark.parametrize("device, bf16, want", [("cpu", True, torch.float32), ("cpu", False, torch.float32), ("cuda", True, torch.bfloat16), ("cuda", False, torch.float16)])
def test_precision_table(device, bf16, want, monkeypatch):
    assert precision_for(device, bf16) == want
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    assert pick_precision(Impl(), torch.device(device)) == want
    assert pick_precision(Impl(precision="bfloat16"), torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize("precision, scales", [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)])
def test_only_float16_has_a_scaler(precision, scales):
    assert trainer(options=dict(precision=precision)).scaler.is_enabled() == scales


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_float16_with_a_scaler_learns_what_float32_learns():
    exact, half = trainer(max_updates=8, optimizer="adamw"), trainer(max_updates=8, optimizer="adamw", options=dict(precision=torch.float16))
    a, b = ([row["loss"] for row in t.updates()] for t in (exact, half))
    assert a == pytest.approx(b, abs=.02) and half.state.skipped <= 3 and half.scaler.get_scale() > 1


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(Impl()) == torch.device("cpu")
    with pytest.raises(CramError, match="impl.device=cuda"): pick_device(Impl(device="cuda"))


# --- torch.compile

def broken_at(place):
    "A compiler that fails when it is called, at the first forward, or at the first backward."
    def compile(f, **options):
        if place == "call": raise RuntimeError("no compiler on this machine\nsecond line")
        def compiled(model, batch):
            if place == "forward": raise RuntimeError("no compiler on this machine\nsecond line")
            loss = f(model, batch)
            loss.register_hook(lambda g: (_ for _ in ()).throw(RuntimeError("no compiler on this machine\nsecond line")))
            return loss
        return compiled
    return compile


@pytest.mark.parametrize("place", ["call", "forward", "backward"])
@pytest.mark.parametrize("counts", [True, False])
def test_a_failing_compiler_is_told_in_one_line_and_done_without(place, counts, monkeypatch):
    plain, told = trainer(max_updates=3, count_compile=counts), []
    for row in plain.updates(): pass
    monkeypatch.setattr(torch, "compile", broken_at(place))
    t = trainer(max_updates=3, count_compile=counts, options=dict(compile_torch=True, say=told.append))
    for row in t.updates(): pass
    assert len(told) == 1 and "torch.compile" in told[0] and "no compiler" in told[0] and "\n" not in told[0] and "impl.compile_torch=False" in told[0]
    assert torch.equal(weights(t), weights(plain)) and t.state == plain.state


def test_an_error_of_the_data_is_not_blamed_on_the_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", eager)
    def source(start, n, number): raise CramError("the text is gone")
    with pytest.raises(CramError, match="the text is gone"): next(trainer(source=source, options=dict(compile_torch=True)).updates())


def test_a_late_error_is_not_blamed_on_the_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", eager)
    def source(start, n, number):
        if number == 4: raise RuntimeError("a device has gone")
        return batches(start, n, number)
    t = trainer(source=source, options=dict(compile_torch=True))
    with pytest.raises(RuntimeError, match="a device has gone"): list(t.updates())
    assert t.state.update == 2 and t.loss.compiled


# --- memory

def test_passes_that_do_not_fit_are_halved_and_it_is_said():
    told, tried = [], []
    def source(start, n, number):
        tried.append(n)
        if n > 5: raise torch.OutOfMemoryError("the card is full")
        return batches(start, n, number)
    t = trainer(microbatch_size=16, max_updates=2, source=source, options=dict(say=told.append))
    for row in t.updates(): pass
    assert tried == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4] and t.state.sequences == 32 and t.state.microbatch == 8
    assert len(told) == 2 and "impl.microbatch_size=4" in told[1]


def test_one_row_that_does_not_fit_ends_the_run():
    def source(start, n, number): raise torch.OutOfMemoryError("the card is full")
    with pytest.raises(torch.OutOfMemoryError): next(trainer(source=source).updates())


def card(monkeypatch, seconds, memory):
    "A card that does not exist: takes so long for n rows, and holds so many."
    clock, tried = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(cramnb.train.time, "perf_counter", lambda: clock.now)
    def make_step(n):
        if n > memory: raise torch.OutOfMemoryError("the card is full")
        if n not in tried: tried.append(n)
        clock.now += seconds(n)
    return make_step, tried


@pytest.mark.parametrize("seconds, memory, batch_size, best", [
    (lambda n: .01 + n/50_000, 700, 8192, 512),            # overhead: the largest that fits
    (lambda n: max(.004, n/16_000), 10**6, 8192, 64),      # busy from 64 on: the smallest that is as fast
    (lambda n: .01 + n/50_000, 10**6, 1536, 512),          # 1024 would leave a rest
    (lambda n: .01 + n/50_000, 10**6, 8192, 1024),         # no larger than asked to try
    (lambda n: .01 + n/50_000, 10**6, 10, 10),             # a batch smaller than the first size
    (lambda n: .01, 3, 8192, 16),                          # nothing fits: the run itself will say so
    (lambda n: .01 + n/50_000, 10**6, 1000, 512),          # nothing divides
])
def test_probing_finds_the_fastest_that_fits(seconds, memory, batch_size, best, monkeypatch):
    make_step, tried = card(monkeypatch, seconds, memory)
    assert probe_microbatch(make_step, batch_size, torch.device("cpu"), largest=1024) == best
    assert tried == sorted(tried) and all(n <= min(memory, 1024) for n in tried)


# --- one look at the device per update

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_look_at_the_device_per_update_whatever_the_number_of_passes(optimizer, monkeypatch):
    looks = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _f=original, _n=name, **k: (looks.append(_n), _f(self, *a, **k))[1])
    ready = [batches(16*(i//2), 16, i) for i in range(40)]       # drawing masks is not what is counted
    for microbatch_size in (16, 2):
        t = trainer(microbatch_size=microbatch_size, max_updates=3, optimizer=optimizer, source=lambda start, n, number: Masked(*(x[:n] for x in ready[number])))
        updates = t.updates()
        next(updates)
        looks.clear()
        next(updates)
        assert looks == ["tolist"]


# --- clipping and updates that are not finite

@pytest.mark.parametrize("limit", [.05, .5, 0.0])
def test_clipping_is_torchs(limit):
    t, twin = trainer(gradient_clipping=limit, optimizer="sgd", momentum=0.0, lr=1.0, weight_decay=0.0, scheduler="none"), model().eval()
    row = next(t.updates())
    for half in (batches(0, 8, 0), batches(8, 8, 1)): (twin(half.input_ids, labels=half.labels).loss/2).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), limit or float("inf"))
    with torch.no_grad():
        for p in twin.parameters(): p -= p.grad
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    torch.testing.assert_close(weights(t), weights(twin), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gradient", "loss", "nan"])
def test_non_finite_updates_are_left_out_counted_and_end_the_run(kind):
    t = trainer(max_skipped=3)
    def spoilt(start, n, number):
        if t.state.update == 2:
            if kind == "gradient": t.model.model.layers[0].mlp.input.weight.register_hook(lambda g: g*float("inf"))
            else: t.loss = lambda m, b: cramnb.train.mlm_loss(m, b) * float("inf" if kind == "loss" else "nan")
        return batches(start, n, number)
    t.batches = spoilt
    seen = []
    with pytest.raises(CramError, match="not finite"):
        for row in t.updates():
            seen.append(row["skipped"])
            if row["update"] == 2: good = weights(t)
    assert seen == [0, 0, 1, 2, 3] and torch.equal(weights(t), good)


def test_a_batch_that_asks_nothing_is_left_out():
    nothing = FIXED._replace(labels=torch.full_like(FIXED.labels, -100))
    t = trainer(source=lambda start, n, number: Masked(*(x[:n] for x in (nothing if number in (2, 3) else FIXED))), max_updates=3)
    assert [row["skipped"] for row in t.updates()] == [0, 1, 1]


def test_a_stop_between_passes_leaves_no_trace():
    asked = iter([False]*5 + [True])
    t = trainer(options=dict(should_stop=lambda: next(asked)))
    with pytest.raises(Stopped):
        for row in t.updates(): after = weights(t)
    assert t.state.update == 2 and t.state.sequences == 32 and t.state.microbatch == 4 and torch.equal(weights(t), after)


@pytest.mark.parametrize("name, dropout", [("bert-o4", False), ("tiny", False), ("modern", False), ("bert-base", False), ("bert-izsak", True), ("bert-original", True)])
def test_dropout_is_on_where_the_preset_says_so(name, dropout):
    t = trainer()
    t.train = replace(t.train, dropout=preset("train", name).dropout)
    t.accumulate(8)
    assert t.model.training == dropout


# --- held-out loss

def test_heldout_loss_weighs_tokens_and_leaves_the_model_as_it_was():
    m, whole = model().train(), unequal()
    parts = [rows_of(whole)(i, n, 0) for i, n in ((0, 8), (8, 8))]
    assert heldout_loss(m, parts) == pytest.approx(heldout_loss(m, [whole]), abs=1e-5) == pytest.approx(heldout_loss(m, [whole._replace(positions=None)]), abs=1e-5)
    assert m.training and heldout_loss(m, parts) == heldout_loss(m, parts)


# --- replay

def test_replay_is_plain_torch():
    "Given weights, given passes of unequal numbers of questions, a constant rate: 12 passes, 6 updates, AdamW, clipped."
    passes = [(b.input_ids, b.labels) for b in (batches(8*i, 8, i) for i in range(12))]
    for ids, labels in passes[::3]: labels[:3] = -100
    ours, twin = model(), model().eval()
    rows = replay(ours, passes, recipe("bert-o4", scheduler="constant", lr=1e-3, gradient_clipping=.5), per_update=2)
    optimizer = torch.optim.AdamW(decay_groups(twin, .01), lr=1e-3, betas=(.9, .98), eps=1e-12)
    for n in range(6):
        optimizer.zero_grad()
        parts = [twin(ids, labels=labels).loss/2 for ids, labels in passes[2*n:2*n+2]]
        for part in parts: part.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), .5)
        optimizer.step()
        assert rows[n]["loss"] == pytest.approx(sum(parts).item(), abs=2e-6) and rows[n]["lr"] == 1e-3
    assert len(rows) == 6
    torch.testing.assert_close(weights(ours), weights(twin), atol=1e-5, rtol=0)


def test_replay_takes_any_iterable_and_says_when_there_is_no_update():
    passes = [(b.input_ids, b.labels) for b in (batches(8*i, 8, i) for i in range(2))]
    assert len(replay(model(), iter(passes), recipe("bert-o4", scheduler="constant"))) == 2
    for per_update, given in ((3, passes), (0, passes), (1, [])):
        with pytest.raises(CramError, match="do not make one update"): replay(model(), given, recipe("bert-o4"), per_update=per_update)


def test_the_example_in_the_documentation_runs():
    code = cramnb.train.__doc__.split("constant rate:\n")[1].split("\nDocs:")[0]
    names = {}
    exec("\n".join(line.removeprefix("    ") for line in code.splitlines() if line.startswith("    ")), names)
    assert len(names["losses"]) == 6 and all(loss > 0 for loss in names["losses"])


# --- determinism

@pytest.mark.parametrize("options", [{}, dict(optimizer="adamw", dropout=True)])
def test_same_seed_same_result_to_the_last_bit(options):
    def run(seed):
        t = trainer(seed, max_updates=8, **options)
        return [(row["loss"], row["grad_norm"]) for row in t.updates()], weights(t)
    (first, end), (again, end_again), (other, _) = run(0), run(0), run(1)
    assert first == again and torch.equal(end, end_again) and first != other
