"""What a finished run of a study leaves: few small files, which are committed.

runs/NAME/config.json     as the run resolved it
          plan.json       as it trained
          metrics.jsonl   a line per step and evaluation
          summary.json    what tables are made of; written last
          errors.json     errors of products, of runs that measured them
"""

import dataclasses
import datetime
import json
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.kept import kept, size
from train.checkpoint import RunFolder, fingerprint
from train.compare import outcomes
from train.configs import RunConfig, UserError
from train.lm import Result
from train.log import read_metrics
from train.model import Llama, next_token_loss
from train.recipes import RECIPES
from train.recipes.execution import execution
from train.study_config import Run, same_run

SUMMARY = "summary.json"
ERRORS = "errors.json"
_FILES = ("config.json", "plan.json", "metrics.jsonl", ERRORS, SUMMARY)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "triton", "jax-triton")


def summarize(run: Run, result: Result, *, commit: str | None, timed: bool) -> dict[str, Any]:
    """Returns the summary of a run that ended, as plain JSON values.

    Args:
      run: of the study.
      result: of its training.
      commit: to name in place of the checkout's.
      timed: whether the run had the device to itself; else `tokens_per_second` is None.

    Losses are nats per token, `kept_bytes` what one micro-batch's loss keeps for its backward pass,
    parameters left out; `share_in_bf16` is of the planned products' multiply-adds, to which neither
    attention nor the head belong, and tokens per second are the median over the log's intervals.
    """
    job, plan = result.job, result.plan
    config = job.config
    model = RECIPES[config.quant].applied(job.model, plan)
    runs = execution(plan, job.layers)
    lines = read_metrics(job.folder.metrics_file)
    speeds = [
        line["tokens_per_second"]
        for line in lines
        if line.get("phase") == "train" and "tokens_per_second" in line
    ]
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return {
        **_identity(run, commit),
        "diverged": None,
        "steps": config.steps,
        "tokens": config.steps * config.batch * config.seq_len,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "heldout": [
            {"step": step, **dataclasses.asdict(outcome)}
            for step, outcome in outcomes(lines).items()
        ],
        "heldout_tokens": sum(batch[:, 1:].size for batch in job.batches),
        "tokens_per_second": round(statistics.median(speeds), 1) if timed and speeds else None,
        "share_in_bf16": runs.share_in_dtype,
        "runs_on": runs.runs_on,
        "kept_bytes": kept_bytes(model, config),
        "data": {"fingerprint": fingerprint(job.corpus), "description": _undated(job.corpus)},
    }


def failure(run: Run, why: str, *, commit: str | None) -> dict[str, Any]:
    """Returns the summary of a run whose loss did not stay finite."""
    return {**_identity(run, commit), "diverged": why}


def _identity(run: Run, commit: str | None) -> dict[str, Any]:
    return {
        "recipe": run.recipe,
        "seed": run.seed,
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "versions": report.versions(_PACKAGES),
        "commit": commit or report.checkout(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _undated(corpus: Any) -> str:
    """The corpus' description without the folder it was in."""
    first, comma, rest = corpus.description.partition(",")
    return f"{Path(first).name}{comma}{rest}"


def kept_bytes(model: Llama, config: RunConfig) -> int:
    """Returns how many bytes one micro-batch's loss keeps for its backward pass; only traced."""
    tokens = np.zeros((config.batch // config.accumulate, config.seq_len + 1), np.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :1])
    loss = next_token_loss(model)
    key = jax.random.key(0)
    return sum(
        size(aval) for aval in kept(lambda v: loss(v, (jnp.asarray(tokens), key)), variables)
    )


def deliver(folder: RunFolder, results: Path, *, data: str | None) -> None:
    """Copies what a finished run leaves into `results`; its summary last, which makes it whole.

    Args:
      folder: of the run, with its summary.
      results: folder to make.
      data: what the study calls the text, in place of where it lay.
    """
    results.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (folder.path / name).exists():
            shutil.copyfile(folder.path / name, results / name)
    config = dataclasses.replace(folder.read_config(), data=data)
    RunFolder(results).config_file.write_text(config.to_json())


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns the summary in a run's folder; None if the run has not finished.

    Raises:
      UserError: it is damaged.
    """
    file = folder / SUMMARY
    if not file.exists():
        return None
    try:
        summary = json.loads(file.read_text())
        return {**summary, "recipe": summary["recipe"], "seed": summary["seed"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no summary of a run ({error!r}); remove the folder") from error


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes the summary, at once whole."""
    partial = folder / f"{SUMMARY}.part"
    partial.write_text(json.dumps(summary, indent=1) + "\n")
    partial.replace(folder / SUMMARY)


def refuse_changed(folder: RunFolder, wanted: RunConfig) -> None:
    """Raises a UserError if the run in `folder` is of another configuration."""
    if wrong := same_run(folder.read_config(), wanted):
        raise UserError(
            f"run {folder.path} was made with another configuration: {'; '.join(wrong)}; give the "
            "recipe another name, or remove the folder to run it again"
        )
