"""Masks: an exact number for each row, every column alike, the same again for the same seed."""

import numpy as np
import pytest
import torch
from cramnb.text.masking import (
    MASKINGS,
    mask_count,
    mask_rate_at,
    mask_tokens,
    microbatch_generator,
    span_starts,
    word_begins,
)
from cramnb.core import CramError

V = 1000
STARTS = torch.arange(V) % 3 != 0  # a made-up vocabulary: every third entry continues a word


def some_rows(n: int = 4000, t: int = 128, low: int = 5) -> torch.Tensor:
    return torch.randint(low, V, (n, t), generator=torch.Generator().manual_seed(0))


def masked(ids, number: int = 1, p: float = 0.25, **more):
    return mask_tokens(
        ids,
        **dict(
            mlm_probability=p,
            mask_token_id=4,
            vocab_size=V,
            starts_word=STARTS,
            generator=microbatch_generator(0, number),
        )
        | more,
    )


def words_of(row: torch.Tensor) -> np.ndarray:
    "The number of the word that each token belongs to; special tokens stand alone."
    special = row < 5
    begins = STARTS[row] | special | torch.cat([torch.tensor([True]), special[:-1]])
    return begins.cumsum(0).numpy()


def test_masks_are_exact_uniform_and_repeatable():
    ids = some_rows()
    ids[:, -1] = 3
    m = masked(ids)
    asked = m.labels != -100
    assert (asked.sum(1) == 32).all() and ((m.input_ids == 4).sum(1) == 26).all()
    assert not asked[:, -1].any()
    assert torch.equal(m.labels[asked], ids[asked])
    assert torch.equal(m.input_ids[~asked], ids[~asked])
    kept = ((m.input_ids == ids) & asked).sum(1)
    assert (kept >= 3).all() and kept.float().mean() < 3.05
    assert (asked[:, :-1].float().mean(0) - 32 / 127).abs().max() < 0.03
    assert torch.equal(m.labels.gather(1, m.positions), m.labels[asked].view(4000, 32))


