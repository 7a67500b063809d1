"""Fused transform and quantization, along the last axis, the first, or both: MX blocks in a row.

A view has the contracted axis last. Its tiles are loaded as they lie in x; along the first axis
they are transposed as they are read from shared memory. Each thread has one row of a view's tile,
and takes its blocks one after the other: `_blocks` says what happens to them. Where both views are
asked for, each tile of x is loaded twice, the second time from the cache.

A folded view divides its rows by reference exponents, which no thread can know that has not seen
all of a row. They are guessed beforehand, from a few values: FP8 spans so many binades that the
guess nearly always serves. Beside the data, the extremes of all scales are written down. Rows
that did not fit, or hold values near the ends of float32's range, are done again, carefully, by
the same kernel and with the exponents that are known by then.

Lowered by Mosaic GPU: TMA loads and stores tiles, and layouts say which thread has what, so that
nothing moves between threads unasked. Tiles are whole: what is not is padded beforehand.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from adahop_jax._formats import OperandSpec
from adahop_jax._view import BLOCK, FOLDS, Request, View, block_signs
from adahop_jax.reference import bits as b
from adahop_jax.reference.operations import rotate as rotate_beforehand
from adahop_jax.reference.operations import squared_norms
from pallas_kernels import _warpgroup as wg
from pallas_kernels._blocks import block_scales, packed, rotate, round_elements, uniform
from pallas_kernels._launch import launch

TILE = wg.THREADS
"""Rows and columns of x that a program works on."""
CHUNK = 64
"""Of a view's row, loaded and stored at a time."""
CHUNKS = TILE // CHUNK
SAMPLES = 8
"""Values of a row that its reference exponent is guessed from."""
TRUSTED = -60, 60
"""Scale exponents between which nothing needs care."""
UNSEEN = 127, -127
"""Least and largest scale exponent of a row of zeros."""


class Extremes(NamedTuple):
    """Least and largest scale exponents of a view's rows, one of each for every tile in a row.

    Attributes:
      least, largest: int32 (tiles, rows), over blocks that are neither zeros nor faults.
    """

    least: jax.Array
    largest: jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What the kernel knows of a view while it is compiled.

    Attributes:
      axis: of x that is contracted.
      folded: whether FP8 is written, not codes.
      spec: how blocks are quantized.
      norms: whether squared norms of the rows are written too.
      careful: see `_blocks`; then only tiles of rows that are named are done.
    """

    axis: int
    folded: bool
    spec: OperandSpec
    norms: bool
    careful: bool

    @property
    def dtype(self) -> Any:
        """Of the data."""
        return FOLDS[self.spec.format].dtype if self.folded else jnp.uint8

    def width(self, length: int) -> int:
        """Bytes of data in so much of a row."""
        return length if self.folded else self.spec.mx.packed_length(length)


class Inputs(NamedTuple):
    """What a view's tiles are made from, besides x; None where it is not needed.

    Attributes:
      refs: int32 (rows,), the rows' reference exponents.
      signs: float32 (32,).
      seed: uint32 (2,).
      again: int32 (tiles,), which tiles of rows are to be done; None for all.
    """

    refs: Any
    signs: Any
    seed: Any
    again: Any


class Results(NamedTuple):
    """What is written of a view, of whole tiles; None where it is not.

    Attributes:
      data: FP8 (rows, length), or uint8 (rows, bytes).
      scales: uint8 (rows, blocks), E8M0, unless folded.
      extremes: of scales.
      norms: float32 (tiles in a row, rows), parts of the squared norms.
    """

    data: Any
    scales: Any
    extremes: Any
    norms: Any


class Scratch(NamedTuple):
    """What a block has to itself for a view.

    Attributes:
      x: a tile as it lies in x, by chunks of the view.
      data: what is written of it.
      arrived: a barrier for each chunk.
    """

    x: Any
    data: Any
    arrived: Any


def _kernel(
    inputs: tuple[Any, tuple[Inputs, ...]],
    results: tuple[Results, ...],
    scratch: tuple[Scratch, ...],
    *,
    cuts: tuple[Cut, ...],
) -> None:
    """A block: one tile of x, for every view."""
    x, given = inputs
    corner = lax.axis_index("down"), lax.axis_index("across")
    views = [
        (cut, corner[1 - cut.axis], corner[cut.axis], *of_view)
        for cut, *of_view in zip(cuts, given, results, scratch, strict=True)
    ]

    def run() -> None:
        for cut, tile, nth, _, _, own in views:
            _load(x, own, tile, nth, cut)
        for cut, tile, nth, of_view, written, own in views:
            _quantize(of_view, written, own, tile, nth, cut)

    if given[0].again is None:
        run()
    else:
        (cut,) = cuts
        pl.when(given[0].again[corner[1 - cut.axis]] != 0)(run)


def _load(x: Any, own: Scratch, tile: Any, nth: Any, cut: Cut) -> None:
    """Starts to load the `nth` tile in the `tile`-th row of a view's tiles."""
    rows = pl.ds(tile * TILE, TILE)
    for i in range(CHUNKS):
        steps = pl.ds(nth * TILE + i * CHUNK, CHUNK)
        place = (rows, steps) if cut.axis else (steps, rows)
        plgpu.copy_gmem_to_smem(x.at[place], own.x.at[i], own.arrived.at[i])


