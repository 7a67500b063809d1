"""The Triton backend: the operations of `adahop_jax.reference.operations`, by kernels.

What they compute is said there. An operand here is a `View` of the kind that the machine's path
reads, or its values in bfloat16.
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from adahop_jax._formats import MXFormat, OperandSpec
from adahop_jax.reference import operations as reference
from adahop_jax.reference.bits import rounded
from adahop_jax.reference.operations import Wanted
from triton_kernels._view import BLOCK, Kind, Request, View
from triton_kernels.estimate import speedup
from triton_kernels.fold import fold
from triton_kernels.machines import Machine, Path
from triton_kernels.matmul import CHUNK, is_large
from triton_kernels.matmul import matmul as folded_matmul
from triton_kernels.native import native_matmul
from triton_kernels.overwrite import overwrite_columns
from triton_kernels.quantize_columns import quantize_columns
from triton_kernels.quantize_rows import quantize_rows
from triton_kernels.quantize_tiles import quantize_tiles, takes
from triton_kernels.select import largest


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a product.

    Attributes:
      values: a `View`, or bfloat16 (rows, length) on the path "bf16".
      format: of its elements.
      rotated: whether it went through a Hadamard transform.
    """

    values: View | jax.Array
    format: MXFormat = dataclasses.field(metadata={"static": True})
    rotated: bool = dataclasses.field(metadata={"static": True})


