"""How kernels are called, as far as it shows without a GPU."""

import jax
import jax.numpy as jnp

from tests.jaxprs import equations
from triton_kernels.overwrite import overwrite_columns


def test_calls_that_write_into_an_inputs_memory_are_kept_apart_from_slices():
    """Else XLA loses the result in `scan`; `test_gpu_step` sees that, where there is a GPU."""
    shapes = ((64, 48), jnp.bfloat16), ((3,), jnp.int32), ((64, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(overwrite_columns)(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    found = list(equations(jaxpr.jaxpr))
    (call,) = [e for e in found if e.primitive.name == "triton_kernel_call"]
    around = {*call.invars, *call.outvars}
    barriers = [e for e in found if e.primitive.name == "optimization_barrier"]
    assert {v for e in barriers for v in (*e.invars, *e.outvars)} >= around
    assert not around & {v for e in found if e not in (call, *barriers) for v in e.invars}
    assert all(len(e.invars) == 1 for e in barriers)  # XLA looks through larger ones
