"""The pattern detector: are a matrix' outliers in few rows, in few columns, or neither?

The variances of a Gaussian matrix' rows scatter by sqrt(2 / (n - 1)) relative to their mean, by
chance. `cv` is how many times more they do. Rows that scatter `threshold_ratio` times more than
columns, each against chance, make the pattern ROW, and the other way round. Source:
arXiv:2604.02525; the published code's detector.

What the detector reads is kept as counts, means and central moments, so that it can be gathered
over micro-batches and merged without cancellation.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adahop_jax._plan import Pattern
from adahop_jax.reference import bits

CODES = (Pattern.NONE, Pattern.ROW, Pattern.COLUMN)
"""Pattern of each integer code that traced code uses."""

THRESHOLD_RATIO = 2.0
_EPSILON = 1e-8
_ROUNDING = 1e-12
"""Variances as small as this, against a largest magnitude of 1 to 2, are float32 rounding."""
_RELATIVE_ROUNDING = 1e-5
"""So is a scatter of the variances as small as this, relative to their mean."""


class Moments(NamedTuple):
    """Count, mean and sums of the second to fourth powers of deviations, in float32."""

    n: jax.Array
    mean: jax.Array
    m2: jax.Array
    m3: jax.Array
    m4: jax.Array


class MatrixStatistics(NamedTuple):
    """What the detector reads of one matrix, times 2^-exponent; all float32.

    Attributes:
      exponent: scalar, binary exponent of the largest magnitude: statistics of a matrix and of 2^n
        times it differ in this alone.
      n: scalar, rows seen.
      mean: (width,) mean of every column.
      m2: (width,) squared deviations of every column, summed.
      rows: `Moments` over the rows of their unbiased variances.
    """

    exponent: jax.Array
    n: jax.Array
    mean: jax.Array
    m2: jax.Array
    rows: Moments


def matrix_statistics(x: jax.Array) -> MatrixStatistics:
    """Statistics of `x`, flattened to (rows, last dim).

    Args:
      x: (..., width) float array.

    Returns:
      Its `MatrixStatistics`; a NaN in x makes them NaN, and the pattern NONE.
    """
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
    exponent = bits.exponent(bits.to_bits(jnp.max(jnp.abs(x), initial=0.0)))
    exponent = jnp.clip(exponent, -126, 126)
    x = x * bits.power_of_two(-exponent)
    rows, width = x.shape
    mean = jnp.sum(x, axis=0) / max(rows, 1)
    centred = x - jnp.sum(x, axis=1, keepdims=True) / max(width, 1)
    variances = jnp.sum(jnp.square(centred), axis=1) / max(width - 1, 1)
    return MatrixStatistics(
        exponent=exponent.astype(jnp.float32),
        n=jnp.float32(rows),
        mean=mean,
        m2=jnp.sum(jnp.square(x - mean[None, :]), axis=0),
        rows=_moments(variances),
    )


def merge(a: MatrixStatistics, b: MatrixStatistics) -> MatrixStatistics:
    """Statistics of two matrices of one width, one above the other."""
    exponent = jnp.maximum(a.exponent, b.exponent)
    a, b = _at_exponent(a, exponent), _at_exponent(b, exponent)
    n = jnp.maximum(a.n + b.n, 1)
    delta = b.mean - a.mean
    return MatrixStatistics(
        exponent=exponent,
        n=a.n + b.n,
        mean=a.mean + delta * (b.n / n),
        m2=a.m2 + b.m2 + jnp.square(delta) * (a.n * b.n / n),
        rows=_merge_moments(a.rows, b.rows),
    )


def pattern_code(
    statistics: MatrixStatistics,
    *,
    threshold_ratio: float | jax.Array = THRESHOLD_RATIO,
    kurtosis_threshold: float | jax.Array = 0.0,
) -> jax.Array:
    """The detector: index into `CODES`, int32.

    Args:
      statistics: of the matrix.
      threshold_ratio: how much more one direction must scatter than the other.
      kurtosis_threshold: least kurtosis of the variances in the winning direction; at 0 the gate
        is open.
    """
    columns = _moments(statistics.m2 / jnp.maximum(statistics.n - 1, 1))
    row_cv = _scatter(statistics.rows, jnp.float32(statistics.mean.shape[0]))
    column_cv = _scatter(columns, statistics.n)
    row = row_cv / (column_cv + _EPSILON) > threshold_ratio
    column = column_cv / (row_cv + _EPSILON) > threshold_ratio
    row_open = _kurtosis(statistics.rows) >= kurtosis_threshold
    column_open = _kurtosis(columns) >= kurtosis_threshold
    # Comparisons with NaN are false, so a matrix with a NaN shows no pattern.
    return jnp.where(row & row_open, 1, jnp.where(column & ~row & column_open, 2, 0))


def classify(
    x: jax.Array, *, threshold_ratio: float = THRESHOLD_RATIO, kurtosis_threshold: float = 0.0
) -> Pattern:
    """The outlier pattern of a matrix.

    Args:
      x: (..., width) float array, flattened to (rows, width).
      threshold_ratio: how much more one direction must scatter than the other, each against what
        a Gaussian matrix does by chance.
      kurtosis_threshold: least kurtosis of the variances in the winning direction.

    Returns:
      `Pattern.ROW`, `Pattern.COLUMN` or `Pattern.NONE`; NONE if x is strong in both directions,
      constant, empty or not finite. The same for x and for 2^n x.

    Raises:
      ValueError: x has no dims, or is being traced (`pattern_code` is the pure function).
    """
    if isinstance(x, jax.core.Tracer):
        raise ValueError(
            "classify: x is being traced, and a Pattern is static; call it outside jit"
        )
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError("classify: x is a scalar; wanted a matrix")
    code = _classify(x, threshold_ratio, kurtosis_threshold)
    return CODES[int(code)]


@jax.jit
def _classify(x: jax.Array, threshold_ratio: float, kurtosis_threshold: float) -> jax.Array:
    return pattern_code(
        matrix_statistics(x),
        threshold_ratio=threshold_ratio,
        kurtosis_threshold=kurtosis_threshold,
    )


def _moments(values: jax.Array) -> Moments:
    n = values.shape[0]
    mean = jnp.sum(values) / max(n, 1)
    d = values - mean
    return Moments(jnp.float32(n), mean, jnp.sum(d**2), jnp.sum(d**3), jnp.sum(d**4))


def _merge_moments(a: Moments, b: Moments) -> Moments:
    """Pébay's pairwise update (SAND2008-6212)."""
    n = jnp.maximum(a.n + b.n, 1)
    d = b.mean - a.mean
    pa, pb = a.n / n, b.n / n
    return Moments(
        n=a.n + b.n,
        mean=a.mean + d * pb,
        m2=a.m2 + b.m2 + d**2 * pa * b.n,
        m3=a.m3 + b.m3 + d**3 * pa * b.n * (pa - pb) + 3 * d * (pa * b.m2 - pb * a.m2),
        m4=a.m4
        + b.m4
        + d**4 * pa * b.n * (pa**2 - pa * pb + pb**2)
        + 6 * d**2 * (pa**2 * b.m2 + pb**2 * a.m2)
        + 4 * d * (pa * b.m3 - pb * a.m3),
    )


