"""A model and data so small that a run takes a second, for all tests that train."""

import itertools
from dataclasses import replace

import torch

from cramnb.text.masking import mask_tokens, microbatch_generator
from cramnb.model.mlm import build_model
from cramnb.recipe import preset
from cramnb.train.loop import Loop

ARCH = replace(
    preset("arch", "tiny"),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
)
SMALL = (  # words of a run that takes seconds
    "arch.hidden_size=32 arch.intermediate_size=64 arch.num_hidden_layers=1 "
    "arch.num_attention_heads=2 data.vocab_size=600 data.seq_length=32 data.heldout=0.3 "
    "train.batch_size=16 train.eval_rows=32 train.progress=updates"
).split()
DATA = 5 + (torch.arange(256)[:, None] + torch.arange(16)) % 12  # rows that count up: easy to learn


def batches(start, n, number, x=0.0):
    rows = DATA[torch.arange(start, start + n) % len(DATA)]
    return mask_tokens(
        rows,
        mlm_probability=0.25,
        mask_token_id=4,
        vocab_size=100,
        generator=microbatch_generator(0, number),
    )


def model(seed=0):
    torch.manual_seed(seed)
    return build_model(ARCH, 100)


def recipe(name="tiny", **changes):
    return replace(
        preset("train", name), **dict(batch_size=16, progress="updates", max_updates=20) | changes
    )


def trainer(
    seed=0, microbatch_size=8, seconds=0.0, source=batches, options=None, **changes
) -> Loop:
    """Each reading of its clock moves it by `seconds`; `options` go to the trainer, `changes` to
    the recipe."""
    ticks = itertools.count()
    return Loop(
        model(seed),
        recipe(**changes),
        source,
        microbatch_size=microbatch_size,
        clock=lambda: next(ticks) * seconds,
        **options or {},
    )


def weights(t) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in getattr(t, "model", t).parameters()])


def gradient(t) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None])
