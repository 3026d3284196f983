"""What a real card adds to the loop: device, precision, compiler, memory; and nothing of the
process stays changed."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cramnb.core import CramError, LostRank, Stopped
from cramnb.device import (
    MaybeCompiled,
    Way,
    auto_microbatch,
    card_options,
    choose,
    compile_ahead,
    fastest_way,
    measure_ways,
    pick_device,
    pick_precision,
    probe_microbatch,
    process_settings,
    recovery,
    uneven_batch,
)
from cramnb.distributed import World
from cramnb.evaluate import _precision
from cramnb.launch import settle
from cramnb.options import Impl
from cramnb.recipe import tiny
from cramnb.run import Run, pretrain
from cramnb.train import mlm_loss
from toy import batches, model, recipe, trainer, weights

CPU = torch.device("cpu")


def compiled_trainer(compiler, say=None, **options):
    "A trainer as on a card, with a compiler of our own."
    loss = MaybeCompiled(say or (lambda text: None), compiler=compiler)
    return trainer(**options, options=dict(loss=loss, recover=recovery(loss.say, loss)))


def run(t):
    compile_ahead(t)
    return list(t.updates())


# --- where and how to compute


def test_a_cpu_computes_in_float32_unless_told():
    assert pick_precision(Impl(), CPU) == torch.float32
    assert pick_precision(Impl(precision="bfloat16"), CPU) == torch.bfloat16


@pytest.mark.parametrize("bf16, want", [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_computes_in_the_half_precision_it_has(bf16, want, monkeypatch):
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: bf16 or including_emulation,
    )
    assert pick_precision(Impl(), torch.device("cuda")) == want


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(Impl()) == CPU
    with pytest.raises(CramError, match="impl.device=cuda"):
        pick_device(Impl(device="cuda"))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_settings_of_the_process_are_put_back(workspace, fails, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)

    def settings():
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        )

    before = settings()
    try:
        with process_settings(
            Impl(threads=before[0] + 1, deterministic=True), torch.device("cuda")
        ):
            assert settings() == (before[0] + 1, True, False, "high", workspace or ":4096:8")
            if fails:
                raise Stopped
    except Stopped:
        assert fails
    assert settings() == before


# --- the way to compute on a CPU: measured, chosen, kept


def ways(*figures, loss=9.01):
    "float32 at 100 sequences a second, and two ways in 16 bits: (speed, loss) of each."
    names = (("bfloat16", "sdpa"), ("bfloat16", "eager"))
    return [
        Way("float32", "sdpa", 100, loss),
        *(Way(*name, *both) for name, both in zip(names, figures)),
    ]


@pytest.mark.parametrize(
    "figures, chosen",
    [
        (((105, 9.01), (160, 9.012)), 2),  # 16 bits in hardware
        (((22, 9.01), (25, 9.01)), 0),  # imitated: four to five times slower
        (((109, 9.01), (109.9, 9.01)), 0),  # less than a tenth: may be noise
        (((90, 9.01), (111, 9.01)), 2),
        (((150, 9.01), (150, 9.01)), 1),  # of equal ones, the earlier
        (((100, 9.01), (100, 9.01)), 0),
        (((130, 9.01), (170, 9.04)), 1),  # the fastest is lossy: the next one
        (((130, 8.98), (170, 9.04)), 0),  # too low a loss is as wrong as too high a one
        (((130, float("nan")), (170, float("inf"))), 0),
        (((130, 9.01),), 1),  # the recipe names the attention: two ways only
        ((), 0),
    ],
)
def test_the_fastest_sound_way_is_chosen_if_it_is_worth_it(figures, chosen):
    rows = ways(*figures)
    assert choose(rows) is rows[chosen]


def test_where_float32_itself_fails_it_stays():
    rows = ways((200, 9.01), (300, float("nan")), loss=float("nan"))
    assert choose(rows) is rows[0]


def test_measuring_takes_turns_and_leaves_no_trace(monkeypatch):
    m, asked, turns = model(), [], []
    before, random = weights(m), torch.get_rng_state()
    real = m.set_attn_implementation
    monkeypatch.setattr(m, "set_attn_implementation", lambda name: (turns.append(name), real(name)))

    def source(start, n, number, x):
        asked.append((start, n, number, x))
        return batches(start, n, number)

    names = [("float32", "sdpa"), ("bfloat16", "sdpa"), ("bfloat16", "eager")]
    found = measure_ways(m, source, 8, names)
    assert [w[:2] for w in found] == names and all(w.speed > 0 for w in found)
    assert set(asked) == {(0, 1, 0, 0.0), (0, 8, 0, 0.0)}
    assert turns[2:-1] == ["sdpa", "sdpa", "eager"] * ((len(turns) - 3) // 3) and len(turns) > 9
    assert torch.equal(before, weights(m)) and torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in m.parameters())
    assert m.config._attn_implementation == "sdpa"
    losses = [w.loss for w in found]
    assert losses == pytest.approx([losses[0]] * 3, abs=0.02) and losses[0] != losses[2]


@pytest.mark.parametrize(
    "attention, kernels", [("auto", "sdpa sdpa eager"), ("eager", "eager eager")]
)
def test_an_attention_that_is_named_stays_and_one_line_says_what_was_chosen(
    attention, kernels, monkeypatch
):
    told, tried = [], []

    def measured(model, source, rows, names):
        tried.extend(names)
        return [Way(*name, 100 + 60 * (name == names[-1]), 9.0) for name in names]

    monkeypatch.setattr("cramnb.device.measure_ways", measured)
    best = fastest_way(attention, model(), batches, 8, told.append)
    assert " ".join(kernel for _, kernel in tried) == kernels
    assert best[:2] == ("bfloat16", "eager") and told == [
        "16-bit products with eager attention: 1.6 times as fast as float32 here; "
        "impl.precision=float32 overrides."
    ]


def forbidden(*_):
    raise AssertionError("this run is not to measure")


@pytest.mark.parametrize(
    "words",
    [
        "impl.deterministic=True",
        "budget=119s",
        "train.progress=updates train.max_updates=9",
        "impl.precision=float32",
        "impl.precision=bfloat16",
        "dryrun=True",
    ],
)
def test_a_run_that_is_short_exact_or_told_what_to_do_does_not_measure(words, monkeypatch):
    monkeypatch.setattr("cramnb.launch.fastest_way", forbidden)
    r = tiny("impl.device=cpu", *words.split())
    impl, took = settle(r, model(), batches, World(), print)
    assert took == 0 and impl == replace(r.impl, microbatch_size="32")


@pytest.mark.parametrize("counts", [True, False])
def test_two_minutes_are_measured_inside_the_budget_as_compiling_is(counts, monkeypatch):
    monkeypatch.setattr("cramnb.launch.fastest_way", lambda *_: Way("bfloat16", "eager", 160, 9.0))
    m, r = model(), tiny("impl.device=cpu", "budget=2m", f"train.count_compile={counts}")
    impl, took = settle(r, m, batches, World(), print)
    assert (impl.precision, impl.attn_implementation) == ("bfloat16", "eager")
    assert m.config._attn_implementation == "eager" and (took > 0) == counts


def test_a_resumed_run_takes_the_saved_way_and_does_not_measure(tmp_path, texts, monkeypatch):
    words = "arch.hidden_size=32 arch.num_hidden_layers=1 arch.num_attention_heads=2"
    words += " arch.intermediate_size=64 data=files data.vocab_size=600 data.heldout=0.3"
    words += " train.batch_size=16 train.eval_rows=32 budget=2m impl.device=cpu name=way"
    places = [f"data.files={texts}", f"impl.path={tmp_path / 'corpora'}", f"base_dir={tmp_path}"]
    this, met = Run(tiny(*words.split(), *places), say=lambda text: None), []
    this.open_corpus()

    def one_update(run, t, held, keep):
        how = t.precision, t.model.config._attn_implementation, t.microbatch_size
        met.append((*how, t.state.elapsed))
        next(t.updates())
        raise Stopped

    def measured(*_):
        return Way("bfloat16", "eager", 160, 9.0)

    monkeypatch.setattr("cramnb.run._train_loop", one_update)
    monkeypatch.setattr("cramnb.launch.auto_microbatch", lambda *_: 8)
    monkeypatch.setattr("cramnb.launch.fastest_way", measured)
    with pytest.raises(Stopped):
        pretrain(this)
    monkeypatch.setattr("cramnb.launch.auto_microbatch", forbidden)
    monkeypatch.setattr("cramnb.launch.fastest_way", forbidden)
    with pytest.raises(Stopped):
        pretrain(this)
    assert met[0][:3] == met[1][:3] == (torch.bfloat16, "eager", 8)
    assert 0 < met[0][3] < met[1][3]
    named = replace(this.recipe.impl, precision="float32", attn_implementation="sdpa")
    with pytest.raises(Stopped):
        pretrain(replace(this, recipe=replace(this.recipe, impl=named)))
    assert met[2][:3] == (torch.float32, "sdpa", 8)


@pytest.mark.parametrize(
    "said, known, want",
    [
        ("auto", dict(on="cpu", precision="bfloat16"), torch.bfloat16),
        ("auto", dict(on="cuda", precision="bfloat16"), torch.float32),
        ("auto", dict(), torch.float32),  # a run from before this was noted
        ("float32", dict(on="cpu", precision="bfloat16"), torch.float32),
    ],
)
def test_fine_tuning_takes_the_format_of_the_run(said, known, want, tmp_path):
    (tmp_path / "pretrain.json").write_text(json.dumps(known))
    run = SimpleNamespace(recipe=tiny(f"impl.precision={said}"))
    assert _precision(run, SimpleNamespace(run=tmp_path), CPU) == want
    for nowhere in (None, Path(tmp_path / "other")):
        unknown = _precision(run, SimpleNamespace(run=nowhere), CPU)
        assert unknown == pick_precision(run.recipe.impl, CPU)


# --- torch.compile


def eager(f, **options):
    "Stands in for torch.compile: notes the shapes it meets."

    def compiled(model, batch):
        compiled.shapes.append(tuple(batch.input_ids.shape))
        return f(model, batch)

    compiled.shapes = []
    return compiled


def test_a_compiled_model_meets_one_shape_only():
    plain = trainer(microbatch_size=6, max_updates=3, batch_size_ramp=0.5)
    t = compiled_trainer(eager, microbatch_size=6, max_updates=3, batch_size_ramp=0.5)
    run(plain), run(t)
    assert set(t.loss.now.shapes) == {(6, 16)} and t.state == replace(
        plain.state, elapsed=t.state.elapsed
    )
    torch.testing.assert_close(weights(t), weights(plain), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts, updates", [(True, 2), (False, 8)])
def test_compiling_counts_or_not_as_the_recipe_says(counts, updates):
    clock, first = SimpleNamespace(now=0.0), [600]

    def compiler(f, **options):
        def slow_at_first(model, batch):
            clock.now += first.pop() if first else 0
            return f(model, batch)

        return slow_at_first

    def source(start, n, number, x):
        clock.now += 50
        return batches(start, n, number)

    t = compiled_trainer(compiler, source=source, progress="time", count_compile=counts)
    t.clock, t.budget, before = lambda: clock.now, 800 / 3600, weights(t)
    assert (
        len(run(t)) == updates
        and t.state.sequences == 16 * updates
        and t.state.elapsed == 100 * updates + 600 * counts
    )
    assert not torch.equal(before, weights(t))


def test_compiling_ahead_leaves_no_trace():
    plain = trainer(max_updates=4, dropout=True)
    ahead = compiled_trainer(eager, max_updates=4, dropout=True, count_compile=False)
    for t in (plain, ahead):
        torch.manual_seed(5)
        run(t)
    assert torch.equal(weights(plain), weights(ahead)) and plain.state == ahead.state


def broken_at(place):
    "A compiler that fails when it is called, at the first forward, or at the first backward."

    def fail(*_):
        raise RuntimeError("no compiler on this machine\nsecond line")

    def compiler(f, **options):
        if place == "call":
            fail()

        def compiled(model, batch):
            if place == "forward":
                fail()
            loss = f(model, batch)
            loss.register_hook(fail)
            return loss

        return compiled

    return compiler


@pytest.mark.parametrize("place", ["call", "forward", "backward"])
@pytest.mark.parametrize("counts", [True, False])
def test_a_failing_compiler_is_told_in_one_line_and_done_without(place, counts):
    told, plain = [], trainer(max_updates=3, count_compile=counts)
    t = compiled_trainer(broken_at(place), told.append, max_updates=3, count_compile=counts)
    run(plain), run(t)
    assert (
        len(told) == 1
        and "torch.compile" in told[0]
        and "no compiler" in told[0]
        and "\n" not in told[0]
        and "impl.compile_torch=False" in told[0]
    )
    assert torch.equal(weights(t), weights(plain)) and t.state == plain.state


@pytest.mark.parametrize(
    "error",
    [CramError("the text is gone"), LostRank("a process has died"), KeyboardInterrupt()],
    ids=repr,
)
def test_what_is_not_the_compilers_fault_is_not_tried_again(error):
    def source(start, n, number, x):
        raise error

    told = []
    with pytest.raises(type(error)):
        run(compiled_trainer(eager, told.append, source=source))
    assert told == []


def test_a_late_error_is_not_blamed_on_the_compiler():
    def source(start, n, number, x):
        if number == 4:
            raise RuntimeError("a device has gone")
        return batches(start, n, number)

    t = compiled_trainer(eager, source=source)
    with pytest.raises(RuntimeError, match="a device has gone"):
        run(t)
    assert t.state.update == 2 and t.loss.compiled


def test_on_a_cpu_the_plain_loss_is_used():
    assert card_options(Impl(), CPU, print)["loss"] is mlm_loss
    assert (
        card_options(Impl(compile_torch=True), torch.device("cuda"), print)["loss"].plain
        is mlm_loss
    )


# --- memory


def small_card(holds, tried):
    def source(start, n, number, x):
        tried.append(n)
        if n > holds:
            raise torch.OutOfMemoryError("the card is full")
        return batches(start, n, number)

    return source


def test_passes_that_do_not_fit_are_halved_and_it_is_said():
    told, tried = [], []
    t = trainer(
        microbatch_size=16,
        max_updates=2,
        source=small_card(5, tried),
        options=dict(recover=recovery(told.append)),
    )
    run(t)
    assert (
        tried == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4]
        and t.state.sequences == 32
        and t.state.microbatch == 8
    )
    assert len(told) == 2 and "impl.microbatch_size=4" in told[1]


@pytest.mark.parametrize("halve", [True, False])
def test_one_row_that_does_not_fit_ends_the_run_and_several_processes_do_not_shrink_one_by_one(
    halve,
):
    tried = []
    with pytest.raises(torch.OutOfMemoryError):
        run(
            trainer(
                source=small_card(0 if halve else 7, tried),
                options=dict(recover=recovery(print, halve=halve)),
            )
        )
    assert tried == ([8, 4, 2, 1] if halve else [8])


def test_a_batch_of_unequal_passes_is_reported():
    line = uneven_batch(recipe(), 6)
    assert (
        "batch_size=16" in line
        and "microbatch 6" in line
        and "3 passes" in line
        and uneven_batch(recipe(), 8) == ""
    )


def card(seconds, memory):
    "A card that does not exist: takes so long for n rows, and holds so many."
    clock, tried = SimpleNamespace(now=0.0), []

    def make_step(n):
        if n > memory:
            raise torch.OutOfMemoryError("the card is full")
        if n not in tried:
            tried.append(n)
        clock.now += seconds(n)

    return make_step, tried, lambda: clock.now


@pytest.mark.parametrize(
    "seconds, memory, batch_size, best",
    [
        (lambda n: 0.01 + n / 50_000, 700, 8192, 512),  # overhead: the largest that fits
        (
            lambda n: max(0.004, n / 16_000),
            10**6,
            8192,
            64,
        ),  # busy from 64 on: the smallest that is as fast
        (lambda n: 0.01 + n / 50_000, 10**6, 1536, 512),  # 1024 would leave a rest
        (lambda n: 0.01 + n / 50_000, 10**6, 8192, 1024),  # no larger than asked to try
        (lambda n: 0.01 + n / 50_000, 10**6, 10, 10),  # a batch smaller than the first size
        (lambda n: 0.01, 3, 8192, 16),  # nothing fits: the run itself will say so
        (lambda n: 0.01 + n / 50_000, 10**6, 1000, 512),  # nothing divides
    ],
)
def test_probing_finds_the_fastest_that_fits(seconds, memory, batch_size, best):
    make_step, tried, clock = card(seconds, memory)
    assert probe_microbatch(make_step, batch_size, CPU, largest=1024, clock=clock) == best
    assert tried == sorted(tried) and all(n <= min(memory, 1024) for n in tried)


def test_a_cpu_does_not_probe():
    assert (
        auto_microbatch(16, None, None, CPU) == 16
        and auto_microbatch(8192, model(), None, CPU) == 32
    )
