"""AdamW with warm-up, cosine decay, clipping, and the gradients of accumulated micro-batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.configs import OptimConfig

PyTree = Any


def make_schedule(config: OptimConfig, *, steps: int) -> optax.Schedule:
    """Returns the learning rate by step: linear warm-up, then a cosine down to its final share."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.lr / (config.warmup + 1),
        peak_value=config.lr,
        warmup_steps=config.warmup,
        decay_steps=max(steps, config.warmup + 1),
        end_value=config.lr * config.final_lr_share,
    )


def make_optimizer(config: OptimConfig, *, steps: int) -> optax.GradientTransformation:
    """Returns AdamW over clipped gradients; only kernels decay (see `decays`)."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            make_schedule(config, steps=steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def decays(params: PyTree) -> PyTree:
    """Marks the parameters that weight decay pulls on: kernels, not norms, biases, embeddings."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def accumulate(
    gradients: Callable[[PyTree, PyTree], tuple[jax.Array, PyTree, PyTree]],
    merge: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    micros: PyTree,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Averages loss and gradients over micro-batches, one at a time.

    Args:
      gradients: (params, micro) -> (loss, gradients, statistics).
      merge: joins the statistics of two micro-batches.
      params: parameters, float32.
      micros: arrays with a leading axis of micro-batches.

    Returns:
      Mean loss, mean gradients, and the statistics merged over all micro-batches.
    """
    start = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), params))

    def add(total: PyTree, micro: PyTree) -> tuple[PyTree, PyTree]:
        loss, grads, statistics = gradients(params, micro)
        return jax.tree.map(jnp.add, total, (loss, grads)), statistics

    total, statistics = jax.lax.scan(add, start, micros)
    count = jax.tree.leaves(micros)[0].shape[0]
    loss, grads = jax.tree.map(lambda x: x / count, total)
    first = jax.tree.map(lambda x: x[0], statistics)
    rest = jax.tree.map(lambda x: x[1:], statistics)
    merged, _ = jax.lax.scan(lambda a, b: (merge(a, b), None), first, rest, length=count - 1)
    return loss, grads, merged
