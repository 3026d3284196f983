"""What a real card adds to the loop: machine, way to compute, compiler, memory; and nothing of the
process stays changed."""

import os
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from cramnb.core import CramError, LostRank, Stopped, write_json
from cramnb.train.distributed import World
from cramnb.options import Impl
from cramnb.recipe import compose, tiny
from cramnb.run.runs import Summary
from cramnb.run.plan import within_memory
from cramnb.run.run import Trainer, _way, open_corpus
from cramnb.train import tuning
from cramnb.train.device import MaybeCompiled, compile_ahead, compiler_settings, find_card
from cramnb.train.device import keep_memory, process_settings, recipe_here
from cramnb.train.tuning import Way, probe_microbatch, recovery, settle
from cramnb.train.tuning import way_of
from toy import batches, model, trainer, weights

CPU = torch.device("cpu")
FAST = Way("bfloat16", "eager", microbatch_size=8)


def compiled_trainer(compiler, say=None, **options):
    "A trainer as on a card, with a compiler of our own."
    loss = MaybeCompiled(say or (lambda text: None), compiler=compiler)
    return trainer(**options, options=dict(loss=loss, recover=recovery(loss.say, loss)))


def run(t):
    compile_ahead(t)
    return list(t.updates())


def forbidden(*_):
    raise AssertionError("this run is not to measure")


def test_settings_of_the_compiler_reach_it_and_a_wrong_one_is_told_first():
    given = []

    def compiler(loss, **how):
        given.append(how)
        return loss

    text = "max_autotune_gemm,triton.cudagraphs=False"
    loss = MaybeCompiled(print, compiler=compiler, settings=compiler_settings(text))
    loss(model(), batches(0, 4, 0))
    asked = {"max_autotune_gemm": True, "triton.cudagraphs": False}
    assert given == [dict(dynamic=False, options=asked)]
    with pytest.raises(CramError, match="max_autotune_gem=.*max_autotune_gemm"):
        compiler_settings("max_autotune_gem=1")


# --- machines, none of which is here


@pytest.mark.parametrize(
    "name, precision, compiled, recipe",
    [
        ("RTX 2080 Ti", "float16", True, "crammed"),
        ("NVIDIA GeForce RTX 3060 Ti", "bfloat16", True, "crammed"),
        ("Apple M1", "float32", False, "tiny"),
    ],
)
def test_what_is_chosen_follows_from_the_facts_of_a_machine(name, precision, compiled, recipe):
    machine = find_card(name)
    assert (machine.precision, machine.compiles) == (precision, compiled)
    assert recipe_here(machine, 24.0)[0] == recipe
    assert recipe_here(machine, 0.5)[0] == "tiny"
    assert recipe_here(replace(machine, memory=4e9), 24.0)[0] == "tiny"


# --- settings of the process


@pytest.mark.parametrize("kind, calls", [("cpu", 5), ("cuda", 0)])
def test_glibc_keeps_memory_for_the_time_of_a_run_on_a_cpu(kind, calls, monkeypatch):
    told = []
    library = SimpleNamespace(mallopt=lambda key, value: told.append((key, value)))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    with pytest.raises(Stopped), keep_memory(torch.device(kind)):
        raise Stopped
    assert told == [(-4, 0), (-1, -1), (-4, 65536), (-3, 2**25), (-1, 2**26)][:calls]


def test_a_limit_is_set_on_a_card_and_taken_back(monkeypatch):
    shares, card = [], SimpleNamespace(total_memory=16e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share)
    )
    with process_settings(Impl(memory="8GB"), torch.device("cuda")):
        assert shares == [0.5]
    assert shares == [0.5, 1.0]


@pytest.mark.parametrize("fails, workspace", [(False, None), (True, ":16:8")])
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


# --- a limit of memory


def test_a_limit_names_the_pass_and_less_memory_means_smaller_passes_or_a_refusal():
    words = "arch=hf-bert-base train=consumer data=bookcorpus-wikipedia impl.device=cpu".split()
    home = lambda *more: compose([*words, "budget=100", "impl.precision=bfloat16", *more])
    told = []
    limits = [home(f"impl.memory={size}") for size in ("8GB", "2.5GB")]
    fits = [within_memory(limit, CPU, told.append).impl for limit in limits]
    assert int(fits[0].microbatch_size) >= 16 and fits[0].recompute == "false"
    assert fits[1].recompute == "true" and len(told) == 2
    with pytest.raises(CramError, match="adamw8bit would fit"):
        within_memory(home("impl.memory=2GB"), CPU)
    assert within_memory(home(), CPU, forbidden) == home()


@pytest.mark.parametrize("text", ["8", "lots", "-8GB", "0GB", "1e9GB", "nanGB"])
def test_a_memory_that_is_none_is_refused(text):
    with pytest.raises(CramError, match="such as 8GB or 500MB"):
        compose([f"impl.memory={text}"])


# --- the way to compute: tried, chosen, kept


@pytest.mark.parametrize("counts", [True, False])
def test_two_minutes_are_measured_inside_the_budget_as_compiling_is(counts, monkeypatch):
    monkeypatch.setattr(tuning, "fastest_way", lambda *_: (FAST, 160))
    m, r = model(), tiny("impl.device=cpu", "budget=2m", f"train.count_compile={counts}")
    way, took = settle(r, m, batches, World(), print)
    assert way == FAST and m.config._attn_implementation == "eager" and (took > 0) == counts