def _quantize(given: Inputs, written: Results, own: Scratch, tile: Any, nth: Any, cut: Cut) -> None:
    """Quantizes and stores what `_load` loads."""
    rows = pl.ds(tile * TILE, TILE)
    ref = wg.load_each(given.refs.at[rows]) if cut.folded else None
    signs = None if given.signs is None else wg.load_all(given.signs)
    per_chunk = CHUNK // BLOCK

    def chunk(i: Any, seen: tuple[Any, ...]) -> tuple[Any, ...]:
        least, largest, norm = seen
        plgpu.barrier_wait(own.arrived.at[i])
        values = (wg.load_rows if cut.axis else wg.load_columns)(own.x.at[i])
        data = []
        for j in range(per_chunk):
            block = values[:, j * BLOCK : (j + 1) * BLOCK].astype(jnp.float32)
            norm = norm + jnp.sum(block * block, axis=1) if cut.norms else norm
            noise = _noise(given, tile * TILE, nth * TILE + i * CHUNK + j * BLOCK, cut)
            y = rotate(block, cut.spec, signs, careful=cut.careful)
            scale, top = block_scales(y, cut.spec)
            # Zeros and faults fit everywhere.
            counts = (top > 0) & (top < b.INFINITY)
            least = jnp.minimum(least, jnp.where(counts, scale, UNSEEN[0]))
            largest = jnp.maximum(largest, jnp.where(counts, scale, UNSEEN[1]))
            r = round_elements(
                y,
                scale,
                top,
                ref if cut.folded else scale,
                noise,
                cut.spec,
                careful=cut.careful,
            )
            if cut.folded:
                data.append(wg.in_vectors(r).astype(cut.dtype))
            else:
                data.append(wg.in_vectors(packed(r, y, top, cut.spec.mx)))
                byte = jnp.where(top < b.INFINITY, scale + 127, 255).astype(jnp.uint8)
                written.scales.at[rows, (nth * CHUNKS + i) * per_chunk + j][...] = byte
        own.data.at[i][...] = wg.beside(data)
        plgpu.commit_smem()
        width = cut.width(CHUNK)
        place = pl.ds((nth * CHUNKS + i) * width, width)
        plgpu.copy_smem_to_gmem(own.data.at[i], written.data.at[rows, place])
        return least, largest, norm

    start = wg.each(UNSEEN[0]), wg.each(UNSEEN[1]), wg.each(0.0)
    least, largest, norm = lax.fori_loop(0, CHUNKS, chunk, start)
    if not cut.careful:
        written.extremes.least.at[nth, rows][...] = least
        written.extremes.largest.at[nth, rows][...] = largest
    if cut.norms:
        written.norms.at[nth, rows][...] = norm
    plgpu.wait_smem_to_gmem(0)


