"""What could stand in the strategy table's column-column cell, measured on real tensors.

Each `Candidate` is one way to compute Y = X W or dW = X^T dY of a layer: a product plan, and what
plans cannot say, which is emulated here. Inner extraction takes k columns and rows out of the
*contracted* dim, zeros them in the quantized operands and adds their product in the model's dtype.
Square blocks share one scale among 32 x 32 elements of W.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import adahop_jax as ah
from adahop_jax._formats import FormatName
from train.product_error import Measurement, Tensors, errors, true_products

Product = Literal["fwd", "wgrad"]
Ranking = Literal["x", "both"]

CELL = "column-column"
EVERY = 3
"""One block of so many is measured."""
INNER = (16, 32, 64)
BLOCK = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to compute a product a b.

    Attributes:
      label: what tables call it.
      plan: of the quantized part, as `adahop_jax.matmul` takes it: "x" is a, "w" is b.
      inner: rows of b and columns of a that are extracted.
      ranked_by: their norms in a, which is X's, or these times those in b.
      square: whether b's blocks are 32 x 32.
    """

    label: str
    plan: ah.ProductPlan
    inner: int = 0
    ranked_by: Ranking = "x"
    square: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Measurement):
    """The error of one candidate, whose label is the strategy.

    Attributes:
      saved_bits: kept of each number of X for wgrad; 0 in other products.
    """

    saved_bits: float


def _plan(
    lhs: FormatName = "mxfp4",
    rhs: FormatName | None = None,
    *,
    hadamard: int = 32,
    oe: Literal["x", "w"] | None = None,
    scale_rule: Literal["even", "floor", "ceil"] = "even",
) -> ah.ProductPlan:
    left, right = (
        ah.OperandSpec(format=name, hadamard=hadamard, scale_rule=scale_rule)
        for name in (lhs, rhs or lhs)
    )
    outliers = None if oe is None else ah.OutlierSpec(tensor=oe)
    return ah.ProductPlan(lhs=left, rhs=right, outliers=outliers)


def candidates(product: Product) -> tuple[Candidate, ...]:
    """Every candidate of a product, those of the forward's MXFP4 alone among them."""
    other, extracted = ("W", "w") if product == "fwd" else ("dY", "x")
    tensor: Literal["x", "w"] = "w" if product == "fwd" else "x"

    def inner(name: str, plan: ah.ProductPlan) -> list[Candidate]:
        return [Candidate(label=f"{name}, inner {k} by X", plan=plan, inner=k) for k in INNER] + [
            Candidate(
                label=f"{name}, inner {INNER[-1]} by X and {other}",
                plan=plan,
                inner=INNER[-1],
                ranked_by="both",
            )
        ]

    found = [
        Candidate(label="full", plan=ah.ProductPlan.full()),
        Candidate(label="mxfp4", plan=_plan(hadamard=0)),
        Candidate(label="iht", plan=_plan()),
        Candidate(label=f"iht+oe({extracted})", plan=_plan(oe=tensor)),
        *inner("iht", _plan()),
    ]
    if product == "fwd":
        for size, name in ((0, "mxfp4"), (32, "iht")):
            found += [
                Candidate(label=f"{name}, floor", plan=_plan(hadamard=size, scale_rule="floor")),
                Candidate(label=f"{name}, ceil", plan=_plan(hadamard=size, scale_rule="ceil")),
                Candidate(label=f"{name}, W in 32 x 32", plan=_plan(hadamard=size), square=True),
            ]
    return (
        *found,
        Candidate(label="iht, X mxfp6", plan=_plan("mxfp6", "mxfp4")),
        Candidate(label=f"iht, {other} mxfp6", plan=_plan("mxfp4", "mxfp6")),
        Candidate(label="mxfp6", plan=_plan("mxfp6", hadamard=0)),
        Candidate(label="iht mxfp6", plan=_plan("mxfp6")),
        Candidate(label=f"iht mxfp6+oe({extracted})", plan=_plan("mxfp6", oe=tensor)),
        *inner("iht mxfp6", _plan("mxfp6")),
    )


