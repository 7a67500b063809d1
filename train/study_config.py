"""A study's file: which runs, in which order, on what. In TOML:

    [options]              # of `train.lm`, shared by all runs
    preset = "125m"
    data = "corpus/tokens.u16"

    [recipes]              # of `train.lm` too, by the name that tables call them
    bf16 = { quant = "bf16" }
    adahop = { quant = "adahop", level = 1 }
    "adahop, fwd in BF16" = { quant = "adahop", of = "adahop", full = ["fwd"] }

    [[runs]]               # in this order: every recipe with the first seed, then the second
    recipes = ["bf16", "adahop"]
    seeds = [0, 1, 2]

    [report]
    base = "bf16"          # what gaps are to
    average_last = 3       # evaluations that a second, steadier gap is the mean of
    target_error = 0.003   # of the gaps, in nats per token

    [watch]                # labels patterns again along these runs; measures errors at their end
    runs = ["adahop-seed0"]
    points = 10
    batches = 4
    error_tokens = 2048

A recipe with `of` takes the plan that the run of that recipe and of its own seed ended with, and
puts the products that `full` names in BF16: in those layers whose path matches `layers_in_full`, a
regular expression, or in all.
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tyro

import adahop_jax as ah
from adahop_jax._plan import PRODUCTS
from train.compare import differences
from train.configs import RunConfig, UserError
from train.options import Options, resolve
from train.recipes import RECIPES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A plan made from another run's: `full` products of `layers` go to BF16.

    Attributes:
      of: recipe of the run whose plan it is.
      full: products.
      layers: regular expression that a layer's whole path matches.
    """

    of: str
    full: tuple[str, ...]
    layers: str = ".*"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: its recipe's name, its seed, and the trainer's options but for its folder."""

    recipe: str
    options: Options
    change: Change | None = None

    @property
    def seed(self) -> int:
        """Of initial weights and data order."""
        assert self.options.seed is not None
        return self.options.seed

    @property
    def name(self) -> str:
        """Of its folder."""
        return run_name(self.recipe, self.seed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Which runs are looked at along the way, how often, and with how much held-out text."""

    runs: tuple[str, ...] = ()
    points: int = 10
    batches: int = 4
    error_tokens: int = 2048


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study as its file says it.

    Attributes:
      file: of the study; results stand beside it.
      runs: in the order to run them.
      base: recipe that gaps are to.
      average_last: evaluations in the steadier gap.
      target_error: standard error that gaps should reach, nats per token.
      watched: runs to label along the way.
    """

    file: Path
    runs: tuple[Run, ...]
    base: str
    average_last: int
    target_error: float
    watched: Watched

    @property
    def name(self) -> str:
        """Of the folder that holds it."""
        return self.file.resolve().parent.name

    def folder(self, run: str) -> Path:
        """Of the results of the run that is named so."""
        return self.file.parent / "runs" / run

    @property
    def recipes(self) -> tuple[str, ...]:
        """Names, in the order of the first run of each."""
        return tuple(dict.fromkeys(run.recipe for run in self.runs))


def run_name(recipe: str, seed: int) -> str:
    """Returns the folder's name of a run.

    >>> run_name("adahop, fwd in BF16", 0)
    'adahop-fwd-in-BF16-seed0'
    """
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', recipe).strip('-')}-seed{seed}"


def load_study(file: Path) -> Study:
    """Reads a study's file.

    Raises:
      UserError: it can't be read, says something unknown, or its runs differ in more than recipe
        and seed.
      SystemExit: options that `train.lm` would refuse, which are named on stderr as it names them.
    """
    try:
        tables = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"study {file} can't be read ({error})") from error
    common = _table(file, tables, "options")
    recipes = _table(file, tables, "recipes")
    groups = tables.pop("runs", [])
    settings = _table(file, tables, "report")
    looks = _table(file, tables, "watch")
    if tables:
        raise UserError(f"study {file}: table {next(iter(tables))!r} is unknown")
    runs = []
    for group in groups:
        if not {"recipes", "seeds"} == group.keys():
            raise UserError(f"study {file}: [[runs]] holds {group}; wanted recipes and seeds")
        for seed in group["seeds"]:
            for recipe in group["recipes"]:
                if recipe not in recipes:
                    raise UserError(f"study {file}: recipe {recipe!r} is not under [recipes]")
                runs.append(_run(file, recipe, common | recipes[recipe] | {"seed": seed}))
    _check_runs(file, runs)
    try:
        watched = Watched(**looks | {"runs": tuple(looks.get("runs", ()))})
        study = Study(
            file=file,
            runs=tuple(runs),
            base=settings.pop("base", "bf16"),
            average_last=settings.pop("average_last", 1),
            target_error=settings.pop("target_error", 0.003),
            watched=watched,
        )
    except TypeError as error:
        raise UserError(f"study {file}: [watch]: {error}") from error
    calibrated = [run.name for run in runs if run.options.quant in (None, "adahop")]
    if settings:
        raise UserError(f"study {file}: [report]: {next(iter(settings))!r} is unknown")
    if wrong := [name for name in watched.runs if name not in calibrated]:
        raise UserError(f"study {file}: [watch]: {wrong[0]!r} is no run of adahop")
    return study


def config_of(run: Run, *, platform: str) -> RunConfig:
    """Returns the run's configuration on a machine, but for what its plan file would add.

    Args:
      run: of a study.
      platform: "cpu" or another, as `resolve` wants it.
    """
    plan = run.options.plan if run.change is None else run.change.of  # any says: no calibration
    return resolve(dataclasses.replace(run.options, plan=plan), platform=platform)


def same_run(found: RunConfig, wanted: RunConfig) -> list[str]:
    """Lists in what a run that is there differs from what the study asks for.

    Where the text lies, what a plan file brings along and the level of a recipe that has none are
    left out; the text itself is checked by its fingerprint.
    """
    one, other = (
        dataclasses.replace(config, data=None, plan=None, level=1) for config in (found, wanted)
    )
    calibrates = found.plan is None and RECIPES[found.quant].is_calibrated
    levels = [found.level, wanted.level] if calibrates else []
    return [
        f"{field.name} is {getattr(one, field.name)} and should be {getattr(other, field.name)}"
        for field in dataclasses.fields(RunConfig)
        if getattr(one, field.name) != getattr(other, field.name)
    ] + ([f"level is {levels[0]} and should be {levels[1]}"] if len(set(levels)) > 1 else [])


def changed_plan(plan: ah.Plan, change: Change) -> ah.Plan:
    """Returns `plan` with the products that `change` names in full."""
    full: dict[str, Any] = {product: ah.ProductPlan.full() for product in change.full}
    layers = tuple(
        (path, dataclasses.replace(layer, **full) if re.fullmatch(change.layers, path) else layer)
        for path, layer in plan
    )
    return dataclasses.replace(plan, layers=layers)


def _table(file: Path, tables: dict[str, Any], name: str) -> dict[str, Any]:
    table = tables.pop(name, {})
    if not isinstance(table, dict):
        raise UserError(f"study {file}: {name} is {table!r}, wanted a table")
    return table


def _run(file: Path, recipe: str, fields: Mapping[str, Any]) -> Run:
    options = {name: value for name, value in fields.items() if name not in _CHANGES}
    change = None
    if "of" in fields:
        change = Change(
            of=fields["of"],
            full=tuple(fields.get("full", ())),
            layers=fields.get("layers_in_full", ".*"),
        )
        unknown = set(change.full) - set(PRODUCTS)
        if unknown:
            raise UserError(f"study {file}: {recipe}: no product is named {unknown.pop()!r}")
    words = [word for name, value in options.items() for word in (f"--{_dashed(name)}", str(value))]
    parsed = tyro.cli(Options, args=words, prog=f"study {file}, {recipe}")
    return Run(recipe=recipe, options=parsed, change=change)


_CHANGES = ("of", "full", "layers_in_full")


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _check_runs(file: Path, runs: list[Run]) -> None:
    names = [run.name for run in runs]
    if not runs:
        raise UserError(f"study {file}: no runs; add [[runs]] with recipes and seeds")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"study {file}: run {twice[0]} is there twice")
    for i, run in enumerate(runs):
        if run.change and run_name(run.change.of, run.seed) not in names[:i]:
            raise UserError(
                f"study {file}: run {run.name} takes the plan of "
                f"{run_name(run.change.of, run.seed)}, which has to come before it"
            )
    first = config_of(runs[0], platform="gpu")
    for run in runs[1:]:
        other = differences(first, config_of(run, platform="gpu"))
        other = [name for name in other if name != "calibration_steps"]  # of adahop alone
        if other:
            raise UserError(
                f"study {file}: runs {runs[0].name} and {run.name} differ in {', '.join(other)} "
                "besides recipe and seed; put it under [options]"
            )
