"""One product of a layer, computed as its plan says.

Both operands are rotated (if at all) and quantized along the dim that the product contracts; their
product is accumulated in float32, the transform is undone by a power of two, the rows or columns
of extracted outliers are overwritten by a side product in `dtype`, and the result is rounded once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adahop_jax._dispatch import resolve
from adahop_jax._plan import CONTRACT, OPERANDS, OutlierSpec, Product, ProductPlan, Tensor
from adahop_jax._random import seed_of
from adahop_jax.reference.operations import dot, rotate

SIGNS = "signs"
Seeds = dict[str, jax.Array]
"""uint32[2] for every operand of a product that is rounded stochastically, and for its signs."""


class Outliers(NamedTuple):
    """Extracted rows or columns.

    Attributes:
      indices: int32 (k,), which.
      values: those rows or columns, of the layer's dtype.
    """

    indices: jax.Array
    values: jax.Array


class Saved(NamedTuple):
    """X as the backward pass keeps it for wgrad: quantized along tokens, outliers beside.

    Attributes:
      codes, scales: uint8 (in, bytes) and (in, blocks), X rotated and quantized.
      outliers: the columns of X that wgrad extracts; None if it extracts none of X.
    """

    codes: jax.Array
    scales: jax.Array
    outliers: Outliers | None


def product_seeds(name: Product, plan: ProductPlan, key: jax.Array | None) -> Seeds:
    """The seeds that a product draws from `key`; none if it draws no random bits."""
    if key is None or not plan.is_random:
        return {}
    key = jax.random.fold_in(key, list(OPERANDS).index(name))
    seeds: Seeds = {}
    for i, (tensor, spec) in enumerate(zip(OPERANDS[name], plan.specs, strict=True)):
        if spec.rounding == "stochastic":
            seeds[tensor] = seed_of(jax.random.fold_in(key, i))
    if plan.specs[0].signs == "random":
        seeds[SIGNS] = seed_of(jax.random.fold_in(key, len(OPERANDS[name])))
    return seeds


def save(x: jax.Array, *, plan: ProductPlan, seeds: Seeds, backend: str | None) -> Saved:
    """What wgrad needs of X.

    Args:
      x: (tokens, in) in the layer's dtype.
      plan: of wgrad, not full.
      seeds: of wgrad.
      backend: a backend's name, or None.
    """
    ops = resolve(backend)[1]
    outliers = plan.outliers if plan.outliers is not None and plan.outliers.tensor == "x" else None
    codes, scales, norms = ops.residual(
        x, axis=0, spec=plan.specs[0], norms=outliers is not None, **_seeds_of("x", seeds)
    )
    return Saved(codes, scales, None if outliers is None else _taken(x, 1, outliers, norms, ops))


def product(
    name: Product,
    lhs: jax.Array | Saved,
    rhs: jax.Array,
    *,
    plan: ProductPlan,
    seeds: Seeds,
    out_dtype: jnp.dtype,
    precision: lax.PrecisionLike,
    backend: str | None,
) -> jax.Array:
    """A quantized product.

    Args:
      name: "fwd", "dgrad" or "wgrad".
      lhs: 2-D operand as stored (`OPERANDS`, `CONTRACT`), in the layer's dtype; `Saved` in wgrad.
      rhs: 2-D operand as stored, in the layer's dtype.
      plan: of this product, not full.
      seeds: from `product_seeds`.
      out_dtype: of the result.
      precision: of the side product.
      backend: a backend's name, or None.

    Returns:
      The 2-D product of `out_dtype`.
    """
    ops = resolve(backend)[1]
    lhs, rhs = _undifferentiable((lhs, rhs))
    lhs_spec, rhs_spec = plan.specs
    lhs_axis, rhs_axis = CONTRACT[name]
    lhs_name, rhs_name = OPERANDS[name]
    extracted = None if plan.outliers is None else plan.outliers.tensor
    norms: jax.Array | None = None
    if isinstance(lhs, Saved):
        left = ops.load(lhs.codes, lhs.scales, spec=lhs_spec)
    else:
        left, norms = ops.operand(
            lhs,
            axis=lhs_axis,
            spec=lhs_spec,
            norms=extracted == lhs_name,
            **_seeds_of(lhs_name, seeds),
        )
    right, rhs_norms = ops.operand(
        rhs,
        axis=rhs_axis,
        spec=rhs_spec,
        norms=extracted == rhs_name,
        **_seeds_of(rhs_name, seeds),
    )

    rows = columns = None
    if extracted == lhs_name:
        outliers = _outliers_of(lhs, 1 - lhs_axis, plan, norms, ops)
        values = dot(outliers.values, rhs, contract=CONTRACT[name], precision=precision)
        rows = outliers.indices, values
    elif extracted == rhs_name:
        outliers = _outliers_of(rhs, 1 - rhs_axis, plan, rhs_norms, ops)
        if isinstance(lhs, Saved):
            values = _side_of_saved(lhs, outliers, plan, seeds.get(SIGNS), precision, ops)
        else:
            values = dot(lhs, outliers.values, contract=CONTRACT[name], precision=precision)
        columns = outliers.indices, values
    return ops.matmul(
        left,
        right,
        scale=_undo(plan),
        dtype=out_dtype,
        rows=rows,
        columns=columns,
    )


def _side_of_saved(
    saved: Saved,
    outliers: Outliers,
    plan: ProductPlan,
    sign_seed: jax.Array | None,
    precision: lax.PrecisionLike,
    ops: Any,
) -> jax.Array:
    """Columns of wgrad from dY's outliers, where no X in `dtype` is kept.

    dY's columns are rotated as X was, and meet its codes.
    """
    lhs_spec, rhs_spec = plan.specs
    columns = outliers.values
    # What is rotated is `hadamard` times as large, which float16 may not hold.
    dtype = jnp.float32 if columns.dtype == jnp.float16 else columns.dtype
    x = ops.dequantize(saved.codes, saved.scales, axis=1, fmt=lhs_spec.mx)
    turned = rotate(columns, axis=CONTRACT["wgrad"][1], spec=rhs_spec, sign_seed=sign_seed)
    values = dot(x.astype(dtype), turned.astype(dtype), contract=(1, 0), precision=precision)
    return values * _undo(plan)


@jax.custom_jvp
def _undifferentiable[T](operands: T) -> T:
    """The operands as they are, where no derivative is asked for.

    Rounding has zero derivative almost everywhere, which would pass for a gradient of zero; the
    layer's own gradient never differentiates through it.
    """
    return operands


@_undifferentiable.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "a quantized product has no derivative of its own: take first derivatives, in reverse "
        "mode, through adahop_jax.Dense, and higher ones with Plan.full()"
    )


def _outliers_of(
    operand: jax.Array | Saved, axis: int, plan: ProductPlan, norms: jax.Array | None, ops: Any
) -> Outliers:
    """Those of an operand, as they were saved or by its norms."""
    assert plan.outliers is not None
    if not isinstance(operand, Saved):
        return _taken(operand, axis, plan.outliers, norms, ops)
    if operand.outliers is None:
        raise ValueError("wgrad: X's outliers are asked for and were not saved")
    return operand.outliers


def _taken(
    x: jax.Array, axis: int, outliers: OutlierSpec, norms: jax.Array | None, ops: Any
) -> Outliers:
    """The k rows (`axis` 0) or columns (1) of x with the largest squared norms."""
    assert norms is not None
    index = ops.largest(norms, outliers.count(x.shape[axis]))
    return Outliers(index, jnp.take(x, index, axis=axis, mode="clip"))


def _undo(plan: ProductPlan) -> float:
    """The factor that takes transform and pre-scales out of the product."""
    lhs, rhs = plan.specs
    return 1 / (max(lhs.hadamard, 1) * lhs.pre_scale * rhs.pre_scale)


def _seeds_of(tensor: Tensor, seeds: Seeds) -> dict[str, jax.Array | None]:
    return {"seed": seeds.get(tensor), "sign_seed": seeds.get(SIGNS)}
