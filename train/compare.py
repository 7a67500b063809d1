"""Compares finished runs, paired by seed: `python -m train.compare RUN...`.

Runs of one seed start from the same parameters and see the same data in the same order, so their
difference is the recipe's, and its spread over seeds is far smaller than that of the losses.
"""

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from train.checkpoint import RunFolder
from train.configs import RunConfig, UserError
from train.log import read_metrics
from train.recipes import RECIPES

_RECIPE_FIELDS = ("quant", "level", "fwd", "dy_rounding", "plan")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run ended with: held-out losses in nats per token, and the unigram entropy."""

    recipe: float
    full: float
    unigram: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Mean difference to another recipe over seeds, and its standard error (NaN for one seed)."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.error:.4f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code: 0, or 2 for runs that cannot be compared."""
    runs = tyro.cli(
        Annotated[tuple[Path, ...], tyro.conf.Positional], args=argv, prog="python -m train.compare"
    )
    try:
        print(table(read_runs(runs)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_runs(paths: Sequence[Path]) -> dict[str, dict[int, Outcome]]:
    """Returns {recipe: {seed: outcome}} of run folders.

    Raises:
      UserError: no runs, an unfinished one, two of one recipe and seed, or two that differ in more
        than recipe and seed.
    """
    runs: dict[str, dict[int, Outcome]] = {}
    first: tuple[Path, RunConfig] | None = None
    for path in paths:
        folder = RunFolder(path)
        config = folder.read_config()
        first = first or (path, config)
        if other := differences(first[1], config):
            raise UserError(
                f"runs {first[0]} and {path} differ in {', '.join(other)} besides recipe and seed; "
                "compare runs of one configuration"
            )
        end = outcomes(read_metrics(folder.metrics_file)).get(config.steps)
        if end is None:
            raise UserError(f"run {path} has not finished; continue it with --resume")
        seeds = runs.setdefault(recipe_name(config), {})
        if config.seed in seeds:
            raise UserError(f"run {path}: another run has its recipe and seed; leave one out")
        seeds[config.seed] = end
    if not runs:
        raise UserError("no runs given; name the folders of two or more finished runs")
    return runs


def outcomes(lines: Iterable[Mapping[str, Any]]) -> dict[int, Outcome]:
    """Returns the held-out losses of a run's metrics by the steps done before each evaluation."""
    return {
        line["step"]: Outcome(
            recipe=line["heldout"], full=line["heldout_full"], unigram=line["unigram"]
        )
        for line in lines
        if "heldout" in line
    }


def recipe_name(config: RunConfig) -> str:
    """A short name of the run's recipe."""
    name = config.quant
    if RECIPES[name].is_calibrated:
        name += f" level {config.level}"
    if config.fwd != "mxfp4":
        name += f", fwd {config.fwd}"
    if config.plan is not None:
        name += f", plan {config.plan}"
    return name if config.dy_rounding == "nearest" else f"{name}, dY {config.dy_rounding}"


def gap(
    runs: Mapping[int, Outcome], base: Mapping[int, Outcome], field: str, base_field: str
) -> Gap | None:
    """Mean of a recipe's loss less another's over the seeds that both ran; None without any."""
    seeds = sorted(runs.keys() & base.keys())
    if not seeds:
        return None
    gaps = [getattr(runs[seed], field) - getattr(base[seed], base_field) for seed in seeds]
    spread = statistics.stdev(gaps) if len(gaps) > 1 else math.nan
    return Gap(mean=statistics.fmean(gaps), error=spread / math.sqrt(len(gaps)))


def table(runs: Mapping[str, Mapping[int, Outcome]]) -> str:
    """Returns a Markdown table, and a line for every pair of recipes other than BF16."""
    base = runs.get("bf16", {})
    lines = [
        "| recipe | seeds | held-out loss | gap to bf16 | same weights, nothing quantised | gap to "
        "bf16 | unigram |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, outcomes in runs.items():
        cells = [name, str(len(outcomes))]
        for field in ("recipe", "full"):
            mean = statistics.fmean(getattr(outcome, field) for outcome in outcomes.values())
            found = gap(outcomes, base, field, "full")
            cells += [f"{mean:.4f}", "-" if name == "bf16" or found is None else str(found)]
        unigram = statistics.fmean(outcome.unigram for outcome in outcomes.values())
        lines.append("| " + " | ".join([*cells, f"{unigram:.4f}"]) + " |")
    others = [name for name in runs if name != "bf16"]
    for i, one in enumerate(others):
        for two in others[i + 1 :]:
            found = gap(runs[two], runs[one], "recipe", "recipe")
            if found is not None:
                lines.append(f"\n{two} less {one}: {found}")
    return "\n".join(lines)


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """Names the fields, besides recipe and seed, in which two runs differ."""
    return [
        field.name
        for field in dataclasses.fields(RunConfig)
        if field.name not in (*_RECIPE_FIELDS, "seed")
        and getattr(one, field.name) != getattr(other, field.name)
    ]


if __name__ == "__main__":
    sys.exit(main())
