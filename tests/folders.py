"""Folders of runs without a run, for tests that only look at them."""

from pathlib import Path

from cramnb.core import write_json, write_text
from cramnb.run.watch import Log


SUMMARY = dict(  # of pretrain.json
    dict.fromkeys("first_heldout loss heldout unigram seconds epochs flops".split(), 1.5),
    **dict.fromkeys("updates tokens skipped parameters".split(), 7),
    **dict.fromkeys("tflops peak_share memory_gb energy_kwh".split()),
    **dict.fromkeys("corpus torch model".split(), "x"),
    **dict(tokens_per_second=10.0, device="cpu", device_name="1 CPU thread"),
    way=dict(device="cpu"),
)
SCORES = dict(  # of glue.json
    dict(checkpoint="model", protocol={}, precision="float32", rules="within the rules"),
    **dict(mean=0.5, harmonic_mean=0.5, scores=[], remarks=[]),
)


def fake_run(base: Path, name: str, rows: int = 5, **files):
    folder = base / name
    folder.mkdir(parents=True)
    write_json(folder / "recipe.json", dict(train=dict(lr=1)))
    log = Log(folder / "metrics.jsonl")
    for u in range(1, rows + 1):
        log.write(
            dict(
                update=u,
                progress=u / 10,
                elapsed=60.0 * u,
                tokens=1000 * u,
                loss=7.0 - u / 10,
                tokens_per_second=10.0,
                **({"heldout": 6.5} if u == rows else {}),
            )
        )
    for k, v in files.items():
        if isinstance(v, str):
            write_text(folder / f"{k}.json", v)
        else:
            write_json(folder / f"{k}.json", dict(pretrain=SUMMARY, glue=SCORES)[k] | v)
    return folder
