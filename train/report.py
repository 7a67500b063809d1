"""Tables before training, and the run folder's pictures: loss curve and plan map."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import adahop_jax as ah
from adahop_jax._plan import PRODUCTS, TENSORS
from train.log import read_metrics


def plan_tables(plan: ah.Plan, layers: Sequence[ah.LayerInfo]) -> str:
    """Returns what the plan does with the model, as text.

    How many layers show which pattern, where the plan was calibrated; how many run which strategy
    in each product, and for which pair of patterns.
    """
    explanation = ah.explain(plan, layers)
    tables = []
    if all(plan[layer.path].patterns is not None for layer in layers):
        seen = (
            (_kind(x.path), t, getattr(plan[x.path].patterns, t)) for x in layers for t in TENSORS
        )
        tables.append(_count_table("layers by pattern", ("linear", *TENSORS), seen))
    runs = ((row.strategy, row.product, row.why or "any pair") for row in explanation.rows)
    tables.append(_count_table("layers by strategy", ("strategy", *PRODUCTS), runs))
    return "\n\n".join(tables)


def draw_plan(plan: ah.Plan, layers: Sequence[ah.LayerInfo], file: Path) -> None:
    """Draws the plan map: a row for each layer, a column for each product, coloured by strategy."""
    strategies = [[plan[layer.path][product].strategy for product in PRODUCTS] for layer in layers]
    names = sorted({name for row in strategies for name in row})
    colors = [f"C{i % 10}" for i in range(len(names))]
    figure = Figure(figsize=(6, 1.5 + 0.2 * len(layers)), layout="constrained")
    axes = figure.subplots()
    codes = [[names.index(name) for name in row] for row in strategies]
    axes.imshow(codes, cmap=ListedColormap(colors), vmin=-0.5, vmax=len(names) - 0.5, aspect="auto")
    axes.set_xticks(range(len(PRODUCTS)), PRODUCTS)
    axes.set_yticks(range(len(layers)), [layer.path for layer in layers], fontsize=7)
    axes.legend(
        handles=[Patch(color=c, label=n) for c, n in zip(colors, names, strict=True)],
        bbox_to_anchor=(1.02, 1),
        loc="upper left",
    )
    figure.savefig(file, dpi=120)


def draw_loss(metrics_file: Path, file: Path, *, unigram: float) -> None:
    """Draws the training loss, its running mean and the held-out losses over the steps."""
    lines = read_metrics(metrics_file)
    trained = [(x["step"] + 1, x["loss"]) for x in lines if "loss" in x]
    steps, losses = np.array(trained or np.empty((0, 2))).T
    held = [x for x in lines if "heldout" in x]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training")
    window = max(1, len(losses) // 50)
    if trained:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color="tab:blue", label=f"mean of {window} steps")
    at = [x["step"] for x in held]
    axes.plot(at, [x["heldout"] for x in held], "o-", color="tab:red", label="held-out")
    in_full = [x["heldout_full"] for x in held]
    axes.plot(at, in_full, "x", color="black", label="held-out, nothing quantised")
    axes.axhline(unigram, color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(file, dpi=120)


def _kind(path: str) -> str:
    """The path without the block, as in "attn/query"."""
    return path.partition("/")[2]


def _count_table(title: str, head: Sequence[str], cells: Iterable[tuple[str, str, str]]) -> str:
    """Counts (row, column, value) triples: each cell reads "value count, value count"."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for row, column, value in cells:
        counts.setdefault((row, column), Counter())[value] += 1
    rows = dict.fromkeys(row for row, _ in counts)
    body = [
        (row, *(_show(counts.get((row, column), Counter())) for column in head[1:])) for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *body)
    )
    return "\n".join((title, *lines))


def _show(counts: Counter[str]) -> str:
    return ", ".join(f"{value} {count}" for value, count in counts.most_common()) or "-"
