"""Selection: where the largest of a list of norms stand. XLA sorts the whole list for it.

Two rounds: the largest of every part, by a program each, and the largest of those by one program. A
norm's key is its bits above its index' complement, so that ties go to the lower index.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from triton_kernels import _launch
from triton_kernels._blocks import MAGNITUDE

PART = 1024
MOST = 65536
"""Norms that two rounds hold in registers; more are left to XLA."""


@triton.jit
def _first_kernel(norm_ptr, key_ptr, COUNT: tl.constexpr, PART: tl.constexpr, K: tl.constexpr):
    """A program: the K largest keys of PART norms."""
    at = tl.program_id(0) * PART + tl.arange(0, PART)
    norm = tl.load(norm_ptr + at, mask=at < COUNT, other=0.0)
    # Non-negative floats are ordered as their bits are, NaN last.
    bits = (norm.to(tl.int32, bitcast=True) & MAGNITUDE).to(tl.int64)
    key = tl.where(at < COUNT, (bits << 16) | (0xFFFF - at), -1)
    to = key_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + tl.program_id(0) * K
    tl.store(to + tl.arange(0, K), tl.topk(key, K))


@triton.jit
def _second_kernel(key_ptr, index_ptr, COUNT: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr):
    """One program: the indices of the K largest of COUNT keys."""
    at = tl.arange(0, SIZE)
    ptr = key_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    key = tl.load(ptr + at, mask=at < COUNT, other=-1)
    tl.store(index_ptr + tl.arange(0, K), 0xFFFF - (tl.topk(key, K) & 0xFFFF).to(tl.int32))


def largest(norms: jax.Array, k: int) -> jax.Array:
    """Indices of the k largest norms, ties to the lower index, NaN before all.

    Args:
      norms: float32 (n,), not negative.
      k: how many, at most n.

    Returns:
      int32 (k,), the largest first.
    """
    # `tl.topk` takes powers of two from 2 on.
    n, several = norms.shape[0], max(2, triton.next_power_of_2(k))
    if n > MOST or several > PART:
        return jax.lax.top_k(norms, k)[1]
    parts = triton.cdiv(n, PART)
    # A key has 64 bits: two words of the type that JAX has without its 64-bit mode.
    (keys,) = _launch.launch(
        _first_kernel,
        norms,
        out=(jax.ShapeDtypeStruct((parts * several * 2,), jnp.int32),),
        grid=parts,
        num_warps=4,
        COUNT=n,
        PART=PART,
        K=several,
    )
    (index,) = _launch.launch(
        _second_kernel,
        keys,
        out=(jax.ShapeDtypeStruct((several,), jnp.int32),),
        grid=1,
        num_warps=4,
        COUNT=parts * several,
        SIZE=triton.next_power_of_2(parts * several),
        K=several,
    )
    return index[:k]