def chosen(
    layers: Sequence[ah.LayerInfo], explanation: ah.Explanation
) -> list[tuple[str, Product]]:
    """Returns (path, product) of what is measured.

    In one block of so many, every forward product and the column-column wgrads.

    Args:
      layers: with paths as "block_3/attn/key".
      explanation: of any level's plan.
    """
    keys = {(row.path, row.product): row.why for row in explanation.rows}
    found: list[tuple[str, Product]] = []
    for layer in layers:
        if int(layer.path.partition("/")[0].removeprefix("block_")) % EVERY == 0:
            found.append((layer.path, "fwd"))
            if keys[layer.path, "wgrad"] == CELL:
                found.append((layer.path, "wgrad"))
    return found


def measure_candidates(path: str, product: Product, tensors: Tensors) -> Iterator[Trial]:
    """Measures every candidate of a product of the layer at `path`."""
    x, w, dy = tensors.x, tensors.w.astype(tensors.x.dtype), tensors.dy
    a, b = (x, w) if product == "fwd" else (x.T, dy)
    true = true_products(tensors)[product]
    for candidate in candidates(product):
        got = np.asarray(candidate_product(a, b, candidate), np.float32)
        error, row_error = errors(got, true)
        yield Trial(
            path=path,
            product=product,
            strategy=candidate.label,
            error=error,
            row_error=row_error,
            share=_share(a.shape, b.shape, candidate),
            work=a.size * b.shape[1],
            saved_bits=_saved_bits(a.shape, candidate) if product == "wgrad" else 0,
        )


@functools.partial(jax.jit, static_argnums=2)
def candidate_product(a: jax.Array, b: jax.Array, candidate: Candidate) -> jax.Array:
    """a @ b as a candidate computes it, float32."""
    extracted: Any = 0
    if candidate.inner:
        a32, b32 = a.astype(jnp.float32), b.astype(jnp.float32)
        sizes = jnp.sum(jnp.square(a32), axis=0)
        if candidate.ranked_by == "both":
            sizes *= jnp.sum(jnp.square(b32), axis=1)
        index = jax.lax.top_k(sizes, candidate.inner)[1]
        extracted = a32[:, index] @ b32[index]
        a, b = a.at[:, index].set(0), b.at[index].set(0)
    if not candidate.square:
        return ah.matmul(a, b, candidate.plan).astype(jnp.float32) + extracted
    size = max(candidate.plan.specs[0].hadamard, 1)
    a, b = ah.hadamard(a, axis=1, size=size), ah.hadamard(b, axis=0, size=size)
    return jnp.matmul(ah.quantize(a).dequantize(), square_blocks(b)) / size


def square_blocks(w: jax.Array) -> jax.Array:
    """`w` rounded to MXFP4 with one scale for every 32 x 32 elements; float32.

    Args:
      w: float32, its dims multiples of 32.
    """
    scales = ah.quantize(w, axis=0).scales  # the scale grows with the largest magnitude
    rows, columns = scales.shape
    exponents = scales.reshape(rows, columns // BLOCK, BLOCK).max(axis=-1).astype(jnp.int32) - 127
    exponents = jnp.repeat(jnp.repeat(exponents, BLOCK, axis=0), BLOCK, axis=1)
    elements = jnp.clip(jnp.ldexp(w, -exponents), -ah.MXFP4.max_value, ah.MXFP4.max_value)
    return jnp.ldexp(elements.astype(jnp.float4_e2m1fn).astype(jnp.float32), exponents)


def _share(a: tuple[int, ...], b: tuple[int, ...], candidate: Candidate) -> float:
    """Of the multiply-adds in the model's dtype."""
    if candidate.plan.is_full:
        return 1.0
    share = candidate.inner / a[1]
    oe = candidate.plan.outliers
    if oe is not None:
        size = a[0] if oe.tensor == "x" else b[1]
        share += oe.count(size) / size
    return share


def _saved_bits(xt: tuple[int, ...], candidate: Candidate) -> float:
    """Kept of each number of X for wgrad, where X^T is (in, tokens)."""
    if candidate.plan.is_full:
        return 16.0
    return candidate.plan.specs[0].mx.stored_bits + 16 * _share(xt, (0, 0), candidate)
