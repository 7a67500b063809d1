"""Tables and pictures of the runs that a study watched: patterns along training, product errors.

After arXiv:2604.02525: its Fig. 3, errors by pair of patterns and strategy, and Figs. 4 and 6, how
patterns form and stay.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import adahop_jax as ah
from adahop_jax._plan import PRODUCTS, TENSORS, Tensor
from benchmarks.report import markdown
from train.checkpoint import RunFolder
from train.log import read_metrics
from train.study_config import Study
from train.study_summary import ERRORS, read_summary
from train.study_watch import seen_along

NAMES: dict[Tensor, str] = {"x": "X", "w": "W", "dy": "dY"}
_COLORS = {ah.Pattern.NONE: "#dddddd", ah.Pattern.ROW: "tab:blue", ah.Pattern.COLUMN: "tab:orange"}
_NOT_COMPARED = ("full",)

Seen = Mapping[str, ah.Plan]
"""Where in the run ("plan" or steps done) -> patterns of every layer."""


def write(study: Study) -> None:
    """Writes patterns.md and its pictures beside the study, of the watched runs that finished."""
    sections = []
    for run in study.watched.runs:
        folder = study.folder(run)
        if read_summary(folder) is not None and (folder / "plan.json").exists():
            sections.append(_section(study, run, folder))
    if sections:
        text = "# Patterns along training\n\n" + "\n\n".join(sections) + "\n"
        (study.file.parent / "patterns.md").write_text(text)


def _section(study: Study, run: str, folder: Path) -> str:
    plan = ah.Plan.load(folder / "plan.json")
    along = seen_along(read_metrics(RunFolder(folder).metrics_file), dict(plan))
    seen = {"plan": plan, **{f"{step:,}": found for step, found in along.items()}}
    beside = study.file.parent
    draw_patterns(seen).savefig(beside / f"patterns-{run}.png", dpi=100)
    draw_shares(seen).savefig(beside / f"shares-{run}.png", dpi=100)
    parts = [
        f"## {run}",
        "Share of layers by pattern: in the plan, that is in the calibrating steps, and after so "
        "many steps.",
        shares_table(seen),
        "Share of labels that are the plan's:",
        stability_table(seen),
        f"![patterns of every layer](patterns-{run}.png)",
        f"![shares of patterns](shares-{run}.png)",
    ]
    if (folder / ERRORS).exists():
        measured = json.loads((folder / ERRORS).read_text())
        draw_errors(measured).savefig(beside / f"errors-{run}.png", dpi=100)
        parts += [
            "Relative error of products by pair of patterns, on this run's tensors at its end "
            "(mean over layers):",
            *(f"{name}:\n\n{errors_table(measured, name)}" for name in PRODUCTS),
            f"![errors by pair and strategy](errors-{run}.png)",
        ]
    return "\n\n".join(parts)


def shares(plan: ah.Plan, tensor: Tensor) -> dict[ah.Pattern, float]:
    """Returns the share of the plan's layers that show each pattern in a tensor."""
    found = Counter(_pattern(layer, tensor) for _, layer in plan)
    return {pattern: found[pattern] / found.total() for pattern in ah.Pattern}


def agreement(plan: ah.Plan, other: ah.Plan, tensor: Tensor) -> float:
    """Returns the share of layers whose pattern in a tensor is the same in both."""
    return statistics.fmean(
        _pattern(layer, tensor) == _pattern(other[path], tensor) for path, layer in plan
    )


def _pattern(layer: ah.LayerPlan, tensor: Tensor) -> ah.Pattern:
    assert layer.patterns is not None
    pattern: ah.Pattern = getattr(layer.patterns, tensor)
    return pattern


def shares_table(seen: Seen) -> str:
    """Returns the shares of patterns of each tensor, a column for each place of the run."""
    body = [
        [
            f"{NAMES[tensor]} {pattern}",
            *(f"{shares(at, tensor)[pattern]:.0%}" for at in seen.values()),
        ]
        for tensor in TENSORS
        for pattern in ah.Pattern
    ]
    return markdown(["", *seen], body)


def stability_table(seen: Seen) -> str:
    """Returns how many labels are the plan's, a column for each place of the run."""
    plan, later = seen["plan"], {name: at for name, at in seen.items() if name != "plan"}
    body = [
        [NAMES[tensor], *(f"{agreement(plan, at, tensor):.0%}" for at in later.values())]
        for tensor in TENSORS
    ]
    return markdown(["", *later], body)


