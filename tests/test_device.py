"""What a real card adds to the loop: device, precision, compiler, memory; and nothing of the
process stays changed."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cramnb.auto import as_before, fit_here, memory_line, settle, way_of
from cramnb.train.checkpoint import save_checkpoint
from cramnb.choices import How, Machine, how_to_compute, machine_of, recipe_for
from cramnb.command import read_command
from cramnb.core import CramError, LostRank, Stopped
from cramnb.device import (
    MaybeCompiled,
    auto_microbatch,
    card_options,
    compile_ahead,
    keep_memory,
    pick_device,
    pick_precision,
    probe_microbatch,
    process_settings,
    recompute_layers,
    recovery,
    uneven_batch,
)
from cramnb.distributed import World
from cramnb.evaluate import _way
from cramnb.options import Impl
from folders import SUMMARY
from cramnb.recipe import compose, preset, tiny
from cramnb.run.run import Run, pretrain
from cramnb.train.loop import mlm_loss
from cramnb.ways import (
    MeasuredWay,
    choose,
    fastest_way,
    measure_compiled,
    measure_ways,
    pays_back,
    worth_compiling,
)
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
    card = Machine("a card", "cuda", 8e9, bf16, True)
    monkeypatch.setattr("cramnb.device.machine_here", lambda device: card)
    assert pick_precision(Impl(), torch.device("cuda")) == want


@pytest.mark.parametrize("kind, calls", [("cpu", 5), ("cuda", 0)])
@pytest.mark.parametrize("fails", [False, True])
def test_glibc_keeps_memory_for_the_time_of_a_run_on_a_cpu(kind, calls, fails, monkeypatch):
    told = []
    library = SimpleNamespace(mallopt=lambda key, value: told.append((key, value)))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    try:
        with keep_memory(torch.device(kind)):
            assert told == [(-4, 0), (-1, -1)][: 2 * bool(calls)]
            if fails:
                raise Stopped
    except Stopped:
        assert fails
    assert len(told) == calls and told[2:] == [(-4, 65536), (-3, 2**25), (-1, 2**26)][:calls]


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_c_library_is_left_alone(error, monkeypatch):
    def nothing(name):
        raise error

    monkeypatch.setattr("ctypes.CDLL", nothing)
    with keep_memory(CPU):
        pass


# --- choices for described machines, none of which is here


CARDS = {  # name: numbers, GB
    "RTX 2080 Ti": ("float16", 11),
    "T4": ("float16", 16),
    "NVIDIA GeForce RTX 3060 Ti": ("bfloat16", 8),
    "rtx4090": ("bfloat16", 24),
    "A100": ("bfloat16", 80),
    "H100": ("bfloat16", 80),
    "NVIDIA H200": ("bfloat16", 141),
}


@pytest.mark.parametrize("name", CARDS)
def test_a_cuda_card_computes_in_16_bits_and_is_compiled(name):
    precision, memory = CARDS[name]
    machine = machine_of(name)
    assert how_to_compute(machine) == How(precision, "sdpa", True)
    assert how_to_compute(machine._replace(compiler=False)) == How(precision, "sdpa", False)
    assert (machine.kind, machine.memory) == ("cuda", memory * 1e9)


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_apple_silicon_and_processors_take_the_safe_way(kind):
    machine = Machine("this one", kind, 16e9, False, True)
    assert how_to_compute(machine) == How("float32", "sdpa", False)
    assert machine_of("Apple M1").kind == "mps"


@pytest.mark.parametrize(
    "machine, hours, name, why",
    [
        (Machine("2 processor threads", "cpu", 16e9, False, True), 0.05, "tiny", "no CUDA card"),
        (Machine("2 processor threads", "cpu", 16e9, False, True), 24.0, "tiny", "no CUDA card"),
        (machine_of("Apple M1"), 24.0, "tiny", "no CUDA card"),
        (machine_of("RTX 3060 Ti"), 24.0, "crammed", "RTX 3060 TI and an hour or more"),
        (machine_of("RTX 3060 Ti"), 0.5, "tiny", "less than an hour"),
        (machine_of("H200"), 1.0, "crammed", "H200"),
        (machine_of("H200")._replace(memory=4e9), 24.0, "tiny", "is small"),
    ],
)
def test_impl_auto_takes_the_recipe_that_suits_the_machine_and_says_so(machine, hours, name, why):
    taken, line = recipe_for(machine, hours)
    assert taken == name and why in line and f"the recipe {name}" in line and "\n" not in line


def test_words_that_are_named_win_over_the_machine(monkeypatch):
    monkeypatch.setattr("cramnb.choices.best_device", lambda: CPU)
    told = []
    asked = ["impl=auto", "budget=24", "name=x"]
    r = read_command(["cram", *asked, "arch=hf-bert-tiny"], told.append)[1]
    assert r.arch.model_type == "bert" and r.train == preset("train", "tiny") and len(told) == 1
    named = ["arch=tiny", "train=tiny", "data=docstrings"]
    read_command(["cram", *asked, *named], told.append)
    read_command(["cram", *asked[1:]], told.append)
    assert len(told) == 1
    machine = machine_of("A100")
    monkeypatch.setattr("cramnb.choices.machine_here", lambda device: machine)
    assert read_command(["cram", *asked])[1].arch.hidden_size == 768


# --- a limit of memory

HOME = "arch=hf-bert-base train=consumer data=bookcorpus-wikipedia budget=100 impl.device=cpu"


def home(*words):
    return compose([*HOME.split(), "impl.precision=bfloat16", *words])


def test_a_bert_fits_eight_gigabytes_by_arithmetic_and_it_is_said():
    r = home("impl.memory=8GB")
    fit = fit_here(r, CPU)
    assert fit.needed <= 0.9 * 8e9 and fit.microbatch >= 16 and not fit.recompute
    line = memory_line(r, fit)
    assert f"passes of at most {fit.microbatch} rows" in line and "kept" in line
    assert f"{2016 // fit.microbatch} for an update of 2016" in line and "optimizer 0.89" in line


def test_less_memory_means_smaller_passes_then_layers_that_forget_then_a_refusal():
    sizes = [fit_here(home(f"impl.memory={m}"), CPU) for m in ("24GB", "8GB", "4GB", "2.5GB")]
    rows = [fit.microbatch for fit in sizes]
    assert rows == sorted(rows, reverse=True) and sizes[-1].recompute and not sizes[1].recompute
    with pytest.raises(CramError, match="adamw8bit would fit"):
        fit_here(home("impl.memory=2GB"), CPU)
    small = fit_here(home("impl.memory=2GB", "train.optimizer=adamw8bit"), CPU)
    assert small.microbatch >= 1 and small.needed <= 0.9 * 2e9


@pytest.mark.parametrize("text", ["8", "lots", "-8GB", "0GB", "8GBs", "1e9GB", "nanGB", "20MB"])
def test_a_memory_that_is_none_is_refused_in_one_line(text):
    with pytest.raises(CramError, match="such as 8GB or 500MB") as told:
        compose([f"impl.memory={text}"])
    assert "\n" not in str(told.value) and f"impl.memory={text}" in str(told.value)


def test_a_limit_caps_what_a_cpu_plans():
    r = tiny("impl.device=cpu", "impl.memory=120MB", "budget=1m", "train.optimizer=sgd")
    fit = fit_here(r, CPU, 100)
    m = model()
    impl, _ = settle(r, m, batches, World(), print)
    assert int(impl.microbatch_size) <= 32 and fit.microbatch >= 1
    assert fit_here(tiny("impl.device=cpu"), CPU) is None


def test_a_limit_is_set_on_a_card_and_taken_back(monkeypatch):
    shares, card = [], SimpleNamespace(total_memory=16e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share)
    )
    with process_settings(Impl(memory="8GB"), torch.device("cuda")):
        assert shares == [0.5]
    with process_settings(Impl(), torch.device("cuda")):
        pass
    assert shares == [0.5, 1.0]


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("arch", ["tiny", "hf-bert-tiny"])
def test_layers_that_compute_again_give_the_same_gradients(arch, dropout):
    from cramnb.mlm import build_model

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        m = build_model(replace(preset("arch", arch), num_hidden_layers=2), 100)
        calls = []
        layer = (m.model.layers if arch == "tiny" else m.bert.encoder.layer)[0]
        block = layer.attention
        block.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if again:
            recompute_layers(m)
        m.train(dropout)
        torch.manual_seed(1)
        mlm_loss(m, batches(0, 4, 0)).backward()
        found.append((torch.cat([p.grad.flatten() for p in m.parameters()]), len(calls)))
    assert torch.equal(found[0][0], found[1][0]) and [n for _, n in found] == [1, 2]


def test_settle_makes_layers_forget_where_the_recipe_says_so():
    m = model()
    r = tiny("impl.device=cpu", "budget=1m", "impl.recompute=True")
    impl, _ = settle(r, m, batches, World(), print)
    assert impl.recompute == "true" and "checkpoint" in repr(m.model.layers[0].forward)
    with torch.no_grad():
        m(batches(0, 2, 0).input_ids)


def test_a_resumed_run_keeps_its_choices_of_memory_and_compiler(tmp_path):
    t = trainer()
    impl = Impl(compile_torch="true", recompute="true", memory="8GB")
    save_checkpoint(tmp_path, t, extra=way_of(t, impl))
    same = as_before(tiny("impl.device=cpu"), tmp_path, World()).impl
    assert (same.compile_torch, same.recompute, same.memory) == ("true", "true", "8GB")
    said = (
        tiny("impl.device=cpu", "impl.recompute=false", "impl.memory=2GB", "impl.compile_torch=0")
        if False
        else tiny("impl.device=cpu", "impl.recompute=false", "impl.memory=2GB")
    )
    kept = as_before(said, tmp_path, World()).impl
    assert (kept.recompute, kept.memory) == ("false", "2GB")


@pytest.mark.parametrize("word, want", [("True", "true"), ("off", "false"), ("auto", "auto")])
def test_switches_are_read_as_the_original_wrote_them(word, want):
    assert tiny(f"impl.compile_torch={word}").impl.compile_torch == want
    assert tiny(f"arch.gradient_checkpointing={word}").impl.recompute == want


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
        MeasuredWay("float32", "sdpa", 100, loss),
        *(MeasuredWay(*name, *both) for name, both in zip(names, figures)),
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
    ticks = itertools.count()  # each look at the clock is a twentieth of a second later
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 20)
    monkeypatch.setattr("cramnb.ways.time", clock)
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
    "attention, kernels", [("auto", "sdpa eager sdpa eager"), ("eager", "eager eager")]
)
def test_an_attention_that_is_named_stays_and_one_line_says_what_was_chosen(
    attention, kernels, monkeypatch
):
    told, tried = [], []

    def measured(model, source, rows, names):
        tried.extend(names)
        return [MeasuredWay(*name, 100 + 60 * (name == names[-1]), 9.0) for name in names]

    monkeypatch.setattr("cramnb.ways.measure_ways", measured)
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
    monkeypatch.setattr("cramnb.auto.fastest_way", forbidden)
    r = tiny("impl.device=cpu", *words.split())
    impl, took = settle(r, model(), batches, World(), print)
    known = dict(microbatch_size="32", compile_torch="false", recompute="false")
    assert took == 0 and impl == replace(r.impl, **known)


@pytest.mark.parametrize("counts", [True, False])
def test_two_minutes_are_measured_inside_the_budget_as_compiling_is(counts, monkeypatch):
    monkeypatch.setattr(
        "cramnb.auto.fastest_way", lambda *_: MeasuredWay("bfloat16", "eager", 160, 9.0)
    )
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
        return MeasuredWay("bfloat16", "eager", 160, 9.0)

    monkeypatch.setattr("cramnb.run.run._train_loop", one_update)
    monkeypatch.setattr("cramnb.auto.auto_microbatch", lambda *_: 8)
    monkeypatch.setattr("cramnb.auto.fastest_way", measured)
    with pytest.raises(Stopped):
        pretrain(this)
    monkeypatch.setattr("cramnb.auto.auto_microbatch", forbidden)
    monkeypatch.setattr("cramnb.auto.fastest_way", forbidden)
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
        ("auto", "eager", "eager"),
        ("sdpa", "eager", "sdpa"),
        ("auto", "flex_attention", "sdpa"),  # has no dropout, which fine-tuning needs
        ("auto", None, "sdpa"),
    ],
)
def test_fine_tuning_takes_the_kernel_of_the_run(said, known, want, tmp_path):
    facts = dict(on="cpu", precision="bfloat16", attn_implementation=known)
    facts = facts if known else dict(on="cuda", attn_implementation="eager")
    (tmp_path / "pretrain.json").write_text(json.dumps(SUMMARY | facts))
    run = SimpleNamespace(recipe=tiny(f"impl.attn_implementation={said}"))
    assert _way(run, SimpleNamespace(run=tmp_path), CPU)[1] == want


@pytest.mark.parametrize(
    "said, known, want",
    [
        ("auto", dict(on="cpu", precision="bfloat16"), torch.bfloat16),
        ("auto", dict(on="cuda", precision="bfloat16"), torch.float32),
        ("float32", dict(on="cpu", precision="bfloat16"), torch.float32),
    ],
)
def test_fine_tuning_takes_the_format_of_the_run(said, known, want, tmp_path):
    (tmp_path / "pretrain.json").write_text(json.dumps(SUMMARY | known))
    run = SimpleNamespace(recipe=tiny(f"impl.precision={said}"))
    assert _way(run, SimpleNamespace(run=tmp_path), CPU)[0] == want
    for nowhere in (None, Path(tmp_path / "other")):
        unknown = _way(run, SimpleNamespace(run=nowhere), CPU)[0]
        assert unknown == pick_precision(run.recipe.impl, CPU)


def test_float32_with_eager_attention_is_named_as_such(monkeypatch):
    told = []

    def measured(model, source, rows, names):
        return [
            MeasuredWay(*name, 100 + 60 * (name == ("float32", "eager")), 9.0) for name in names
        ]

    monkeypatch.setattr("cramnb.ways.measure_ways", measured)
    assert fastest_way("auto", model(), batches, 8, told.append)[:2] == ("float32", "eager")
    assert "impl.attn_implementation=sdpa overrides" in told[0] and "with sdpa" in told[0]


@pytest.mark.parametrize(
    "gain, cost, left, worth",
    [
        (1.4, 60, 180, False),
        (1.4, 60, 1200, True),
        (1.05, 60, 1200, False),
        (1.04, 60, 86400, True),
        (1.0, 0, 86400, False),  # no gain: not worth the risk
        (0.9, 1, 86400, False),
        (float("nan"), 1, 86400, False),
        (3.0, 1300, 1200, False),  # it took longer than the budget
    ],
)
def test_compiling_is_taken_where_it_pays_back_within_the_budget(gain, cost, left, worth):
    assert pays_back(gain, cost, left) == worth


@pytest.mark.parametrize(
    "found, left, taken, said",
    [
        ((1.5, 40.0, 0.0), 1200, True, "1.50 times as fast after 40 seconds: taken"),
        ((1.5, 40.0, 0.03), 1200, False, "left out"),  # another loss
        ((1.02, 40.0, 0.0), 1200, False, "left out"),
        ((1.5, 40.0, 0.0), 1199, False, ""),  # not even tried
    ],
)
def test_a_compiler_is_measured_and_its_fate_is_said(found, left, taken, said, monkeypatch):
    told = []
    monkeypatch.setattr("cramnb.ways.measure_compiled", lambda *_: found)
    way = MeasuredWay("float32", "sdpa", 100, 9.0)
    assert worth_compiling(way, model(), batches, 8, left, told.append) == taken
    assert said in " ".join(told) and len(told) == bool(said)


def test_measuring_a_compiler_leaves_no_trace():
    m, random = model(), torch.get_rng_state()
    gain, cost, off = measure_compiled(
        MeasuredWay("float32", "eager", 1, 9.0), m, batches, 8, lambda loss, **_: loss
    )
    assert gain > 0 and cost > 0 and off == 0.0
    assert torch.equal(random, torch.get_rng_state()) and all(
        p.grad is None for p in m.parameters()
    )
    assert m.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("compiler, compiled", [(True, "true"), (False, "false")])
def test_without_a_compiler_none_is_offered_and_its_choice_is_kept(
    compiler, compiled, monkeypatch, tmp_path
):
    here = Machine("this processor", "cpu", 16e9, False, compiler)
    monkeypatch.setattr("cramnb.auto.machine_here", lambda device: here)
    monkeypatch.setattr(
        "cramnb.auto.fastest_way", lambda *_: MeasuredWay("float32", "sdpa", 100, 9.0)
    )
    monkeypatch.setattr("cramnb.auto.worth_compiling", lambda *_: True)
    m, r = model(), tiny("impl.device=cpu", "budget=30m")
    impl, _ = settle(r, m, batches, World(), print)
    assert impl.compile_torch == compiled
    loss = card_options(impl, CPU, print)["loss"]
    assert isinstance(loss, MaybeCompiled) == compiler


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
    assert card_options(Impl(compile_torch="true"), CPU, print)["loss"].plain is mlm_loss


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
    assert auto_microbatch(8192, model(), None, CPU, largest=4) == 4
    assert (
        auto_microbatch(16, None, None, CPU) == 16
        and auto_microbatch(8192, model(), None, CPU) == 32
    )
