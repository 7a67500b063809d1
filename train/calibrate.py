"""The plan of a run: uniform, from a file, or from the votes of its first, calibrating steps.

Calibration is part of training. For the first N steps every product runs in BF16 and each step
labels the patterns of X, W and dY of every layer; the parameters train on. The majority of the
labels decides the plan, and the run continues with it from the very next step.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import adahop_jax as ah
from adahop_jax._plan import Level
from train.configs import RunConfig, UserError
from train.model import Llama, next_token_loss
from train.recipes import RECIPES

PyTree = Any
Labels = dict[str, NDArray[np.int32]]


def find_layers(model: Llama, config: RunConfig) -> tuple[ah.LayerInfo, ...]:
    """Returns the planned layers of `model` and their sizes for one micro-batch.

    Raises:
      ah.PlanError: the model's plan lacks a layer, or was made for other dims.
    """
    tokens = jax.ShapeDtypeStruct(
        (config.batch // config.accumulate, config.seq_len + 1), jnp.int32
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(model.init, key, jnp.zeros((1, 1), jnp.int32))
    return ah.layers(next_token_loss(model), variables, (tokens, key))


def uniform_plan(config: RunConfig) -> ah.Plan | None:
    """Returns the plan of a recipe that is one; None if calibration makes it, or it has none."""
    plan = RECIPES[config.quant].plan
    return None if plan is None else adjusted(plan, config)


def load_plan(
    path: Path, model: Llama, config: RunConfig, *, level: Level | None
) -> tuple[ah.Plan, RunConfig]:
    """Loads the plan of an earlier calibration, holds it against the model, and makes the run's.

    Args:
      path: of the plan.
      model: with nothing quantised.
      config: of the run.
      level: that the user asked for, if any.

    Returns:
      The plan, and the configuration with its level and digest.

    Raises:
      ah.PlanError: unreadable, of another version, or of another model.
      UserError: of another level than asked for.
    """
    plan = ah.Plan.load(path)
    if level not in (None, plan.level):
        raise UserError(
            f"{path}: the plan is of level {plan.level}, and --level is {level}; "
            "leave --level out, or calibrate"
        )
    try:
        plan.check(layer.path for layer in find_layers(model, config))
        find_layers(model.clone(plan=plan), config)
    except ah.PlanError as error:
        raise ah.PlanError(f"{path}: {error}") from error
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()[:12]
    config = dataclasses.replace(config, plan=digest, level=plan.level or config.level)
    return of_calibrated(plan, config), config


def decide(votes: Sequence[Labels], layers: Sequence[ah.LayerInfo], config: RunConfig) -> ah.Plan:
    """Returns the recipe's plan from the majority of the calibrating steps' labels."""
    plan = ah.plan_from_labels(votes, layers=layers, level=config.level, fwd="mxfp4")
    return of_calibrated(plan, config)


def of_calibrated(plan: ah.Plan, config: RunConfig) -> ah.Plan:
    """Returns what the run's recipe makes of a calibrated plan."""
    recipe = RECIPES[config.quant]
    if recipe.of_calibrated is None:
        raise ValueError(f"recipe {config.quant} takes no calibrated plan")
    return adjusted(recipe.of_calibrated(plan, config.seed), config)


def adjusted(plan: ah.Plan, config: RunConfig) -> ah.Plan:
    """Returns `plan` with the run's forward format and rounding of dY, if not the plan's own."""
    if config.fwd != "mxfp4":
        plan = plan.with_format(config.fwd, products=("fwd",))
    return plan.with_stochastic_dy() if config.dy_rounding == "stochastic" else plan


def votes_to_json(votes: Sequence[Labels]) -> list[dict[str, list[int]]]:
    """Returns votes as plain lists, for a checkpoint taken amid calibration."""
    return [{path: np.asarray(codes).tolist() for path, codes in vote.items()} for vote in votes]


def votes_from_json(votes: Sequence[Mapping[str, Sequence[int]]]) -> list[Labels]:
    """Reads `votes_to_json`'s lists back."""
    return [{path: np.array(codes, np.int32) for path, codes in vote.items()} for vote in votes]
