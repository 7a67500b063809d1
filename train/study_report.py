"""A study's table and picture, of the summaries that are there: needs no GPU and no text.

Gaps are paired: for every seed the recipe's held-out loss less the base's, which started from the
same parameters and saw the same data in the same order. Their mean is shown with its standard error
over seeds. A recipe ranks behind another only if its gap is larger by more than twice the two
errors combined, the root of the sum of their squares.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import markdown
from train.checkpoint import RunFolder
from train.compare import Gap, Outcome, gap
from train.configs import UserError
from train.study_config import Study
from train.study_summary import read_summary

Outcomes = dict[int, Outcome]
"""Steps done -> held-out losses."""

_ALONE = " (one seed)"
MARK = "<!-- Below: written by `python -m train.study`. -->"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the runs of a recipe came to. Gaps are None where the base lacks the seeds.

    Attributes:
      recipe: its name.
      seeds: that finished.
      diverged: seeds whose loss did not stay finite.
      loss: held-out loss at the end, nats per token, mean over seeds; NaN if none finished.
      gap: to the base at the end, evaluated as trained.
      steady: the same, mean of the last evaluations.
      in_full: to the base at the end, same weights with nothing quantised.
      losses: held-out loss at every evaluation, by steps done, mean over seeds.
      along: gap at every evaluation, by steps done.
      summary: of the first seed that finished, for what does not depend on the seed.
      speed: tokens per second, median over seeds.
      share: of multiply-adds in BF16, mean over seeds.
    """

    recipe: str
    seeds: tuple[int, ...]
    diverged: tuple[int, ...]
    loss: float
    gap: Gap | None
    steady: Gap | None
    in_full: Gap | None
    losses: Mapping[int, float]
    along: Mapping[int, Gap]
    summary: Mapping[str, Any]
    speed: float | None
    share: float


def write(study: Study) -> None:
    """Writes README.md's table, keeping what stands above its mark, and gaps.png."""
    found = read_rows(study)
    folder = study.file.parent
    readme = folder / "README.md"
    text = readme.read_text() if readme.exists() else f"# {study.name}\n\n"
    above = text.partition(MARK)[0].rstrip()
    readme.write_text(f"{above}\n\n{MARK}\n\n{page(study, found)}")
    if any(row.seeds for row in found):
        draw(study, found).savefig(folder / "gaps.png", dpi=120)
    print(page(study, found))


def read_rows(study: Study) -> list[Row]:
    """Returns a row for every recipe with a run that ended, the smallest gap first.

    Raises:
      UserError: two runs were on different text.
    """
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    texts: dict[str, str] = {}
    for run in study.runs:
        summary = read_summary(study.folder(run.name))
        if summary is None:
            continue
        runs.setdefault(run.recipe, {})[run.seed] = summary
        if summary["diverged"] is None:
            texts[summary["data"]["fingerprint"]] = run.name
    if len(texts) > 1:
        raise UserError(
            f"study {study.file}: runs {' and '.join(texts.values())} were on different text; "
            "remove those of one and run them again"
        )
    trajectories = {
        recipe: {
            seed: _outcomes(summary) for seed, summary in seeds.items() if not summary["diverged"]
        }
        for recipe, seeds in runs.items()
    }
    base = trajectories.get(study.base, {})
    rows = [_row(study, recipe, runs[recipe], trajectories[recipe], base) for recipe in runs]
    return sorted(rows, key=lambda row: _order(row, study.base))


