"""The book's program: the same science as the library's `tiny`, without armour, and without us."""

import ast
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cramnb import mini
from cramnb.model import mlm
from cramnb.text import masking, packing, tokenizer
from cramnb.train import optim
from cramnb.train import loop as train
from cramnb.recipe import tiny
from cramnb.run.run import load
from cramnb.train.schedule import lr_factor

V, T = 300, 32


@pytest.fixture
def pair():
    "The library's model and mini's, with the library's weights, none of them zero."
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_attention_heads=2, intermediate_size=256)
    ours = mlm.build_model(replace(tiny().arch, **sizes), V).eval()
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.1)
    small = mini.MaskedLM(V, D=64, H=2, wide=256)
    small.load_state_dict(ours.state_dict())
    return ours, small


@pytest.fixture
def batch():
    rows = torch.randint(1, V, (8, T), generator=torch.Generator().manual_seed(1))
    return masking.MaskedBatch(*mini.mask_rows(rows, V, mini.generator_at(0)))


WORDS = "river card clock model word bank field garden letter night".split()


def documents(n=400):
    "Sentences of a small grammar: much of it can be learnt in seconds."
    draw = np.random.default_rng(0)
    verbs = "sees finds keeps moves likes".split()
    told = "The {} {} the {}, and then the {} {} it again."
    kinds = WORDS, verbs, WORDS, WORDS, verbs
    return [told.format(*(draw.choice(kind) for kind in kinds)) for _ in range(n)]


def test_imports_nothing_of_ours():
    tree = ast.parse(Path(mini.__file__).read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module.split(".")[0])
    assert names - set(sys.stdlib_module_names) <= {"torch", "tokenizers", "numpy", "safetensors"}


def test_masks_of_equal_seeds_are_equal():
    rows = torch.randint(0, V, (8, T), generator=torch.Generator().manual_seed(2))
    for number in (0, 7):
        theirs = masking.mask_tokens(
            rows,
            mlm_probability=0.25,
            mask_token_id=4,
            vocab_size=V,
            generator=masking.microbatch_generator(3, number),
        )
        for a, b in zip(theirs, mini.mask_rows(rows, V, mini.generator_at(number, 3))):
            assert torch.equal(a, b)


def test_logits_loss_and_gradients_are_equal(pair, batch):
    ours, small = pair
    logits = ours(batch.input_ids, masked_positions=batch.positions).logits
    torch.testing.assert_close(
        small(batch.input_ids, batch.positions), logits, rtol=1e-4, atol=1e-5
    )
    a, b = train.mlm_loss(ours, batch), mini.loss_of(small, batch)
    assert a.item() == pytest.approx(b.item(), rel=1e-5)
    a.backward()
    b.backward()
    for (name, p), (same, q) in zip(ours.named_parameters(), small.named_parameters()):
        assert name == same
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_weights_go_both_ways_and_fresh_ones_spread_alike(pair):
    ours, small = pair
    ours.load_state_dict(mini.MaskedLM(V, D=64, H=2, wide=256).state_dict())
    torch.manual_seed(0)
    fresh = mlm.build_model(tiny().arch, 4096)
    for (name, p), q in zip(fresh.named_parameters(), mini.MaskedLM(4096).parameters()):
        assert p.shape == q.shape and abs(p.std() - q.std()) < 1e-3, name


def test_one_update_is_equal(pair, batch):
    ours, small = pair
    optimizer, states = optim.build_optimizer(ours, tiny().train), {}
    for factor in (1.0, 0.3):
        optim.set_lr(optimizer, factor)
        train.mlm_loss(ours, batch).backward()
        for p, q in zip(ours.parameters(), small.parameters()):
            q.grad = p.grad.clone()  # of one gradient: rounding is no part of this test
        optimizer.step()
        optimizer.zero_grad()
        mini.step(small, states, factor)
        for (name, p), q in zip(ours.named_parameters(), small.parameters()):
            torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5, msg=name)


