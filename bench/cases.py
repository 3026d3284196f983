"""How to measure speed on a machine that is never quiet: the same work, two ways, in turns

Two ways of doing the same work, timed in turns, A B A B, and compared round by round.
`side_by_side` gives the median quotient with its spread, `measure` refuses arms that do not do
the same work, and `bench` is the command that prints a table and writes `bench.json`. A new
case is a function that returns a `Case`, and its name in `CASES`.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from cramnb.core import CramError, nearest, quiet, write_json
from cramnb.train.device import pick_device
from cramnb.judge.tasks import load_tasks
from cramnb.judge.finetune import run_trial
from cramnb.judge.tasks import local_suite
from cramnb.text.masking import mask_tokens
from cramnb.model.mlm import build_model
from cramnb.options import Arch, Data
from cramnb.text.packing import Rows, write_rows
from cramnb.text.store import Corpus
from cramnb.recipe import Recipe, compose
from .rivals import beside_transformers, run_arm, same_contents, stored_table
from .rivals import with_collator, with_data_loader, with_trainer
from cramnb.text.sources import documents
from .steps import beside_original, own_words, step_arms, step_recipe
from .throughput import machine, tell, whole_loop
from cramnb.text.tokenizer import train_tokenizer


@dataclass
class Timing:
    "What one run of an arm took, where the arm measures itself."

    seconds: float  # by the clock that counts
    memory: int = 0  # bytes at the peak
    result: object = None  # what came out


@dataclass
class Ratio:
    "Times of both arms, round by round; `str` gives the quotient with its spread."

    ours: list[float]  # seconds for each unit of work
    theirs: list[float]  # the same of the other arm
    runs: list[tuple] = field(default_factory=list, repr=False)  # a Timing of each arm, by round

    @property
    def each(self) -> list[float]:
        "Quotients theirs / ours, one for each round."
        return [t / o for o, t in zip(self.ours, self.theirs)]

    @property
    def median(self) -> float:
        "The middle one of them."
        return statistics.median(self.each)

    def __str__(self):
        return f'{self.median:.2f} ({min(self.each):.2f} to {max(self.each):.2f})'


def side_by_side(
    ours: Callable,  # does the work our way; may return a Timing of its own
    theirs: Callable,  # does the same work the usual way
    rounds: int = 5,  # that count
    clock: Callable = time.perf_counter,  # seconds
    warm: int = 1,  # rounds that come first and are thrown away
) -> Ratio:
    "Time two ways of doing the same work in turns, A B A B. Raises CramError for no rounds."
    if rounds < 1:
        raise CramError(f"rounds={rounds} measures nothing: give at least 1.")
    runs = [(_timed(ours, clock), _timed(theirs, clock)) for _ in range(warm + rounds)][warm:]
    return Ratio([a.seconds for a, _ in runs], [b.seconds for _, b in runs], runs)


def _timed(arm, clock):
    "One run of one arm."
    start = clock()
    out = arm()
    return out if isinstance(out, Timing) else Timing(clock() - start, result=out)


@dataclass
class Case:
    "Two ways of doing the same work."

    ours: Callable  # one round our way
    theirs: Callable  # one round the usual way
    against: str  # what the usual way is, in one line
    amount: float = 0  # units of work in a round (0: `count` asks the result)
    unit: str = 'tokens'  # of the work
    same: Callable = lambda ours, theirs: True  # do the two results agree?
    count: Callable = float  # units of work, from a result
    warm: int = 1  # rounds to throw away; none where each arm starts a process of its own
    clock: Callable = time.perf_counter  # of both arms, in seconds
    more: Callable = lambda record: {}  # what else the record shall hold


def measure(
    name: str,  # of the case
    case: Case,  # both arms
    rounds: int = 5,  # that count
) -> dict:  # what `bench.json` keeps
    "Time both arms and check that they agree. Raises CramError when they did not do the same."
    ratio = side_by_side(case.ours, case.theirs, rounds, case.clock, case.warm)
    ours, theirs = zip(*ratio.runs)
    results = ours[-1].result, theirs[-1].result
    if not case.same(*results):
        shown = ' and '.join(f'{r!r:.80}' for r in results)
        reason = f"did not do the same work ({shown}), so their times say nothing"
        raise CramError(f"bench {name}: the two arms {reason}.")
    amounts = [case.amount or case.count(r) for r in results]
    rate = Ratio([t / amounts[0] for t in ratio.ours], [t / amounts[1] for t in ratio.theirs])
    speed = [round(1 / statistics.median(times), 1) for times in (rate.ours, rate.theirs)]
    peak = [max(t.memory for t in runs) for runs in (ours, theirs)]
    low, high = (round(end(rate.each), 3) for end in (min, max))
    record = dict(case=name, against=case.against, unit=case.unit, rounds=rounds)
    record |= dict(ours=speed[0], theirs=speed[1], ratio=round(rate.median, 3), low=low, high=high)
    record |= dict(amount=amounts[0], memory_ours=peak[0], memory_theirs=peak[1])
    return record | case.more(record)


def _rows(
    n: int,  # rows
    seq_length: int = 128,  # T
    vocab_size: int = 32_768,  # V
) -> np.ndarray:  # (n, T) uint16
    "Random rows: the speed of reading and masking does not depend on what the numbers mean."
    return np.random.default_rng(0).integers(5, vocab_size, (n, seq_length), dtype=np.uint16)


def masking(
    recipe: Recipe,  # reads train.mlm_probability
    folder: Path,  # for scraps
) -> Case:
    "Hide tokens, one thread."
    ids, p = torch.from_numpy(_rows(2048).astype(np.int64)), recipe.train.mlm_probability
    collator = with_collator(p)
    rules = dict(mask_token_id=4, vocab_size=32_768, generator=torch.Generator().manual_seed(0))

    def ours():
        return mask_tokens(ids, mlm_probability=p, **rules).labels

    def theirs():
        return collator(ids)

    def same(a, b):
        return abs(((a != -100).float() - (b != -100).float()).mean()) < 0.01

    name = 'DataCollatorForLanguageModeling of transformers'
    return Case(ours, theirs, name, amount=ids.numel(), same=same)


def loader(
    recipe: Recipe,  # reads seed
    folder: Path,  # where the rows are written
    n: int = 65_536,  # rows
) -> Case:
    "Read random rows from disk as batches of int32, one thread; the other arm a sixteenth."
    ids, size = _rows(n), 512
    write_rows(np.array_split(ids, 8), folder / 'rows.arrow', 32_768)
    stored = Rows(folder / 'rows.arrow')
    corpus = Corpus(folder, stored, stored, None, dict(data=dict(ordering='randomized')))
    table = stored_table(ids[: n // 16], folder / 'theirs')

    def ours():
        starts = range(0, n, size)
        return sum(corpus.batch(i, size, recipe.seed).astype(np.int32).size for i in starts)

    def theirs():
        return with_data_loader(table, size)

    name = 'DataLoader over a datasets table'
    return Case(ours, theirs, name, same=lambda a, b: a == 16 * b)


def data(
    recipe: Recipe,  # reads data
    folder: Path,  # for the text and both results
) -> Case:
    "Raw text to packed rows, tokens a processor second; neither arm cuts repeats."
    plain = dict(deduplicate=False, tokenizer='WordPiece', include_cls=False, heldout=0.01)
    d = replace(recipe.data, ordering='randomized', fold_punctuation=False, **plain)
    text = folder / 'text.jsonl'
    with text.open('w', encoding='utf-8') as f:
        f.writelines(json.dumps(dict(text=t)) + '\n' for t, _ in documents(d))
    read = 'mix hub_path files heldout_files join_rows near_duplicates max_documents '
    fresh = Data()  # defaults: `text` already obeys the limits
    d = replace(d, **{k: getattr(fresh, k) for k in [*read.split(), 'max_megabytes', 'text_key']})
    write_json(text.with_suffix('.json'), asdict(d))

    def ours():
        return Timing(**run_arm('ours', text, folder))

    def theirs():
        return Timing(**run_arm('theirs', text, folder))

    how = dict(same=same_contents, count=lambda made: made['tokens'], warm=0)
    return Case(ours, theirs, 'the same steps with datasets.map', **how)


def _exam(recipe, rows):
    "An Eval, its first task with `rows` rows, and a tokenizer learnt from the texts of the task."
    first = recipe.eval.tasks.split(',')[0]
    ev = replace(recipe.eval, epochs=1, tasks=first, classifier_pooling='mean')
    given, short = ev.glue_dir or ev.files, replace(recipe.data, max_megabytes=2.0)
    suite = None if given else local_suite([t for t, _ in documents(short)])
    task, splits, _ = load_tasks(ev, suite)[0]
    texts = [' '.join(r[f] for f in task.fields) for r in splits['train'][:20_000]]
    splits = dict(train=splits['train'][:rows], dev=splits['dev'][: rows // 2])
    return ev, task, splits, train_tokenizer(texts, recipe.data, vocab_size=8192)


def finetune(
    recipe: Recipe,  # reads eval: glue_dir and the first of its tasks; else a task of built-in text
    folder: Path,  # for the checkpoint
    rows: int = 640,  # training rows, and half as many to evaluate
) -> Case:
    "Fine-tune on a task for one epoch on the processor, tokenising included."
    ev, task, splits, tokenizer = _exam(recipe, rows)
    sizes = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=4)
    torch.manual_seed(0)
    arch = Arch(**sizes, intermediate_size=1024, classifier_hidden_size=256)
    build_model(arch, 8192).save_pretrained(folder / 'exam')
    tokenizer.save_pretrained(folder / 'exam')

    def ours():
        with quiet():
            return run_trial(folder / 'exam', task, splits, ev, 0)[0].metrics[task.target]

    def theirs():
        with quiet():
            return with_trainer(folder, tokenizer, task, splits, ev)

    how = dict(amount=rows, unit='examples', same=lambda a, b: abs(a - b) < 0.2)
    return Case(ours, theirs, "transformers' Trainer, every text padded to 128", **how)


def step(
    recipe: Recipe,  # reads impl, train, the sizes in arch, and data.vocab_size
    own: dict,  # `compiled`: who may compile; from `own_words`
) -> Case:
    "One step of training in BERT's shape, after equal loss and gradients."
    torch.manual_seed(recipe.seed)
    compiled = own.get('compiled') != 'none'
    sides = beside_transformers(recipe.arch, recipe.data.vocab_size, compiled)
    return Case(against='BertForMaskedLM of transformers', **step_arms(recipe, sides))


def original(
    recipe: Recipe,  # as for `step`
    own: dict,  # `original`: the folder of the code; `compiled`: who may; `lend`: 16-bit products?
) -> Case:
    "One step of training beside the original's code. Raises CramError."
    if not own.get('original'):
        raise CramError("bench original needs a copy of the original's code: bench.original=FOLDER")
    torch.manual_seed(recipe.seed)
    asked, lend = recipe.train.mlm_probability, own.get('lend') in ('True', 'true')
    known = (recipe.arch, recipe.data.vocab_size, asked, own.get('compiled', 'ours'), lend)
    sides = beside_original(Path(own['original']).expanduser(), *known)
    return Case(against='the original code', **step_arms(recipe, sides))


CASES = dict(masking=masking, loader=loader, data=data, finetune=finetune)  # of a recipe, a folder
STEPS = dict(step=step, original=original)  # of a recipe, the bench's own words


def read_bench(
    words: list[str],  # of the command line, without `bench` and its own options
) -> tuple[list[str], int, Recipe]:  # cases, rounds, recipe
    "Split the words of `python -m bench`. Raises CramError."
    names, options = [w for w in words if '=' not in w], [w for w in words if '=' in w]
    known = [*CASES, *STEPS, 'gpu']
    wrong = [name for name in names if name not in known]
    if wrong:
        hint = nearest(wrong[0], known)
        raise CramError(f"{wrong[0]!r} is not a case: choose from {', '.join(known)}.{hint}")
    if 'finetune' in (names or CASES) and find_spec('accelerate') is None:
        raise CramError("bench finetune needs transformers' Trainer: pip install accelerate.")
    rounds = [w.partition('=')[2] for w in options if w.startswith('rounds=')] or ['5']
    if not rounds[-1].isdecimal() or int(rounds[-1]) < 1:
        raise CramError(f"rounds={rounds[-1]} is not possible: give a whole number from 1.")
    options = [w for w in options if not w.startswith('rounds=')]
    short = [] if any(w.startswith('data') for w in options) else ['data.max_megabytes=4']
    return names or [*CASES, 'step'], int(rounds[-1]), compose(short + options)


def _side_by_side_all(names, rounds, recipe, of_steps, say):
    "A record for each case, and the lines of the table while they come."
    threads, records = torch.get_num_threads(), []
    spread = f'ratio (lowest to highest of {rounds})'
    torch.set_num_threads(1)
    try:
        for name in names:
            with tempfile.TemporaryDirectory() as scratch:
                given = of_steps if name in STEPS else (recipe, Path(scratch))
                case = (CASES | STEPS)[name](*given)
                if not records:
                    say(f"{'case':<10}{'ours/s':>12}{'theirs/s':>12}   {spread}   against")
                r = measure(name, case, rounds)
            records.append(r)
            ratio = f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
            say(f"{name:<10}{r['ours']:>12,.0f}{r['theirs']:>12,.0f}   {ratio}   {r['against']}")
            for who in ('ours', 'theirs') if 'way_ours' in r else ():
                say(f"  {who}: {r['way_' + who]}; {r['share_' + who]:.0%} of the matrix rate")
    finally:
        torch.set_num_threads(threads)
    return records


def bench(
    words: list[str],  # cases and key=value options
    out: str | Path = 'bench.json',  # figures, for chapters and lab books
    say: Callable = print,  # where to tell
) -> dict:  # machine and one record for each case
    "Measure cases side by side on one thread, print a table, write `bench.json`."
    own, rest = own_words(words)
    names, rounds, recipe = read_bench(rest)
    if 'step' in names and own.get('original'):
        names = list(dict.fromkeys([*names, 'original']))
    steps = step_recipe(rest, small='gpu' not in names)
    result = dict(**machine(pick_device(recipe.impl).type), words=words)
    if 'gpu' in names:
        with tempfile.TemporaryDirectory() as scratch:
            result['gpu'] = whole_loop(steps, Path(scratch), rounds, say)
        say('\n'.join(tell(result['gpu'])))
    names = [name for name in names if name != 'gpu']
    result['cases'] = _side_by_side_all(names, rounds, recipe, (steps, own), say) if names else []
    write_json(Path(out), result)
    say(f'Figures: {out}')
    return result
