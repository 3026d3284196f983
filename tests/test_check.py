"""The checker finds what does not work in a reader's own file, and says it in one line."""

import ast
import inspect
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from cramnb import mini
from cramnb.book.check import asked, check, judge
from cramnb.book.numbers import NUMBERS, number
from cramnb.cli import main

NAMES = [name for names in asked().values() for name in names]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(mini, name))]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(mini, name))]
SOURCE = Path(mini.__file__).read_text(encoding="utf-8")


def told(name: str, definition) -> str:
    "What the judge says of mini with one definition in place of its own."
    my = {n: getattr(mini, n) for n in NAMES} | {name: definition}
    return judge(SimpleNamespace(**my), name)


def spoilt(value, how):
    "The same with numbers how(x) in place of x."
    if isinstance(value, torch.Tensor | np.ndarray | float | int):
        return how(value)
    if isinstance(value, tuple | list):
        return type(value)(spoilt(x, how) for x in value)
    return value[:0] if isinstance(value, str) else None


def zeros(x):
    return x * 0


def nan(x):
    floating = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x * math.nan if floating or isinstance(x, float) else x * 0


def nothing(x):
    return None


def ignoring(function, parameter):
    "It takes the first value that it ever saw, or the default, whatever it is given."
    signature, seen = inspect.signature(function), {}
    default = signature.parameters[parameter].default

    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        value = bound.arguments[parameter] if default is inspect.Parameter.empty else default
        bound.arguments[parameter] = seen.setdefault(parameter, value)
        return function(*bound.args, **bound.kwargs)

    return call


# --- one name wrong


@pytest.mark.parametrize("name", NAMES)
def test_mini_is_as_asked(name):
    assert told(name, getattr(mini, name)) == ""


IN_PLACE = ("adamw_step", "muon_step", "step")  # they return nothing
SLOW = ("train", "save", "export", "main", "read_documents")
VALUES = [n for n in FUNCTIONS if n not in (*IN_PLACE, *SLOW)]


@pytest.mark.parametrize("name", VALUES)
def test_zeros_nan_and_nothing_are_found(name):
    function = getattr(mini, name)
    for how in (zeros, nan, nothing):
        assert told(name, lambda *a, **k: spoilt(function(*a, **k), how)), how.__name__


@pytest.mark.parametrize("name", [*IN_PLACE, "train", "save", "export"])
def test_what_does_nothing_is_found(name):
    assert told(name, lambda *a, **k: []).startswith(name)


ARGUMENTS = [
    (name, parameter)
    for name in FUNCTIONS
    for parameter in inspect.signature(getattr(mini, name)).parameters
    if name not in ("read_documents", "train", "prepare", "main", "mean_loss")  # these are slow
]


@pytest.mark.parametrize("name, parameter", [*ARGUMENTS, ("train", "passes"), ("train", "bf16")])
def test_an_ignored_argument_is_found(name, parameter):
    assert told(name, ignoring(getattr(mini, name), parameter))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("how", [zeros, nan, torch.Tensor.detach])
def test_a_module_without_values_or_gradients_is_found(name, how):
    class Wrong(getattr(mini, name)):
        def forward(self, *inputs):
            return how(super().forward(*inputs))

    assert told(name, Wrong)


def interleaved(x):
    T, K = x.shape[-2:]
    angle = torch.arange(T)[:, None] * 10_000.0 ** (-torch.arange(0.0, K, 2) / K)
    a, b = x[..., ::2], x[..., 1::2]
    parts = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.stack(parts, dim=-1).flatten(-2)


