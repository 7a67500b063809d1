"""One planned product, and the transform by itself, without a layer around them."""

import math

import jax
import jax.numpy as jnp

from adahop_jax._mxarray import check_dtype
from adahop_jax._plan import ProductPlan
from adahop_jax._product import Use, product, product_seeds, sides
from adahop_jax._shapes import negative_axis, restore, two_d
from adahop_jax.reference import hadamard as reference


def matmul(
    a: jax.Array,
    b: jax.Array,
    strategy: str | ProductPlan,
    *,
    key: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """a @ b as a strategy computes it; not for use under autodiff (`Dense` is).

    Args:
      a: (..., M, K); float32, bfloat16 or float16.
      b: (K, N), of a's dtype.
      strategy: "full", "mxfp4", "iht", or a `ProductPlan`, whose outliers are rows of a ("x") or
        columns of b ("w").
      key: a JAX random key, for a plan that draws random bits.
      backend: a backend's name, or None for the best here.

    Returns:
      (..., M, N) of a's dtype, accumulated in float32 and rounded once.

    Raises:
      TypeError: dtypes that differ or are not supported.
      ValueError: shapes that do not contract, an unknown strategy, a plan that draws random bits
        without a key or extracts a tensor that is no operand here.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    check_dtype("matmul", a.dtype)
    if a.dtype != b.dtype:
        raise TypeError(f"matmul: a is {a.dtype} and b is {b.dtype}; cast one to the other's dtype")
    if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"matmul: a {a.shape} and b {b.shape} do not contract; wanted (..., M, K) and (K, N)"
        )
    plan = ProductPlan.named(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(plan, ProductPlan):
        raise TypeError(
            f"matmul: strategy is a {type(plan).__name__}; wanted 'full', 'mxfp4', 'iht' or an "
            "adahop_jax.ProductPlan"
        )
    if plan.is_full:
        return jnp.matmul(a, b)
    if plan.outliers is not None and plan.outliers.tensor not in ("x", "w"):
        raise ValueError(
            "matmul: extracts 'dy', which is no operand here; choose 'x' (a) or 'w' (b)"
        )
    if plan.is_random and key is None:
        raise ValueError("matmul: the strategy draws random bits; pass key=")
    use = Use("fwd", plan, product_seeds("fwd", plan, key))
    a_rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    y = product(
        use,
        sides("x", a_rows, [use], backend=backend)[0],
        sides("w", b, [use], backend=backend)[0],
        out_dtype=a.dtype,
        precision=None,
        backend=backend,
    )
    return y.reshape(*a.shape[:-1], b.shape[1])


def hadamard(x: jax.Array, *, axis: int = -1, size: int = 32) -> jax.Array:
    """Every block of `size` elements along `axis` times the +-1 Sylvester matrix.

    Unnormalized: H H^T = size * I, so that (a H) (H^T b) is `size` times a b, exactly undone by a
    power of two.

    Args:
      x: float array of any rank above 0.
      axis: the axis that a product contracts; zero-padded up to a multiple of `size`.
      size: a power of two.

    Returns:
      float32 of the padded shape.

    Raises:
      ValueError: axis out of range, or a size that is no power of two.
    """
    x = jnp.asarray(x)
    axis = negative_axis("hadamard", x, axis)
    if size < 1 or size & (size - 1):
        raise ValueError(f"hadamard: size {size} is no power of two; choose e.g. 32")
    flat, flat_axis = two_d(x, axis)
    return restore(reference.hadamard(flat, axis=flat_axis, size=size), x.shape, axis)