def _row(
    study: Study,
    recipe: str,
    summaries: Mapping[int, Mapping[str, Any]],
    runs: Mapping[int, Outcomes],
    base: Mapping[int, Outcomes],
) -> Row:
    ended = [summaries[seed] for seed in runs]
    speeds = [s["tokens_per_second"] for s in ended if s["tokens_per_second"] is not None]
    last = study.average_last
    steps = list(next(iter(runs.values()), {}))
    return Row(
        recipe=recipe,
        seeds=tuple(sorted(runs)),
        diverged=tuple(sorted(summaries.keys() - runs.keys())),
        loss=statistics.fmean(_end(run, 1).recipe for run in runs.values()) if runs else math.nan,
        gap=gap(_ends(runs, 1), _ends(base, 1), "recipe", "full"),
        steady=gap(_ends(runs, last), _ends(base, last), "recipe", "full"),
        in_full=gap(_ends(runs, 1), _ends(base, 1), "full", "full"),
        losses={
            step: statistics.fmean(outcome.recipe for outcome in _at(runs, step).values())
            for step in steps
        },
        along={
            step: found
            for step in steps
            if (found := gap(_at(runs, step), _at(base, step), "recipe", "full")) is not None
        },
        summary=ended[0] if ended else next(iter(summaries.values())),
        speed=statistics.median(speeds) if speeds else None,
        share=statistics.fmean(s["share_in_bf16"] for s in ended) if ended else math.nan,
    )


def _outcomes(summary: Mapping[str, Any]) -> Outcomes:
    return {
        line["step"]: Outcome(recipe=line["recipe"], full=line["full"], unigram=line["unigram"])
        for line in summary["heldout"]
    }


def _at(runs: Mapping[int, Outcomes], step: int) -> Outcomes:
    return {seed: run[step] for seed, run in runs.items() if step in run}


def _ends(runs: Mapping[int, Outcomes], last: int) -> Outcomes:
    return {seed: _end(run, last) for seed, run in runs.items()}


def _end(run: Outcomes, last: int) -> Outcome:
    """The mean of a run's last evaluations."""
    ends = list(run.values())[-last:]
    return Outcome(
        recipe=statistics.fmean(end.recipe for end in ends),
        full=statistics.fmean(end.full for end in ends),
        unigram=ends[-1].unigram,
    )


def _order(row: Row, base: str) -> tuple[bool, float]:
    if row.recipe == base:
        return False, -math.inf
    return row.gap is None, row.loss if row.gap is None else row.gap.mean


def ranks(rows: Sequence[Row]) -> dict[str, int | None]:
    """Returns each recipe's rank: one more than how many are better by more than the errors.

    None for a recipe whose gap has no error, since fewer than two seeds of it are there.
    """
    known = {row.recipe: row.gap for row in rows if row.gap and not math.isnan(row.gap.error)}
    return {
        row.recipe: 1 + sum(_behind(known[row.recipe], other) for other in known.values())
        if row.recipe in known
        else None
        for row in rows
    }


def _behind(one: Gap, other: Gap) -> bool:
    return one.mean - other.mean > 2 * math.hypot(one.error, other.error)