class Backend:
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

    def quantize(
        self,
        x: jax.Array,
        *,
        axis: int,
        spec: OperandSpec,
        seed: jax.Array | None = None,
        sign_seed: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """For storage, blocks along `axis`."""
        view = self._view(x, Wanted(True, axis, spec, seed, sign_seed))
        if axis == 0:
            return view.data.T, view.scales.T
        return view.data, view.scales

    def dequantize(
        self, codes: jax.Array, scales: jax.Array, *, axis: int, fmt: MXFormat
    ) -> jax.Array:
        """Values in float32; by XLA, which fuses it with what reads them."""
        return reference.dequantize(codes, scales, axis=axis, fmt=fmt)

    def residual(
        self,
        x: jax.Array,
        *,
        axis: int,
        spec: OperandSpec,
        seed: jax.Array | None = None,
        sign_seed: jax.Array | None = None,
        norms: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """For storage, `axis` last."""
        view = self._view(x, Wanted(True, axis, spec, seed, sign_seed, norms))
        return view.data, view.scales, view.norms

    def operand(
        self,
        x: jax.Array,
        *,
        axis: int,
        spec: OperandSpec,
        seed: jax.Array | None = None,
        sign_seed: jax.Array | None = None,
        norms: bool = False,
    ) -> tuple[Operand, jax.Array | None]:
        """For a product."""
        view = self._view(x, Wanted(False, axis, spec, seed, sign_seed, norms))
        return self._operand(view, spec), view.norms

    def views(self, x: jax.Array, *wanted: Wanted) -> list[tuple[Any, ...]]:
        """Several at once: those of both axes in one read, where a kernel can."""
        by_axis = {w.axis: w for w in wanted}
        if len(by_axis) == len(wanted) == 2 and all(self._on_tiles(x, w) for w in wanted):
            last, first = self._tiles(x, by_axis[1], by_axis[0])
            found = [last if w.axis == 1 else first for w in wanted]
        else:
            found = [self._view(x, w) for w in wanted]
        return [
            (view.data, view.scales, view.norms)
            if w.stored
            else (self._operand(view, w.spec), view.norms)
            for w, view in zip(wanted, found, strict=True)
        ]

    def load(self, codes: jax.Array, scales: jax.Array, *, spec: OperandSpec) -> Operand:
        """From storage for a product."""
        view = View(codes, scales, None, None)
        if self._path == "fp8" and codes.size:
            view = fold(codes, scales, fmt=spec.mx, machine=self._machine)
        elif self._path == "native" and spec.format != "mxfp4":
            view = view._replace(data=_elements(codes, spec.mx))
        return self._operand(view, spec)

    def matmul(
        self,
        lhs: Operand,
        rhs: Operand,
        *,
        scale: float,
        dtype: jnp.dtype,
        rows: tuple[jax.Array, jax.Array] | None = None,
        columns: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """lhs @ rhs^T, `scale` times, with rows and columns replaced."""
        if isinstance(lhs.values, jax.Array) or isinstance(rhs.values, jax.Array):
            return reference.matmul(
                lhs.values, rhs.values, scale=scale, dtype=dtype, rows=rows, columns=columns
            )
        y = self._product(lhs, rhs, scale, dtype)
        if not y.size:
            return y
        if rows is not None:
            where: Any = {"unique_indices": True, "mode": "promise_in_bounds"}
            y = y.at[rows[0], :].set(rounded(rows[1], dtype), **where)
        if columns is not None:
            y = overwrite_columns(y, columns[0], columns[1])
        return y

    def largest(self, norms: jax.Array, k: int) -> jax.Array:
        """Indices of the k largest norms."""
        return largest(norms, k)

    def speedup(
        self, *, rows: int, columns: int, length: int, stored: bool, extracted: str | None
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

    def _product(self, lhs: Operand, rhs: Operand, scale: float, dtype: jnp.dtype) -> jax.Array:
        a, b = lhs.values, rhs.values
        shape = a.data.shape[0], b.data.shape[0]
        if not (a.data.size and b.data.size):
            return jnp.zeros(shape, dtype)
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
        length, chunk = a.data.shape[1], CHUNK["rotated" if rotated else "plain"]
        where: Any = {"machine": self._machine, "processors": self._processors}
        if (
            self._large is not None
            and is_large(m=shape[0], n=shape[1], **where)
            and length <= min(self._machine.pallas, chunk)
            and self._large.takes(*shape, length)
        ):
            return self._large.matmul(
                *(a.data, a.refs, b.data, b.refs),
                scale=scale,
                chunk=chunk,
                dtype=dtype,
                processors=self._processors,
            )
        return folded_matmul(a, b, scale=scale, rotated=rotated, dtype=dtype, **where)

    def _view(self, x: jax.Array, wanted: Wanted) -> View:
        """A tensor quantized along an axis, which comes last."""
        axis, spec, norms = wanted.axis, wanted.spec, wanted.norms
        request = self._request(wanted)
        if not x.size:
            return _empty(x, axis, request)
        # Rows by themselves need no guess, and no settling.
        if axis == 0 and self._on_tiles(x, wanted):
            return self._tiles(x, None, wanted)[1]
        # Transforms larger than a block are done beforehand, so that the kernel sees another x.
        beforehand = norms and spec.hadamard > BLOCK
        request = request._replace(norms=norms and not beforehand)
        if axis == 0:
            view = quantize_columns(x, request, machine=self._machine)
        else:
            view = quantize_rows(x, request, machine=self._machine, processors=self._processors)
        if beforehand:
            view = view._replace(norms=reference.squared_norms(x, axis=axis))
        return view

    def _on_tiles(self, x: jax.Array, wanted: Wanted) -> bool:
        return bool(x.size) and takes(x, wanted.spec, self._machine)

    def _tiles(self, x: jax.Array, last: Wanted | None, first: Wanted | None) -> tuple[Any, Any]:
        """The views along the last axis and along the first, None where it is not wanted."""
        return quantize_tiles(
            x,
            None if last is None else self._request(last),
            None if first is None else self._request(first),
            machine=self._machine,
            processors=self._processors,
        )

    def _request(self, wanted: Wanted) -> Request:
        stored, _, spec, seed, sign_seed, norms = wanted
        return Request("codes" if stored else self._kind(spec.mx), spec, seed, sign_seed, norms)

    def _kind(self, fmt: MXFormat) -> Kind:
        if self._path == "fp8":
            return "folded"
        return "elements" if self._path == "native" and fmt.name != "mxfp4" else "codes"

    def _operand(self, view: View, spec: OperandSpec) -> Operand:
        values: View | jax.Array = view._replace(norms=None)
        if self._path == "bf16":
            values = reference.load(view.data, view.scales, spec=spec)
        return Operand(values, spec.mx, bool(spec.hadamard))


def _empty(x: jax.Array, axis: int, request: Request) -> View:
    """The view of a tensor without elements, for which no kernel runs."""
    spec, stored = request.spec, request.kind == "codes"
    rows, length = x.shape[1 - axis], spec.padded_length(x.shape[axis])
    width = spec.mx.packed_length(length) if stored else length
    return View(
        jnp.zeros((rows, width), jnp.uint8 if stored else jnp.float8_e4m3fn),
        jnp.zeros((rows, spec.mx.blocks(length)), jnp.uint8),
        None,
        jnp.zeros((rows,), jnp.float32) if request.norms else None,
    )


def _elements(codes: jax.Array, fmt: MXFormat) -> jax.Array:
    """Packed codes as E4M3 elements, which hold E2M1 and E2M3 exactly."""
    unit = jnp.full((codes.shape[0], codes.shape[1] * 8 // fmt.element_bits // 32), 127, jnp.uint8)
    return reference.dequantize(codes, unit, axis=1, fmt=fmt).astype(jnp.float8_e4m3fn)
