"""What a user would write instead, kept for comparison

The usual ways, for comparison: `with_collator`, `with_data_loader`, `with_datasets`,
`with_trainer` and `beside_transformers` do with parts from the shelf what the library does,
`run_arm` runs one arm in a
process of its own, and `same_contents` compares what both made.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from cramnb.core import CramError
from cramnb.text.clean import normalizer
from cramnb.judge.tasks import score
from cramnb.model.mlm import build_model
from cramnb.options import Arch, Data
from cramnb.run.hub import bert_names
from cramnb.recipe import preset
from .steps import WAYS, Side, our_ways
from cramnb.text.store import Corpus
from cramnb.text.tokenizer import SPECIAL_TOKENS, wrap
from cramnb.train.loop import mlm_loss


def with_collator(
    probability: float,  # that a token is hidden
    vocab_size: int = 32_768,  # of the tokenizer
) -> Callable:  # int64 (rows, T) -> labels of the same shape, -100 where nothing is asked
    "Mask with the collator of transformers; no token is special."
    words = [*SPECIAL_TOKENS, *(f'w{i}' for i in range(5, vocab_size))]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = wrap(Tokenizer(models.WordLevel(vocab, unk_token='[UNK]')), 128)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)

    def masked(ids):
        special = torch.zeros(ids.shape, dtype=torch.bool)
        return collator.torch_mask_tokens(ids.clone(), special_tokens_mask=special)[1]

    return masked


@contextmanager
def without_bars():
    "Keep the progress bars of datasets off the screen; afterwards they are as they were."
    were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()


def stored_table(
    ids: np.ndarray,  # (rows, T)
    folder: Path,  # where the table goes
) -> datasets.Dataset:  # gives tensors, read from disk
    "Rows as a table of datasets."
    with without_bars():
        table = datasets.Dataset.from_dict(dict(input_ids=ids.astype(np.int32)))
        table.save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder)).with_format('torch')


def with_data_loader(
    table: datasets.Dataset,  # from `stored_table`
    size: int = 512,  # rows of a batch
) -> int:  # tokens
    "Read all rows once, in random order."

    def stack(rows):
        return torch.stack([r['input_ids'] for r in rows])

    batches = torch.utils.data.DataLoader(table, size, shuffle=True, collate_fn=stack)
    return sum(b.numel() for b in batches)


def _learn(batches, data):
    "A WordPiece vocabulary, learnt in one pass, as most scripts do it."
    tok = Tokenizer(models.WordPiece(unk_token='[UNK]', max_input_chars_per_word=100))
    tok.normalizer, tok.pre_tokenizer = normalizer(data), pre_tokenizers.BertPreTokenizer()
    special = dict(special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    trainer = trainers.WordPieceTrainer(vocab_size=data.vocab_size, **special)
    tok.train_from_iterator(batches, trainer)
    ends = dict(single='$A [SEP]', special_tokens=[('[SEP]', 3)])
    tok.post_processor = processors.TemplateProcessing(**ends)
    return PreTrainedTokenizerFast(tokenizer_object=tok)


def _batches(text):
    "Documents, many at a time."
    return (text[i : i + 4096]['text'] for i in range(0, len(text), 4096))


def _without_trash(text, data):
    "Leave out documents that need more tokens a character than the cutoff."
    judge = _learn(_batches(text), data)

    def dense(batch):
        counts = map(len, judge(batch['text'])['input_ids'])
        return [n < data.trash_cutoff * len(t) for n, t in zip(counts, batch['text'])]

    return text.filter(dense, batched=True, batch_size=1024)


def with_datasets(
    files: str,  # a JSON-lines file
    data: Data,  # reads the normaliser, vocab_size, seq_length, trash_cutoff
    folder: Path,  # where the rows go
) -> tuple[datasets.Dataset, PreTrainedTokenizerFast]:  # rows, tokenizer
    "Raw text to packed rows with `datasets.map`, in the steps of the original."
    cache = dict(split='train', cache_dir=str(folder / 'cache'))
    text = datasets.load_dataset('json', data_files=files, **cache).select_columns('text')
    text = text.shuffle(seed=89)
    if data.trash_cutoff:
        text = _without_trash(text, data)
    tokenizer, T = _learn(_batches(text), data), data.seq_length

    def encode(batch):
        return dict(input_ids=tokenizer(batch['text'])['input_ids'])

    def group(batch):
        joined = list(chain.from_iterable(batch['input_ids']))
        return dict(input_ids=[joined[i : i + T] for i in range(0, len(joined) - T + 1, T)])

    ids = text.map(encode, batched=True, batch_size=1024, remove_columns='text')
    rows = ids.map(group, batched=True, batch_size=1024).shuffle(seed=233)
    rows.flatten_indices().save_to_disk(str(folder / 'rows'))
    tokenizer.save_pretrained(str(folder / 'tokenizer'))
    return rows, tokenizer


def with_cramnb(
    files: str,  # a JSON-lines file
    data: Data,  # as for `with_datasets`
    folder: Path,  # where the corpus goes
) -> Corpus:
    "The same with this library."
    return Corpus.build(replace(data, source='files', files=files), folder)


def _contents(rows, tokenizer, count):
    "What an arm made: tokens, and how frequent the most frequent of them are in a sample."
    ids = np.asarray(rows)
    share = np.bincount(ids.ravel(), minlength=len(tokenizer)) / max(ids.size, 1)
    top = np.argsort(-share, kind='stable')[:100].tolist()
    names = tokenizer.convert_ids_to_tokens(top)
    return dict(tokens=count * ids.shape[-1], share=dict(zip(names, share[top].tolist())))


def same_contents(
    ours: dict,  # tokens, and shares of the most frequent ones
    theirs: dict,  # the same of the other arm
) -> bool:
    "As many tokens within five per cent, and the same ones as frequent."
    a, b = ours['share'], theirs['share']
    common = sum(min(share, a.get(name, 0)) for name, share in b.items())
    return abs(ours['tokens'] / theirs['tokens'] - 1) < 0.05 and common > 0.9 * sum(b.values())


def arm_process(
    which: str,  # 'ours' or 'theirs'
    files: str,  # a JSON-lines file; its `Data` lies beside it as .json
    folder: str,  # for scraps
):
    "Run one arm in a process of its own; print seconds of processor, peak bytes and contents."
    import resource

    data = Data(**json.loads(Path(files).with_suffix('.json').read_text()))
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        before = sum(os.times()[:4])
        arm = dict(ours=with_cramnb, theirs=with_datasets)[which]
        made = arm(files, data, Path(scratch))
        seconds = sum(os.times()[:4]) - before
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        peak = max(resource.getrusage(w).ru_maxrss for w in whose)
        if which == 'ours':  # what it holds apart is encoded, too
            count = len(made.rows) + len(made.heldout)
            result = _contents(made.rows[:2000], made.tokenizer, count)
        else:
            rows, tokenizer = made
            result = _contents(rows[:2000]['input_ids'], tokenizer, len(rows))
    memory = peak * (1 if sys.platform == 'darwin' else 1024)
    print(json.dumps(dict(seconds=seconds, memory=memory, result=result)))


def run_arm(
    which: str,  # 'ours' or 'theirs'
    files: Path,  # a JSON-lines file; its `Data` lies beside it as .json
    folder: Path,  # for scraps
) -> dict:  # seconds of the processor, bytes at the peak, contents
    "Run one arm in a process of its own, on one thread. Raises CramError when it fails."
    one = dict.fromkeys(('OMP_NUM_THREADS', 'RAYON_NUM_THREADS', 'LOKY_MAX_CPU_COUNT'), '1')
    one['TOKENIZERS_PARALLELISM'] = 'false'  # a helper that is not waited for has no seconds here
    program = 'import sys; from bench.rivals import arm_process; arm_process(*sys.argv[1:])'
    words = [sys.executable, '-c', program, which, str(files), str(folder)]
    done = subprocess.run(words, env={**os.environ, **one}, text=True, capture_output=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ['no message'])[-1]
        raise CramError(f"bench data: the arm {which!r} failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _padded(tokenizer, row, task, ev):
    "One row as run_glue.py feeds it."
    texts = [row[f] for f in task.fields] + [''] * (len(task.fields) == 1 and ev.pair_template)
    rules = dict(truncation=True, padding='max_length', max_length=ev.max_seq_length)
    return dict(tokenizer(*texts, **rules, return_token_type_ids=False), label=row['label'])


def with_trainer(
    folder: Path,  # holds the pretrained model as exam, takes the trainer's files
    tokenizer: PreTrainedTokenizerFast,  # of that model
    task,  # a Task
    splits: dict,  # rows of 'train' and 'dev'
    ev,  # an Eval: reads max_seq_length, pair_template, batch_size, lr
) -> float:  # the target metric
    "Fine-tune as run_glue.py does, and score the rows of `dev`."
    torch.manual_seed(0)
    rules = dict(classifier_pooling='mean', num_labels=task.num_labels)
    model = AutoModelForSequenceClassification.from_pretrained(folder / 'exam', **rules)
    feed = {k: [_padded(tokenizer, r, task, ev) for r in rows] for k, rows in splits.items()}
    silent = dict(report_to='none', save_strategy='no', logging_strategy='no', disable_tqdm=True)
    options = TrainingArguments(
        str(folder / 'trainer'),
        per_device_train_batch_size=ev.batch_size,
        per_device_eval_batch_size=128,
        num_train_epochs=1,
        learning_rate=ev.lr,
        lr_scheduler_type='cosine',
        use_cpu=True,
        **silent,
    )
    trainer = Trainer(model, options, train_dataset=feed['train'])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    out = trainer.predict(feed['dev']).predictions
    answers = out[:, 0] if task.num_labels == 1 else out.argmax(1)
    return score(task.target, answers, np.array([r['label'] for r in splits['dev']]))


def from_bert(
    names: list[str],  # of our parameters
    theirs: dict[str, Tensor],  # tensors of a BertForMaskedLM, or their gradients
    values: bool,  # are these weights? the gradient of a sum is not a sum
) -> dict[str, Tensor]:  # of our model in BERT's shape
    "BERT's tensors under our names."
    out = {}
    for name in names:
        out[name] = torch.cat([theirs[key] for key in bert_names(name)])
        if values and name == 'model.embeddings.position.table.weight':
            out[name] = out[name] + theirs['bert.embeddings.token_type_embeddings.weight'][0]
    return out


def beside_transformers(
    arch: Arch,  # reads the sizes
    vocab_size: int,  # V
    compiled: bool = True,  # may our side compile?
) -> tuple[Side, Side, Callable]:  # ours, theirs, and `translate`
    "Our model in BERT's shape, and `BertForMaskedLM` as its users train it, dropout on."
    sizes = 'hidden_size num_hidden_layers num_attention_heads intermediate_size'.split()
    given = {name: getattr(arch, name) for name in sizes} | dict(hidden_act='gelu')
    shape = replace(preset('arch', 'bert-original'), **given, max_position_embeddings=512)
    model = build_model(shape, vocab_size)
    bert = BertForMaskedLM(BertConfig(vocab_size=vocab_size, **given))
    names = [name for name, _ in model.named_parameters()]

    def loss(model, batch):
        visible = torch.ones_like(batch.input_ids)
        return model(batch.input_ids, attention_mask=visible, labels=batch.labels).loss

    def translate(tensors, values):
        return from_bert(names, tensors, values)

    ours = Side(model, mlm_loss, our_ways(compiled))
    return ours, Side(bert, loss, WAYS, dropout=True), translate
