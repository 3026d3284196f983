"""Modules:

- `cramnb.book.check`: `cramnb check my_bert.py` says, lesson by lesson, what works
- `cramnb.book.checks`: One short check for each name of the book's program
- `cramnb.book.numbers`: What a reader's own program does with a reader's own text
- `cramnb.book.show`: Colours, tables, flow diagrams, sliders, and the short text that the lessons share
- `cramnb.cli`: Words become a verb and a recipe, and a mistake is told in one line, at once
- `cramnb.core`: Errors with the nearest name, files written whole or not at all
- `cramnb.cram`: Raw text to score table: what `cramnb cram`, `pretrain`, `eval` and `data` do
- `cramnb.judge.finetune`: From a checkpoint to one score: a fresh head, five epochs, one setting for all tasks
- `cramnb.judge.probe`: Any masked language model fills the blanks of a text
- `cramnb.judge.score`: Several seeds, the median, the spread, and why published averages differ
- `cramnb.judge.tasks`: GLUE's exams, a suite from held-out text, and tables of one's own: their rows, and how answers are counted
- `cramnb.mini`: What a BERT is, the rules of cramming, and what three minutes of training can do
- `cramnb.model.attention`: Queries meet keys, by hand or by the fastest kernel at hand
- `cramnb.model.encoder`: Configuration, embeddings, layers and masks of crammed-BERT, as a model of transformers
- `cramnb.model.mlm`: A decoder that looks only where it is asked, classifiers, and their entry in transformers
- `cramnb.model.original`: The published crammed-BERT weights, of both generations, as the function that they were
- `cramnb.model.zoo`: Each relative of crammed-BERT as a few changed fields, and what it weighs
- `cramnb.options`: Every choice of a run, in six groups with types and bounds, and the named sets of values
- `cramnb.recipe`: One graphics card, one day, and every choice of the run in one typed object
- `cramnb.run.hub`: Checkpoints of the original in; ordinary Hugging Face folders, model cards and rows out
- `cramnb.run.page`: Loss, speed, memory and time left in a browser, without an account
- `cramnb.run.plan`: Memory, rate, tokens, disk and, near the runs that were measured, the loss: all before anything is built
- `cramnb.run.report`: Compare runs, tell a sick one from a healthy one, and put a run on one page
- `cramnb.run.run`: The front door: train inside a folder, go on after a kill, score, load
- `cramnb.run.runs`: Open, lock and list
- `cramnb.run.watch`: One line per update: loss, speed, share of the card, energy; and those who are told about it
- `cramnb.text.clean`: One spelling for one word, a filter for trash, and repeats found at any size
- `cramnb.text.masking`: Hide an exact share of each row, as a function of seed and number
- `cramnb.text.packing`: Pack the tokens once, read them in an order that can be computed again
- `cramnb.text.sources`: Files, the hub, docstrings or a mix of them, in one stream of documents
- `cramnb.text.store`: Every distinct word once: from any text to rows of tokens, built once and known by content
- `cramnb.text.tokenizer`: A vocabulary learnt from the text itself, the same bytes on every run
- `cramnb.train.checkpoint`: A folder from which another process goes on, to the last bit
- `cramnb.train.device`: One description of a device, what follows from it, and what torch keeps for the whole process
- `cramnb.train.distributed`: What torchrun leaves to the program: which process am I, where are the others, what if one dies?
- `cramnb.train.loop`: Passes that add up exactly, broken updates left out, and a clock that is an argument
- `cramnb.train.optim`: One factory from the recipe: AdamW and its relatives, Muon, Lion
- `cramnb.train.schedule`: Learning rate and batch size as functions of the share of the budget that is spent
- `cramnb.train.tuning`: What a recipe leaves at auto, settled by trying before the clock starts, and kept in checkpoints"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType

_DOOR = dict(  # public name -> the module that is loaded when it is asked for
    Corpus="text.store",
    build_model="model.mlm",
    Trainer="run.run",
    evaluate="run.run",
    load="run.run",
)
__all__ = [*_DOOR, "__version__"]


def __dir__():
    return [*globals(), *__all__]


def __getattr__(name):
    "The front door and `__version__`, looked up when somebody asks: torch takes a while to load."
    if name in _DOOR:
        return getattr(import_module(f"cramnb.{_DOOR[name]}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("cramnb")
    raise AttributeError(f"module 'cramnb' has no attribute {name!r}")


# transformers has no entry points, and registering our classes at once would load torch. But its
# table of model types is lazy: a name there stands for a class, which it imports from
# transformers.models when the first model of that type is asked for. So we add one name and one
# module; when the module is asked for our class, the real one loads and registers all of them.
_TABLE, _OURS = "transformers.models.auto.configuration_auto", "transformers.models.crammed_bert"


def _load(name):
    if name.startswith("__"):  # only somebody who lists all modules
        raise AttributeError(name)
    return getattr(import_module("cramnb.model.mlm"), name)


def _add(table):
    table.CONFIG_MAPPING_NAMES["crammed_bert"] = "CrammedBertConfig"


class _WhenLoaded:
    "Import hook: adds the name as soon as transformers' table is loaded."

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _TABLE:
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), _add(module))
        return spec


sys.modules[_OURS] = ModuleType(_OURS)
sys.modules[_OURS].__getattr__ = _load
if _TABLE in sys.modules:
    _add(sys.modules[_TABLE])
else:
    sys.meta_path.insert(0, _WhenLoaded)
