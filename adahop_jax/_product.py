"""One product of a layer, computed as its plan says.

Both operands are rotated (if at all) and quantized along the dim that the product contracts; their
product is accumulated in float32, the transform is undone by a power of two, the rows or columns
of extracted outliers are overwritten by a side product in `dtype`, and the result is rounded once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adahop_jax._dispatch import resolve
from adahop_jax._plan import CONTRACT, OPERANDS, Product, ProductPlan, Tensor
from adahop_jax._random import seed_of
from adahop_jax.reference.operations import Wanted, dot, rotate
from adahop_jax.reference.philox import uniform

SIGNS, OUTLIERS = "signs", "outliers"
Seeds = dict[str, jax.Array]
"""uint32[2] for every operand of a product that is rounded stochastically, for its signs, and for
what it extracts at random."""


class Outliers(NamedTuple):
    """Extracted rows or columns.

    Attributes:
      indices: int32 (k,), which.
      values: those rows or columns, of the layer's dtype.
    """

    indices: jax.Array
    values: jax.Array


class Use(NamedTuple):
    """A product that a tensor enters.

    Attributes:
      product: "fwd", "dgrad" or "wgrad".
      plan: of that product.
      seeds: from `product_seeds`.
    """

    product: Product
    plan: ProductPlan
    seeds: Seeds


class Side(NamedTuple):
    """A tensor as a product takes it.

    Attributes:
      tensor: as it is stored, 2-D, in the layer's dtype.
      operand: the backend's own, quantized along the contracted axis.
      outliers: what the product extracts of it; None if nothing.
    """

    tensor: jax.Array
    operand: Any
    outliers: Outliers | None


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
    if plan.outliers is not None and plan.outliers.norm == "random":
        seeds[OUTLIERS] = seed_of(jax.random.fold_in(key, len(OPERANDS[name]) + 1))
    return seeds


def sides(
    name: Tensor, tensor: jax.Array, uses: Sequence[Use], *, backend: str | None
) -> list[Any]:
    """A tensor quantized for products that it enters, in one read where the backend can.

    Products that want the same view of it share that view, and the outliers that they both extract.

    Args:
      name: "x", "w" or "dy".
      tensor: as it is stored, 2-D, in the layer's dtype.
      uses: the products; of several layers, if they read the same tensor.
      backend: a backend's name, or None.

    Returns:
      For each use a `Side`, `Saved` of X for wgrad, or None for a product in full.
    """
    wanted = [None if use.plan.is_full else _wanted(name, use) for use in uses]
    distinct: dict[Any, Wanted] = {}
    for want in wanted:
        if want is not None:
            known = distinct.get(_view_key(want), want)
            distinct[_view_key(want)] = known._replace(norms=known.norms or want.norms)
    if not distinct:
        return [None] * len(uses)
    ops = resolve(backend)[1]
    tensor = _undifferentiable(tensor)
    views = dict(zip(distinct, ops.views(tensor, *distinct.values()), strict=True))
    taken: dict[Any, Outliers] = {}

    def side(use: Use, want: Wanted) -> Side | Saved:
        view = views[_view_key(want)]
        outliers = None
        if use.plan.outliers is not None and use.plan.outliers.tensor == name:
            size = tensor.shape[1 - want.axis]
            k = use.plan.outliers.count(size)
            key = _view_key(want), k, id(use.seeds.get(OUTLIERS))
            if key not in taken:
                norms = view[-1] if want.norms else uniform((1, size), use.seeds[OUTLIERS])[0]
                taken[key] = _largest(tensor, 1 - want.axis, k, norms, ops)
            outliers = taken[key]
        if want.stored:
            return Saved(view[0], view[1], outliers)
        return Side(tensor, view[0], outliers)

    return [
        None if want is None else side(use, want) for use, want in zip(uses, wanted, strict=True)
    ]


def product(
    use: Use,
    lhs: Side | Saved,
    rhs: Side,
    *,
    out_dtype: jnp.dtype,
    precision: lax.PrecisionLike,
    backend: str | None,
) -> jax.Array:
    """A quantized product.

    Args:
      use: which, with its plan, not full.
      lhs, rhs: its operands (`OPERANDS`), from `sides`.
      out_dtype: of the result.
      precision: of the side product.
      backend: a backend's name, or None.

    Returns:
      The 2-D product of `out_dtype`.
    """
    name, plan, seeds = use
    ops = resolve(backend)[1]
    if isinstance(lhs, Saved):
        left = ops.load(lhs.codes, lhs.scales, spec=plan.specs[0])
    else:
        left = lhs.operand

    rows = columns = None
    if plan.outliers is not None:
        of_lhs = plan.outliers.tensor == OPERANDS[name][0]
        outliers = (lhs if of_lhs else rhs).outliers
        assert outliers is not None
        if of_lhs:
            values = dot(outliers.values, rhs.tensor, contract=CONTRACT[name], precision=precision)
            rows = outliers.indices, values
        else:
            if isinstance(lhs, Saved):
                values = _side_of_saved(lhs, outliers, plan, seeds.get(SIGNS), precision, ops)
            else:
                values = dot(
                    lhs.tensor, outliers.values, contract=CONTRACT[name], precision=precision
                )
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


def _wanted(tensor: Tensor, use: Use) -> Wanted:
    """The view of a tensor that a product wants."""
    side = OPERANDS[use.product].index(tensor)
    oe = use.plan.outliers
    return Wanted(
        stored=(tensor, use.product) == ("x", "wgrad"),
        axis=CONTRACT[use.product][side],
        spec=use.plan.specs[side],
        seed=use.seeds.get(tensor),
        sign_seed=use.seeds.get(SIGNS),
        norms=oe is not None and (oe.tensor, oe.norm) == (tensor, "l2"),
    )


def _view_key(want: Wanted) -> tuple[Any, ...]:
    """Equal for views of equal codes and scales: norms do not alter these, other seeds do."""
    return want.stored, want.axis, want.spec, id(want.seed), id(want.sign_seed)


def _largest(x: jax.Array, axis: int, k: int, norms: jax.Array, ops: Any) -> Outliers:
    """The k rows (`axis` 0) or columns (1) of x with the largest norms, or numbers for norms."""
    index = ops.largest(norms, k)
    return Outliers(index, jnp.take(x, index, axis=axis, mode="clip"))


def _undo(plan: ProductPlan) -> float:
    """The factor that takes transform and pre-scales out of the product."""
    lhs, rhs = plan.specs
    return 1 / (max(lhs.hadamard, 1) * lhs.pre_scale * rhs.pre_scale)