def test_adamw_is_that_of_torch():
    w = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    hand, state = w.detach().clone(), {}
    theirs = torch.optim.AdamW([w], lr=0.01, betas=(0.9, 0.98), eps=1e-12, weight_decay=0.1)
    for i in range(5):
        w.grad = torch.sin(w.detach() * (i + 1))
        g = w.grad.clone()
        theirs.step()
        mini.adamw_step(hand, g, state, lr=0.01, weight_decay=0.1)
    torch.testing.assert_close(hand, w.detach())


def test_schedule_is_that_of_tiny():
    t = tiny().train
    for x in np.linspace(0, 1.2, 121):
        theirs = lr_factor(t.scheduler, x, warmup=t.warmup, cooldown=t.cooldown)
        assert mini.height(x) == pytest.approx(theirs, abs=1e-12)


def test_tokens_and_rows_of_equal_documents_are_equal():
    texts = documents()
    data = replace(tiny().data, vocab_size=100)
    theirs = tokenizer.train_tokenizer(texts, data, vocab_size=100)
    small = mini.learn_tokenizer(texts, 100)
    assert small.get_vocab() == theirs.get_vocab()
    ids = mini.encode_all(small, texts)
    assert ids == tokenizer.encode(theirs, texts)
    for a, b in zip(mini.pack_rows(ids, T), packing.pack(ids, T)):
        assert np.array_equal(a, b)


def test_each_epoch_holds_each_row_once_from_any_place():
    stream = mini.rows_at(0, 35, 7)
    assert [sorted(stream[i : i + 7]) for i in range(0, 35, 7)] == [list(range(7))] * 5
    assert stream[:7] != stream[7:14]
    assert stream[3:20] == mini.rows_at(3, 17, 7)


def test_a_repeated_sentence_and_what_is_no_prose_are_cut():
    notice = "This page may be copied as long as this notice stays with it. "
    seen = set()
    first, second = mini.clean([notice + "One river.", notice + "Two rivers run to the sea."], seen)
    assert notice.strip() in first and second == "Two rivers run to the sea."
    assert mini.clean(["0.153 17.2 99.1 23.7 == 77", notice], seen) == []


class Death(Exception):
    "The process is gone."


def small_run(rows, where, updates=12, die_at=None):
    "A run under a clock that ticks a second an update; it saves after each third update."
    path, ticks = where / "checkpoint.safetensors", iter(range(10**6))
    torch.manual_seed(0)
    model = mini.MaskedLM(V, D=32, depth=1, H=2, wide=64)
    run = dict(updates=0, elapsed=0.0, states={})
    if path.exists():
        torch.manual_seed(99)  # what follows must come from the file
        run = mini.load(path, model)

    def batches(number):
        return mini.batch_at(number, rows, V, size=4)

    for _ in mini.train(model, batches, updates, run, 2, 0.5, lambda: float(next(ticks))):
        if run["updates"] % 3 == 0:
            mini.save(path, model, run)
        if run["updates"] == die_at:
            raise Death
    return model, torch.rand(1)


def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    rows = np.random.default_rng(0).integers(5, V, (20, T)).astype(np.uint16)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, draw = small_run(rows, tmp_path / "a")
    for death in (2, 5, 10):
        with pytest.raises(Death):
            small_run(rows, tmp_path / "b", die_at=death)
    again, same_draw = small_run(rows, tmp_path / "b")
    for p, q in zip(whole.parameters(), again.parameters()):
        assert torch.equal(p, q)
    assert torch.equal(draw, same_draw)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["checkpoint.safetensors"]


