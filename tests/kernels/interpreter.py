"""Runs the Triton kernels on the CPU, by Triton's interpreter, in place of jax-triton.

Needs TRITON_INTERPRET=1 before Triton is imported.
"""

import dataclasses
import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels import _launch
from triton_kernels.machines import MACHINES

TYPES = {
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
POISON = 0xA5
MACHINE = dataclasses.replace(MACHINES["9.0"], target=("interpreter", "", 32))


def install(monkeypatch):
    """Puts the interpreter in place of jax-triton."""
    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(ReduceOps, "generic_reduce", reduce)


class _Storage:
    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return _Storage(self.array.copy())

    def copy_(self, other):
        np.copyto(self.array, other.array)

    def size(self):
        return self.array.nbytes


class _Tensor:
    """A NumPy array with as much of a PyTorch tensor as the interpreter asks for."""

    def __init__(self, array=None):
        self.array = array

    dtype = property(lambda self: self.array.dtype)
    shape = property(lambda self: self.array.shape)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return _Storage(self.array)

    def new_empty(self, n, device=None):
        return _Tensor()

    def set_(self, storage, offset, size, stride):
        self.array = storage.array.reshape(size)

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self):
        return self.array.itemsize


def launch(
    kernel,
    *arrays,
    out,
    grid,
    num_warps,
    num_stages=1,
    aliases=None,
    tiles=None,
    written=None,
    zeroed=(),
    scalars=(),
    **constants,
):
    """As `triton_kernels._launch.launch`; results start poisoned."""
    inputs = [_Tensor(np.array(array)) for array in arrays]
    results = []
    for i, spec in enumerate(out):
        taken = [source for source, to in (aliases or {}).items() if to == i]
        if taken:
            results.append(inputs[taken[0]])
            continue
        size = int(np.prod(spec.shape)) * jnp.dtype(spec.dtype).itemsize
        raw = np.full(size, 0 if i in zeroed else POISON, np.uint8)
        results.append(_Tensor(raw.view(spec.dtype).reshape(spec.shape)))
    # The interpreter hands strings on as they are, which `tl.dot_scaled` does not take.
    if "FORMAT" in constants:
        constants["FORMAT"] = tl.constexpr(constants["FORMAT"])
    described = {i: (inputs[i], tile) for i, tile in (tiles or {}).items()}
    for i, tile in (written or {}).items():
        described[len(inputs)] = results[i], tile
        inputs.append(results[i])
    for i, (base, tile) in described.items():
        inputs[i] = TensorDescriptor(base, base.shape, base.stride(), tile)
    taken_over = {*(aliases or {}).values(), *(written or {})}
    fresh = [r for i, r in enumerate(results) if i not in taken_over]
    kernel[(grid,)](*inputs, *scalars, *fresh, **constants)
    return tuple(jnp.asarray(r.array) for r in results)


def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """`InterpreterBuilder.create_dot`, whose own knows no FP8 and no bfloat16, and uses no BLAS."""
    left, right = (x.data.view(TYPES[x.dtype.name]).astype(np.float32) for x in (a, b))
    with np.errstate(invalid="ignore"):
        return TensorHandle(left @ right + d.data, d.dtype.scalar)


def reduce(self, input):
    """`ReduceOps.generic_reduce` of one tensor, whose own combines an element at a time."""
    (x,) = input
    parts = (self.to_tensor(part, x.dtype) for part in np.moveaxis(x.handle.data, self.axis, 0))
    result = functools.reduce(self.combine_fn.fn, parts)
    if self.keep_dims:
        result = self.to_tensor(np.expand_dims(result.handle.data, self.axis), x.dtype)
    return [result]
