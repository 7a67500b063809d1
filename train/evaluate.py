"""Held-out loss, in the recipe's own precision and with the same weights in full products."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

import adahop_jax as ah
from train.model import Llama, next_token_loss

PyTree = Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """Mean losses over the held-out batches, in nats per token.

    `full` runs every product in the model's `dtype`, BF16 unless chosen otherwise. So `recipe` less
    `full` is what quantised products cost at evaluation; what they cost in training is in both.
    """

    recipe: float
    full: float


def make_evaluate(
    model: Llama, batches: Sequence[NDArray[np.int32]]
) -> Callable[[PyTree], Heldout]:
    """Returns a function from parameters to `Heldout`; each of the two ways compiles once.

    Args:
      model: the decoder with the recipe applied.
      batches: int32 ids of shape (B, T + 1), the same ones for every evaluation.
    """
    full_model = model.clone(plan=ah.Plan.full(), dot_general_cls=None)
    # A plan may round forward operands stochastically; a fixed key makes that repeatable.
    key = jax.random.key(0)

    def mean_loss(loss_fn: Callable, params: PyTree) -> float:
        return float(np.mean([loss_fn({"params": params}, (batch, key)) for batch in batches]))

    in_full = (model.plan, model.dot_general_cls) == (full_model.plan, None)
    recipe_loss, full_loss = jax.jit(next_token_loss(model)), jax.jit(next_token_loss(full_model))

    def evaluate(params: PyTree) -> Heldout:
        full = mean_loss(full_loss, params)
        recipe = full if in_full else mean_loss(recipe_loss, params)
        return Heldout(recipe=recipe, full=full)

    return evaluate