def errors_table(measured: Sequence[Mapping[str, Any]], product: str) -> str:
    """Returns a product's errors: a row for each pair of patterns, a column for each strategy."""
    found = errors_by_pair(measured, product)
    strategies = list(dict.fromkeys(name for errors in found.values() for name in errors))
    body = [
        [
            pair,
            str(max(len(errors) for errors in by_strategy.values())),
            *(_mean(by_strategy.get(name, ())) for name in strategies),
        ]
        for pair, by_strategy in found.items()
    ]
    return markdown(["pair", "layers", *strategies], body)


def _mean(errors: Sequence[float]) -> str:
    return f"{statistics.fmean(errors):.4f}" if errors else "-"


def errors_by_pair(
    measured: Sequence[Mapping[str, Any]], product: str
) -> dict[str, dict[str, list[float]]]:
    """Returns {pair: {strategy: errors of the layers}} of a product, the frequent pairs first."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in measured:
        if row["product"] == product and row["strategy"] not in _NOT_COMPARED:
            by_strategy = found.setdefault(row["pair"], {})
            by_strategy.setdefault(row["strategy"], []).append(row["error"])
    return dict(sorted(found.items(), key=lambda item: -len(next(iter(item[1].values())))))


def draw_patterns(seen: Seen) -> Figure:
    """Draws the pattern of every layer (rows) along the run (columns), a panel for each tensor."""
    paths = seen["plan"].paths
    figure = Figure(figsize=(4 + 0.8 * len(seen), 1.5 + 0.16 * len(paths)), layout="constrained")
    order = list(_COLORS)
    for axes, tensor in zip(figure.subplots(1, len(TENSORS), sharey=True), TENSORS, strict=True):
        codes = [
            [order.index(_pattern(at[path], tensor)) for at in seen.values()] for path in paths
        ]
        colors = ListedColormap(list(_COLORS.values()))
        axes.imshow(codes, cmap=colors, vmin=-0.5, vmax=len(order) - 0.5, aspect="auto")
        axes.set_xticks(range(len(seen)), list(seen), rotation=90, fontsize=7)
        axes.set_yticks(range(len(paths)), list(paths), fontsize=6)
        axes.set(title=NAMES[tensor], xlabel="steps")
    figure.legend(
        handles=[Patch(color=color, label=str(pattern)) for pattern, color in _COLORS.items()],
        loc="outside right upper",
    )
    return figure


def draw_shares(seen: Seen) -> Figure:
    """Draws shares of patterns along the run, and how many labels are the plan's."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, len(TENSORS), sharey=True)
    for axes, tensor in zip(panels, TENSORS, strict=True):
        bottom = [0.0] * len(seen)
        for pattern, color in _COLORS.items():
            heights = [shares(at, tensor)[pattern] for at in seen.values()]
            axes.bar(list(seen), heights, bottom=bottom, color=color, label=str(pattern))
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        same = [agreement(seen["plan"], at, tensor) for at in seen.values()]
        axes.plot(list(seen), same, "k.-", label="the plan's")
        axes.set(title=NAMES[tensor], xlabel="steps")
        axes.tick_params("x", rotation=90)
    panels[0].set_ylabel("share of layers")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def draw_errors(measured: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws mean errors by pair of patterns and strategy, a panel for each product."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    strategies = [
        name
        for name in dict.fromkeys(row["strategy"] for row in measured)
        if name not in _NOT_COMPARED
    ]
    panels = figure.subplots(1, len(PRODUCTS), sharey=True)
    for axes, product in zip(panels, PRODUCTS, strict=True):
        found = errors_by_pair(measured, product)
        here = [name for name in strategies if any(name in errors for errors in found.values())]
        width = 0.8 / len(here)
        for i, name in enumerate(here):
            at = [(x, errors[name]) for x, errors in enumerate(found.values()) if name in errors]
            places = [x + (i - (len(here) - 1) / 2) * width for x, _ in at]
            means = [statistics.fmean(errors) for _, errors in at]
            axes.bar(places, means, width, color=f"C{strategies.index(name)}")
        axes.set_xticks(range(len(found)), list(found), rotation=30, ha="right", fontsize=8)
        axes.set(title=product)
    panels[0].set_ylabel("relative error of the product")
    figure.legend(
        handles=[Patch(color=f"C{i}", label=name) for i, name in enumerate(strategies)],
        loc="outside right upper",
    )
    return figure
