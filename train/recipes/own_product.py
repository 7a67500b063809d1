"""How a recipe that no plan can say gets into a layer: as the `dot_general` of `adahop_jax.Dense`.

A layer whose plan is full computes its product by `dot_general_cls`, as `flax.linen.Dense` does. An
`OwnProduct` stands there, with the recipe's `custom_vjp` in it: names, shapes and initial values of
the parameters are those of every other recipe. As in `nn.Dense`, the kernel is cast to `dtype`
before, and its gradient comes back in `dtype`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


class Product(Protocol):
    """x @ w with a recipe's gradient: a `custom_vjp`."""

    def __call__(self, x: jax.Array, w: jax.Array, seeds: jax.Array, /) -> jax.Array:
        """Returns (tokens, out) of x's dtype.

        Args:
          x: (tokens, in) of the layer's `dtype`.
          w: (in, out) likewise.
          seeds: uint32 (n, 2), one for each thing that is drawn at random.
        """


def with_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Product:
    """Returns the `custom_vjp` of a recipe.

    Args:
      forward: (x, w, seeds) -> x @ w, and what the backward pass keeps.
      backward: (what is kept, dY) -> dX, dW and None.
    """

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array, seeds: jax.Array) -> jax.Array:
        y: jax.Array = forward(x, w, seeds)[0]
        return y

    product.defvjp(forward, backward)
    return product


class OwnProduct(nn.Module):
    """A `dot_general` that computes a recipe's product.

    Attributes:
      product: of the recipe.
      seeds: how many it takes; they come from the RNG stream "quantize".
    """

    product: Product
    seeds: int

    def __call__(
        self, x: jax.Array, w: jax.Array, dimension_numbers: Any, *, precision: Any = None
    ) -> jax.Array:
        """Returns (..., out) for x of (..., in) and w of (in, out).

        Args:
          x, w: the operands.
          dimension_numbers, precision: as `lax.dot_general` takes them; a `Dense` contracts x's
            last dim with w's first, and so does this.
        """
        if self.is_initializing():
            return lax.dot_general(x, w, dimension_numbers, precision=precision)
        seeds = jnp.zeros((0, 2), jnp.uint32)
        if self.seeds:
            seeds = jax.random.bits(self.make_rng("quantize"), (self.seeds, 2), jnp.uint32)
        y = self.product(x.reshape(-1, x.shape[-1]), w, seeds)
        return y.reshape(*x.shape[:-1], w.shape[1])