def test_layers_forget_where_the_recipe_says_so_or_no_pass_fits(monkeypatch):
    words = "impl.device=cpu", "budget=1m"
    for more, found in (["impl.recompute=True"], [16]), ([], [16, 0]):
        monkeypatch.setattr(tuning, "auto_microbatch", lambda *_, found=found: found.pop())
        m = model()
        way, _ = settle(tiny(*words, *more), m, batches, World(), print)
        assert (way.recompute, way.microbatch_size, found) == (True, 16, [])
        assert way_of(trainer(options=dict())).recompute is False
        m(batches(0, 2, 0).input_ids).logits.mean().backward()


def test_a_resumed_run_takes_the_saved_way_and_does_not_measure(tmp_path, texts, monkeypatch):
    words = "arch.hidden_size=32 arch.num_hidden_layers=1 arch.num_attention_heads=2"
    words += " arch.intermediate_size=64 data=files data.vocab_size=600 data.heldout=0.3"
    words += " train.batch_size=16 train.eval_rows=32 budget=2m impl.device=cpu name=way"
    places = [f"data.files={texts}", f"impl.path={tmp_path / 'corpora'}", f"base_dir={tmp_path}"]
    recipe, met = tiny(*words.split(), *places), []
    corpus = open_corpus(recipe)

    def one_update(recipe, loop, *_):
        met.append((way_of(loop), loop.state.elapsed))
        next(loop.updates())
        raise Stopped

    def fit():
        with pytest.raises(Stopped):
            Trainer.from_recipe(recipe, corpus, forbidden, lambda text: None).fit()

    monkeypatch.setattr("cramnb.run.run._drive", one_update)
    monkeypatch.setattr(tuning, "fastest_way", lambda *_: (FAST, 160))
    fit()
    monkeypatch.setattr(tuning, "auto_microbatch", forbidden)
    monkeypatch.setattr(tuning, "fastest_way", forbidden)
    fit()
    assert met[0][0] == met[1][0] == FAST and 0 < met[0][1] < met[1][1]


@pytest.mark.parametrize(
    "words, known, want",
    [
        ([], FAST, (torch.bfloat16, "eager")),
        (["precision=float32", "attn_implementation=sdpa"], FAST, (torch.float32, "sdpa")),
        ([], replace(FAST, attention="flex_attention"), (torch.bfloat16, "sdpa")),  # no dropout
        ([], replace(FAST, device="cuda"), (torch.float32, "sdpa")),
    ],
)
def test_fine_tuning_computes_as_the_run(words, known, want, tmp_path):
    facts = {k: "" if t is str else 0.0 for k, t in Summary.__annotations__.items()}
    facts |= dict(updates=0, tokens=0, skipped=0, parameters=0, hosts=[], way=asdict(known))
    write_json(tmp_path / "pretrain.json", facts)
    impl = tiny(*(f"impl.{w}" for w in words)).impl
    assert _way(impl, SimpleNamespace(run=tmp_path), CPU) == want
    assert _way(impl, SimpleNamespace(run=None), CPU) == (torch.float32, "sdpa")


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


@pytest.mark.parametrize("place, counts", [("call", True), ("forward", False), ("backward", True)])
def test_a_failing_compiler_is_told_in_one_line_and_done_without(place, counts):
    told, plain = [], trainer(max_updates=3, count_compile=counts)
    t = compiled_trainer(broken_at(place), told.append, max_updates=3, count_compile=counts)
    run(plain), run(t)
    assert (
        len(told) == 1
        and "torch.compile" in told[0]
        and "no compiler" in told[0]
        and "\n" not in told[0]
        and "impl.compile_torch=false" in told[0]
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


# --- memory


def small_card(holds, tried):
    def source(start, n, number, x):
        tried.append(n)
        if n > holds:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batches(start, n, number)

    return source


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


def card(seconds, memory):
    "A card that does not exist: takes so long for n rows, and holds so many."
    clock, tried = SimpleNamespace(now=0.0), []

    def make_step(n):
        if n > memory:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if n not in tried:
            tried.append(n)
        clock.now += seconds(n)

    return make_step, tried, lambda: clock.now


@pytest.mark.parametrize(
    "seconds, memory, batch_size, best",
    [
        (lambda n: 0.01 + n / 50_000, 700, 8192, 512),  # overhead: the largest that fits
        (lambda n: max(0.004, n / 16_000), 10**6, 8192, 64),  # busy: the smallest as fast
        (lambda n: 0.01 + n / 50_000, 10**6, 1536, 512),  # 1024 would leave a rest
        (lambda n: 0.01 + n / 50_000, 10**6, 8192, 1024),  # no larger one is tried
        (lambda n: 0.01 + n / 50_000, 10**6, 5, 5),  # a batch smaller than the first size
        (lambda n: 0.01, 3, 8192, 0),  # nothing fits
        (lambda n: 0.01 + n / 50_000, 10**6, 1001, 512),  # nothing divides
        (lambda n: 0.01 + n / 50_000, 10**6, 2016, 1024),  # 32 divides, and would be slow
    ],
)
def test_probing_finds_the_fastest_that_fits(seconds, memory, batch_size, best):
    make_step, tried, clock = card(seconds, memory)
    assert probe_microbatch(make_step, batch_size, CPU, clock=clock) == best
    assert tried == sorted(tried) and all(n <= min(memory, 1024) for n in tried)
