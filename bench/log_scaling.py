"""The committed losses of the scaling runs:
`python bench/log_scaling.py runs/s* > nbs/data/scaling_runs.json`. LAB.md has their commands."""

import json
import sys
from datetime import date
from pathlib import Path

from cramnb.options import Arch
from cramnb.run.plan import parameters_by_part
from cramnb.recipe import preset

VOCAB = 4096
NOISE = dict(hidden_size=128, num_hidden_layers=2, updates=183)  # the run of three seeds
DAY = Path(__file__).parent.parent / "nbs/data/cram_cpu.json"
HELD_BACK = 320  # the width that no fit sees


def read(folder: Path) -> dict:
    recipe, ended = (json.loads((folder / f"{n}.json").read_text()) for n in ("recipe", "pretrain"))
    arch = Arch(**recipe["arch"])
    return dict(
        hidden_size=arch.hidden_size,
        num_hidden_layers=arch.num_hidden_layers,
        layers=parameters_by_part(arch, VOCAB)["layers"],
        tokens=ended["tokens"],
        updates=ended["updates"],
        seed=recipe["seed"],
        heldout=round(ended["heldout"], 4),
        held_back=arch.hidden_size == HELD_BACK,
    )


def main(folders: list[Path]) -> dict:
    runs = sorted((read(f) for f in folders), key=lambda r: (r["layers"], r["tokens"], r["seed"]))
    same = [r for r in runs if all(r[k] == v for k, v in NOISE.items())]
    day = json.loads(DAY.read_text(encoding="utf-8"))  # a longer run, to try the law on
    tiny = parameters_by_part(preset("arch", "tiny"), VOCAB)["layers"]
    return dict(
        device="one core of two, 16-bit products",
        date=date.today().isoformat(),
        corpus=f"docstrings, vocabulary 4,096, unigram entropy {day['unigram']:.2f}",
        recipe="arch=tiny at other sizes, train=tiny, 32 rows an update",
        noise=dict(layers=same[0]["layers"], tokens=same[0]["tokens"]),
        three_minutes={k: day[k] for k in "commit date tokens tokens_per_second heldout".split()}
        | dict(layers=tiny),
        runs=runs,
    )


if __name__ == "__main__":
    result = main([Path(word) for word in sys.argv[1:] if Path(word, "pretrain.json").exists()])
    rows = ",\n  ".join(json.dumps(run) for run in result.pop("runs"))
    head = json.dumps(result, indent=1)[:-2]
    print(f'{head},\n "runs": [\n  {rows}\n ]\n}}')
