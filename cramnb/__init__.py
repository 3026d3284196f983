"""Modules:

- `cramnb.attention`: Attention by hand on four tokens, then by the fastest kernel at hand
- `cramnb.bench`: The same work done our way and the usual way, in turns, in one run
- `cramnb.checkpoint`: A day of somebody's only GPU must never be lost, not even its last bit
- `cramnb.corpus`: Documents in, clean documents out, and a count of everything that was dropped
- `cramnb.cram`: Raw text to score table, in three minutes or in twenty-four hours, by one command
- `cramnb.distributed`: The same run on two cards, with the same numbers, and nobody left hanging
- `cramnb.encoder`: Positions, norms, gates and a stream that every layer adds to: the encoder of crammed-BERT
- `cramnb.finetune`: One set of hyper-parameters, five epochs at most, several seeds, and the median
- `cramnb.glue`: The GLUE tasks, their numbers, and a suite made from your own text
- `cramnb.hub`: The published crammed-BERT checkpoints in, a model card and plain Hugging Face folders out
- `cramnb.masking`: Hide a quarter of the text, and ask for it back
- `cramnb.mlm`: A decoder that looks only where it is asked, and the model classes
- `cramnb.optim`: AdamW by hand, Muon for matrices, and who gets weight decay
- `cramnb.packing`: Pack the tokens once, and read them for ever
- `cramnb.probe`: Fill the blank, where the loss sits, where the heads look, and what training changes
- `cramnb.recipe`: One graphics card, one day, and every choice of the run in one typed object
- `cramnb.schedule`: Learning rate and batch size as functions of the share of the day that is spent
- `cramnb.show`: One look for all chapters, and the short text they share
- `cramnb.tokenizer`: A vocabulary learnt from the text itself, one merge at a time
- `cramnb.train`: A loop that knows how much of its day is gone, and ends on time with nothing broken
- `cramnb.watch`: Loss, speed, share of the card and energy, while the clock runs and afterwards
- `cramnb.zoo`: The relatives of crammed-BERT side by side, each as a few changed lines of one recipe"""

import os
from importlib.metadata import version

# Before torch loads its threads: let waiting ones sleep. Spinning gains nothing on a quiet machine and costs up to several times beside other jobs (LAB.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from .mlm import register  # noqa: E402

__version__ = version("cramnb")
register()
