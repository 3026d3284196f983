"""Hostile and damaged input, one behaviour a test: a line and exit code 2, nothing run, nothing
left behind."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import cramnb

from cramnb.cli import main

MODEL = [
    "arch.hidden_size=16",
    "arch.num_attention_heads=2",
    "arch.intermediate_size=32",
    "arch.num_hidden_layers=2",
]
WORDS = [
    *MODEL,
    "data=files",
    "data.files=docs.jsonl",
    "data.vocab_size=800",
    "data.heldout=0.2",
    "data.deduplicate=False",
    "train.batch_size=4",
    "train.progress=updates",
    "train.max_updates=12",
    "train.eval_rows=8",
    "impl.save_every=1e-9",
    "impl.keep_checkpoints=3",
    "eval.epochs=1",
    "eval.max_train_examples=32",
    "eval.tasks=acceptability",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory, texts):
    "A small scored run, made once; tests get copies."
    home = tmp_path_factory.mktemp("attacks")
    shutil.copy(texts, home / "docs.jsonl")
    here = os.getcwd()
    os.chdir(home)
    try:
        assert main(["cram", "name=base", *WORDS]) == 0
    finally:
        os.chdir(here)
    return home


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    "A copy of the run that may be spoilt, as the working directory."
    shutil.copytree(made, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.delenv("CRAMNB_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


def told(capsys, *words: str) -> str:
    """Run a command that must fail: exit code 2, one line at the end, no traceback. Returns the
    line."""
    capsys.readouterr()
    code = main(list(words))
    err = capsys.readouterr().err
    line = err.splitlines()[-1] if err else ""
    assert code == 2 and line.startswith("cramnb: ") and "Traceback" not in err, (code, err)
    return line


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.name.endswith(".lock")}


def edit(path: Path, **change):
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize("verb", ["probe", "eval", "publish"])  # 1
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_a_model_folder_never_runs(home, capsys, monkeypatch, verb, file):
    model = home / "runs/base/model"
    (model / "evil.py").write_text(
        f"open({str(home / 'ran')!r}, 'w').write('yes')\nclass C: pass\n"
    )
    edit(
        model / file,
        auto_map={
            "AutoConfig": "evil.C",
            "AutoTokenizer": ["evil.C", "evil.C"],
            "AutoModelForMaskedLM": "evil.C",
            "AutoModelForSequenceClassification": "evil.C",
        },
        model_type="theirs",
        tokenizer_class="Theirs",
    )
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    assert main([verb, "name=base", *(WORDS if verb == "eval" else [])]) in (0, 2)
    assert not (home / "ran").exists()
    for p in home.rglob("evil.py"):
        assert p.parent == model, "code was copied"


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit on file sizes here")  # 2
def test_a_full_disk_at_the_end_of_training_is_one_line_and_the_run_goes_on(home):
    def small():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "cramnb", "pretrain", "name=full", *WORDS]
    full = subprocess.run(
        words, cwd=home, env=env, text=True, capture_output=True, preexec_fn=small
    )
    assert full.returncode == 2 and "The disk is full" in full.stderr.splitlines()[-1], full.stderr
    assert "Traceback" not in full.stderr and not (home / "runs/full/pretrain.json").exists()
    assert not [
        p for p in (home / "runs/full").rglob("*") if ".tmp" in p.name or ".partial" in p.name
    ]
    assert subprocess.run(words, cwd=home, env=env, capture_output=True).returncode == 0


def spoilt(model: Path, how: str):
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if how == "gone":
        weights.unlink()
    if how == "cut":
        weights.write_bytes(data[: len(data) // 2])
    if how == "noise":
        weights.write_bytes(os.urandom(len(data)))
    if how == "nan":
        from safetensors.numpy import load_file, save_file

        tensors = load_file(weights)
        for t in tensors.values():
            t[...] = float("nan")
        save_file(tensors, weights, metadata={"format": "pt"})
    if how == "tokenizer":
        (model / "tokenizer.json").write_text("")


@pytest.mark.parametrize("how", ["gone", "cut", "noise", "nan", "tokenizer"])  # 3
def test_publish_writes_nothing_it_could_not_load(home, capsys, how):
    spoilt(home / "runs/base/model", how)
    before = files(home)
    told(capsys, "publish", "name=base")
    assert files(home) == before


def test_publish_writes_only_what_it_has_loaded(home):  # 3
    model = home / "runs/base/model"
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    (model / "extra.py").write_text("1")
    before = files(home)
    assert main(["publish", "name=base"]) == 0
    new = {Path(p).name for p in files(home) - before}
    assert "model.safetensors" in new and not new & {"pytorch_model.bin", "extra.py"}


@pytest.mark.parametrize("verb", ["probe", "eval"])  # 4
def test_pickles_are_refused(home, capsys, verb):
    import torch
    from safetensors.torch import load_file

    model = home / "runs/base/model"
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    told(capsys, verb, "name=base", *(WORDS if verb == "eval" else []))


def texts_for_numbers(value):
    if isinstance(value, dict):
        return {k: texts_for_numbers(v) for k, v in value.items()}
    return "many" if type(value) in (int, float) else value


DAMAGE = {  # what becomes of a JSON object
    "null": dict.fromkeys,
    "texts": texts_for_numbers,
    "missing": lambda value: dict(list(value.items())[1:]),
    "unknown": lambda value: value | {"keep_rows": 1},
    "list": lambda value: [value],
    "cut": None,
    "bytes": None,
    "folder": None,
    "pipe": None,
}
AGAIN, EVAL, PUBLISH = "pretrain name=base", "eval name=base", "publish name=base"
READERS = {  # a file of a run, and the commands that read it
    "corpora/*/card.json": ("data", "pretrain name=two", EVAL),
    "corpora/*/tokenizer/tokenizer.json": ("pretrain name=two",),
    "corpora/*/tokenizer/tokenizer_config.json": ("pretrain name=two",),
    "runs/base/recipe.json": (AGAIN, EVAL, "runs"),
    "runs/base/checkpoints/*/state.json": (AGAIN,),
    "runs/base/pretrain.json": ("runs", AGAIN, EVAL, PUBLISH),
    "runs/base/metrics.jsonl": ("runs", "plot base", AGAIN),
    "runs/base/glue.json": ("runs", PUBLISH),
    "runs/base/model/config.json": ("probe name=base", PUBLISH),
    "runs/base/model/tokenizer.json": ("probe name=base",),
    "runs/base/eval/*/*.seed0.json": (EVAL,),
}


def damage(path: Path, how: str):
    "Spoil a file as a disk, a hand or another version would."
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how in ("cut", "bytes"):
        path.write_bytes(content[:20] if how == "cut" else b"\xff\x00\xfe")
    else:
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        path.write_text("\n".join(json.dumps(DAMAGE[how](json.loads(line))) for line in lines))


@pytest.mark.parametrize("how", DAMAGE)  # 5
@pytest.mark.parametrize("pattern", READERS)
def test_a_damaged_file_is_one_line(home, capsys, pattern, how):
    spoilt = list(home.glob(pattern))
    assert spoilt, pattern
    for path in spoilt:
        damage(path, how)
    if "checkpoints" in pattern:  # a finished run looks at none
        (home / "runs/base/pretrain.json").unlink()
    for command in READERS[pattern]:
        words = command.split()
        code = main([*words, *(WORDS if words[0] in ("data", "pretrain", "eval") else [])])
        told = capsys.readouterr().err.splitlines()
        ours = [line for line in told if line.startswith("cramnb: ")]
        assert code == 0 and not ours or code == 2 and ours == told[-1:], (command, told)
        whose = "corpora" in pattern or "checkpoints" in pattern  # built by us, found damaged
        if how in ("folder", "pipe") and not whose:  # no reason to throw a run away
            assert not re.search("[Dd]elete|fresh=True|damaged", "".join(ours)), (command, ours)


def test_a_recipe_of_another_version_is_not_called_damaged(home, capsys):
    path = home / "runs/base/recipe.json"
    recipe = json.loads(path.read_text())
    recipe["data"]["keep_rows"] = 4
    path.write_text(json.dumps(recipe))
    line = told(capsys, "pretrain", "name=base", *WORDS)
    assert "another version" in line and "data.keep_rows" in line
    assert "damaged" not in line and "fresh" not in line


@pytest.mark.parametrize("how", ["noise", "zeros", "bit", "card"])  # 6
def test_damaged_rows_are_noticed(home, capsys, how):
    rows = max(home.glob("corpora/*/*.arrow"), key=lambda p: p.stat().st_size)
    data = bytearray(rows.read_bytes())
    data = dict(noise=os.urandom(len(data)), zeros=bytes(len(data))).get(how, data)
    if how == "bit":
        data[len(data) // 2] ^= 1
    if how == "card":  # it says nothing about the files
        edit(rows.parent / "card.json", checksums={}, bytes={})
    rows.write_bytes(bytes(data))
    if how != "bit":
        assert rows.parent.name in told(capsys, "pretrain", "name=two", *WORDS)
    assert rows.parent.name in told(capsys, "data", *WORDS)  # it compares checksums, too


@pytest.mark.parametrize(
    "word",
    [  # 7, 16, 17
        "seed=4294967296",
        "impl.threads=100000000000",
        "arch.hidden_dropout_prob=2",
        "arch.position_embedding_type=rotary arch.hidden_size=6 arch.num_attention_heads=2",
        "arch.position_embedding_type=rotary arch.hidden_size=2 arch.num_attention_heads=2",
        "data.seq_length=1 data.include_cls=true",
        "impl.microbatch_size=²",
        "impl.microbatch_size=-1",
        "train.dropout=1_000",
        "train.dropout=1",
        "seed=${train.batch_size}",
        "name=${seed}",
        "data.hub_name=x",
        "train.lr=1e300",
        "train.lr=1e400",
        "train.betas=[0.9]",
        "train.betas=[0.9,1.5]",
        "eval.lr=1e300",
        "eval.warmup=1",
        "train.batch_size=1e300",
        "data.vocab_size=0",
        "name=" + "n" * 300,
        "name=a\tb",
        "eval.betas=[]",
        "eval.sweep_lr=[-1]",
        "data.heldout=1",
        "train.muon_lr=0",
    ],
)
def test_values_that_would_crash_later_are_refused_at_once(word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(__file__, "docs.jsonl")
    told(capsys, "pretrain", *WORDS, *word.split(" "))
    assert files(tmp_path) == {"docs.jsonl"}


@pytest.mark.parametrize(
    "env",
    [
        dict(OMP_NUM_THREADS="4,2"),
        dict(OMP_NUM_THREADS="abc"),  # 8
        dict(RANK="x"),
        dict(WORLD_SIZE="x"),
        dict(RANK="x", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="h", MASTER_PORT="1"),
    ],
)
def test_the_environment_never_ends_in_a_traceback(env, home):
    shutil.rmtree(home / "corpora")
    done = cramnb("data", *WORDS, cwd=home, **env)
    assert "Traceback" not in done.stderr and done.returncode in (0, 2), done.stderr
    assert done.returncode == 0 or done.stderr.splitlines()[-1].startswith("cramnb: ")


def test_publish_writes_the_final_weights_of_a_run_and_no_others(home, capsys):  # 9
    shutil.copytree(home / "runs/base/model", home / "foreign/model")
    before = files(home / "foreign")
    for which in ("best", "untrained", "foreign/model"):
        assert main(["publish", "name=base", f"eval.checkpoint={which}"]) == 2
    assert files(home / "foreign") == before
    capsys.readouterr()
    told(capsys, "eval", "name=base", "eval.checkpoint=hf://./foreign/nothing", *WORDS)


@pytest.mark.parametrize(
    "change",
    [  # 10
        dict(architectures=-1),
        dict(pad_token_id=2.5),
        dict(norm_eps="../../etc/passwd"),
        dict(norm_eps=-1),
        dict(hidden_dropout_prob={}),
        dict(hidden_size="768"),
        dict(num_attention_heads=0),
        dict(vocab_size=10**12),
        dict(num_hidden_layers=None),
        dict(hidden_act=["gelu"]),
        dict(arch=[]),
        dict(model_type=3),
    ],
)
def test_convert_refuses_a_damaged_configuration(home, capsys, change):
    edit(home / "runs/base/model/config.json", **change)
    before = files(home)
    code = main(["convert", "runs/base/model", "converted"])
    err = capsys.readouterr().err
    if code:
        assert code == 2 and err.splitlines()[-1].startswith("cramnb: ") and files(home) == before
    else:
        from transformers import AutoModelForMaskedLM

        AutoModelForMaskedLM.from_pretrained("converted")
        kept = json.loads((home / "converted/config.json").read_text())
        assert all(kept.get(k) != v for k, v in change.items())


@pytest.mark.parametrize(
    "rows",
    [  # 11
        b"PAR1 not a table PAR1",
        b'{"sentence": "a", "label": ' + b"1" + b"0" * 400 + b"}\n",
        b"[" * 100_000,
        b'{"sentence": {"a": {}}, "label": []}\n',
        b"\xff\xfe\x00\x00",
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "tsv"])
def test_hostile_exams_are_one_line(home, capsys, rows, suffix):
    (home / "glue/cola").mkdir(parents=True)
    for part in ("train", "validation"):
        (home / f"glue/cola/{part}.{suffix}").write_bytes(rows)
    told(capsys, "eval", "name=base", *WORDS, "eval.tasks=cola", "eval.glue_dir=glue")


@pytest.mark.parametrize(
    "when", ["cramnb.recipe", "numpy", "torch._C", "transformers", "cramnb.train.loop"]
)  # 12
def test_ctrl_c_while_modules_load_ends_with_one_line(when, home):
    run = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "cramnb", "pretrain", *WORDS],
        cwd=home,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seen = ""
    for line in run.stderr:
        seen = line.rpartition("|")[2].strip()
        if seen == when or seen.startswith(when + "."):
            break
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    text = [line for line in err.splitlines() if line and not line.startswith("import time:")]
    assert seen.startswith(when) and len(text) == 1 and text[0].startswith("Stopped"), err[-2000:]
    assert run.returncode in (0, 130)


def test_control_characters_and_markup_are_shown_not_obeyed(home, capsys):  # 13
    bad = "\x1b[31mred\x07 <script>alert(1)</script>\u202e"
    (home / "docs.jsonl").write_text(
        "".join(json.dumps({"text": f"{bad} number {n} of the list"}) + "\n" for n in range(400))
    )
    assert main(["data", *WORDS, "data.ascii_only=False", "data.vocab_size=200"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\x07" not in out + err and "\u202e" not in out + err
    for card in home.glob("corpora/*/README.md"):
        text = card.read_text(encoding="utf-8")
        assert "\x1b" not in text and "\x07" not in text and "<script>" not in text
    from cramnb.book.show import show_table

    assert "<script>" not in str(getattr(show_table([[bad]], ["a"]), "data", ""))


@pytest.mark.parametrize(
    "words",
    [  # 14
        ["pretrain", "data=files", "data.files=nowhere"],
        ["eval", "name=nobody"],
        ["eval", "eval.tasks=kola"],
        ["cram", "train.scheduler=triangel"],
        ["cram", "eval=GLUE_sane", "eval.glue_dir=nowhere"],
        ["probe", "name=nobody"],
        ["publish", "name=nobody"],
        ["convert", "nowhere", "target"],
        ["plot", "nobody"],
        ["data", "data=files", "data.files=nowhere"],
        ["pretrain", "impl.attn_implementation=flash_attention_2"],
    ],
)
def test_a_failed_start_leaves_nothing(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CRAMNB_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told(capsys, *words)
    assert not list(tmp_path.iterdir())


def test_a_failed_eval_leaves_nothing_in_the_run(home, capsys):  # 14
    spoilt(home / "runs/base/model", "cut")
    before = files(home / "runs/base")
    told(capsys, "eval", "name=base", *WORDS, "eval.lr=1e-4")
    assert files(home / "runs/base") == before


def test_a_folder_in_place_of_a_checkpoint_file_falls_back_to_the_older_one(home, capsys):  # 15
    run = home / "runs/base"
    there = sorted(
        p for p in (run / "checkpoints").iterdir() if p.is_dir() and p.name.startswith("update_")
    )
    assert len(there) >= 2
    spoil = next(p for p in there[-1].iterdir() if p.suffix == ".safetensors")
    spoil.unlink()
    spoil.mkdir()
    for name in ("pretrain.json", "report.md"):
        (run / name).unlink()
    assert main(["pretrain", "name=base", *WORDS]) == 0
    out = capsys.readouterr().out
    assert there[-1].name in out and "Going on at" in out
