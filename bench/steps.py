"""The same weights in two models, equal loss and gradients first, and only then a clock

One training step on two sides. A `Side` has a model, a loss and the ways to compute it;
`check_equal` gives both sides the same weights and compares loss and gradients, `best_way` finds
how each is computed fastest, `step_arms` makes two functions for the lab's page on speed, and
`beside_original` reads the original's model from a copy of its code.
"""

import sys
import time
import types
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from torch import nn

from cramnb.core import CramError
from cramnb.train.device import keep_memory, pick_device
from cramnb.text.masking import MaskedBatch
from cramnb.model.mlm import build_model, flops_per_token
from cramnb.train.optim import build_optimizer
from cramnb.options import Arch, Train
from cramnb.model.original import from_original
from cramnb.run.plan import random_batch
from cramnb.recipe import Recipe, compose
from .throughput import matmul_rate, wait
from cramnb.train.loop import accumulate, clip_and_step, mlm_loss


@dataclass(frozen=True)
class Way:
    "How a model is computed."

    precision: str = 'float32'  # of the matrix products
    attention: str = ''  # kernel of transformers' interface; empty: the model has its own
    compiled: bool = False  # by torch.compile
    chunk: int = 0  # rows of logits held at once, where the model can do that
    memory: bool = False  # does the process keep the memory of tensors that are gone?

    def __str__(self):
        words = [self.precision, self.attention, self.compiled and 'compiled']
        words += [f'chunks of {self.chunk}' if self.chunk else '', self.memory and 'memory kept']
        return ', '.join(word for word in words if word)


@dataclass
class Side:
    "A model, its loss, and the ways in which it may be computed."

    model: nn.Module
    loss: Callable  # (model, batch) -> mean over the asked tokens
    ways: list[Way]  # the first one is the safe one
    dropout: bool = False  # is it on in training?
    way: Way = field(default_factory=Way)  # the one that is used
    optimizer: object = None

    def use(self, way: Way):
        "Compute like this from now on."
        self.way, self.compiled = way, torch.compile(self.loss, dynamic=False)
        if way.attention:
            self.model.set_attn_implementation(way.attention)
        if hasattr(self.model, 'loss_chunk_size'):
            self.model.loss_chunk_size = way.chunk

    def update(self, batch: MaskedBatch, train: Train) -> float:  # its loss
        "One step: forward, backward, clip, move."
        precision = getattr(torch, self.way.precision)
        self.optimizer = self.optimizer or build_optimizer(self.model, train, precision)
        self.model.train(self.dropout)
        loss = self.compiled if self.way.compiled else self.loss
        how = dict(loss=loss, precision=precision)
        device = batch.input_ids.device
        with keep_memory(device) if self.way.memory else nullcontext():
            loss = accumulate(self.model, [batch], len(batch.input_ids), **how)
            return clip_and_step(self.optimizer, loss, train.gradient_clipping)[0]


def best_way(
    side: Side,  # its weights move by a few steps of rate zero
    batch: MaskedBatch,  # for the trial
    train: Train,  # of the optimizer
    clock: Callable[[], float],  # seconds
    tries: int = 2,  # steps in each way that count
) -> Way:
    "The fastest way whose loss is within 0.02 nats of the first one's."
    still = replace(train, optimizer='sgd', lr=1e-12, weight_decay=0.0)
    found = {}
    side.optimizer, dropout, side.dropout = None, side.dropout, False
    for way in side.ways:
        side.use(way)
        times, loss = [], side.update(batch, still)
        for _ in range(tries):
            began = clock()
            side.update(batch, still)
            wait(batch.input_ids.device)
            times.append(clock() - began)
        found[way] = min(times), loss
    safe = found[side.ways[0]][1]
    sound = [way for way, (_, loss) in found.items() if abs(loss - safe) <= 0.02]
    side.optimizer, side.dropout = None, dropout
    return min(sound, key=lambda way: found[way][0])


def _gradients(model):
    "Gradients by name; zeros for a weight that the loss did not reach."
    named = model.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def _compare_gradients(pairs):
    "The smallest cosine of all pairs, and a line about each kind of difference."
    cosines = {n: F.cosine_similarity(a, b, dim=0).item() for n, (a, b) in pairs.items()}
    lengths = {n: (a.norm() / b.norm()).item() for n, (a, b) in pairs.items()}
    turned = min(cosines, key=cosines.get)
    longer = max(lengths, key=lambda n: abs(lengths[n] - 1))
    told = []
    if not cosines[turned] > 1 - 1e-6:
        told.append(f'the gradients of {turned} have a cosine of {cosines[turned]:.7f}')
    elif not abs(lengths[longer] - 1) < 1e-3:
        told.append(f'the gradient of {longer} is {lengths[longer]:.4f} times as long on our side')
    return cosines[turned], told


