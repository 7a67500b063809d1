"""Statistics of X and dY of every layer, handed out by `jax.grad`.

dY exists only inside the backward pass. A layer that finds a zero-valued probe beside its kernel
computes its product in full, and the probe's "gradient" is what the detector reads of X and dY: no
callbacks, no state, and under `jit` a reduction over all shards like any other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from adahop_jax._patterns import MatrixStatistics, matrix_statistics, merge
from adahop_jax._sharding import compiler_placed

PROBE = "adahop_probe"


class LayerStatistics(NamedTuple):
    """What one evaluation of the gradient shows of a layer.

    Attributes:
      x: of X, (tokens, in).
      dy: of dY, (tokens, out).
      calls: float32 scalar, how often the layer ran; statistics of more than one call are void,
        since gradients add up where statistics would have to be merged.
    """

    x: MatrixStatistics
    dy: MatrixStatistics
    calls: jax.Array


def observed_dot(
    x: jax.Array,
    w: jax.Array,
    probe: LayerStatistics,
    dot: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """dot(x, w), with the statistics of x and of the result's cotangent as `probe`'s cotangent."""

    @jax.custom_vjp
    def observed(x: jax.Array, w: jax.Array, probe: LayerStatistics) -> jax.Array:
        return dot(x, w)

    def forward(x: jax.Array, w: jax.Array, probe: LayerStatistics) -> tuple[jax.Array, Any]:
        y, pullback = jax.vjp(dot, x, w)
        return y, (pullback, x)

    def backward(residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
        pullback, x = residuals
        return *pullback(dy), compiler_placed(_statistics, out=PartitionSpec())(x, dy)

    observed.defvjp(forward, backward)
    return observed(x, w, probe)


def _statistics(x: jax.Array, dy: jax.Array) -> LayerStatistics:
    return LayerStatistics(matrix_statistics(x), matrix_statistics(dy), jnp.float32(1))


def zero_probe(in_features: int, out_features: int, stacked: tuple[int, ...]) -> LayerStatistics:
    """A probe for a kernel (*stacked, in_features, out_features)."""
    seen = jax.eval_shape(
        _statistics,
        jax.ShapeDtypeStruct((1, in_features), jnp.float32),
        jax.ShapeDtypeStruct((1, out_features), jnp.float32),
    )
    return jax.tree.map(lambda leaf: jnp.zeros(stacked + leaf.shape, leaf.dtype), seen)


def merge_layer(a: LayerStatistics, b: LayerStatistics) -> LayerStatistics:
    """Statistics of two micro-batches of one step."""
    stacked = jnp.ndim(a.calls)

    def both(a: LayerStatistics, b: LayerStatistics) -> LayerStatistics:
        return LayerStatistics(merge(a.x, b.x), merge(a.dy, b.dy), jnp.maximum(a.calls, b.calls))

    for _ in range(stacked):
        both = jax.vmap(both)
    return both(a, b)