def _at_exponent(s: MatrixStatistics, exponent: jax.Array) -> MatrixStatistics:
    """The same statistics with another exponent, no smaller than their own."""
    # What lies so far below the other matrix that it underflows adds nothing to it either.
    shift = jnp.maximum(s.exponent - exponent, -126)
    f = bits.power_of_two(shift.astype(jnp.int32))
    v = f**2
    n, mean, m2, m3, m4 = s.rows
    rows = Moments(n, mean * v, m2 * v**2, m3 * v**3, m4 * v**4)
    return MatrixStatistics(exponent, s.n, s.mean * f, s.m2 * v, rows)


def _scatter(variances: Moments, n: jax.Array) -> jax.Array:
    """Coefficient of variation of the variances of n values, in units of a Gaussian's."""
    std = jnp.sqrt(variances.m2 / jnp.maximum(variances.n - 1, 1))
    cv = std / (variances.mean + _EPSILON) / jnp.sqrt(2 / jnp.maximum(n - 1, 1))
    seen = (variances.mean > _ROUNDING) & (std > _RELATIVE_ROUNDING * variances.mean)
    return jnp.where(seen, cv, 0.0)


def _kurtosis(v: Moments) -> jax.Array:
    """Mean fourth power of the values standardized by their unbiased deviation."""
    variance = v.m2 / jnp.maximum(v.n - 1, 1)
    return jnp.where(v.m2 > 0, v.m4 / v.n / jnp.where(v.m2 > 0, variance, 1) ** 2, 0.0)