def test_a_spoilt_update_leaves_the_weights_alone(tmp_path):
    rows = np.random.default_rng(0).integers(5, V, (20, T)).astype(np.uint16)
    model, ticks = mini.MaskedLM(V, D=32, depth=1, H=2, wide=64), iter(range(100))
    before = [p.detach().clone() for p in model.parameters()]
    model.model.layers[0].mlp.input.weight.register_hook(lambda g: g * float("inf"))
    run = dict(updates=0, elapsed=0.0, states={})
    batches = lambda n: mini.batch_at(n, rows, V, size=4)  # noqa: E731
    assert len(list(mini.train(model, batches, 2, run, clock=lambda: float(next(ticks))))) == 2
    for p, q in zip(model.parameters(), before):
        assert torch.equal(p, q)


def test_text_is_learnt_beyond_the_counting_of_words(tmp_path):
    "Sixty updates of a very small model, under a clock that ticks, so that no machine is too slow."
    folder, ticks = tmp_path / "text", iter(range(1000))
    folder.mkdir()
    (folder / "grammar.txt").write_text("\n\n".join(documents(4000)), encoding="utf-8")
    tok, rows, heldout, _ = mini.prepare(str(folder), tmp_path / "run")
    size = tok.get_vocab_size()
    torch.manual_seed(0)
    model, run = mini.MaskedLM(size, D=64, H=2, wide=128), dict(updates=0, elapsed=0.0, states={})
    batches = mini.fixed_batches(heldout, size)
    entropy = mini.unigram_loss(rows, size, batches)
    assert mini.mean_loss(model, batches) > entropy
    clock = lambda: float(next(ticks))  # noqa: E731
    for _ in mini.train(model, lambda n: mini.batch_at(n, rows, size, 8), 60, run, clock=clock):
        pass
    assert mini.mean_loss(model, batches) < entropy - 0.5


def model_after(updates, size, batches):
    "A fresh model, or what so many updates make of it, under a clock that ticks."
    torch.manual_seed(0)
    model, ticks = mini.MaskedLM(size, D=64, H=2, wide=128), iter(range(10**6))
    run = dict(updates=0, elapsed=0.0, states={})
    clock = lambda: float(next(ticks))  # noqa: E731
    for _ in mini.train(model, batches, updates, run, clock=clock) if updates else []:
        pass
    return model


def test_after_reading_an_exam_is_passed_better_and_a_blank_gets_a_noun():
    apart, rest = documents(900)[:300], documents(900)[300:]
    tok = mini.learn_tokenizer(rest)
    size = tok.get_vocab_size()
    rows, _ = mini.pack_rows(mini.encode_all(tok, rest), T)
    learn, judge = mini.make_exam(apart)
    assert len(learn) > len(judge) > 80
    exam = learn[:48], judge
    fresh, reader = (model_after(n, size, lambda n: mini.batch_at(n, rows, size)) for n in (0, 60))
    kept = [p.clone() for p in reader.parameters()]
    lowest, highest = mini.score(reader, tok, exam)[1], mini.score(fresh, tok, exam)[2]
    assert lowest > highest + 0.1
    assert all(map(torch.equal, kept, reader.parameters())), "an exam leaves the model as it is"
    blanks = mini.fill(reader, tok, "The [MASK] sees the [MASK], and then the card finds it again.")
    assert all(word in WORDS for guesses in blanks for word, _ in guesses) and len(blanks) == 2
    assert mini.fill(fresh, tok, "The [MASK] sees.")[0][0][0] == "[MASK]", "it says what it sees"


def test_shuffled_questions_keep_their_words_and_documents_their_side():
    texts = [f"The {a} {b} sees a {a} and finds no {b}." for a in WORDS for b in WORDS if a < b]
    sides = mini.make_exam(texts, most=1000)
    found = [{tuple(sorted(q[:-1].split())) for q, _ in side} for side in sides]
    asked = [tuple(sorted(t[:-1].lower().split())) for t in texts]
    assert sorted(found[0] | found[1]) == sorted(set(asked)) and not found[0] & found[1]
    for question, intact in sides[0] + sides[1]:
        assert question.endswith(".") and (question.capitalize() in texts) == bool(intact)


