"""The three products of dense layers that read the same X, under one `custom_vjp`.

    Y [T, out] = X [T, in]    W [in, out]      fwd,   contracts in
    dX [T, in] = dY [T, out]  W^T [out, in]    dgrad, contracts out
    dW [in, out] = X^T [in, T]  dY [T, out]    wgrad, contracts T (tokens)

MX blocks lie along the contracted dim, so each tensor is quantized anew, along another axis, for
each product it enters. What the backward pass keeps of X is the view that wgrad needs: rotated and
quantized along tokens, packed; once for all layers that want the same. W is the parameter itself,
quantized again in dgrad, so nothing of it is kept. A product whose plan is full is the one that
`nn.Dense` and its gradient compute.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from adahop_jax._plan import PRODUCTS, LayerPlan, Product
from adahop_jax._product import Saved, Seeds, Use, product, product_seeds, sides
from adahop_jax.reference.bits import rounded

Dot = Callable[[jax.Array, jax.Array], jax.Array]
Arrays = tuple[jax.Array, ...]

_SAVED = "adahop_jax.saved"
save_quantized = jax.checkpoint_policies.save_only_these_names(_SAVED)
"""A policy of `jax.checkpoint` and `nn.remat`: X as wgrad takes it is kept, packed, and all else
computed again in the backward pass. X that a plan leaves to wgrad in full is not kept."""


class Layer(NamedTuple):
    """What is static of a layer, and its own.

    Attributes:
      plan: of the layer.
      dot: the product in full.
      precision: of the side product of outlier extraction.
    """

    plan: LayerPlan
    dot: Dot
    precision: lax.PrecisionLike


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def dense(
    x: jax.Array,
    ws: Arrays,
    seeds: tuple[dict[Product, Seeds], ...],
    layers: tuple[Layer, ...],
    dtype: jnp.dtype,
    backend: str | None,
) -> Arrays:
    """x @ w for every w, each with its products as planned.

    Args:
      x: (..., in), any float dtype; cast to `dtype` inside, its gradient has its own dtype.
      ws: (in, out) each, likewise; a gradient in float32 is never rounded to `dtype`.
      seeds: from `layer_seeds`, of each layer.
      layers: of each w.
      dtype: in which operands are read before quantization and products in full computed.
      backend: a backend's name, or None for the best here.

    Returns:
      (..., out) of `dtype` for every w.
    """
    return _ys(x, ws, seeds, layers, dtype, backend, keeps=False)[0]


def layer_seeds(plan: LayerPlan, key: jax.Array | None) -> dict[Product, Seeds]:
    """Seeds of all three products."""
    return {name: product_seeds(name, plan[name], key) for name in PRODUCTS}


def _ys(
    x: jax.Array,
    ws: Arrays,
    seeds: tuple[dict[Product, Seeds], ...],
    layers: tuple[Layer, ...],
    dtype: jnp.dtype,
    backend: str | None,
    *,
    keeps: bool,
) -> tuple[Arrays, list[jax.Array | Saved]]:
    """Every Y, and of X what each layer's wgrad needs if `keeps`."""
    members = list(zip(layers, seeds, strict=True))
    fwd = [_use("fwd", *member) for member in members]
    wgrad = [_use("wgrad", *member) for member in members] if keeps else []
    of_x = sides("x", _flat(rounded(x, dtype)), [*fwd, *wgrad], backend=backend)
    for_fwd, for_wgrad = of_x[: len(fwd)], of_x[len(fwd) :]
    ys = []
    for use, x_side, w, layer in zip(fwd, for_fwd, ws, layers, strict=True):
        if x_side is None:
            y = layer.dot(x.astype(dtype), w.astype(dtype))
        else:
            (w_side,) = sides("w", rounded(w, dtype), [use], backend=backend)
            y = product(
                use,
                x_side,
                w_side,
                out_dtype=dtype,
                precision=layer.precision,
                backend=backend,
            ).reshape(*x.shape[:-1], w.shape[1])
        ys.append(y)
    return tuple(ys), [x if side is None else side for side in for_wgrad]


