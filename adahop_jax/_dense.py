"""The dense layer's three products under one `custom_vjp`.

    Y [T, out] = X [T, in]    W [in, out]      fwd,   contracts in
    dX [T, in] = dY [T, out]  W^T [out, in]    dgrad, contracts out
    dW [in, out] = X^T [in, T]  dY [T, out]    wgrad, contracts T (tokens)

MX blocks lie along the contracted dim, so each tensor is quantized anew, along another axis, for
each product it enters. What the backward pass keeps of X is the view that wgrad needs: rotated and
quantized along tokens, packed. W is the parameter itself, quantized again in dgrad, so nothing of
it is kept. A product whose plan is full is the one that `nn.Dense` and its gradient compute.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from adahop_jax._plan import PRODUCTS, LayerPlan, Product, ProductPlan
from adahop_jax._product import Saved, Seeds, product, product_seeds, sides
from adahop_jax.reference.bits import rounded

Dot = Callable[[jax.Array, jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def dense(
    x: jax.Array,
    w: jax.Array,
    seeds: dict[Product, Seeds],
    plan: LayerPlan,
    dtype: jnp.dtype,
    dot: Dot,
    precision: lax.PrecisionLike,
    backend: str | None,
) -> jax.Array:
    """x @ w with every product as planned.

    Args:
      x: (..., in), any float dtype; cast to `dtype` inside, its gradient has its own dtype.
      w: (in, out), likewise; a gradient in float32 is never rounded to `dtype`.
      seeds: from `layer_seeds`.
      plan: of this layer.
      dtype: in which operands are read before quantization and products in full computed.
      dot: the product in full.
      precision: of the side product of outlier extraction.
      backend: a backend's name, or None for the best here.

    Returns:
      (..., out) of `dtype`.
    """
    return _y(x, w, seeds, plan, dtype, dot, precision, backend, keeps=False)[0]


def layer_seeds(plan: LayerPlan, key: jax.Array | None) -> dict[Product, Seeds]:
    """Seeds of all three products."""
    return {name: product_seeds(name, plan[name], key) for name in PRODUCTS}


def _y(
    x: jax.Array,
    w: jax.Array,
    seeds: dict[Product, Seeds],
    plan: LayerPlan,
    dtype: jnp.dtype,
    dot: Dot,
    precision: lax.PrecisionLike,
    backend: str | None,
    *,
    keeps: bool,
) -> tuple[jax.Array, jax.Array | Saved]:
    """Y, and of X what wgrad needs if `keeps`."""
    enters: tuple[Product, ...] = ("fwd", "wgrad") if keeps else ("fwd",)
    of_x = sides("x", _flat(rounded(x, dtype)), _quantized(plan, enters), seeds, backend=backend)
    if plan.fwd.is_full:
        y = dot(x.astype(dtype), w.astype(dtype))
    else:
        of_w = sides("w", rounded(w, dtype), {"fwd": plan.fwd}, seeds, backend=backend)
        y = product(
            "fwd",
            of_x["fwd"],
            of_w["fwd"],
            plan=plan.fwd,
            seeds=seeds["fwd"],
            out_dtype=dtype,
            precision=precision,
            backend=backend,
        ).reshape(*x.shape[:-1], w.shape[1])
    return y, of_x.get("wgrad", x)


def _quantized(plan: LayerPlan, names: tuple[Product, ...]) -> dict[Product, ProductPlan]:
    """Those of the products that are not full."""
    return {name: plan[name] for name in names if not plan[name].is_full}


def _forward(
    x: jax.Array,
    w: jax.Array,
    seeds: dict[Product, Seeds],
    plan: LayerPlan,
    dtype: jnp.dtype,
    dot: Dot,
    precision: lax.PrecisionLike,
    backend: str | None,
) -> tuple[jax.Array, Any]:
    y, kept = _y(x, w, seeds, plan, dtype, dot, precision, backend, keeps=True)
    # An empty array carries x's dtype, which its packed view does not know.
    return y, (kept, w, seeds, jnp.zeros((0,), x.dtype))


def _backward(
    plan: LayerPlan,
    dtype: jnp.dtype,
    dot: Dot,
    precision: lax.PrecisionLike,
    backend: str | None,
    residuals: Any,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    kept, w, seeds, like_x = residuals
    common: Any = {"precision": precision, "backend": backend}
    x_shape = (*dy.shape[:-1], w.shape[0])
    of_dy = sides(
        "dy",
        _flat(rounded(dy, dtype)),
        _quantized(plan, ("dgrad", "wgrad")),
        seeds,
        backend=backend,
    )
    if plan.dgrad.is_full:
        like = jax.ShapeDtypeStruct(x_shape, dtype)
        (dx,) = jax.linear_transpose(lambda x: dot(x, w.astype(dtype)), like)(dy)
    else:
        of_w = sides("w", rounded(w, dtype), {"dgrad": plan.dgrad}, seeds, backend=backend)
        dx = product(
            "dgrad",
            of_dy["dgrad"],
            of_w["dgrad"],
            plan=plan.dgrad,
            seeds=seeds["dgrad"],
            out_dtype=dtype,
            **common,
        ).reshape(x_shape)
    if plan.wgrad.is_full:
        x_cast = kept.astype(dtype)
        (dw,) = jax.linear_transpose(lambda w: dot(x_cast, w), w.astype(dtype))(dy)
    else:
        dw = product(
            "wgrad",
            kept,
            of_dy["wgrad"],
            plan=plan.wgrad,
            seeds=seeds["wgrad"],
            out_dtype=w.dtype,
            **common,
        )
    return dx.astype(like_x.dtype), dw.astype(w.dtype), None


def _flat(x: jax.Array) -> jax.Array:
    """(..., width) -> (tokens, width)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


dense.defvjp(_forward, _backward)


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias in y's dtype; the bias' gradient is summed in float32.

    Args:
      y: (..., out).
      bias: (out,), any float dtype.
    """
    return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


def _add_bias_forward(y: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return add_bias(y, bias), jnp.zeros((0,), bias.dtype)


def _add_bias_backward(like_bias: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dy, jnp.sum(dy.astype(jnp.float32), axis=tuple(range(dy.ndim - 1))).astype(
        like_bias.dtype
    )


add_bias.defvjp(_add_bias_forward, _add_bias_backward)
