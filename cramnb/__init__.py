"""Modules:

- `cramnb.attention`: Attention by hand on four tokens, then by the fastest kernel at hand
- `cramnb.auto`: Memory, the size of a pass and the way to compute: settled before the clock starts, said, and kept
- `cramnb.bench`: How to measure speed on a machine that is never quiet: the same work, two ways, in turns
- `cramnb.book.show`: Colours, tables, flow diagrams, sliders, and the short text that the lessons share
- `cramnb.cards`: One table of graphics cards: how fast, how much memory, and where that stands
- `cramnb.choices`: Number format, attention, compiler and recipe as functions of a described device, so that they can be tested without it
- `cramnb.command`: Words become a verb and a recipe, and a mistake is told in one line, at once
- `cramnb.consumer`: A hundred hours on 8 GB with Hugging Face's own parts, beside our engine, and what both are worth
- `cramnb.core`: Errors with the nearest name, files written whole or not at all
- `cramnb.cram`: Raw text to score table, in three minutes or in twenty-four hours, by one command
- `cramnb.curves`: Compare runs, and tell a sick one from a healthy one
- `cramnb.device`: Device, precision, compiler and microbatch, chosen by measuring, and a second try where a card fails
- `cramnb.distributed`: The same run on two cards, with the same numbers, and nobody left hanging
- `cramnb.encoder`: Positions, norms, gates and a stream that every layer adds to: the encoder of crammed-BERT
- `cramnb.evaluate`: Same weights, same questions, same protocol: the same trials, found again
- `cramnb.exams`: GLUE's own files and the hub's, and rows that are checked before anybody trains on them
- `cramnb.fields`: An option knows its meaning and its bounds, and a word of the command line is read by its type
- `cramnb.glue`: What GLUE asks, how its answers are counted, and a suite made from your own text
- `cramnb.hub`: Checkpoints of the original in, ordinary Hugging Face folders out
- `cramnb.judge.finetune`: From a checkpoint to one score: a fresh head, five epochs, one setting for all tasks
- `cramnb.judge.probe`: Fill the blank, where the loss sits, where the heads look, and what training changes
- `cramnb.judge.score`: Several seeds, the median, the spread, and why published averages differ
- `cramnb.launch`: What torchrun leaves to the program: which process am I, where are the others, what if one dies?
- `cramnb.memory`: What a pass keeps, counted with tensors that have a shape and no content
- `cramnb.mlm`: A decoder that looks only where it is asked, and the model classes
- `cramnb.names`: Command lines of cramming, understood option for option
- `cramnb.options`: Collected from the chapters they belong to, in a module that loads without torch
- `cramnb.original`: The published crammed-BERT weights, of both generations, as the function that they were
- `cramnb.pace`: Tokens per second, measured in a second or two before a run begins
- `cramnb.presets`: Named recipes, collected from the chapters they belong to
- `cramnb.publish`: A folder for the hub, with a card that says how each number was measured
- `cramnb.recipe`: One graphics card, one day, and every choice of the run in one typed object
- `cramnb.report`: Recipe, data, pretraining and scores on one page
- `cramnb.rivals`: What a user would write instead, kept for comparison
- `cramnb.rules`: Mistakes that only two parts of a recipe together can show, told before anything starts
- `cramnb.run.page`: Loss, speed, memory and time left in a browser, without an account
- `cramnb.run.run`: Train inside a folder, and go on after a kill
- `cramnb.run.runs`: Open, lock, list, and find a checkpoint
- `cramnb.run.watch`: One line per update: loss, speed, share of the card, energy; and those who are told about it
- `cramnb.scaling`: What fits on a card, how many tokens a day is, and what a law learnt from small runs can promise
- `cramnb.steps`: The same weights in two models, equal loss and gradients first, and only then a clock
- `cramnb.tables`: Rows from CSV, JSON, Parquet or Arrow, made into a task
- `cramnb.text.clean`: One spelling for one word, a filter for trash, and repeats found at any size
- `cramnb.text.masking`: Hide a quarter of the text, and ask for it back
- `cramnb.text.packing`: Pack the tokens once, and read them for ever
- `cramnb.text.sources`: Files, the hub, docstrings or a mix of them, in one stream of documents
- `cramnb.text.store`: Every distinct word once: from any text to rows of tokens, built once and known by content
- `cramnb.text.tokenizer`: A vocabulary learnt from the text itself, one merge at a time
- `cramnb.throughput`: The real model, loader and optimizer on the device at hand, and where the time goes
- `cramnb.train.checkpoint`: A day of somebody's only GPU must never be lost, not even its last bit
- `cramnb.train.loop`: A loop that knows how much of its day is gone, and ends on time with nothing broken
- `cramnb.train.optim`: AdamW by hand, Muon for matrices, and who gets weight decay
- `cramnb.train.schedule`: Learning rate and batch size as functions of the share of the day that is spent
- `cramnb.ways`: Number format, attention and compiler, chosen by timing real passes before a run starts
- `cramnb.zoo`: The relatives of crammed-BERT side by side, each as a few changed lines of one recipe"""

import importlib.util
import sys

_AUTO = "transformers.models.auto.configuration_auto"  # every Auto class asks this module first


def __getattr__(name):
    "`cramnb.__version__`, read when somebody asks: reading package facts takes a while."
    if name == "__version__":
        from importlib.metadata import version

        return version("cramnb")
    raise AttributeError(f"module 'cramnb' has no attribute {name!r}")


def _teach(auto):
    "Let transformers' table of model types know ours; its classes load at the first question."
    table = type(auto.CONFIG_MAPPING)

    def ask(question):
        def asked(self, model_type):
            if model_type == "crammed_bert":
                importlib.import_module("cramnb.mlm").register()
            return question(self, model_type)

        return asked

    ways = dict(__contains__=ask(table.__contains__), __getitem__=ask(table.__getitem__))
    auto.CONFIG_MAPPING.__class__ = type(table.__name__, (table,), ways)


class _WhenLoaded:
    "One of those whom Python asks for a module; steps in once, for transformers' Auto classes."

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != _AUTO:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), _teach(module))
        return spec


if _AUTO in sys.modules:
    _teach(sys.modules[_AUTO])
else:
    sys.meta_path.insert(0, _WhenLoaded)
