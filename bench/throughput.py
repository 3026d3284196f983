"""The real model, loader and optimizer on the device at hand, and where the time goes

The whole loop of pretraining on the device at hand. `matmul_rate` measures what the device can do,
`time_updates` what the real loader, model and optimizer reach, `memory_by_rows` the memory of a
pass, and `whole_loop` puts it together for `python -m bench gpu`.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models

from cramnb.train.device import pick_device
from cramnb.text.masking import MaskedBatch
from cramnb.model.mlm import flops_per_token
from cramnb.text.packing import Rows, write_rows
from cramnb.text.store import Corpus
from cramnb.recipe import Recipe
from cramnb.run.run import make_loop, new_model
from cramnb.text.tokenizer import SPECIAL_TOKENS, wrap
from cramnb.train.loop import Loop, accumulate


def wait(
    device: torch.device,  # a GPU works while the processor goes on
):
    "Until the device has finished what it was given."
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def matmul_rate(
    device: torch.device,  # to measure
    precision: torch.dtype,  # of the matrices
    side: int = 0,  # of the matrices (0: 1,024 on a CPU, 8,192 on a GPU)
    seconds: float = 0.5,  # to go on
    clock: Callable[[], float] = time.perf_counter,  # time.process_time on a busy machine
) -> float:  # operations a second, multiply and add counted apart
    "The fastest product of two square matrices."
    side = side or (1024 if device.type == 'cpu' else 8192)
    a, b = torch.randn(2, side, side, device=device).to(precision)
    best, until = float('inf'), clock() + seconds
    while True:
        began = clock()
        a @ b
        wait(device)
        best = min(best, clock() - began)
        if clock() > until:
            return 2 * side**3 / best


def random_corpus(
    folder: Path,  # where the rows go
    rows: int,  # to train on
    vocab_size: int,  # V
    seq_length: int = 128,  # T
) -> Corpus:
    "A corpus of random rows, with the tokenizer that masking asks for its special tokens."
    draw = np.random.default_rng(0)
    ids = draw.integers(len(SPECIAL_TOKENS), vocab_size, (rows, seq_length), dtype=np.uint32)
    write_rows([ids], folder / 'rows.arrow', vocab_size)
    words = [*SPECIAL_TOKENS, *(f'w{i}' for i in range(len(SPECIAL_TOKENS), vocab_size))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='[UNK]')
    stored = Rows(folder / 'rows.arrow')
    card = dict(data=dict(ordering='randomized'))
    return Corpus(folder, stored, stored, wrap(Tokenizer(model), seq_length), card)


class _Stopwatch:
    "A function that knows how many seconds were spent in it."

    def __init__(self, function):
        self.function, self.seconds = function, 0.0

    def __call__(self, *args):
        began = time.perf_counter()
        out = self.function(*args)
        self.seconds += time.perf_counter() - began
        return out


def _peak(device):
    "Most bytes that tensors took on a card since the last reset; None on a CPU."
    return torch.cuda.max_memory_allocated(device) if device.type == 'cuda' else None


def time_updates(
    trainer: Loop,  # ready to go, with a budget in updates
    warm: int = 2,  # updates that do not count
) -> dict:  # tokens_per_second, loader_share, memory in bytes (None on a CPU)
    "Run the trainer to the end of its budget, and time all updates but the first ones."
    device, read = trainer.device, _Stopwatch(trainer.batches)
    trainer.batches = read
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    for row in trainer.updates():
        if row['update'] == warm:
            wait(device)
            read.seconds, tokens, began = 0.0, trainer.state.tokens, time.perf_counter()
    wait(device)
    took = time.perf_counter() - began
    speed = (trainer.state.tokens - tokens) / took
    memory = _peak(device)
    return dict(tokens_per_second=speed, loader_share=read.seconds / took, memory=memory)


def memory_by_rows(
    trainer: Loop,  # whose model and batches serve
    largest: int = 1024,  # rows of the largest pass that is tried
) -> list[list]:  # [rows, bytes at the peak or None, tokens a second] of each pass that fits
    "Forward and backward with 16, 32, 64, … rows, until one does not fit."
    device, found = trainer.device, []
    sizes = [16 << i for i in range(20) if 16 << i <= largest] or [largest]
    for rows in sizes:
        batch = trainer.batches(0, rows, 0, 0.0)
        try:
            _one_pass(trainer, batch)
            if device.type == 'cuda':
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            _one_pass(trainer, batch)
            took = time.perf_counter() - began
        except torch.OutOfMemoryError:
            break
        finally:
            trainer.model.zero_grad()
        found.append([rows, _peak(device), batch.input_ids.numel() / took])
    return found


def _one_pass(trainer: Loop, batch: MaskedBatch):
    "Forward and backward without the compiler, which would have to learn each shape."
    accumulate(trainer.model, [batch], len(batch.input_ids), precision=trainer.precision)
    wait(trainer.device)


def tell(
    record: dict,  # from `whole_loop`
) -> list[str]:  # lines to print
    "The report in words."
    lines = [f"rows of a pass: {record['microbatch_size']}, {record['precision']}"]
    for name in [n for n in ('eager', 'compiled') if n in record]:
        r = record[name]
        parts = [f"{r['tokens_per_second']:,.0f} tokens/s", f"{r['share']:.0%} of the matrix rate"]
        parts += [f"loader {r['loader_share']:.1%}"]
        parts += [f"{r['memory'] / 1e9:.1f} GB"] if r['memory'] else ['memory not measured']
        lines.append(f"{name}: {', '.join(parts)}")
    for rows, memory, speed in record['memory_by_rows']:
        used = f'{memory / 1e9:.2f} GB' if memory else 'memory not measured'
        lines.append(f'pass of {rows:>4} rows: {used}, {speed:,.0f} tokens/s')
    return lines


def whole_loop(
    recipe: Recipe,  # of the run; its data gives vocabulary and length of rows
    folder: Path,  # for the rows
    updates: int = 5,  # that are timed
    say: Callable[[str], None] = lambda text: None,  # told what a trainer chose
) -> dict:  # for `bench.json`
    "Tokens a second, shares and memory of a recipe on the device at hand."
    data, train, device = recipe.data, recipe.train, pick_device(recipe.impl)
    corpus = random_corpus(folder, 4 * train.batch_size, data.vocab_size, data.seq_length)
    fixed = dict(progress='updates', max_updates=updates + 2, batch_size_ramp=0.0)
    out = dict(updates=updates, batch_size=train.batch_size)
    for name, compiled in (('eager', False), ('compiled', True)):
        wanted = recipe.impl.compile_torch
        if compiled and (wanted == 'false' or device.type == 'cpu' and wanted == 'auto'):
            continue
        impl = replace(recipe.impl, compile_torch=str(compiled).lower())
        chosen = replace(recipe, impl=impl, train=replace(train, **fixed))
        trainer = make_loop(chosen, new_model(chosen, corpus), corpus, say=say)
        if not compiled:
            out['memory_by_rows'] = memory_by_rows(trainer, min(1024, train.batch_size))
        out[name] = time_updates(trainer)
        out |= dict(microbatch_size=trainer.microbatch_size, precision=str(trainer.precision)[6:])
    asked = train.mlm_probability
    flops = flops_per_token(recipe.arch, data.vocab_size, data.seq_length, asked)
    rate = matmul_rate(device, getattr(torch, out['precision']))
    for name in ('eager', 'compiled'):
        if name in out:
            out[name]['share'] = out[name]['tokens_per_second'] * flops / rate
    return out | dict(flops_per_token=flops, matmul_rate=rate)


def machine(
    device: str = 'cpu',  # or 'cuda'
) -> dict:
    "What a figure needs beside it: device, versions, commit, date."
    packages = 'torch datasets tokenizers transformers numpy'.split()
    here = Path(sys.modules[Recipe.__module__].__file__).parent
    ask = ['git', '-C', str(here), 'rev-parse', '--short', 'HEAD']
    name = f'{os.cpu_count()} CPU threads, {platform.machine()}'
    return dict(
        device=device,
        device_name=torch.cuda.get_device_name() if device == 'cuda' else name,
        python=platform.python_version(),
        versions={p: version(p) for p in packages},
        commit=subprocess.run(ask, text=True, capture_output=True).stdout.strip(),
        date=str(date.today()),
    )
