"""Repeats are cut exactly, near-duplicates found, and the memory of both is bounded."""

import random

import numpy as np
import pytest

from cramnb.text.clean import BloomFilter, NearDuplicates, Paragraphs, as_bytes, deduplicate
from cramnb.text.clean import dropped_spans, megabytes_for, repeated_bytes, shingles, signatures
from cramnb.text.clean import without


def test_the_filter_remembers_all_and_claims_little():
    seen, rng = BloomFilter(megabytes=1), np.random.default_rng(0)
    first, other = (
        rng.integers(0, 2**63, 20_000).astype(np.uint64),
        rng.integers(0, 2**63, 20_000).astype(np.uint64),
    )
    assert not seen.add(first).any() and seen.known(first).all() and seen.add(first).all()
    assert seen.known(other).mean() < 0.001
    keys = np.array([5, 6, 5, 7, 6], np.uint64)
    assert BloomFilter(megabytes=1).add(keys).tolist() == [False, False, True, False, True]


def test_signatures_estimate_what_two_texts_share():
    rng = random.Random(0)
    words = [f"w{rng.randrange(5000)}" for _ in range(2000)]
    for share in (0.0, 0.3, 0.7, 1.0):
        other = words[: int(2000 * share)] + [
            f"v{rng.randrange(5000)}" for _ in range(2000 - int(2000 * share))
        ]
        a, b = (set(shingles(" ".join(w)).tolist()) for w in (words, other))
        exact = len(a & b) / len(a | b)
        assert (
            abs((signatures([" ".join(words)]) == signatures([" ".join(other)])).mean() - exact)
            < 0.13
        )
    by_words = {tuple(words[k : k + 5]) for k in range(len(words) - 4)}
    assert len(a) == len(by_words)
    assert len(shingles("")) == len(shingles("...")) == 1 and len(shingles("One, two.")) == 1
    assert (shingles("one TWO") == shingles("One, two.")).all()


def test_near_duplicates_are_found_across_shards_and_strangers_are_kept():
    rng = random.Random(1)
    docs = [" ".join(f"w{rng.randrange(3000)}" for _ in range(300)) for _ in range(300)]

    def changed(text, n):
        words = text.split()
        for i in rng.sample(range(len(words)), n):
            words[i] = "changed"
        return " ".join(words)

    near = NearDuplicates(0.8, megabytes=4)
    assert not near.add(docs).any(), "strangers are kept"
    assert near.known([changed(t, 2) for t in docs]).mean() > 0.95
    assert near.known([changed(t, 40) for t in docs]).mean() < 0.05
    assert near.add([docs[3], "new " + docs[4].replace("w1", "x"), docs[3]])[[0, 2]].all()
    assert near.add([]).tolist() == []


def test_paragraphs_of_earlier_shards_are_cut_and_shorter_ones_stay():
    notice, short = (
        "This page may be copied as long as this notice stays with it and nobody is charged. " * 2,
        "Yours truly",
    )
    look = Paragraphs(100, megabytes=1)
    first = [f"One.\n{notice}\n{short}", "Two."]
    assert look.cut(first) == first
    look.add(first)
    assert look.cut([f"Three.\n{notice}\nfour\n{short}", "Two."]) == [
        f"Three.\nfour\n{short}",
        "Two.",
    ]
    assert look.cut([notice]) == [""]


# --- exactly the repeats, inside documents, and never a character more


def cut_by_force(texts: list[str], threshold: int) -> list[str]:
    "Each window of each document, compared with all before it; no blanks at the seams."
    seen, out = [], []
    for text in texts:
        raw = text.encode()
        marked = set()
        for i in range(len(raw) - threshold + 1):
            if raw[i : i + threshold] in seen:
                marked |= set(range(i, i + threshold))
            seen.append(raw[i : i + threshold])
        kept, at = [], 0
        for letter in text:
            size = len(letter.encode())
            if not marked.issuperset(range(at, at + size)):
                kept.append(letter)
            at += size
        out.append("".join(kept))
    return out


@pytest.mark.parametrize("alphabet", ["ab", "ab ", "aé", "éèê", "a日本b", "a😀b😁 "])
def test_repeats_are_cut_exactly_as_by_brute_force(alphabet):
    rng = random.Random(alphabet)
    for _ in range(150):
        texts = [
            "".join(rng.choice(alphabet) for _ in range(rng.randrange(25)))
            for _ in range(rng.randrange(1, 7))
        ]
        threshold = rng.randrange(1, 10)
        for text, found, wanted in zip(
            texts, deduplicate(texts, threshold), cut_by_force(texts, threshold), strict=True
        ):
            assert found.replace(" ", "") == wanted.replace(" ", ""), (texts, threshold)
            assert len(wanted) <= len(found) <= len(text), "a blank only where something was cut"


def test_what_is_no_repeat_stays_to_the_last_blank():
    texts = ["  two  blanks, \n\n lines \t and an end  ", "\n", "", "  two  blanks, again  "]
    assert deduplicate(texts, 30) == texts


def test_a_repeat_never_runs_into_the_next_document():
    ending = "and they lived happily ever after, until the ferry came back."
    texts = [f"Story {k} is about {k * 7919}. {ending}" for k in range(40)]
    texts += [f"The cat {k} ran." for k in range(3)]
    found = deduplicate(texts, 50)
    assert found[0] == texts[0] and found[40:] == texts[40:]
    assert all(t.startswith(f) for f, t in zip(found[1:40], texts[1:]))
    assert all(len(f) >= len(t) - len(ending) - 3 for f, t in zip(found[1:40], texts[1:]))


def test_borders_ends_and_overlaps():
    span = "0123456789" * 2
    assert deduplicate([span, span], 20) == [span, ""]
    assert deduplicate([span + "a", "b" + span, span], 20) == [span + "a", "b", ""]
    assert deduplicate(["x" * 50], 20) == ["x"], "a span may overlap its own copy"
    assert deduplicate([span + "x" + span + "y"], 20) == [span + "x y"]
    assert deduplicate(["ab", "ab"], 3) == ["ab", "ab"]
    assert deduplicate([], 5) == [""] and deduplicate(["a\0b"], 5) == ["a b"]


def test_half_a_letter_is_never_cut():
    # é is C3 A9 and © is C2 A9: the repeat begins in the middle of a letter
    first, second = "é" + "same old words", "©" + "same old words"
    raw = as_bytes([first, second])
    assert repeated_bytes(raw, 15).sum() == 14, "the stray A9 is left to its letter"
    assert deduplicate([first, second], 15) == [first, "©"]


def test_what_is_shown_as_dropped_was_dropped():
    notice = "This page may be copied as long as nobody is charged for it. "
    raw = as_bytes(["One. " + notice, "Two. " + notice * 2, "Three, without."])
    marks = repeated_bytes(raw, 40)
    shown, cut = dropped_spans(raw, marks), without(raw, marks)
    assert shown and all(s in notice * 3 for s in shown)
    assert not any(s in " ".join(cut[1:]) for s in shown)
    assert dropped_spans(raw, np.zeros(len(raw), bool)) == []


# --- memory from the size of the corpus


def test_a_filter_of_the_right_size_tells_strangers_apart():
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**63, 1_000_000).astype(np.uint64)
    right, small = BloomFilter(megabytes_for(500_000)), BloomFilter(1)
    right.add(keys[:500_000])
    small.add(keys)
    assert megabytes_for(500_000) == 2 and right.known(keys[500_000:]).mean() < 2e-5
    assert right.error_rate() < 1e-5 and small.error_rate() > 1e-4
    assert megabytes_for(1) == 1 and megabytes_for(250_000_000) == 954