def check_equal(
    ours: Side,  # gets their weights
    theirs: Side,
    translate: Callable,  # (their tensors by name, are they weights?) -> ours by name
    batch: MaskedBatch,  # for the comparison
) -> float:  # the smallest cosine between two gradients
    "Copy the weights, compare loss and gradients. Raises CramError where they differ."
    own = dict(ours.model.named_parameters())
    with torch.no_grad():
        for name, value in translate(dict(theirs.model.named_parameters()), True).items():
            own[name].copy_(value)
    losses = []
    for side in (ours, theirs):
        side.model.double().eval().zero_grad()
        losses.append(side.loss(side.model, batch))
        losses[-1].backward()
    ours_by_name, theirs_by_name = (_gradients(side.model) for side in (ours, theirs))
    wanted = translate(theirs_by_name, False)
    pairs = {n: (ours_by_name[n].flatten(), g.flatten()) for n, g in wanted.items()}
    a, b = (loss.item() for loss in losses)
    cosine, gradients = _compare_gradients(pairs)
    if abs(a - b) > 1e-5 * max(1, abs(b)) or gradients:
        words = [f'losses {a:.6f} and {b:.6f}', *gradients]
        raise CramError(f"bench step: {', '.join(words)}: not the same work.")
    for side in (ours, theirs):
        side.model.zero_grad()
        side.model.float()
    return cosine


WAYS = [Way('float32', 'sdpa'), Way('bfloat16', 'sdpa'), Way('bfloat16', 'eager')]  # of anybody


def our_ways(
    compiled: bool,  # may our side compile?
) -> list[Way]:
    "What our side may choose from: what users of transformers have, and three things more."
    fast = replace(WAYS[2], memory=True)
    ways = [replace(way, memory=True) for way in WAYS] + [replace(fast, chunk=512)]
    return ways + [replace(fast, compiled=True)] * compiled


def step_arms(
    recipe: Recipe,  # reads impl, train, and the lengths in data
    sides: tuple,  # ours, theirs, translate
) -> dict:  # ours, theirs, amount, clock and more, for a `Case` of the lab's page on speed
    "Two functions that make one step each, after the check. Raises CramError."
    ours, theirs, translate = sides
    train, data, device = recipe.train, recipe.data, pick_device(recipe.impl)
    clock = time.process_time if device.type == 'cpu' else time.perf_counter
    rows = recipe.impl.microbatch_size.replace('auto', '16')
    shape = (int(rows), data.vocab_size, train.mlm_probability, data.seq_length)
    batch = random_batch(*shape, device)
    for side in (ours, theirs):
        side.model.to(device)
    cosine = check_equal(ours, theirs, translate, batch)
    for side in (ours, theirs):
        side.use(best_way(side, batch, train, clock))
    flops = flops_per_token(ours.model.config, *shape[1::2], shape[2])

    def more(record):
        known = dict(rows=shape[0], flops_per_token=flops, cosine=cosine)
        for name, side in (('ours', ours), ('theirs', theirs)):
            rate = matmul_rate(device, getattr(torch, side.way.precision), clock=clock)
            known |= {f'way_{name}': str(side.way), f'share_{name}': record[name] * flops / rate}
        return known

    arms = {n: _arm(side, batch, train) for n, side in (('ours', ours), ('theirs', theirs))}
    return arms | dict(amount=batch.input_ids.numel(), clock=clock, more=more)


def _arm(side, batch, train):
    def run():
        loss = side.update(batch, train)
        wait(batch.input_ids.device)
        return loss

    return run


class _Keys(dict):
    "A dict whose keys are attributes, too: all that the original asks of OmegaConf."

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        value = self[name]
        return _Keys(value) if isinstance(value, dict) else value


def _stand_ins(path):
    "Modules by name: the original's package without its contents, and what is not installed."

    def module(name, **contents):
        made = types.ModuleType(name)
        vars(made).update(contents)
        return made

    first = lambda: True  # is this the main process?
    made = [module('cramming', __path__=[str(path / 'cramming')])]
    made += [module('cramming.utils', is_main_process=first)]
    if find_spec('omegaconf') is None:
        made += [module('omegaconf', OmegaConf=types.SimpleNamespace(create=_Keys))]
    if find_spec('einops') is None:
        made += [module('einops', rearrange=None, repeat=None, __path__=[])]
        made += [
            module('einops.layers', __path__=[]),
            module('einops.layers.torch', Rearrange=None),
        ]
    return {m.__name__: m for m in made}


