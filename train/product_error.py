"""How far each strategy's products are from the true ones, on the tensors of a real model.

A layer's products come out of `adahop_jax.Dense` and its gradient, as in training. The truth is
the float64 product of the same X, W and dY. Errors are relative: |got - true| / |true|, Frobenius.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import adahop_jax as ah

KEPT_X = "iht+oe(dy), X kept"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """One layer's tensors in one step.

    Attributes:
      x: (tokens, in) input, in the model's dtype.
      w: (in, out) kernel, float32.
      dy: (tokens, out) gradient of the loss by the output, in the model's dtype.
    """

    x: jax.Array
    w: jax.Array
    dy: jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The error of one product of one layer under one strategy.

    Attributes:
      path: of the layer.
      product: "fwd", "dgrad" or "wgrad".
      strategy: as `adahop_jax.ProductPlan.strategy` names it, or `KEPT_X`.
      error: relative Frobenius error.
      row_error: the median over the result's rows of each row's own relative error, which a few
        large rows do not decide.
      share: of the multiply-adds done in the model's dtype.
      work: multiply-adds of the product.
    """

    path: str
    product: str
    strategy: str
    error: float
    row_error: float
    share: float
    work: int


def capture(
    loss_fn: Callable[..., jax.Array], variables: Mapping[str, Any], *args: Any
) -> dict[str, Tensors]:
    """Returns X, W and dY of every `adahop_jax.Dense` that `loss_fn(variables, *args)` calls.

    Zeros are added to each layer's output; the gradient by those zeros is dY.

    Args:
      loss_fn: as for `adahop_jax.observe`; calls each layer once, its products in full.
      variables: of the model.
      *args: further arguments of `loss_fn`.
    """

    def run(zeros: Mapping[str, jax.Array] | None) -> tuple[jax.Array, Any]:
        inputs, outputs = {}, {}

        def intercept(
            next_fun: Callable[..., Any],
            call_args: tuple[Any, ...],
            kwargs: dict[str, Any],
            context: nn.module.InterceptorContext,
        ) -> Any:
            call = next_fun(*call_args, **kwargs)
            if not (isinstance(context.module, ah.Dense) and context.method_name == "prepare"):
                return call
            path, dot = "/".join(context.module.path), call.layer.dot
            if not call.in_full:
                raise ValueError(f"{path}: its products are quantized; capture with Plan.full()")
            inputs[path], outputs[path] = call_args[0], dot(*call.promoted)
            if zeros is None:
                return call
            added = call.layer._replace(dot=lambda x, w: dot(x, w) + zeros[path])
            return call._replace(layer=added)

        with nn.intercept_methods(intercept):
            value = loss_fn(variables, *args)
        return value, (inputs, outputs)

    _, (_, shapes) = jax.eval_shape(lambda: run(None))

    @jax.jit
    def gradients() -> Any:
        zeros = {path: jnp.zeros(y.shape, y.dtype) for path, y in shapes.items()}
        return jax.grad(lambda z: run(z), has_aux=True)(zeros)

    dys, (inputs, _) = gradients()
    found = {}
    for path, dy in dys.items():
        kernel = functools.reduce(
            lambda node, name: node[name], path.split("/"), variables["params"]
        )
        x = inputs[path].astype(dy.dtype)
        found[path] = Tensors(
            x=x.reshape(-1, x.shape[-1]), w=kernel["kernel"], dy=dy.reshape(-1, dy.shape[-1])
        )
    return found


def measure(layer: ah.LayerInfo, tensors: Tensors) -> Iterator[Measurement]:
    """Measures every strategy in every product of `layer`."""
    truth = true_products(tensors)
    for plan in strategies():
        results = planned_products(tensors, plan)
        for row in ah.explain(ah.Plan(default=plan), [layer]).rows:
            record = functools.partial(
                Measurement,
                path=layer.path,
                product=row.product,
                share=row.share_in_dtype,
                work=row.multiply_adds,
            )
            got, true = results[row.product], truth[row.product]
            error, row_error = errors(got, true)
            yield record(strategy=row.strategy, error=error, row_error=row_error)
            if (row.product, row.strategy) == ("wgrad", "iht+oe(dy)"):
                error, row_error = errors(_with_x_kept(got, tensors, row.k), true)
                yield record(strategy=KEPT_X, error=error, row_error=row_error)


def strategies() -> tuple[ah.LayerPlan, ...]:
    """Layer plans that between them hold every strategy of every product."""
    six = ah.OperandSpec(format="mxfp6", hadamard=32)
    uniform = [
        ah.ProductPlan.full(),
        ah.ProductPlan.mxfp4(),
        ah.ProductPlan.iht(),
        ah.ProductPlan(lhs=six, rhs=six),
    ]
    x, w, dy = (ah.ProductPlan.iht(outliers=tensor) for tensor in ("x", "w", "dy"))
    return (
        *(ah.LayerPlan.uniform(plan) for plan in uniform),
        ah.LayerPlan(fwd=x, dgrad=dy, wgrad=dy),
        ah.LayerPlan(fwd=w, dgrad=w, wgrad=x),
    )


def planned_products(tensors: Tensors, plan: ah.LayerPlan) -> dict[str, NDArray[np.float32]]:
    """Returns Y, dX and dW of a layer under `plan`, keyed "fwd", "dgrad" and "wgrad"."""
    results = _planned(tensors.x, tensors.w, tensors.dy, plan)
    return {name: np.asarray(value, np.float32) for name, value in results.items()}


def true_products(tensors: Tensors) -> dict[str, NDArray[np.float64]]:
    """Returns Y, dX and dW in float64."""
    x, w, dy = (np.asarray(t, np.float64) for t in (tensors.x, tensors.w, tensors.dy))
    return {"fwd": x @ w, "dgrad": dy @ w.T, "wgrad": x.T @ dy}


def errors(got: NDArray[np.float32], true: NDArray[np.float64]) -> tuple[float, float]:
    """Returns `error` and `row_error` of `Measurement`; rows of zeros have none."""
    wrong, size = _squares(got - true, axis=1), _squares(true, axis=1)
    rows = size > 0
    of_rows = np.median(wrong[rows] / size[rows])
    return float(np.sqrt(wrong.sum() / size.sum())), float(np.sqrt(of_rows))


@functools.partial(jax.jit, static_argnums=3)
def _planned(x: jax.Array, w: jax.Array, dy: jax.Array, plan: ah.LayerPlan) -> dict[str, jax.Array]:
    # In plain JAX, whose few programs compile sooner than kernels for every size and strategy.
    layer = ah.Dense(
        w.shape[1],
        use_bias=False,
        dtype=x.dtype,
        plan=ah.Plan(default=plan),
        backend="reference",
    )
    y, vjp = jax.vjp(lambda x, w: layer.apply({"params": {"kernel": w}}, x), x, w)
    dx, dw = vjp(dy)
    return {"fwd": y, "dgrad": dx, "wgrad": dw}


@jax.jit
def _product(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.matmul(x.T, dy, preferred_element_type=jnp.float32)


def _with_x_kept(got: NDArray[np.float32], tensors: Tensors, k: int) -> NDArray[np.float32]:
    """`got` with the columns that belong to dY's k largest computed from X itself."""
    index = np.argsort(-_squares(tensors.dy), kind="stable")[:k]
    got = got.copy()
    got[:, index] = _product(tensors.x, tensors.dy[:, index])
    return got


def _squares(matrix: Any, axis: int = 0) -> NDArray[np.float64]:
    return np.square(np.asarray(matrix, np.float64)).sum(axis=axis)
