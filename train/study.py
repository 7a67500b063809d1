"""Runs a study, or what is left of it: `python -m train.study results/NAME/study.toml`.

Each run is one of `train.lm`, from scratch or from its own last checkpoint in `--scratch`; what a
finished one leaves goes to `runs/` beside the study's file, and is not run again. At the end the
table and the pictures are made anew of all that is there. With `--minutes` no run starts after that
time, and one under way is saved; the same command continues it.
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import tyro

import adahop_jax as ah
from train import lm, study_patterns, study_report, study_watch
from train.checkpoint import RunFolder
from train.configs import UserError
from train.data import DataError
from train.log import Diverged
from train.options import Options
from train.study_config import Run, Study, changed_plan, config_of, load_study, run_name
from train.study_summary import (
    deliver,
    failure,
    read_summary,
    refuse_changed,
    summarize,
    write_summary,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Runs what is left of a study, and makes its table and pictures."""

    study: tyro.conf.Positional[Path]
    """the study's file, study.toml; results go beside it"""
    minutes: float | None = None
    """time to spend: then the run under way is saved and no other starts"""
    only: tuple[str, ...] = ()
    """names of runs, as adahop-seed0; all if not given"""
    report: bool = False
    """only make the table and the pictures of what is there"""
    data: str | None = None
    """where the text is, in place of the study's own path"""
    shared_device: bool = False
    """other programs use the device meanwhile, as a second `train.study --only ...` that computes
    while this one compiles: summaries then state no speed"""
    commit: str | None = None
    """commit to name in summaries, in place of the checkout's"""
    scratch: Path = Path("runs")
    """folder for checkpoints of runs that have not finished"""
    cache_dir: str = Options().cache_dir
    """folder of trained tokenizers and compiled programs"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code: 0, 2 for bad input, 130 if interrupted."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m train.study")
    try:
        study = load_study(arguments.study)
        unknown = set(arguments.only) - {run.name for run in study.runs}
        if unknown:
            raise UserError(f"study {study.file}: no run is named {min(unknown)!r}")
        left = [] if arguments.report else run_all(study, arguments)
        study_report.write(study)
        study_patterns.write(study)
    except (UserError, DataError, ah.PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if left:
        print(f"{len(left)} runs are left: {', '.join(left)}; the same command continues")
    return 0


def run_all(study: Study, arguments: Arguments) -> list[str]:
    """Runs what has not finished, in order; returns the names of what is left."""
    deadline = None
    if arguments.minutes is not None:
        deadline = time.monotonic() + 60 * arguments.minutes
    if jax.config.jax_compilation_cache_dir is None:
        folder = Path(arguments.cache_dir).expanduser() / "programs"
        jax.config.update("jax_compilation_cache_dir", str(folder))

    def over() -> bool:
        return deadline is not None and time.monotonic() >= deadline

    wanted = [run for run in study.runs if not arguments.only or run.name in arguments.only]
    for run in wanted:  # so that a contradiction shows before hours are spent
        finished(study, run)
    stopped = False
    left = []
    for run in wanted:
        if finished(study, run):
            continue
        if not (stopped or over()):
            stopped = not run_one(study, run, arguments, over)
        if not finished(study, run):
            left.append(run.name)
    if stopped and not over():
        raise KeyboardInterrupt  # a run was, and saved itself
    return left


def finished(study: Study, run: Run) -> bool:
    """Whether a run's results are there.

    Raises:
      UserError: they are of another configuration than the study's.
    """
    results = study.folder(run.name)
    summary = read_summary(results)
    if summary is None:
        return False
    refuse_changed(RunFolder(results), config_of(run, platform=summary["platform"]))
    return True


def run_one(study: Study, run: Run, arguments: Arguments, over: Callable[[], bool]) -> bool:
    """Starts or continues a run; returns whether it finished."""
    folder = RunFolder(arguments.scratch / study.name / run.name)
    print(f"\n== {run.name}", flush=True)
    if read_summary(folder.path) is None:
        if folder.config_file.exists():
            refuse_changed(folder, config_of(run, platform=jax.default_backend()))
        summary = _train(study, run, arguments, folder, over)
        if summary is None:
            return False
        write_summary(folder.path, summary)
    else:
        refuse_changed(folder, config_of(run, platform=jax.default_backend()))
    deliver(folder, study.folder(run.name), data=run.options.data)
    shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
    return True


def _train(
    study: Study, run: Run, arguments: Arguments, folder: RunFolder, over: Callable[[], bool]
) -> dict[str, object] | None:
    """The summary of a run once it has finished or diverged; None if it was interrupted."""
    options = dataclasses.replace(
        run.options,
        run_dir=str(folder.path),
        data=arguments.data or run.options.data,
        cache_dir=arguments.cache_dir,
        resume=folder.has_checkpoint(),
        plan=None if folder.has_checkpoint() else _plan_file(study, run, arguments),
    )
    watch = study_watch.watch_of(study, run)
    try:
        result = lm.train(options, stop=over, watch=watch)
    except Diverged as error:
        return failure(run, str(error), commit=arguments.commit)
    if result.heldout is None:
        return None
    return summarize(run, result, commit=arguments.commit, timed=not arguments.shared_device)


def _plan_file(study: Study, run: Run, arguments: Arguments) -> str | None:
    """Writes the plan of a run that takes another's; None for a run that needs none."""
    if run.change is None:
        return run.options.plan
    source = study.folder(run_name(run.change.of, run.seed))
    if read_summary(source) is None:
        raise UserError(f"run {run.name} takes the plan of {source.name}, which has not finished")
    file = arguments.scratch / study.name / f"{run.name}.plan.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    changed_plan(ah.Plan.load(source / "plan.json"), run.change).save(file)
    return str(file)


if __name__ == "__main__":
    sys.exit(main())
