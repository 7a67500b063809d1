"""Looks at a run along the way: its patterns labelled again, and errors of products at its end.

Labels are made as the calibrating steps make them, all products in full and the micro-batches of a
step merged, but on held-out text, the same at every point, and nothing is trained on it.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import adahop_jax as ah
from train import lm
from train.calibrate import votes_from_json, votes_to_json
from train.model import next_token_loss
from train.product_error import capture, measure
from train.study_config import Run, Study, Watched, config_of
from train.study_summary import ERRORS

PyTree = Any
PATTERNS = "patterns"
"""Key of the labels in a line of metrics: for every vote {layer: codes of X, W and dY}."""


def watch_of(study: Study, run: Run) -> lm.Watch:
    """Returns what the study looks at along `run`: nothing, or points that are evenly spread."""
    watched = study.watched
    if run.name not in watched.runs:
        return {}
    steps = config_of(run, platform="gpu").steps
    points = [steps * (i + 1) // watched.points for i in range(watched.points)]
    look = _looking(watched)
    return {point: look for point in points if point}


def _looking(watched: Watched) -> Callable[[lm.Job, PyTree, int], dict[str, Any]]:
    """A function of `lm.Watch`; what it compiles serves all points of a run."""
    labels_of: Callable[..., list[Any]] | None = None

    def look(job: lm.Job, params: PyTree, step: int) -> dict[str, Any]:
        nonlocal labels_of
        labels_of = labels_of or _labelling(job, watched.batches)
        votes = labels_of({"params": params})
        if step == job.config.steps:
            _write_errors(job, params, votes, watched.error_tokens)
        return {PATTERNS: votes_to_json(votes)}

    return look


def _labelling(job: lm.Job, count: int) -> Callable[[PyTree], list[Any]]:
    """A function from variables to the labels of `count` batches of held-out text."""
    observe = ah.observe(next_token_loss(job.model))
    statistics = jax.jit(lambda variables, tokens, key: observe(variables, (tokens, key))[2])
    merge, label = jax.jit(ah.merge_statistics), jax.jit(ah.label)

    def labels(variables: PyTree) -> list[Any]:
        micros, votes = itertools.cycle(job.batches), []
        for _ in range(count):
            seen = statistics(variables, next(micros), jax.random.key(0))
            for _ in range(job.config.accumulate - 1):
                seen = merge(seen, statistics(variables, next(micros), jax.random.key(0)))
            votes.append(jax.device_get(label(variables, seen)))
        return votes

    return labels


def _write_errors(job: lm.Job, params: PyTree, votes: list[Any], tokens: int) -> None:
    """Measures every strategy's products on the tensors of one batch of held-out text."""
    sequences = max(1, tokens // job.config.seq_len)
    batch = jnp.asarray(job.batches[0][:sequences]), jax.random.key(0)
    variables, loss_fn = {"params": params}, next_token_loss(job.model)
    layers = ah.layers(loss_fn, variables, batch)
    plan = ah.plan_from_labels(votes, layers=layers, level=1, fwd="mxfp4")
    pairs = {(row.path, str(row.product)): row.why for row in ah.explain(plan, layers).rows}
    found = capture(loss_fn, variables, batch)
    measured = [
        dataclasses.asdict(m) | {"pair": pairs[m.path, m.product]}
        for layer in layers
        for m in measure(layer, found[layer.path])
    ]
    (job.folder.path / ERRORS).write_text(
        "[\n" + ",\n".join(json.dumps(m) for m in measured) + "\n]\n"
    )


def seen_along(lines: list[dict[str, Any]], layers: Mapping[str, Any]) -> dict[int, ah.Plan]:
    """Returns the patterns that a run's metrics hold: steps done -> a plan made of its labels.

    Args:
      lines: of metrics.jsonl.
      layers: of the run's plan, {path: `adahop_jax.LayerPlan`}.
    """
    infos = [
        ah.LayerInfo(path, 0, plan.in_features or 1, plan.out_features or 1)
        for path, plan in layers.items()
    ]
    return {
        line["step"]: ah.plan_from_labels(
            votes_from_json(line[PATTERNS]), layers=infos, level=1, fwd="mxfp4"
        )
        for line in lines
        if PATTERNS in line
    }
