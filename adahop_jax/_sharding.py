"""What `lax.dot_general` gets for free and a `custom_vjp` over many operations has to ask for."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Inside `shard_map`: marks every array as varying over the axes that any of them varies over.

    The cotangent of one that did not is then summed over those axes by JAX.
    """
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    return tuple(
        lax.pcast(array, missing, to="varying")
        if (missing := tuple(axes - varying_axes(array)))
        else array
        for array in arrays
    )


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Inside `shard_map`: the mesh's axes that the array varies over."""
    return jax.typeof(array).manual_axis_type.varying


def compiler_placed[T: Callable[..., Any]](fn: T, *, out: Any) -> T:
    """On a mesh with explicit axes: `fn` with its inner shardings left to the compiler.

    Args:
      fn: any function of arrays.
      out: sharding of its results, a `PartitionSpec` each; unused where no such mesh is set.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return fn
    return jax.sharding.auto_axes(fn, out_sharding=out)


def sharding_of(fn: Callable[..., jax.Array], *args: jax.Array) -> PartitionSpec | None:
    """The sharding that JAX gives the result of `fn` on a mesh with explicit axes."""
    sharding = jax.eval_shape(fn, *args).sharding
    return None if sharding is None else sharding.spec
