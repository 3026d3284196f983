"""The home run of lesson 20 with Hugging Face's own parts, for `log_consumer.py`."""

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def cut_chunks(
    texts: Iterable[str],  # documents
    size: int = 820,  # characters of a chunk, or a few more: a cut is made at a blank
    least: int = 200,  # a shorter rest is dropped
) -> Iterator[str]:
    "Cut documents into chunks of about one row of tokens, as the home run did."
    for text in texts:
        while len(text) >= least:
            end = text.find(' ', size)
            end = len(text) if end < 0 else end
            yield text[:end]
            text = text[end:].strip()


def learn_wordpiece(
    texts: Iterable[str],  # to learn from
    vocab_size: int,  # entries at most
) -> PreTrainedTokenizerFast:  # puts [CLS] in front and [SEP] behind
    "A vocabulary of word pieces in lower case, learnt by the tokenizers library."
    pieces = BertWordPieceTokenizer(lowercase=True)
    how = dict(vocab_size=vocab_size, min_frequency=2, show_progress=False)
    pieces.train_from_iterator(texts, **how)
    return BertTokenizerFast(tokenizer_object=pieces._tokenizer)


class Chunks(torch.utils.data.Dataset):
    "Texts that become token ids when the trainer asks for them."

    def __init__(self, texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int = 128):
        self.texts, self.tokenizer, self.length = texts, tokenizer, length

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i: int) -> dict:
        how = dict(truncation=True, max_length=self.length, return_special_tokens_mask=True)
        return dict(self.tokenizer(self.texts[i], **how))


def home_arguments(
    folder,  # takes the checkpoints
    updates: int,  # of the whole run; the learning rate follows them
    rows: int = 36,  # of a pass: as many as fit
    passes: int = 56,  # of an update
    **more,  # other options of TrainingArguments
) -> TrainingArguments:
    "The options of the home run: the numbers are those of its notebook."
    known = dict(
        output_dir=str(folder),
        max_steps=updates,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        learning_rate=1e-3,
        warmup_steps=0.5,  # below 1: a share of all updates
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-9,
        weight_decay=0.01,
        max_grad_norm=0.5,
        save_steps=60,
        save_total_limit=2,
        logging_steps=1,
        report_to='none',
        disable_tqdm=True,
    )
    return TrainingArguments(**known | more)


class StopAfter(TrainerCallback):
    "Save and end a run when its seconds are spent."

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.seconds, self.clock = seconds, clock

    def on_train_begin(self, args, state, control, **_):
        self.start = self.clock()

    def on_step_end(self, args, state, control, **_):
        if self.clock() - self.start >= self.seconds:
            control.should_save = control.should_training_stop = True


def home_trainer(
    model: PreTrainedModel,  # for masked words
    rows: torch.utils.data.Dataset,  # `Chunks`, or other rows of token ids
    tokenizer: PreTrainedTokenizerFast,  # of these rows
    options: TrainingArguments,  # from `home_arguments`
    *watchers: TrainerCallback,  # such as `StopAfter`
) -> Trainer:
    "Hugging Face's Trainer with 15 % of the tokens hidden, and without its printed lines."
    hide = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    parts = dict(processing_class=tokenizer, callbacks=list(watchers))
    trainer = Trainer(model, options, hide, rows, **parts)
    trainer.model_accepts_loss_kwargs = False  # BERT does not average over the passes: issue 47688
    trainer.remove_callback(PrinterCallback)
    return trainer
