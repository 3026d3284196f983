"""Learning rate and batch size as functions of the share of the budget, against the original's
numbers."""

import math

import pytest

from cramnb.core import CramError
from cramnb.recipe import compose
from cramnb.train.schedule import SCHEDULES, batch_size_at, lr_factor, microbatches, schedule_name

X = (0, 0.05, 0.10, 0.25, 0.50, 0.60, 0.75, 0.90, 1.0)
GRID = [i / 800 for i in range(1601)]  # 0 to 2
JUMPS = {"budget-cosine-annealing"}  # restarts; all others have no step


# the budget-dive of the original stops with a TypeError: here as it was meant
VALUES = """
budget-triangle2 : 0.25 0.3 0.35 0.5 0.75 0.85 1 0.4 0
budget-triangle1 : 0.5 0.5333 0.5667 0.6667 0.8333 0.9 1 0.4 0
budget-one-cycle : 0 0.1 0.2 0.5 1 0.8 0.5 0.2 0
budget-multi-cycle : 0 0.8 0.4 0 0 0.4 0 0.4 0
budget-linear warmup=0.06 : 0 0.8333 0.9574 0.7979 0.5319 0.4255 0.266 0.1064 0
budget-polynomial warmup=0.06 : 0 0.8333 0.9574 0.7979 0.5319 0.4255 0.266 0.1064 0
budget-cosine-decay warmup=0.06 : 0 0.8333 0.9955 0.9025 0.55 0.3841 0.1646 0.0277 0
budget-cosine-decay : 1 0.9938 0.9755 0.8536 0.5 0.3455 0.1464 0.0245 0
budget-inverse-sqrt warmup=0.06 cooldown=0.1 : 0 0.8333 0.7746 0.4899 0.3464 0.3162 0.2828 0.2582 0
budget-constant warmup=0.06 cooldown=0.1 : 0 0.8333 1 1 1 1 1 1 0
budget-cosine-annealing : 1 0.9045 0.6545 1 1 0.6545 1 0.3455 1
budget-inv-cosine cooldown=0.1 : 0 0.0062 0.0245 0.1464 0.5 0.6545 0.8536 0.9755 0
budget-ramp cooldown=0.1 : 0 0.05 0.1 0.25 0.5 0.6 0.75 0.9 0
budget-dive : 1 1 1 1 1 0.8 0.5 0.2 0
budget-dive-slow : 1 1 1 1 0.6667 0.5333 0.3333 0.1333 0
budget-dive-fast : 1 1 1 1 1 1 1 0.4 0
wsd warmup=0.1 cooldown=0.5 : 0 0.5 1 1 1 0.8 0.5 0.2 0
none : 1 1 1 1 1 1 1 1 1
"""


@pytest.mark.parametrize("line", VALUES.strip().splitlines())
def test_values_of_the_original(line):
    words, values = (part.split() for part in line.split(":"))
    options = {key: float(share) for key, share in (w.split("=") for w in words[1:])}
    want = pytest.approx([float(v) for v in values], abs=1e-4)
    assert [lr_factor(words[0], x, **options) for x in X] == want


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup, cooldown", [(0, 0), (0.06, 0.1), (0.5, 0.5), (0, 1), (1, 0)])
def test_between_zero_and_one_everywhere_and_past_the_end(name, warmup, cooldown):
    values = [lr_factor(name, x, warmup=warmup, cooldown=cooldown) for x in [-1, *GRID, 1e9]]
    assert all(0 <= v <= 1 + 1e-12 and math.isfinite(v) for v in values)
    assert lr_factor(name, 2.0, warmup=warmup, cooldown=cooldown) == lr_factor(
        name, 1.0, warmup=warmup, cooldown=cooldown
    )


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - JUMPS))
def test_no_step_in_the_curve(name):
    values = [lr_factor(name, x, warmup=0.06, cooldown=0.1) for x in GRID]
    assert max(abs(a - b) for a, b in zip(values, values[1:])) < 0.03, (
        "a straight warm-up of 6 % climbs by .021 between two of these places"
    )


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("triangle2", "budget-triangle2"),
        ("one-cycle", "budget-one-cycle"),
        ("constant_with_warmup", "budget-constant"),
        ("budget-wsd", "wsd"),
        ("budget-cosine", "budget-cosine-decay"),
    ],
)
def test_names_as_users_of_the_original_type_them(typed, meant):
    assert schedule_name(typed) == meant
    assert lr_factor(typed, 0.3, warmup=0.05) == lr_factor(meant, 0.3, warmup=0.05)


def test_cycles_begin_where_they_should_to_the_last_bit():
    for warmup in (0, 0.05, 0.06, 0.1, 0.2, 0.25, 0.3, 0.4):
        for cycle in range(5):
            assert lr_factor(
                "budget-cosine-annealing", warmup + (1 - warmup) * cycle / 4, warmup=warmup
            ) == pytest.approx(1), (warmup, cycle)


def test_hugging_face_schedules_agree():
    from torch.optim import SGD
    from torch.nn import Parameter
    from torch import zeros
    from transformers import get_scheduler

    for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant_with_warmup"):
        scheduler = get_scheduler(
            name, SGD([Parameter(zeros(1))], lr=1.0), num_warmup_steps=10, num_training_steps=100
        )
        for step in range(100):
            assert lr_factor(name, step / 100, warmup=0.1) == pytest.approx(
                scheduler.get_last_lr()[0], abs=1e-6
            ), (name, step)
            scheduler.optimizer.step()
            scheduler.step()


def test_unknown_names_and_impossible_shares_are_refused():
    with pytest.raises(CramError, match="triangel2.*Did you mean 'triangle2'"):
        lr_factor("triangel2", 0.5)
    with pytest.raises(CramError, match="wsd"):
        lr_factor("nonsense", 0.5)
    with pytest.raises(CramError, match="train.warmup=0.6"):
        compose(["train.warmup=0.6", "train.cooldown=0.5"])


@pytest.mark.parametrize(
    "m, sizes",
    [
        (512, (512, 1024, 1536, 3072, 4608, 5632, 7168, 8192, 8192)),
        (128, (128, 768, 1408, 2816, 4224, 5504, 6912, 8064, 8192)),
    ],
)
def test_batch_ramp_of_the_original(m, sizes):
    assert (
        tuple(
            batch_size_at(x, batch_size=8192, microbatch_size=m, ramp=0.6)
            for x in (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.59, 0.6)
        )
        == sizes
    )


@pytest.mark.parametrize("m", [1, 96, 128, 500, 8192, 10_000])
def test_batch_only_grows_in_whole_passes_and_ends_full(m):
    sizes = [batch_size_at(x, batch_size=8192, microbatch_size=m, ramp=0.6) for x in GRID]
    assert (
        sizes == sorted(sizes)
        and sizes[0] == min(m, 8192)
        and all(n % m == 0 or n == 8192 for n in sizes)
    )
    assert all(n == 8192 for x, n in zip(GRID, sizes) if x >= 0.6)
    assert batch_size_at(0, batch_size=8192, microbatch_size=m, ramp=0) == 8192


def test_passes_sum_to_the_batch():
    assert (
        sum(microbatches(8192, 96)) == 8192
        and len(microbatches(8192, 96)) == 86
        and microbatches(64, 32) == [32, 32]
        and microbatches(5, 8) == [5]
    )
