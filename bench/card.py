"""The picture of a shared link: the promise, and the loss curve of the committed run."""

import json

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"


def main():
    run = json.loads((ROOT / "nbs/data/cram_cpu.json").read_text(encoding="utf-8"))
    seconds, _, losses = zip(*run["curve"])
    figure, axes = plt.subplots(figsize=(12, 6.3), dpi=100, facecolor="white")
    axes.set_position([0.08, 0.11, 0.86, 0.47])
    axes.plot([s / 60 for s in seconds], losses, color=BLUE, lw=3)
    axes.axhline(run["unigram"], color=ORANGE, lw=2, ls="--")
    axes.text(3, run["unigram"] + 0.1, "counting words", color=ORANGE, ha="right", fontsize=15)
    axes.set_xlabel(f"minutes on {run['device']}", fontsize=15, color=GREY)
    axes.set_ylabel("loss, nats", fontsize=15, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=13, colors=GREY)
    figure.text(0.05, 0.83, "cramnb", fontsize=54, weight="bold", color=BLUE)
    figure.text(
        0.05, 0.75, "Train a BERT from scratch on one graphics card in one day,", fontsize=23
    )
    figure.text(0.05, 0.68, "and understand every line of it", fontsize=23)
    figure.savefig(ROOT / "nbs/images/card.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
