"""Until text.store and model.mlm bring their own: the corpus and the model as the front door sees them.

To delete: point `cramnb/__init__.py` and the imports of `run.run` at `text.store.Corpus` and
`model.mlm.build_model`.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

from .core import CramError, fingerprint, write_text
from .model.mlm import build_model
from .options import Data
from .text.packing import PackedCorpus as Corpus
from .recipe import preset
from .store import load_corpus, prepare_corpus


def _data(base, options):
    wrong = options.keys() - {f.name for f in fields(Data)}
    if wrong:
        raise CramError(f"{', '.join(sorted(wrong))} is not an option of data.")
    return replace(preset("data", base), **options)


def _corpus_build(data, folder="corpora", progress=lambda *_, **__: None):
    return prepare_corpus(data, Path(folder).expanduser(), progress)[0]


def _corpus_from_texts(texts, *, folder="corpora", **options):
    texts = [texts] if isinstance(texts, str) else list(texts)
    path = Path(folder).expanduser() / f"texts_{fingerprint(texts)[:12]}.jsonl"
    if not path.exists():
        write_text(path, "".join(json.dumps(dict(text=t)) + "\n" for t in texts))
    return _corpus_from_files(path, folder=folder, **options)


def _corpus_from_files(files, *, folder="corpora", **options):
    files = [files] if isinstance(files, (str, Path)) else files
    return _corpus_build(_data("files", dict(files=",".join(map(str, files))) | options), folder)


def _corpus_from_hub(name, *, folder="corpora", **options):
    return _corpus_build(_data("bookcorpus-wikipedia", dict(hub_path=name) | options), folder)



Corpus.build = staticmethod(_corpus_build)
Corpus.from_texts = staticmethod(_corpus_from_texts)
Corpus.from_files = staticmethod(_corpus_from_files)
Corpus.from_hub = staticmethod(_corpus_from_hub)
Corpus.load = staticmethod(lambda folder: load_corpus(Path(folder)))
