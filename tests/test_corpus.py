"""The normaliser, the built-in corpus, and a corpus through the whole build."""

import json
import random
import sysconfig
from pathlib import Path

import pytest

from cramnb.text import sources as corpus
from cramnb.text.clean import lost_characters, normalizer
from cramnb.text.sources import read_file
from cramnb.text.store import Corpus
from cramnb.options import Data


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Café  ``x``", 'cafe "x"'),
        ("naïve — test", "naive test"),
        ("a\tb ''c''", 'a\tb "c"'),
        ("ÀÉ  Ü — ß", "ae u "),
        ("", ""),
        ("日本", ""),
    ],
)
def test_normaliser_is_the_original_with_its_double_space_mended(text, expected):
    assert normalizer(Data()).normalize_str(text) == expected


def test_each_rule_of_the_normaliser_can_be_switched_off():
    clean = lambda **options: normalizer(Data(**options)).normalize_str("Grüße, Αθήνα ﬁ")
    assert clean(lowercase=False) == "Grue, "
    assert clean(ascii_only=False) == "gruße, αθηνα ﬁ"
    assert clean(ascii_only=False, strip_accents=False) == "grüße, αθήνα fi"
    assert clean(ascii_only=False, strip_accents=False, lowercase=False) == "Grüße, Αθήνα fi"


# --- own text keeps its words


@pytest.mark.parametrize(
    "text, expected",
    [
        ("word—another", "word-another"),
        ("it doesn’t — „so“ «there» …", "it doesn't - \"so\" \"there\" ..."),
        ("straße, GROẞ, ﬁnal, Œuvre, smørrebrød", "strasse, gross, final, oeuvre, smorrebrod"),
        ("Łódź, Đà Nẵng, Þór, ½ kg, a\u00a0b", "lodz, da nang, thor, 1/2 kg, a b"),
        ("日本 🙂", " "),
    ],
)
def test_own_text_is_folded_before_anything_is_dropped(text, expected):
    assert normalizer(Data(fold_punctuation=True)).normalize_str(text) == expected


def test_faithful_presets_do_not_fold():
    clean = normalizer(Data()).normalize_str
    assert clean("word—another, don’t, straße") == "wordanother, dont, strae"


def test_what_the_normaliser_deletes_is_named():
    assert lost_characters("café — naïve 日本", Data()) == "—日本"
    assert lost_characters("café — naïve 日本", Data(fold_punctuation=True)) == "日本"
    assert lost_characters("café — 日本", Data(ascii_only=False)) == ""
    assert lost_characters("cafe\u0301", Data()) == "", "an accent is taken off, not lost"


# --- the built-in corpus


def test_only_the_standard_library_and_a_fixed_list_are_read():
    site = Path(sysconfig.get_paths()["purelib"])
    inside = {p.relative_to(site).parts[0] for p in corpus.python_files() if site in p.parents}
    assert inside <= set(corpus.PACKAGES) and {"numpy", "torch", "transformers"} <= inside


def test_a_document_says_itself_on_which_side_it_falls():
    assert corpus.checksum("123456789") == 0xCBF43926, "the check value of CRC-32"
    texts = [f"document {k}" for k in range(2000)]
    held = [t for t in texts if corpus.is_heldout(t, 0.1)]
    assert 150 < len(held) < 250 and not any(corpus.is_heldout(t, 0.0) for t in texts)


# --- through the whole build


def test_the_card_tells_what_was_met_and_what_was_dropped(tmp_path, texts):
    docs, rng = list(read_file(texts))[:600], random.Random(0)
    retold = [d.replace(" the ", " THE ", 1) + " Again." for d in docs[:40] if len(d) > 600]
    junk = ["".join(rng.choice("0123456789abcdef") for _ in range(300)) for _ in range(20)]
    records = "".join(json.dumps({"text": d}) + "\n" for d in docs + retold + junk + [""])
    (tmp_path / "a.jsonl").write_text(records + "torn\n")
    how = dict(vocab_size=1000, seq_length=64, heldout=0.1, trash_cutoff=0.5, near_duplicates=0.8)
    built = Corpus.from_files(tmp_path / "a.jsonl", tmp_path / "c", deduplicate=True, **how)
    count, card = built.card["counts"], (built.folder / "README.md").read_text(encoding="utf-8")
    assert count["reading"]["counts"] == {"bad_lines": 1, "empty": 1} and "- bad lines: 1" in card
    assert count["reading"]["sources"]["files"]["documents"] == count["documents"]
    for step in ("near-duplicates", "repeats", "quality filter"):
        assert count["dropped"][step] and f"Dropped by {step}:" in card
    assert len(retold) > 3 and not set(junk) & set(built.heldout_documents())