@contextmanager
def original_code(
    path: Path,  # of a copy of the original's repository
):
    "The module of the original's model; afterwards nothing of it is left among the modules."
    if not (path / 'cramming/architectures/crammed_bert.py').is_file():
        raise CramError(f"bench.original={path} holds no cramming/architectures/crammed_bert.py.")
    made = _stand_ins(path)
    before = {name: sys.modules[name] for name in made if name in sys.modules}
    sys.modules.update(made)
    try:
        yield import_module('cramming.architectures.crammed_bert')
    finally:
        for name in [n for n in sys.modules if n in made or n.startswith('cramming.')]:
            del sys.modules[name]
        sys.modules.update(before)


def _their_arch(path, arch, vocab_size, probability):
    "The original's own file of crammed-BERT, at the sizes of the recipe."
    file = path / 'cramming/config/arch/crammed-bert.yaml'
    theirs = yaml.safe_load(file.read_text(encoding='utf-8'))
    theirs |= dict(hidden_size=arch.hidden_size, intermed_size=arch.intermediate_size)
    theirs |= dict(num_transformer_layers=arch.num_hidden_layers, sparse_prediction=probability)
    theirs['norm_eps'] = float(theirs['norm_eps'])  # 1e-12 is a text to this reader
    theirs['embedding'] |= dict(embedding_dim=arch.hidden_size, vocab_size=vocab_size)
    theirs['attention'] |= dict(num_attention_heads=arch.num_attention_heads)
    theirs['classification_head'] |= dict(classifier_dropout=0.1)
    return theirs


def beside_original(
    path: Path,  # of a copy of the original's repository
    arch: Arch,  # crammed-BERT of some size
    vocab_size: int,  # V
    probability: float,  # share of the tokens that is hidden
    compiled: str = 'ours',  # who may compile: none, ours or both
    lend: bool = False,  # 16-bit products to a side that has none on a CPU?
) -> tuple[Side, Side, Callable]:  # ours, theirs, and `translate`
    "Our crammed-BERT and the original's, of the same sizes. Raises CramError."
    with original_code(path) as code:
        theirs = _their_arch(path, arch, vocab_size, probability)
        model = code.ScriptableLMForPreTraining(code.crammedBertConfig(theirs))
    sizes = {f: getattr(arch, f) for f in ('hidden_size', 'num_hidden_layers')}
    sizes |= {f: getattr(arch, f) for f in ('num_attention_heads', 'intermediate_size')}
    own = build_model(Arch(**sizes), vocab_size)

    def loss(model, batch):
        return model(input_ids=batch.input_ids, labels=batch.labels)['loss']

    def translate(tensors, values):
        return dict(from_original(theirs, tensors).named_parameters())

    ways = [Way()] + [Way('bfloat16')] * lend
    ways += [replace(way, compiled=True) for way in ways] * (compiled == 'both')
    ours = Side(own, mlm_loss, our_ways(compiled != 'none'))
    return ours, Side(model, loss, ways), translate


def own_words(
    words: list[str],  # of the command line, without `bench`
) -> tuple[dict, list[str]]:  # options of the bench alone, and all other words
    "Take out `bench.original=…` and its like. Raises CramError."
    mine = [w for w in words if w.startswith('bench.')]
    own = dict(w.removeprefix('bench.').partition('=')[::2] for w in mine)
    known = dict(original='a folder', compiled='none, ours or both', lend='True or False')
    if wrong := [name for name in own if name not in known]:
        options = ', '.join(f'bench.{k} ({v})' for k, v in known.items())
        raise CramError(f"bench.{wrong[0]} is not an option of the bench: it has {options}.")
    choices = dict(compiled=('none', 'ours', 'both'), lend=('True', 'False', 'true', 'false'))
    for name in own.keys() & choices:
        if own[name] not in choices[name]:
            raise CramError(f"bench.{name}={own[name]} is not possible: give {known[name]}.")
    return own, [w for w in words if w not in mine]


def step_recipe(
    words: list[str],  # of the command line; only those with = count
    small: bool,  # width 256 and four layers, where no size is named
) -> Recipe:
    "The published recipe and what the words change in it."
    options = [w for w in words if '=' in w and not w.startswith('rounds=')]
    base = 'arch=crammed-bert train=bert-o4 data.vocab_size=32768'
    sizes = 'hidden_size=256 num_hidden_layers=4 num_attention_heads=4 intermediate_size=1024'
    named = any(w.startswith('arch') for w in options)
    given = [f'arch.{size}' for size in sizes.split()] if small and not named else []
    return compose([*base.split(), *given, *options])
