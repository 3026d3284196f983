"""The loop keeps its promises: accumulation, budget, precision, waiting, broken updates, replay,
determinism."""

from dataclasses import replace

import pytest
import torch

from cramnb.train import loop
from cramnb.text.masking import MaskedBatch
from cramnb.model.mlm import build_model
from cramnb.core import CramError
from cramnb.recipe import preset
from cramnb.train.schedule import lr_factor
from cramnb.train.loop import heldout_loss, unigram_entropy
from toy import batches, gradient, model, recipe, trainer, weights

FIXED = batches(0, 16, 0)


def rows_of(batch):
    "A source that serves these rows, whatever the passes."
    return lambda start, n, number=0, x=0.0: MaskedBatch(
        *(t if t is None else t[start : start + n] for t in batch)
    )


def unequal(positions=True):
    "Rows that are asked different numbers of tokens, and some nothing."
    labels = FIXED.labels.clone()
    labels[3] = -100
    labels[8:12] = torch.where(torch.arange(16) < 6, labels[8:12], -100)
    return MaskedBatch(FIXED.input_ids, labels, FIXED.positions if positions else None)


# --- accumulation


@pytest.mark.parametrize(
    "batch",
    [FIXED, FIXED._replace(positions=None), unequal(), unequal(positions=False)],
    ids=["sparse", "dense", "unequal", "unequal-dense"],
)
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
    bert = build_model(
        replace(preset("arch", "hf-bert-tiny"), hidden_size=32, intermediate_size=64), 100
    )

    def run(size):
        t = loop.Loop(
            bert, recipe(optimizer="adamw"), rows_of(unequal()), budget=1, microbatch_size=size
        )
        t.accumulate(16)
        found = gradient(t).clone()
        t.optimizer.zero_grad()
        return found

    torch.testing.assert_close(run(3), run(16), atol=1e-5, rtol=1e-5)


def test_a_microbatch_that_does_not_divide_the_batch_uses_every_row():
    seen = []

    def source(start, n, number, x):
        seen.append((start, n))
        return batches(start, n, number)

    t = trainer(microbatch_size=6, max_updates=2, source=source)
    assert [row["batch_size"] for row in t.updates()] == [16, 16]
    assert seen == [(0, 6), (6, 6), (12, 4), (16, 6), (22, 6), (28, 4)]


# --- the budget


def test_the_clock_stops_the_run_on_the_first_update_past_the_budget():
    t = trainer(
        progress="time", seconds=700.0, scheduler="budget-triangle2"
    )  # each update takes 700 s of an hour
    rows = list(t.updates())
    assert len(rows) == 6 and rows[-1]["elapsed"] == 4200 and t.progress() >= 1
    peaks = [g["peak_lr"] for g in t.optimizer.param_groups]
    assert rows[-1]["lr"] == pytest.approx(peaks[-1] * lr_factor("budget-triangle2", 3500 / 3600))


def test_progress_by_tokens():
    t = trainer(progress="tokens", max_tokens=16 * 16 * 5)
    assert len(list(t.updates())) == 5 and t.state.tokens == 16 * 16 * 5


def test_progress_is_read_once_an_update_and_never_goes_back():
    class Counting(loop.Loop):
        read = 0

        def progress(self):
            Counting.read += 1
            return super().progress()

    readings = iter(
        [0, 900, 900, 100, 100, 2000, 2000, 3700]
    )  # a clock that is set back by a quarter of an hour in the third reading
    told = []

    def source(start, n, number, x):
        told.append(x)
        return batches(start, n, number)

    t = Counting(
        model(),
        recipe(progress="time", max_updates=0, batch_size_ramp=0.0),
        source,
        budget=1.0,
        microbatch_size=8,
        clock=lambda: next(readings),
    )
    rows = list(t.updates())
    shares = [row["progress"] for row in rows]
    assert shares == sorted(shares) and Counting.read == len(rows) + 1
    assert told == [x for x in shares for _ in range(2)], (
        "the source is told the share of the update, the same for all its passes"
    )


# --- where and how to compute


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_float16_with_a_scaler_learns_what_float32_learns():
    exact, half = (
        trainer(max_updates=8, optimizer="adamw"),
        trainer(max_updates=8, optimizer="adamw", options=dict(precision=torch.float16)),
    )
    a, b = ([row["loss"] for row in t.updates()] for t in (exact, half))
    assert (
        a == pytest.approx(b, abs=0.02) and half.state.skipped <= 3 and half.scaler.get_scale() > 1
    )