def _noise(given: Inputs, row: Any, step: Any, cut: Cut) -> jax.Array | None:
    """Noise for a block in each of a view's rows from `row` on; None where it is not wanted.

    It belongs to places in x, where four neighbours in a row share a draw. Along the first axis
    these are four threads', each of which draws anew.
    """
    if given.seed is None:
        return None
    if cut.axis:
        thread, i = wg.iota(BLOCK // 4, 0), wg.iota(BLOCK // 4, 1)
        return wg.interleaved(uniform(row + thread, step // 4 + i, given.seed))
    thread, i = wg.iota(BLOCK, 0), wg.iota(BLOCK, 1)
    first, second, third, fourth = uniform(step + i, (row + thread) // 4, given.seed)
    half = jnp.where(thread % 2 == 0, first, second), jnp.where(thread % 2 == 0, third, fourth)
    return jnp.where(thread % 4 < 2, *half)


def quantize(x: jax.Array, *wanted: tuple[int, Request]) -> list[View]:
    """Rotates and quantizes along one axis, or along both in one read.

    Reads 2 bytes an element of BF16; for every view it writes 1 as FP8, or 1/2 as packed MXFP4 and
    1/32 of scales, and 1/16 of extremes.

    Args:
      x: (rows, columns) float32, bfloat16 or float16, not empty.
      wanted: the views: the axis that is contracted and how the view is asked for, folded or as
        codes; two of different axes, or one.

    Returns:
      The views.

    Raises:
      ValueError: a seed is missing.
    """
    if any(request.spec.hadamard > BLOCK for _, request in wanted):
        if len(wanted) > 1:
            return [view for w in wanted for view in quantize(x, w)]
        return [_large(x, *wanted[0])]
    shape = x.shape
    x = wg.whole(x)
    cuts, given = zip(*(_asked(x, axis, request) for axis, request in wanted), strict=True)
    results = _launched(x, cuts, given, tuple(_memory(x.shape, cut) for cut in cuts))
    return [
        _view(_settled(x, cut, *of_view), cut, shape)
        for cut, *of_view in zip(cuts, given, results, strict=True)
    ]


def _large(x: jax.Array, axis: int, request: Request) -> View:
    """A view whose transform is larger than a block, and is done beforehand in plain JAX."""
    spec = request.spec
    y = rotate_beforehand(x, axis=axis, spec=spec, sign_seed=request.sign_seed)
    left = dataclasses.replace(spec, hadamard=0, signs="none", pre_scale=1.0)
    (view,) = quantize(y, (axis, request._replace(spec=left, norms=False)))
    return view._replace(norms=squared_norms(x, axis=axis)) if request.norms else view


def _asked(x: jax.Array, axis: int, request: Request) -> tuple[Cut, Inputs]:
    """What the kernel does for a view, and what it needs besides x."""
    kind, spec, seed, sign_seed, norms = request
    if spec.rounding == "stochastic" and seed is None:
        raise ValueError("stochastic rounding needs a seed; pass a uint32[2]")
    cut = Cut(axis=axis, folded=kind == "folded", spec=spec, norms=norms, careful=False)
    signs = block_signs(spec, sign_seed, count=BLOCK) if spec.signs == "random" else None
    refs = _guess(x, cut) if cut.folded else None
    return cut, Inputs(refs, signs, seed if spec.rounding == "stochastic" else None, None)


def _guess(x: jax.Array, cut: Cut) -> jax.Array:
    """Reference exponents from a few values of each row of a view, all over it.

    Padding lies at an end, and sequences begin at even parts of the tokens: the values lie between.
    A row of which only zeros are seen is taken for the largest.
    """
    length, fold, spec = x.shape[cut.axis], FOLDS[cut.spec.format], cut.spec
    first, stride = 3 * length // (8 * SAMPLES), length // SAMPLES
    some = lax.slice_in_dim(x, first, None, stride=stride, axis=cut.axis).astype(jnp.float32)
    largest = jnp.max(jnp.abs(some), axis=cut.axis)
    largest = jnp.where(largest == 0, jnp.max(largest, initial=0, where=largest < jnp.inf), largest)
    # A rotated block's largest value is some four times its values' usual size.
    growth = round(math.log2(spec.pre_scale)) + (2 if spec.hadamard else 0)
    expected = b.exponent(b.to_bits(largest)) - spec.mx.max_exponent + growth
    return jnp.clip(expected, TRUSTED[0] - fold.low, TRUSTED[1] - fold.top)


def _memory(shape: tuple[int, ...], cut: Cut) -> Results:
    """Shapes and dtypes of what is written, for x of whole tiles."""
    rows, length = shape[1 - cut.axis], shape[cut.axis]
    each = jax.ShapeDtypeStruct((length // TILE, rows), jnp.int32)
    return Results(
        data=jax.ShapeDtypeStruct((rows, cut.width(length)), cut.dtype),
        scales=None if cut.folded else jax.ShapeDtypeStruct((rows, length // BLOCK), jnp.uint8),
        extremes=Extremes(each, each),
        norms=jax.ShapeDtypeStruct(each.shape, jnp.float32) if cut.norms else None,
    )


def _launched(
    x: jax.Array, cuts: tuple[Cut, ...], given: tuple[Inputs, ...], results: tuple[Results, ...]
) -> tuple[Results, ...]:
    scratch = []
    for cut in cuts:
        tile = (CHUNKS, TILE, CHUNK) if cut.axis else (CHUNKS, CHUNK, TILE)
        scratch.append(
            Scratch(
                wg.shared(tile, x.dtype),
                wg.shared((CHUNKS, TILE, cut.width(CHUNK)), cut.dtype),
                plgpu.Barrier(num_barriers=CHUNKS),
            )
        )
    return launch(
        functools.partial(_kernel, cuts=cuts),
        (x, given),
        results,
        grid=(x.shape[0] // TILE, x.shape[1] // TILE),
        grid_names=("down", "across"),
        scratch=tuple(scratch),
    )


def _settled(x: jax.Array, cut: Cut, given: Inputs, results: Results) -> tuple[Results, jax.Array]:
    """A view in which rows that did not fit are done again; and its reference exponents."""
    least = jnp.min(results.extremes.least, axis=0)
    largest = jnp.max(results.extremes.largest, axis=0)
    fits = (least >= TRUSTED[0]) & (largest <= TRUSTED[1])
    refs = given.refs
    if cut.folded:
        fold = FOLDS[cut.spec.format]
        fits &= (least >= refs + fold.low) & (largest <= refs + fold.top)
        refs = jnp.where(fits, refs, jnp.maximum(largest - fold.top, -127))
    again = jnp.any(~fits.reshape(-1, TILE), axis=1).astype(jnp.int32)
    (settled,) = _launched(
        x,
        (dataclasses.replace(cut, careful=True, norms=False),),
        (given._replace(refs=refs, again=again),),
        (results._replace(extremes=None, norms=None),),
    )
    return settled._replace(norms=results.norms), refs


def _view(settled: tuple[Results, jax.Array], cut: Cut, shape: tuple[int, ...]) -> View:
    """What callers see of it, who passed x of that shape."""
    results, refs = settled
    rows, length = shape[1 - cut.axis], cut.spec.padded_length(shape[cut.axis])
    return View(
        results.data[:rows, : cut.width(length)],
        None if cut.folded else results.scales[:rows, : cut.spec.mx.blocks(length)],
        (refs[:rows] + 127).astype(jnp.uint8) if cut.folded else None,
        jnp.sum(results.norms, axis=0)[:rows] if cut.norms else None,
    )
