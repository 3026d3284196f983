"""Vocabularies: the same bytes from every run, so many entries or none, ids that do not move."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cramnb.text.sources import SPECIMEN
from cramnb.text.sources import read_file
from cramnb.core import CramError
from cramnb.options import Data
from cramnb.text.tokenizer import SPECIAL_TOKENS, encode, fertility, train_tokenizer, word_starts
from transformers import AutoTokenizer

KINDS = ["WordPiece", "BPE", "Unigram", "WordLevel", "SentencePieceBPE"]
GERMAN = [
    "Die Grüße aus Köln: schöne Straßen, süße Äpfel und ein Café.",
    "Ein naïver Bär fährt über die Brücke, müde und fröhlich.",
    "Größe zählt, sagte der Bär, und fuhr nach Köln.",
] * 3
CODE = """
import json, sys
from cramnb.options import Data
from cramnb.text.tokenizer import train_tokenizer
docs = json.load(sys.stdin)
for kind in sys.argv[1:]:
    tokenizer = train_tokenizer(docs, Data(tokenizer=kind), vocab_size=400)
    print(tokenizer.backend_tokenizer.to_str())
"""


@pytest.fixture(scope="module")
def docs(texts) -> list[str]:
    return list(itertools.islice(read_file(texts), 150))


def test_a_vocabulary_is_the_same_to_the_last_byte(docs):
    """Three processes with other hash seeds, other numbers of threads, with and without parallel
    tokenizing."""

    def run(seed, threads, parallel):
        env = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": parallel,
        }
        return subprocess.run(
            [sys.executable, "-c", CODE, *KINDS],
            input=json.dumps(docs),
            env=env,
            text=True,
            capture_output=True,
            check=True,
        ).stdout.splitlines()

    runs = [run("1", "1", "false"), run("2", "2", "true"), run("3", "4", "true")]
    for kind, *versions in zip(KINDS, *runs):
        assert len(set(versions)) == 1 and json.loads(versions[0])["model"]["vocab"], kind


@pytest.mark.parametrize("kind", [*KINDS, "WordPieceBERT", "SentencePieceUnigram"])
def test_special_tokens_are_the_first_five_and_text_cannot_name_them(kind, docs, tmp_path):
    vocab_size = 450
    tok = train_tokenizer(
        [*docs[:150], "say [MASK] and [SEP] [MASK]" * 50],
        Data(tokenizer=kind, vocab_size=vocab_size, lowercase=False),
    )
    tok.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert len(again) == vocab_size and again.is_fast
    assert again.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS)
    assert again.model_max_length == 128
    assert (
        again.pad_token_id,
        again.unk_token_id,
        again.cls_token_id,
        again.sep_token_id,
        again.mask_token_id,
    ) == (0, 1, 2, 3, 4)
    assert (
        again("return a list")["input_ids"]
        == tok("return a list")["input_ids"]
        == encode(tok, ["return a list"])[0]
    )
    text = "say [MASK] and [SEP], return"
    assert set(encode(tok, [text])[0][:-1]) & {0, 2, 3, 4} == set()
    assert {3, 4} <= set(again(text)["input_ids"][:-1])
    assert encode(again, [text]) == encode(tok, [text]), "saved and loaded, it cuts alike"


def test_the_mask_takes_the_space_before_it(docs):
    for kind in ("BPE", "Unigram", "SentencePieceBPE"):
        tok = train_tokenizer(docs, Data(tokenizer=kind), vocab_size=600)
        ids = tok("return [MASK]", add_special_tokens=False)["input_ids"]
        assert ids == [*tok("return", add_special_tokens=False)["input_ids"], 4], (
            "no lone space in front of it"
        )


def test_templates(docs):
    single = lambda **more: encode(train_tokenizer(docs, Data(**more), vocab_size=300), ["return"])[
        0
    ]
    bare = single(include_sep=False)
    assert single() == [*bare, 3] and single(include_cls=True) == [2, *bare, 3]
    assert single(include_cls=True, include_sep=False) == [2, *bare]
    for second in (0, 1):
        pair = train_tokenizer(docs, Data(use_type_ids=bool(second)), vocab_size=300)(
            "return", "return", return_token_type_ids=True
        )
        assert pair["input_ids"] == [2, *bare, 3, *bare, 3]
        assert pair["token_type_ids"] == [0] * (2 + len(bare)) + [second] * (1 + len(bare))


def test_unigram_names_the_largest_size():
    data = Data(tokenizer="Unigram", vocab_size=5000)
    with pytest.raises(CramError, match="supports up to [0-9]+ entries") as e:
        train_tokenizer([SPECIMEN], data)
    most = int(e.value.args[0].split()[-2])
    assert len(train_tokenizer([SPECIMEN], Data(tokenizer="Unigram", vocab_size=most))) == most
    for n in (1, 20):
        with pytest.raises(CramError, match=f"vocab_size={n}"):
            train_tokenizer([SPECIMEN], Data(tokenizer="Unigram", vocab_size=n))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "Unigram"])
def test_the_size_is_exact_or_the_largest_is_named(kind):
    data = lambda n: Data(tokenizer=kind, vocab_size=n)
    with pytest.raises(
        CramError,
        match=f"vocab_size=5000 does not fit this text: with data.tokenizer={kind} "
        "it supports [0-9]+ to [0-9]+ entries",
    ) as e:
        train_tokenizer([SPECIMEN], data(5000))
    least, most = (int(e.value.args[0].split()[i]) for i in (-4, -2))
    for n in (least, (least + most) // 2, most):
        assert len(train_tokenizer([SPECIMEN], data(n))) == n
    with pytest.raises(CramError, match="supports"):
        train_tokenizer([SPECIMEN], data(most + 1))
    if kind != "WordLevel":
        with pytest.raises(CramError, match=f"{least} entries or more"):
            train_tokenizer([SPECIMEN], data(least - 1))


def test_an_empty_text_is_one_message():
    for kind in KINDS:
        with pytest.raises(CramError, match="does not fit"):
            train_tokenizer([], Data(tokenizer=kind))


def test_bytes_come_back_whatever_was_written():
    tok = train_tokenizer(
        GERMAN,
        Data(tokenizer="BPE", lowercase=False, strip_accents=False, ascii_only=False),
        vocab_size=300,
    )
    for text in (*GERMAN, "never seen: žluťoučký kůň, 日本語, 🙂"):
        ids = encode(tok, [text])[0][:-1]
        assert 1 not in ids and tok.decode(ids).strip() == text


def test_another_language_keeps_its_accents():
    kept = dict(lowercase=False, strip_accents=False, ascii_only=False)
    for kind in ("WordPiece", "Unigram", "SentencePieceBPE"):
        tok = train_tokenizer(GERMAN, Data(tokenizer=kind, **kept), vocab_size=120)
        text = tok.decode(encode(tok, ["Die Bären fahren über Köln"])[0], skip_special_tokens=True)
        assert text == "Die Bären fahren über Köln", kind
    folded = train_tokenizer(GERMAN, Data(), vocab_size=120)
    assert folded.decode(encode(folded, ["über Köln"])[0], skip_special_tokens=True) == "uber koln"


def test_our_unigram_is_as_short_as_the_library_s(docs):
    from tokenizers import Tokenizer, models, trainers

    from cramnb.text.tokenizer import wrap

    ours = train_tokenizer(docs[:100], Data(tokenizer="Unigram"), vocab_size=600)
    library, like = Tokenizer(models.Unigram()), ours.backend_tokenizer
    library.normalizer, library.pre_tokenizer = like.normalizer, like.pre_tokenizer
    library.post_processor = like.post_processor
    common = dict(special_tokens=list(SPECIAL_TOKENS), unk_token="[UNK]", show_progress=False)
    library.train_from_iterator(docs[:100], trainers.UnigramTrainer(vocab_size=600, **common))
    assert set(library.get_vocab()) == set(ours.get_vocab())
    assert fertility(ours, docs[100:]) < 1.02 * fertility(wrap(library, 128), docs[100:])


def test_each_vocabulary_knows_where_words_begin(docs):
    text = "An unbelievable river (fast) runs."
    for kind in KINDS:
        tok = train_tokenizer(docs, Data(tokenizer=kind), vocab_size=600)
        starts, ids = word_starts(tok), encode(tok, [text])[0]
        assert starts.shape == (600,) and starts[:5].all()
        pieces = [
            (tok.convert_ids_to_tokens(i).replace("##", "").strip("Ġ▁"), bool(starts[i]))
            for i in ids[:-1]
        ]
        words = "".join(("|" if begins else "") + p for p, begins in pieces)
        if kind != "WordLevel":
            assert words.replace("|(|", "|(").lower().startswith(
                "|an|unbelievable|r"
            ) and words.endswith(("|runs.", "|runs|.")), (kind, words)
        else:
            assert starts.all()
    tok = train_tokenizer(
        GERMAN,
        Data(tokenizer="BPE", lowercase=False, strip_accents=False, ascii_only=False),
        vocab_size=261,
    )
    ids = encode(tok, ["Köln über"])[0][:-1]
    assert np.flatnonzero(word_starts(tok)[ids]).tolist() == [0, 6], (
        "one letter may be several bytes"
    )


def test_an_earlier_call_does_not_cut_what_is_encoded():
    tokenizer = train_tokenizer([SPECIMEN], Data(vocab_size=200))
    before = encode(tokenizer, [SPECIMEN])
    tokenizer(SPECIMEN, truncation=True, padding="max_length", max_length=8)
    assert encode(tokenizer, [SPECIMEN]) == before