def clockwise(x):
    mirror = torch.tensor([1.0, -1.0]).repeat_interleave(x.shape[-1] // 2)
    return mirror * mini.turned(mirror * x)


def with_special_letters(documents, vocab_size=4096):
    tokenizer = mini.learn_tokenizer(documents, vocab_size)
    tokenizer.add_special_tokens([*mini.SPECIAL, "a", "##e"])
    return tokenizer


def not_guarded(g):
    return mini.orthogonal(g) + 0 / g.norm()


def without_end(model, tokenizer, text, most=5):
    mask = mini.SPECIAL.index("[MASK]")
    parts = [tokenizer.encode(part).ids + [mask] for part in text.split("[MASK]")]
    ids = torch.tensor([sum(parts, [])[:-1]])
    p = model(ids, (ids == mask).nonzero()[None, :, 1])[0].softmax(-1)
    return [[(tokenizer.id_to_token(int(row.argmax())), row.max().item())] for row in p]


def without_the_last(rows, vocab_size, generator, probability=0.25):
    hidden = torch.cat([rows[:, :-1], torch.zeros_like(rows[:, :1])], dim=1)
    ids, labels, columns = mini.mask_rows(hidden, vocab_size, generator, probability)
    ids[:, -1] = rows[:, -1]
    return ids, labels, columns


def decaying(model, states, factor=1.0):
    mini.step(model, states, factor)
    for p in model.parameters():
        p.data *= 1 - 0.016 * 0.01


def counting(x, warmup=0.02, cooldown=0.6, calls=[]):  # noqa: B006 - the mistake itself
    calls.append(x)
    return max(0.0, 1 - len(calls) / 1000)


def without_random_state(path, model):
    before = torch.get_rng_state()
    run = mini.load(path, model)
    torch.set_rng_state(before)
    return run


class Sharing(mini.Classifier):
    def __init__(self, model, classes=2):
        super().__init__(model, classes)
        self.encoder = model.model


def padding(ids, size, draw):
    order = draw.permutation(len(ids)).tolist()
    return [order[i : i + size] for i in range(0, len(order), size)]


def with_moving_marks(documents, most=1000, seed=0):
    draw = np.random.default_rng(seed)
    moved = lambda text: " ".join(draw.permutation(text.split()))  # noqa: E731
    sides = mini.make_exam(documents, most, seed)
    return [[(t, 1) if y else (moved(t), 0) for t, y in side] for side in sides]


def head_alone(model, ids, labels, seed=0, epochs=3, lr=1e-3):
    student = mini.fine_tune(model, ids, labels, seed, epochs, lr)
    student.encoder.load_state_dict(model.model.state_dict())
    return student


def best_of_all(model, tokenizer, exam, seeds=3):
    _, lowest, highest = mini.score(model, tokenizer, exam, seeds)
    return highest, lowest, highest


def written_over(path, model, run):
    with patch.object(Path, "with_suffix", lambda path, suffix: path):
        mini.save(path, model, run)


class Untied(mini.MaskedLM):
    def __init__(self, V, **sizes):
        super().__init__(V, **sizes)
        self.decoder.weight = torch.nn.Parameter(self.decoder.weight.detach().clone())


@pytest.mark.parametrize(
    "name, wrong, why",
    [
        ("learn_tokenizer", with_special_letters, "fresh"),
        ("turned", interleaved, "neighbours"),
        ("turned", clockwise, "other way"),
        ("orthogonal", not_guarded, "nan"),
        ("mask_rows", without_the_last, "never hides column 39"),
        ("step", decaying, "decays"),
        ("height", counting, "again"),
        ("load", without_random_state, "random"),
        ("save", written_over, "spoils"),
        ("MaskedLM", Untied, "table"),
        ("Classifier", Sharing, "copy"),
        ("same_lengths", padding, "unequal"),
        ("make_exam", with_moving_marks, "mark"),
        ("fine_tune", head_alone, ""),
        ("score", best_of_all, "median"),
        ("fill", without_end, "[SEP]"),
    ],
)
def test_a_classic_mistake_is_named(name, wrong, why):
    sentence = told(name, wrong)
    assert name in sentence and why in sentence, sentence


def test_an_exam_may_be_judged_by_any_third_of_the_documents():
    def other_side(folder, where):
        *rows, (learn, judge) = mini.prepare(folder, where)
        return *rows, (judge, learn)

    assert told("prepare", other_side) == ""


# --- a whole file, in its own process


@pytest.fixture
def mine(tmp_path, monkeypatch):
    "A folder to work in, and a way to write my_bert.py there."
    monkeypatch.chdir(tmp_path)
    return lambda text: Path("my_bert.py").write_text(text, encoding="utf-8")


def part(*names) -> str:
    "These definitions of mini, with its imports."
    tree = ast.parse(SOURCE)
    kept = [
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or getattr(node, "name", "") in names
        or isinstance(node, ast.Assign)
        and node.targets[0].id in names
    ]
    return ast.unparse(ast.Module(kept, []))


def test_mini_itself_passes_and_leaves_no_foreign_lines(mine, capfd):
    noise = (
        "import os, sys, warnings\nprint('noise')\nwarnings.warn('noise')\nos.system('echo noise')"
    )
    mine(SOURCE + f"\n{noise}\nprint('noise', file=sys.stderr)\n")
    assert main(["check", "my_bert.py"]) == 0
    out, err = capfd.readouterr()
    want = [f"{chapter}: {len(names)} of {len(names)}" for chapter, names in asked().items()]
    assert out.splitlines() == want and not err
    assert os.listdir() == ["my_bert.py"]


def test_missing_misspelt_broken_and_endless_are_one_line_each(mine):
    text = part("SPECIAL", "pack_rows", "rows_at", "generator_at", "batch_at")
    text = text.replace("def rows_at(", "def row_at(").replace("rows_at(number", "row_at(number")
    text += "\ndef attend(q, k, v):\n    while True: pass\ndef turned(x):\n    return x / 0 / no\n"
    mine(text + "class Block:\n    def __init__(self, *a):\n        raise SystemExit\n")
    lines, began = [], time.monotonic()
    assert check("my_bert.py", limit=3, say=lines.append) is False
    assert time.monotonic() - began < 60
    told = {line[:2]: line for line in lines}
    assert len(lines) == 6, "no chapter after the last one that is begun"
    assert "row_at" in told["03"] and "1 of 2" in told["03"]
    assert "mask_rows is missing" in told["04"] and "batch_at" not in told["04"]
    assert "attend" in told["05"] and "3 s" in told["05"]
    assert "Block: SystemExit in line" in told["06"]


@pytest.mark.parametrize("wrong", ["step, which is wrong", "step, which is missing"])
def test_a_definition_is_not_blamed_for_another_that_it_uses(wrong, mine):
    names = ["train"] if "missing" in wrong else ["train", "step"]
    mine(part(*names).replace("0.02 *", "0.03 *"))
    lines = []
    assert check("my_bert.py", say=lines.append) is False
    told = {line[:2]: line for line in lines}
    assert "step" in told["08"] and "1 of 4. fixed_batches is missing" in told["10"]


def test_a_new_file_has_every_name_and_is_never_written_over(mine, capsys):
    for words in (["--new", "my_bert.py"], ["new=other.py"]):
        assert main(["check", *words]) == 0
    text = Path("my_bert.py").read_text(encoding="utf-8")
    assert text == Path("other.py").read_text(encoding="utf-8")
    space = {}
    exec(compile(text, "my_bert.py", "exec"), space)
    for name in FUNCTIONS:
        same = inspect.signature(getattr(mini, name)) == inspect.signature(space[name])
        assert same and space[name].__doc__ == getattr(mini, name).__doc__, name
    assert set(NAMES) <= set(space)
    assert main(["check", "my_bert.py"]) == 1
    mine("mine")
    assert main(["check", "--new", "my_bert.py"]) == 2
    assert Path("my_bert.py").read_text() == "mine"


def test_a_number_of_too_little_text_is_a_sentence(tmp_path):
    (tmp_path / "note.txt").write_text("Too short.")
    for lesson in NUMBERS:
        assert number(SimpleNamespace(), lesson, str(tmp_path))  # nothing is raised
    assert "too little text" in number(SimpleNamespace(), 15, str(tmp_path))


def test_a_folder_without_texts_is_told_before_anything_is_judged(mine, tmp_path, capsys):
    mine("SPECIAL = 1")
    for folder in ("nowhere", str(tmp_path / "my_bert.py")):
        assert main(["check", "my_bert.py", f"text={folder}"]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "no such file"),
        ("def f(:", "line 1"),
        ("\0", "Python"),
        ("SPECIAL = 1\nimport nowhere_at_all", "line 2"),
        ("import os\nSPECIAL = os._exit(3)", "ends"),
        ("import os\nSPECIAL = [os.write(n, b'[]\\n') for n in (1, 2, 3)]", "ends"),
        ("-" * 100_000 + "1", "not Python"),
    ],
)
def test_what_is_no_program_is_a_mistake(text, why, mine, capsys):
    if text is not None:
        mine(text)
    assert main(["check", "my_bert.py"]) == 2
    err = capsys.readouterr().err
    assert why in err and err.count("\n") == 1, err