def test_an_exported_model_is_the_librarys_and_the_way_back_is_open(tmp_path):
    tok = mini.learn_tokenizer(documents())
    size = tok.get_vocab_size()
    small = mini.MaskedLM(size, D=64, H=2, wide=256)
    for p in small.parameters():
        torch.nn.init.normal_(p, std=0.1)
    mini.export(small, tok, tmp_path / "model")
    ours, wrapped = load(tmp_path / "model")
    ids = torch.tensor(mini.encode_all(tok, ["The river sees the card."]))
    assert wrapped("The river sees the card.").input_ids == ids[0].tolist()
    assert wrapped.mask_token_id in wrapped("The [MASK] sees the card.").input_ids
    columns = torch.arange(ids.shape[1])[None]
    torch.testing.assert_close(ours(ids).logits, small(ids, columns), rtol=1e-4, atol=1e-5)

    sizes = dict(hidden_size=64, num_attention_heads=2, intermediate_size=256)
    theirs = mlm.build_model(replace(tiny().arch, **sizes), size).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    assert small.load_state_dict(weights, strict=False).missing_keys == ["decoder.weight"]
    torch.testing.assert_close(theirs(ids).logits, small(ids, columns), rtol=1e-4, atol=1e-5)


def test_the_program_killed_anywhere_ends_with_the_same_bits(tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "grammar.txt").write_text("\n\n".join(documents(400)), encoding="utf-8")

    def run(where, die_at=10**6):
        def clock():
            if (tick := next(ticks)) == die_at:
                raise Death
            return float(tick)

        ticks = iter(range(10**6))
        return mini.main(str(folder), 4.0, str(tmp_path / where), clock)

    whole = run("a")
    for die_at in (3, 5):
        with pytest.raises(Death):
            run("b", die_at)
    assert run("b") == whole
    loss, score, untrained = whole
    assert math.isfinite(loss) and 0 <= untrained <= 1 and 0 <= score <= 1
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        a, b = ((tmp_path / where / name).read_bytes() for where in "ab")
        assert a == b, name


def test_the_command_ends_with_a_loss_and_goes_on_when_called_again(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "grammar.txt").write_text("\n\n".join(documents(400)), encoding="utf-8")
    words = [sys.executable, "-m", "cramnb.mini", str(folder)]
    how = dict(cwd=tmp_path, capture_output=True, text=True)
    how["env"] = os.environ | dict(PYTHONPATH=str(Path(mini.__file__).parents[1]))
    first = subprocess.run([*words, "1"], **how)
    assert first.returncode == 0, first.stderr
    told = first.stdout.splitlines()[-2:]
    assert math.isfinite(float(re.search(r"held-out loss ([\d.]+)", told[0])[1]))
    assert re.search(r"exam: [\d.]+%.*untrained: [\d.]+%", told[1])
    again = subprocess.run([*words, "1"], **how)  # its time is over, and nothing has changed
    assert again.stdout.splitlines()[-2:] == told
    shutil.copy(mini.__file__, tmp_path / "my_bert.py")  # a reader's program has a run of its own
    mine = subprocess.run([sys.executable, "my_bert.py", str(folder), "1"], **how)
    assert "run: my_bert-run-text" in mine.stdout, mine.stderr
    (tmp_path / "other").mkdir()  # another text does not go on with this one's run
    other = subprocess.run([*words[:-1], "other", "1"], **how)
    assert other.returncode == 1 and "too little text" in other.stderr
    for wrong in (["other", "0"], ["other", "ten"], ["other", "1", "more"], ["--help"]):
        assert "usage" in subprocess.run([*words[:-1], *wrong], **how).stderr, wrong


def test_too_little_text_is_said_in_one_line_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "note.txt").write_text("Too short.", encoding="utf-8")
    with pytest.raises(SystemExit, match="too little text"):
        mini.main(str(tmp_path), 1.0, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