def _use(name: Product, layer: Layer, seeds: dict[Product, Seeds]) -> Use:
    return Use(name, layer.plan[name], seeds[name])


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["places", "tree"]
)
@dataclasses.dataclass(frozen=True)
class _Once:
    """A pytree in which an array that several leaves share is kept once.

    Attributes:
      arrays: the different ones.
      places: of every leaf, its index in `arrays`.
      tree: the pytree's structure.
    """

    arrays: list[jax.Array]
    places: tuple[int, ...]
    tree: Any

    @classmethod
    def of(cls, tree: Any) -> Self:
        leaves, structure = jax.tree.flatten(tree)
        distinct = {id(leaf): leaf for leaf in leaves}
        order = list(distinct)
        places = tuple(order.index(id(leaf)) for leaf in leaves)
        return cls(list(distinct.values()), places, structure)

    def unfold(self) -> Any:
        return jax.tree.unflatten(self.tree, [self.arrays[place] for place in self.places])


def _forward(
    x: jax.Array,
    ws: Arrays,
    seeds: tuple[dict[Product, Seeds], ...],
    layers: tuple[Layer, ...],
    dtype: jnp.dtype,
    backend: str | None,
) -> tuple[Arrays, Any]:
    ys, of_x = _ys(x, ws, seeds, layers, dtype, backend, keeps=True)
    kept = _Once.of(of_x)
    named = [a if a is x else checkpoint_name(a, _SAVED) for a in kept.arrays]
    # An empty array carries x's dtype, which its packed view does not know.
    like_x = jnp.zeros((0,), x.dtype)
    return ys, (dataclasses.replace(kept, arrays=named), ws, seeds, like_x)


def _backward(
    layers: tuple[Layer, ...],
    dtype: jnp.dtype,
    backend: str | None,
    residuals: Any,
    dys: Arrays,
) -> tuple[jax.Array, Arrays, None]:
    kept, ws, seeds, like_x = residuals
    gradients = [
        _gradients(*member, dtype, backend, like_x.dtype)
        for member in zip(layers, seeds, kept.unfold(), ws, dys, strict=True)
    ]
    dxs, dws = zip(*gradients, strict=True)
    # From the last to the first, as JAX adds up the gradients of calls one after the other.
    return functools.reduce(jnp.add, reversed(dxs)), dws, None


def _gradients(
    layer: Layer,
    seeds: dict[Product, Seeds],
    kept: Any,
    w: jax.Array,
    dy: jax.Array,
    dtype: jnp.dtype,
    backend: str | None,
    x_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """dX and dW of one layer."""
    common: Any = {"precision": layer.precision, "backend": backend}
    x_shape = (*dy.shape[:-1], w.shape[0])
    dgrad, wgrad = (_use(name, layer, seeds) for name in ("dgrad", "wgrad"))
    dy_dgrad, dy_wgrad = sides("dy", _flat(rounded(dy, dtype)), [dgrad, wgrad], backend=backend)
    if dgrad.plan.is_full:
        like = jax.ShapeDtypeStruct(x_shape, dtype)
        (dx,) = jax.linear_transpose(lambda x: layer.dot(x, w.astype(dtype)), like)(dy)
    else:
        (w_side,) = sides("w", rounded(w, dtype), [dgrad], backend=backend)
        dx = product(dgrad, dy_dgrad, w_side, out_dtype=dtype, **common).reshape(x_shape)
    if wgrad.plan.is_full:
        x_cast = kept.astype(dtype)
        (dw,) = jax.linear_transpose(lambda w: layer.dot(x_cast, w), w.astype(dtype))(dy)
    else:
        dw = product(wgrad, kept, dy_wgrad, out_dtype=w.dtype, **common)
    return dx.astype(x_dtype), dw.astype(w.dtype)


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