def page(study: Study, rows: Sequence[Row]) -> str:
    """Returns the tables as Markdown."""
    if not any(row.seeds for row in rows):
        return "No run has finished.\n"
    ranked = ranks([row for row in rows if row.recipe != study.base])
    body = [_cells(row, ranked.get(row.recipe), study) for row in rows]
    head = [
        "recipe", "seeds", "held-out loss", f"gap to {study.base}", "rank",
        f"mean gap of the last {study.average_last} evaluations", "gap with nothing quantised",
        "in BF16", "tokens/s", "kept for backward", "runs on",
    ]  # fmt: skip
    parts = [
        _setting(study, rows),
        markdown(head, body),
        _notes(study, rows, ranked),
        f"Held-out loss of {study.base} and the others' gaps to it along the way, by steps done:",
        _along(study, rows),
        "![gaps along the way and at the end](gaps.png)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cells(row: Row, rank: int | None, study: Study) -> list[str]:
    seeds = str(len(row.seeds)) + (f", {len(row.diverged)} diverged" if row.diverged else "")
    if not row.seeds:
        return [row.recipe, seeds, *["-"] * 9]
    is_base = row.recipe == study.base
    gaps = ["-" if is_base else show(found) for found in (row.gap, row.steady, row.in_full)]
    return [
        row.recipe,
        seeds,
        f"{row.loss:.4f}",
        gaps[0],
        "-" if rank is None else str(rank),
        *gaps[1:],
        f"{row.share:.2%}",
        "-" if row.speed is None else f"{row.speed:,.0f}",
        f"{row.summary['kept_bytes'] / 2**30:.2f} GiB",
        row.summary["runs_on"],
    ]


def show(found: Gap | None) -> str:
    """Returns a gap as text; one seed has no error, and says so."""
    if found is None:
        return "-"
    return f"{found.mean:+.4f}{_ALONE}" if math.isnan(found.error) else str(found)


def _setting(study: Study, rows: Sequence[Row]) -> str:
    row = next(row for row in rows if row.seeds)
    summary = row.summary
    config = RunFolder(study.folder(_first_run(study, row))).read_config()
    devices = sorted({row.summary["device"] for row in rows})
    return (
        f"{summary['parameters'] / 1e6:.1f}M parameters, {summary['tokens'] / 1e6:.1f}M tokens in "
        f"{summary['steps']:,} steps of {config.batch} × {config.seq_len:,}, held-out loss on "
        f"{summary['heldout_tokens']:,} tokens. {summary['data']['description']}. "
        f"On {', '.join(devices)}; JAX {summary['versions']['jax']}. Losses are nats per token, "
        "gaps paired by seed, ± their standard error over seeds. In BF16: the share of the planned "
        "products' multiply-adds. Kept: by one micro-batch's loss for its backward pass."
    )


def _first_run(study: Study, row: Row) -> str:
    return next(
        run.name for run in study.runs if (run.recipe, run.seed) == (row.recipe, row.seeds[0])
    )


def _notes(study: Study, rows: Sequence[Row], ranked: Mapping[str, int | None]) -> str:
    lines = [
        "A recipe ranks behind another only if its gap is larger by more than twice their errors "
        "combined; equal ranks could not be told apart."
    ]
    if alone := [name for name, rank in ranked.items() if rank is None]:
        lines.append(f"Not ranked, for want of a second seed: {', '.join(alone)}.")
    wide = [
        f"{row.recipe} ({row.gap.error:.4f})"
        for row in rows
        if row.gap and row.recipe != study.base and row.gap.error > study.target_error
    ]
    if wide:
        lines.append(f"Errors above {study.target_error}: {', '.join(wide)}.")
    left = [run.name for run in study.runs if read_summary(study.folder(run.name)) is None]
    if left:
        lines.append(f"Not run yet: {', '.join(left)}.")
    return " ".join(lines)


def _along(study: Study, rows: Sequence[Row]) -> str:
    others = [row for row in rows if row.along and row.recipe != study.base]
    losses = next((row.losses for row in rows if row.recipe == study.base), {})
    steps = sorted({*losses, *(step for row in others for step in row.along)})
    body = [
        [study.base, *(f"{losses[step]:.4f}" if step in losses else "-" for step in steps)],
        *(
            [row.recipe, *(show(row.along.get(step)).removesuffix(_ALONE) for step in steps)]
            for row in others
        ),
    ]
    return markdown(["recipe", *(f"{step:,}" for step in steps)], body)


def draw(study: Study, rows: Sequence[Row]) -> Figure:
    """Draws gaps over steps, and at the end with two standard errors."""
    others = [row for row in rows if row.recipe != study.base and row.gap is not None]
    figure = Figure(figsize=(12, 5), layout="constrained")
    along, end = figure.subplots(1, 2, width_ratios=(2, 1))
    for i, row in enumerate(others):
        color = f"C{i % 10}"
        steps = list(row.along)
        means = [row.along[step].mean for step in steps]
        errors = [_two_errors(row.along[step]) for step in steps]
        along.errorbar(steps, means, errors, color=color, marker=".", capsize=2, label=row.recipe)
        if row.gap is not None:
            end.errorbar(
                row.gap.mean, i, xerr=_two_errors(row.gap), color=color, fmt="o", capsize=3
            )
    along.axhline(0, color="black", linewidth=0.8)
    along.set(xlabel="step", ylabel=f"held-out loss less {study.base}'s (nats per token)")
    if others:
        along.legend()
    end.axvline(0, color="black", linewidth=0.8)
    end.set_yticks(range(len(others)), [row.recipe for row in others])
    end.invert_yaxis()
    end.set(xlabel="gap at the end, ± 2 standard errors")
    return figure


def _two_errors(found: Gap) -> float:
    return 0.0 if math.isnan(found.error) else 2 * found.error