# --- one look at the device per update


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_look_at_the_device_per_update_whatever_the_number_of_passes(optimizer, monkeypatch):
    looks = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *a, _f=original, _n=name, **k: (looks.append(_n), _f(self, *a, **k))[1],
        )
    ready = [
        batches(16 * (i // 2), 16, i) for i in range(40)
    ]  # drawing masks is not what is counted
    for microbatch_size in (16, 2):
        t = trainer(
            microbatch_size=microbatch_size,
            max_updates=3,
            optimizer=optimizer,
            source=lambda start, n, number, x: MaskedBatch(*(x[:n] for x in ready[number])),
        )
        updates = t.updates()
        next(updates)
        looks.clear()
        next(updates)
        assert looks == ["tolist"]


# --- clipping and updates that are not finite


@pytest.mark.parametrize("kind", ["gradient", "loss", "nan"])
def test_non_finite_updates_are_left_out_counted_and_end_the_run(kind):
    def loss(model, batch):
        broken = t.state.update == 2 or t.state.skipped
        return loop.mlm_loss(model, batch) * (
            float("inf" if kind == "loss" else "nan") if broken and kind != "gradient" else 1
        )

    t = trainer(max_skipped=3, options=dict(loss=loss))

    def overflow(g):
        return g * float("inf") if t.state.update >= 2 else g

    if kind == "gradient":
        t.model.model.layers[0].mlp.input.weight.register_hook(overflow)
    seen = []
    with pytest.raises(CramError, match="not finite"):
        for row in t.updates():
            seen.append(row["skipped"])
            if row["update"] == 2:
                good = weights(t)
    assert seen == [0, 0, 1, 2, 3] and torch.equal(weights(t), good)


# --- held-out loss


def test_heldout_loss_weighs_tokens_and_leaves_the_model_as_it_was():
    m, whole = model().train(), unequal()
    parts = [rows_of(whole)(i, n) for i, n in ((0, 8), (8, 8))]
    assert (
        heldout_loss(m, parts)
        == pytest.approx(heldout_loss(m, [whole]), abs=1e-5)
        == pytest.approx(heldout_loss(m, [whole._replace(positions=None)]), abs=1e-5)
    )
    assert m.training and heldout_loss(m, parts) == heldout_loss(m, parts)


def test_the_unigram_entropy_is_that_of_all_training_tokens():
    "Not of the first rows, which a curriculum makes unusual."
    rows = torch.cat(
        [
            torch.full((30, 16), 7),
            torch.randint(5, 100, (70, 16), generator=torch.Generator().manual_seed(0)),
        ]
    )
    counts = torch.bincount(rows.flatten(), minlength=100)
    p = (counts + 1).double() / (counts.sum() + 100)
    want = -p[FIXED.labels[FIXED.labels != -100]].log().mean().item()
    assert unigram_entropy(counts, [FIXED]) == pytest.approx(want)
    first = torch.bincount(rows[:30].flatten(), minlength=100)
    assert abs(unigram_entropy(first, [FIXED]) - want) > 1


# --- replay


def test_the_example_in_the_documentation_runs():
    code = loop.__doc__.split("constant rate:\n")[1].split("\nDocs:")[0]
    names = {}
    exec(
        "\n".join(
            line.removeprefix("    ") for line in code.splitlines() if line.startswith("    ")
        ),
        names,
    )
    assert len(names["losses"]) == 6 and all(loss > 0 for loss in names["losses"])


# --- determinism


def test_same_seed_same_result_to_the_last_bit():
    def run(seed):
        t = trainer(seed, max_updates=8, dropout=True)
        return [(row["loss"], row["grad_norm"]) for row in t.updates()], weights(t)

    (first, end), (again, end_again), (other, _) = run(0), run(0), run(1)
    assert first == again and torch.equal(end, end_again) and first != other


def test_a_pass_that_fails_leaves_nothing_of_its_update_behind():
    "The second pass fails once; what the first had added up must not be added again."
    calls = []

    def loss(m, batch):
        calls.append(1)
        if len(calls) == 6:  # of the third update: the rate of the first one is zero
            raise RuntimeError("a device was busy")
        return loop.mlm_loss(m, batch)

    whole, broken = trainer(), trainer(options=dict(loss=loss, recover=lambda *_: True))
    for t in (whole, broken):
        for _, _ in zip(range(3), t.updates()):
            pass
    assert len(calls) >= 8 and torch.equal(weights(whole), weights(broken))