@pytest.mark.parametrize(
    "p, hidden, random, kept",
    [(0.15, 15, 2, 2), (0.15625, 16, 2, 2), (0.2, 21, 2, 3), (0.25, 26, 3, 3), (0.40, 41, 5, 5)],
)
def test_the_original_counts(p, hidden, random, kept):
    ids = some_rows(2000)
    m = masked(ids, p=p)
    asked = m.labels != -100
    same = ((m.input_ids == ids) & asked).sum(1)
    assert mask_count(p, 128) == hidden + random + kept
    assert (asked.sum(1) == hidden + random + kept).all()
    assert ((m.input_ids == 4).sum(1) == hidden).all()
    assert (
        same >= kept
    ).all() and same.float().mean() < kept + 0.05  # once in V draws a random token is the old one
    assert (
        (masked(ids, p=p, use_80_20_rule=False).input_ids == 4).sum(1).eq(mask_count(p, 128)).all()
    )


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize(
    "t, p", [(128, 0.25), (128, 0.15), (33, 0.4), (8, 0.5), (1, 0.25), (64, 1.0)]
)
def test_every_way_hides_exactly_so_many_and_never_a_special_token(masking, t, p):
    ids = some_rows(500, t, low=0 if t > 64 else 5)
    if t > 8:
        ids[:, t // 2] = 3
    m, k = masked(ids, p=p, masking=masking), mask_count(p, t)
    asked = m.labels != -100
    assert m.positions.shape == (500, k) and (m.positions.diff(dim=1) > 0).all()
    assert torch.equal(asked.sum(1), torch.minimum(torch.tensor(k), (ids >= 5).sum(1)))
    assert torch.equal(m.labels[asked], ids[asked]) and (ids[asked] >= 5).all()
    assert torch.equal(m.input_ids[~asked], ids[~asked])
    assert torch.equal(asked, torch.zeros_like(asked).scatter(1, m.positions, True) & asked), (
        "positions hold every question"
    )
    again, other = masked(ids, p=p, masking=masking), masked(ids, number=2, p=p, masking=masking)
    assert all(torch.equal(a, b) for a, b in zip(m, again))
    assert k == t or not torch.equal(m.positions, other.positions)


def test_a_row_with_too_few_words_asks_less_and_keeps_its_shape():
    for masking in MASKINGS:
        m = masked(torch.tensor([[2, 10, 11, 3, 3, 3, 3, 3], [0] * 8]), p=0.5, masking=masking)
        assert m.positions.shape == (2, 4) and (m.labels != -100).sum(1).tolist() == [2, 0]
        assert m.input_ids[1].tolist() == [0] * 8


def test_the_original_also_hides_and_draws_special_tokens():
    ids = torch.randint(0, 10, (4000, 32), generator=torch.Generator().manual_seed(0))
    m = masked(ids, mask_special_tokens=True, vocab_size=10)
    asked = m.labels != -100
    share = torch.bincount(m.labels[asked], minlength=10) / asked.sum()
    assert (asked.sum(1) == 8).all() and (share - 0.1).abs().max() < 0.01
    random = m.input_ids[asked & (m.input_ids != ids) & (m.input_ids != 4)]
    assert (random < 5).any() and (random >= 5).any()


def test_no_column_is_favoured():
    "By chance a rate of 0.25 over 40,000 rows strays by 0.0022; five times that is no chance."
    for masking, more in (("token", {}), ("span", dict(starts_word=None))):
        ids = torch.full((10_000, 64), 9)
        draws = [masked(ids, number=n, masking=masking, **more).labels != -100 for n in range(4)]
        assert (torch.cat(draws).float().mean(0) - 0.25).abs().max() < 0.011, masking
    ids = some_rows(10_000, 64)
    hidden = (masked(ids, masking="whole-word").labels != -100).float().mean(0)
    assert (hidden - 0.25).abs().max() < 0.03, "words: nearly so"


@pytest.mark.parametrize("masking", ["whole-word", "span"])
def test_words_are_hidden_whole_but_for_the_last(masking):
    ids = some_rows(400, 64)
    ids[:, 40] = 3
    asked = (masked(ids, masking=masking).labels != -100).numpy()
    for row, hidden in zip(ids, asked):
        words = words_of(row)
        cut = [w for w in np.unique(words) if 0 < hidden[words == w].sum() < (words == w).sum()]
        assert len(cut) <= 1, "one word may be cut, to make the number exact"
        if cut:
            assert hidden[words == cut[0]][0], "and of it the beginning is hidden"


def test_nothing_reaches_across_a_special_token():
    "The pieces behind a [SEP] are a word of their own, and the sides of it share no span."
    begins, _ = word_begins(torch.tensor([[10, 12, 3, 12, 15]]), 5, STARTS)
    assert begins.tolist() == [[True, False, True, True, False]]
    ids = torch.full((4000, 32), 10)
    ids[:, 16] = 3
    hidden = masked(ids, masking="span").labels != -100
    assert (hidden[:, 15] & hidden[:, 17]).float().mean() < 0.1, "by chance 0.06; in one span 0.15"


def test_any_seed_is_possible_and_no_two_runs_share_masks():
    at = [(0, 7), (0, 8), (1, 7), (2**50 + 5, 7)]
    draws = [torch.rand(2, generator=microbatch_generator(*place)) for place in at]
    assert len({tuple(d.tolist()) for d in draws}) == 4


def test_spans_have_the_lengths_of_the_paper():
    words = torch.ones(4000, 128, dtype=torch.bool)
    begins = span_starts(words, torch.Generator().manual_seed(0))
    ends = torch.cat([begins[:, 1:], torch.ones(4000, 1, dtype=torch.bool)], 1)
    flat = begins.reshape(-1).nonzero()[:, 0]
    inner = flat[:-1] % 128 < 118  # the last spans of a row end with it
    lengths = flat.diff()[inner]
    assert begins[:, 0].all() and ends[:, -1].all() and lengths.max() == 10 and lengths.min() == 1
    chances = np.array([0.2 * 0.8**n for n in range(10)])
    assert np.allclose(
        np.bincount(lengths, minlength=11)[1:] / len(lengths), chances / chances.sum(), atol=0.005
    )
    assert abs(lengths.float().mean() - 3.8) < 0.03  # SpanBERT, section 3.1


def test_a_falling_rate_keeps_every_shape():
    assert [mask_rate_at(x, start=0.3, end=0.15) for x in (-1, 0, 0.5, 1, 2)] == pytest.approx(
        [0.3, 0.3, 0.225, 0.15, 0.15]
    )
    ids = some_rows(300)
    for masking in MASKINGS:
        for x in (0, 0.3, 0.7, 1):
            rate = mask_rate_at(x, start=0.3, end=0.15)
            m, k = masked(ids, p=rate, max_probability=0.3, masking=masking), mask_count(rate, 128)
            asked = m.labels != -100
            assert m.positions.shape == (300, 38) and (asked.sum(1) == k).all()
            assert (m.labels.gather(1, m.positions) != -100).sum().item() == 300 * k
            assert torch.equal(m.input_ids[~asked], ids[~asked])
            assert ((m.input_ids == 4).sum(1) == round(0.8 * k)).all()
            narrow = masked(ids, p=rate, masking=masking)
            assert torch.equal(narrow.labels, m.labels) and torch.equal(
                narrow.input_ids, m.input_ids
            ), "the room changes nothing else"


def test_mistakes_have_one_message():
    with pytest.raises(
        CramError, match="masking=whole_word is not supported.*Did you mean 'whole-word'"
    ):
        masked(some_rows(2), masking="whole_word")
    with pytest.raises(CramError, match="needs starts_word"):
        masked(some_rows(2), masking="whole-word", starts_word=None)
    with pytest.raises(CramError, match="1.5 is not possible"):
        mask_tokens(some_rows(2), mlm_probability=1.5, mask_token_id=4, vocab_size=100)


def test_the_stream_of_a_run_follows_its_recipe():
    from types import SimpleNamespace

    from cramnb.train.loop import masked_rows
    from cramnb.recipe import tiny
    from cramnb.book.show import specimen

    s = specimen()
    corpus = SimpleNamespace(
        tokenizer=s.tokenizer, vocab_size=200, batch=lambda start, n, seed: s.rows[:n]
    )

    def stream(*words):
        return masked_rows(corpus, tiny(*words).train, 0, torch.device("cpu"))

    falling = stream("train.mlm_probability=0.3", "train.mlm_probability_end=0.15")
    counts = [
        ((m := falling(0, 5, 0, x)).labels != -100).sum(1).tolist() + list(m.positions.shape)
        for x in (0, 1)
    ]
    assert counts == [[10] * 5 + [5, 10], [5] * 5 + [5, 10]]
    ways = [stream(f"train.masking={m}")(0, 5, 0, 0.0) for m in MASKINGS]
    assert torch.equal(ways[0].input_ids, s.input_ids)
    assert len({tuple(m.positions.flatten().tolist()) for m in ways}) == 3
