"""What a function's backward pass is handed, read off the trace of `jax.vjp`'s closure."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

MIB, GIB = 2**20, 2**30


def kept(function: Callable[..., Any], parameters: Any, *args: Any) -> list[Any]:
    """Shape and dtype of every array that is kept for the backward pass but the parameters.

    Nothing is computed, so that sizes which no machine holds can be counted.

    Args:
      function: function(parameters, *args), differentiated by all of them.
      parameters, *args: pytrees of floating arrays or `jax.ShapeDtypeStruct`s.
    """
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(function, *args)[1]))(
        parameters, *args
    ).jaxpr
    own = set(jaxpr.invars[: len(jax.tree.leaves(parameters))])
    found = dict.fromkeys(var for var in jaxpr.outvars if not isinstance(var, Literal))
    return [var.aval for var in found if var not in own]


def size(aval: Any) -> int:
    """In bytes; of random keys 0."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize
