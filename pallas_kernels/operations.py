"""The Pallas backend."""

import jax
import jax.numpy as jnp

from adahop_jax._formats import OperandSpec
from adahop_jax._kernels import KernelBackend, Operand
from adahop_jax._view import CHUNK, Request, View
from pallas_kernels.fold import fold
from pallas_kernels.matmul import matmul
from pallas_kernels.overwrite import overwrite_columns
from pallas_kernels.quantize import quantize
from pallas_kernels.select import largest


class Backend(KernelBackend):
    """The operations on Hopper's FP8 units.

    Args:
      processors: of the GPU.
    """

    def __init__(self, processors: int) -> None:
        self._processors = processors

    def largest(self, norms: jax.Array, k: int) -> jax.Array:
        """Indices of the k largest norms."""
        return largest(norms, k)

    def _views(self, x: jax.Array, wanted: list[tuple[int, Request]]) -> list[View]:
        axes = {axis for axis, _ in wanted}
        if len(axes) == len(wanted):
            return quantize(x, *wanted)
        return [view for w in wanted for view in quantize(x, w)]

    def _loaded(self, codes: jax.Array, scales: jax.Array, spec: OperandSpec) -> View:
        return fold(codes, scales, fmt=spec.mx)

    def _product(self, lhs: Operand, rhs: Operand, scale: float, dtype: jnp.dtype) -> jax.Array:
        a, b = lhs.values, rhs.values
        assert isinstance(a, View) and isinstance(b, View)
        chunk = CHUNK["rotated" if lhs.rotated and rhs.rotated else "plain"]
        return matmul(a, b, scale=scale, chunk=chunk, dtype=dtype, processors=self._processors)

    def _overwrite_columns(self, y: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
        return overwrite_columns(y, index, values)
