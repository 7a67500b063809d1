"""One product of a layer, computed as its plan says.

Both operands are rotated (if at all) and quantized along the dim that the product contracts; their
product is accumulated in float32, the transform is undone by a power of two, the rows or columns
of extracted outliers are overwritten by a side product in `dtype`, and the result is rounded once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adahop_jax._dispatch import resolve
from adahop_jax._plan import CONTRACT, OPERANDS, Product, ProductPlan, Tensor
from adahop_jax._random import seed_of
from adahop_jax.reference.operations import Wanted, dot, rotate

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


class Side(NamedTuple):
    """A tensor as a product takes it.

    Attributes:
      tensor: as it is stored, 2-D, in the layer's dtype.
      operand: the backend's own, quantized along the contracted axis.
      norms: squared norms along that axis; None if nothing is extracted of it.
    """

    tensor: jax.Array
    operand: Any
    norms: jax.Array | None


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


def sides(
    name: Tensor,
    tensor: jax.Array,
    plans: Mapping[Product, ProductPlan],
    seeds: Mapping[Product, Seeds],
    *,
    backend: str | None,
) -> dict[Product, Any]:
    """A tensor quantized for products that it enters, in one read where the backend can.

    Args:
      name: "x", "w" or "dy".
      tensor: as it is stored, 2-D, in the layer's dtype.
      plans: the products that want it, with their plans, none of them full.
      seeds: from `product_seeds`.
      backend: a backend's name, or None.

    Returns:
      A `Side` for each product; `Saved` of X for wgrad.
    """
    if not plans:
        return {}
    ops = resolve(backend)[1]
    tensor = _undifferentiable(tensor)
    found: dict[Product, Any] = {}
    wanted = [_wanted(name, product, plan, seeds[product]) for product, plan in plans.items()]
    for (product, plan), want, view in zip(
        plans.items(), wanted, ops.views(tensor, *wanted), strict=True
    ):
        if want.stored:
            codes, scales, norms = view
            outliers = _taken(tensor, 1 - want.axis, plan, norms, ops) if want.norms else None
            found[product] = Saved(codes, scales, outliers)
        else:
            found[product] = Side(tensor, *view)
    return found


def product(
    name: Product,
    lhs: Side | Saved,
    rhs: Side,
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
      lhs, rhs: its operands (`OPERANDS`), from `sides`.
      plan: of this product, not full.
      seeds: from `product_seeds`.
      out_dtype: of the result.
      precision: of the side product.
      backend: a backend's name, or None.

    Returns:
      The 2-D product of `out_dtype`.
    """
    ops = resolve(backend)[1]
    contract = lhs_axis, rhs_axis = CONTRACT[name]
    extracted = None if plan.outliers is None else plan.outliers.tensor
    if isinstance(lhs, Saved):
        left = ops.load(lhs.codes, lhs.scales, spec=plan.specs[0])
    else:
        left = lhs.operand

    rows = columns = None
    if extracted == OPERANDS[name][0]:
        if isinstance(lhs, Side):
            outliers = _taken(lhs.tensor, 1 - lhs_axis, plan, lhs.norms, ops)
        elif lhs.outliers is not None:
            outliers = lhs.outliers
        else:
            raise ValueError("wgrad: X's outliers are asked for and were not saved")
        values = dot(outliers.values, rhs.tensor, contract=contract, precision=precision)
        rows = outliers.indices, values
    elif extracted is not None:
        outliers = _taken(rhs.tensor, 1 - rhs_axis, plan, rhs.norms, ops)
        if isinstance(lhs, Saved):
            values = _side_of_saved(lhs, outliers, plan, seeds.get(SIGNS), precision, ops)
        else:
            values = dot(lhs.tensor, outliers.values, contract=contract, precision=precision)
        columns = outliers.indices, values
    return ops.matmul(
        left,
        rhs.operand,
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


def _wanted(tensor: Tensor, product: Product, plan: ProductPlan, seeds: Seeds) -> Wanted:
    """The view of a tensor that a product wants."""
    side = OPERANDS[product].index(tensor)
    return Wanted(
        stored=(tensor, product) == ("x", "wgrad"),
        axis=CONTRACT[product][side],
        spec=plan.specs[side],
        seed=seeds.get(tensor),
        sign_seed=seeds.get(SIGNS),
        norms=plan.outliers is not None and plan.outliers.tensor == tensor,
    )


def _taken(
    x: jax.Array, axis: int, plan: ProductPlan, norms: jax.Array | None, ops: Any
) -> Outliers:
    """The k rows (`axis` 0) or columns (1) of x with the largest squared norms."""
    assert norms is not None and plan.outliers is not None
    index = ops.largest(norms, plan.outliers.count(x.shape[axis]))
    return Outliers(index, jnp.take(x, index, axis=axis, mode="clip"))


def _undo(plan: ProductPlan) -> float:
    """The factor that takes transform and pre-scales out of the product."""
    lhs, rhs = plan.specs
    return 1 / (max(lhs.hadamard, 1) * lhs.pre_scale * rhs.pre_scale)
