"""The Triton backend."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from adahop_jax._formats import MXFormat, OperandSpec
from adahop_jax._kernels import KernelBackend, Operand
from adahop_jax._view import BLOCK, CHUNK, FOLDS, Kind, Request, View
from adahop_jax.reference import operations as reference
from triton_kernels.estimate import speedup
from triton_kernels.fold import fold
from triton_kernels.machines import Machine, Path
from triton_kernels.matmul import is_large
from triton_kernels.matmul import matmul as folded_matmul
from triton_kernels.native import native_matmul
from triton_kernels.overwrite import overwrite_columns
from triton_kernels.quantize_columns import quantize_columns
from triton_kernels.quantize_rows import quantize_rows
from triton_kernels.quantize_tiles import quantize_tiles, takes
from triton_kernels.select import largest


class Backend(KernelBackend):
    """The operations on one path of a machine, see `machines`.

    Args:
      machine: the machine.
      path: one of its paths.
      processors: how many it has.
      large: a module with another `matmul` of folded operands, for large products that it takes.
    """

    def __init__(
        self, machine: Machine, path: Path, processors: int, large: ModuleType | None = None
    ) -> None:
        self._machine, self._path, self._processors = machine, path, processors
        self._large = large

    def largest(self, norms: jax.Array, k: int) -> jax.Array:
        """Indices of the k largest norms."""
        return largest(norms, k)

    def speedup(
        self,
        *,
        rows: int,
        columns: int,
        length: int,
        stored: MXFormat | None,
        extracted: str | None,
    ) -> float | None:
        """Expected time in BF16 over expected time here; None on machines never measured."""
        if self._machine.rates is None or self._path != "fp8":
            return None
        return speedup(
            self._machine.rates,
            rows=rows,
            columns=columns,
            length=length,
            stored=stored,
            extracted=extracted,
        )

    def _views(self, x: jax.Array, wanted: list[tuple[int, Request]]) -> list[View]:
        by_axis = dict(wanted)
        pair = len(by_axis) == len(wanted) == 2 and not _wide(by_axis[1])
        if pair and all(takes(x, request.spec, self._machine) for _, request in wanted):
            last, first = self._tiles(x, by_axis[1], by_axis[0])
            return [last if axis == 1 else first for axis, _ in wanted]
        return [self._view(x, axis, request) for axis, request in wanted]

    def _loaded(self, codes: jax.Array, scales: jax.Array, spec: OperandSpec) -> View:
        view = View(codes, scales, None, None)
        if self._path == "fp8":
            return fold(codes, scales, fmt=spec.mx, machine=self._machine)
        if self._path == "native" and spec.format != "mxfp4":
            return view._replace(data=_elements(codes, spec.mx))
        return view

    def _product(self, lhs: Operand, rhs: Operand, scale: float, dtype: jnp.dtype) -> jax.Array:
        a, b = lhs.values, rhs.values
        assert isinstance(a, View) and isinstance(b, View)
        if self._path == "native":
            if a.data.dtype != b.data.dtype:
                a, b = (
                    v._replace(data=_elements(v.data, side.format))
                    if v.data.dtype == jnp.uint8
                    else v
                    for v, side in ((a, lhs), (b, rhs))
                )
            return native_matmul(a, b, scale=scale, dtype=dtype, machine=self._machine)
        rotated = lhs.rotated and rhs.rotated
        (m, length), n = a.data.shape, b.data.shape[0]
        chunk = CHUNK["rotated" if rotated else "plain"]
        where: Any = {"machine": self._machine, "processors": self._processors}
        if (
            self._large is not None
            and is_large(m=m, n=n, **where)
            and length <= min(self._machine.pallas, chunk)
        ):
            return self._large.matmul(
                a, b, scale=scale, chunk=chunk, dtype=dtype, processors=self._processors
            )
        return folded_matmul(a, b, scale=scale, rotated=rotated, dtype=dtype, **where)

    def _overwrite_columns(self, y: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
        return overwrite_columns(y, index, values)

    def _kind(self, fmt: MXFormat) -> Kind:
        if self._path == "fp8":
            return "folded"
        return "elements" if self._path == "native" and fmt.name != "mxfp4" else "codes"

    def _operand(self, view: View, spec: OperandSpec) -> Operand:
        if self._path != "bf16":
            return super()._operand(view, spec)
        values = reference.load(view.data, view.scales, spec=spec)
        return Operand(values, spec.mx, bool(spec.hadamard))

    def _view(self, x: jax.Array, axis: int, request: Request) -> View:
        """A tensor quantized along an axis, which comes last."""
        # Rows by themselves need no guess, and no settling.
        if axis == 0 and takes(x, request.spec, self._machine):
            return self._tiles(x, None, request)[1]
        # Transforms larger than a block are done beforehand, so that the kernel sees another x.
        beforehand = request.norms and request.spec.hadamard > BLOCK
        request = request._replace(norms=request.norms and not beforehand)
        if axis == 0:
            view = quantize_columns(x, request, machine=self._machine)
        else:
            view = quantize_rows(x, request, machine=self._machine, processors=self._processors)
        if beforehand:
            view = view._replace(norms=reference.squared_norms(x, axis=axis))
        return view

    def _tiles(self, x: jax.Array, last: Request | None, first: Request | None) -> tuple[Any, Any]:
        """The views along the last axis and along the first, None where it is not wanted."""
        return quantize_tiles(x, last, first, machine=self._machine, processors=self._processors)


def _wide(request: Request) -> bool:
    """Whether rows are likely to span more binades than a guessed exponent serves.

    One column of outliers is enough, where FP8 leaves a dozen binades to the scales.
    """
    fold = FOLDS[request.spec.format]
    return request.kind == "folded" and fold.top - fold.low < 16


def _elements(codes: jax.Array, fmt: MXFormat) -> jax.Array:
    """Packed codes as E4M3 elements, which hold E2M1 and E2M3 exactly."""
    unit = jnp.full((codes.shape[0], codes.shape[1] * 8 // fmt.element_bits // 32), 127, jnp.uint8)
    return reference.dequantize(codes, unit, axis=1, fmt=fmt).astype(jnp.float8_e4m3fn)
