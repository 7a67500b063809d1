"""The gate before any timing: what is timed has to be right."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import adahop_jax as ah
from adahop_jax.reference import operations as reference
from benchmarks import kernels, layers, product
from benchmarks.shapes import GATE

LIMIT = 4e-3
"""Relative error of a product: two roundings to BF16, each up to 2^-9, and float32 sums."""


class GateError(RuntimeError):
    """A result is wrong; no figure of it means anything."""


def check(ops: Any, plans: Mapping[str, ah.LayerPlan]) -> None:
    """Holds kernels, products and layers against the reference at a small shape.

    Args:
      ops: the backend that is timed.
      plans: of the layers that are timed, by name.

    Raises:
      GateError: with everything that is wrong.
    """
    checks: list[Callable[[], Iterator[str]]] = [functools.partial(_products, ops)]
    checks += [
        functools.partial(_kernel, ops, name, axis) for name in kernels.SPECS for axis in (0, 1)
    ]
    checks += [functools.partial(_layer, name, plan) for name, plan in plans.items()]
    # Side by side, as compiling is what takes long.
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        wrong = [text for texts in pool.map(lambda check: list(check()), checks) for text in texts]
    if wrong:
        raise GateError("; ".join(wrong))


def _kernel(ops: Any, name: str, axis: int) -> Iterator[str]:
    tokens, width, _ = GATE
    x = jax.random.normal(jax.random.key(3), (tokens, width), jnp.bfloat16)
    got, want = (
        jax.jit(kernels.quantizing(b.residual, axis=axis, spec=kernels.SPECS[name], norms=True))(
            x, kernels.seed()
        )
        for b in (ops, reference)
    )
    for part, ours, theirs in zip(("codes", "scales"), got, want, strict=False):
        if not np.array_equal(ours, theirs):
            yield f"{name}, axis {axis}: {part} differ from the reference's"
    if not np.allclose(got[2], want[2], rtol=1e-5):
        yield f"{name}, axis {axis}: norms differ from the reference's"


def _products(ops: Any) -> Iterator[str]:
    m, n, k = GATE
    a = jax.random.normal(jax.random.key(1), (m, k), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(2), (k, n), jnp.bfloat16)
    spec = product.SPEC
    exact = (
        np.asarray(reference.operand(a, axis=1, spec=spec)[0].astype(jnp.float32), np.float64)
        @ np.asarray(reference.operand(b, axis=0, spec=spec)[0].astype(jnp.float32), np.float64).T
    )
    jobs = {job.name: job for job in product.jobs(ops, a, b)}
    for name, scale in ((product.OURS, 1 / 32), (product.DOT_SCALED, 1 / 32)):
        job = jobs[name]
        got = jax.jit(job.function)(*job.args)
        error = relative(got, exact * scale)
        if not error < LIMIT:
            yield f"{name}: relative error {error:.1e}, wanted below {LIMIT:.0e}"


def _layer(label: str, plan: ah.LayerPlan) -> Iterator[str]:
    tokens, width, out = GATE
    variables, x, dy = layers.tensors(tokens, width, out)
    # Rows and columns of very different size, so that none is extracted by a hair's breadth.
    x = x * _spread(tokens)[:, None] * _spread(width)[None, :]
    dy = dy * _spread(tokens)[:, None] * _spread(out)[None, :]
    kernel = variables["params"]["kernel"] * _spread(width)[:, None] * _spread(out)[None, :]
    variables = {"params": {"kernel": kernel}}
    free = ah.Plan(default=ah.LayerPlan(fwd=plan.fwd, dgrad=plan.dgrad, wgrad=plan.wgrad))
    results = [
        jax.jit(layers.step(layers.dense(out, plan=free, backend=backend)))(variables, x, dy)
        for backend in (None, "reference")
    ]
    for name, ours, theirs in zip(("y", "gradients"), *results, strict=True):
        for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            error = relative(got, np.asarray(want, np.float64))
            if not error < LIMIT:
                yield (
                    f"layer {label}: {name} {got.shape}: relative error {error:.1e}, "
                    f"wanted below {LIMIT:.0e}"
                )


def relative(got: jax.Array, want: np.ndarray) -> float:
    """|got - want| / |want|, Frobenius, in float64."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def _spread(size: int) -> jax.Array:
    """Factors from 1 to 8 in no order."""
    factors = 2 ** jnp.linspace(0, 3, size)
    return jax.random.permutation(jax.random.key(size), factors).astype(jnp.bfloat16)
