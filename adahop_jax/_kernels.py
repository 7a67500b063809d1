"""A backend made of kernels: the operations of `reference.operations`, by what a package offers.

What they compute is said there. An operand here is a `View` of the kind that a package's product
reads, or its values in bfloat16.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from adahop_jax._formats import MXFormat, OperandSpec
from adahop_jax._view import Kind, Request, View
from adahop_jax.reference import operations as reference
from adahop_jax.reference.bits import rounded
from adahop_jax.reference.operations import Wanted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a product.

    Attributes:
      values: a `View`, or bfloat16 (rows, length) where the product is XLA's.
      format: of its elements.
      rotated: whether it went through a Hadamard transform.
    """

    values: View | jax.Array
    format: MXFormat = dataclasses.field(metadata={"static": True})
    rotated: bool = dataclasses.field(metadata={"static": True})


class KernelBackend(abc.ABC):
    """The operations, in terms of kernels: abstract methods, never called for empty arrays."""

    @abc.abstractmethod
    def largest(self, norms: jax.Array, k: int) -> jax.Array:
        """Indices of the k largest norms."""

    def speedup(
        self,
        *,
        rows: int,
        columns: int,
        length: int,
        stored: MXFormat | None,
        extracted: str | None,
    ) -> float | None:
        """Expected time in BF16 over expected time here; None where it was never measured."""
        return None

    @abc.abstractmethod
    def _views(self, x: jax.Array, wanted: list[tuple[int, Request]]) -> list[View]:
        """Views of a tensor, of contracted axes and as they are asked for."""

    @abc.abstractmethod
    def _loaded(self, codes: jax.Array, scales: jax.Array, spec: OperandSpec) -> View:
        """What is stored as the product reads it."""

    @abc.abstractmethod
    def _product(self, lhs: Operand, rhs: Operand, scale: float, dtype: jnp.dtype) -> jax.Array:
        """lhs @ rhs^T, `scale` times, of views."""

    @abc.abstractmethod
    def _overwrite_columns(self, y: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
        """y with columns replaced by float32 values."""

    def _kind(self, fmt: MXFormat) -> Kind:
        """What the product reads."""
        return "folded"

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
        ((codes, scales, _),) = self.views(x, Wanted(True, axis, spec, seed, sign_seed))
        return (codes.T, scales.T) if axis == 0 else (codes, scales)

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
        (view,) = self.views(x, Wanted(True, axis, spec, seed, sign_seed, norms))
        codes, scales, squares = view
        return codes, scales, squares

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
        (view,) = self.views(x, Wanted(False, axis, spec, seed, sign_seed, norms))
        operand, squares = view
        return operand, squares

    def views(self, x: jax.Array, *wanted: Wanted) -> list[tuple[Any, ...]]:
        """Several at once: those of both axes in one read, where a kernel can."""
        requests = [(w.axis, self._request(w)) for w in wanted]
        if x.size:
            found = self._views(x, requests)
        else:
            found = [_empty(x, axis, request) for axis, request in requests]
        return [
            (view.data, view.scales, view.norms)
            if w.stored
            else (self._operand(view, w.spec), view.norms)
            for w, view in zip(wanted, found, strict=True)
        ]

    def load(self, codes: jax.Array, scales: jax.Array, *, spec: OperandSpec) -> Operand:
        """From storage for a product."""
        view = View(codes, scales, None, None)
        return self._operand(self._loaded(codes, scales, spec) if codes.size else view, spec)

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
        a, b = lhs.values, rhs.values
        if isinstance(a, jax.Array) or isinstance(b, jax.Array):
            return reference.matmul(a, b, scale=scale, dtype=dtype, rows=rows, columns=columns)
        if not (a.data.size and b.data.size):
            y = jnp.zeros((a.data.shape[0], b.data.shape[0]), dtype)
        else:
            y = self._product(lhs, rhs, scale, dtype)
        if not y.size:
            return y
        if rows is not None:
            where: Any = {"unique_indices": True, "mode": "promise_in_bounds"}
            y = y.at[rows[0], :].set(rounded(rows[1], dtype), **where)
        if columns is not None:
            y = self._overwrite_columns(y, columns[0], columns[1])
        return y

    def _operand(self, view: View, spec: OperandSpec) -> Operand:
        return Operand(view._replace(norms=None), spec.mx, bool(spec.hadamard))

    def _request(self, wanted: Wanted) -> Request:
        stored, _, spec, seed, sign_seed, norms = wanted
        return Request("codes" if stored else self._kind(spec.mx), spec, seed, sign_seed, norms)


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
