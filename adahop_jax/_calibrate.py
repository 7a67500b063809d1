"""Calibration: a few steps in full, a label for each tensor and step, a vote, a plan.

    observe(loss_fn)(variables, batch)  ->  loss, gradients, statistics     (pure, jit it)
    label(variables, statistics)        ->  pattern codes of every layer    (pure, jit it)
    plan_from_labels(labels of all steps, layers, level)  ->  Plan          (on the host)

`calibrate` runs the three over a few batches with the variables as they are. A trainer calls them
in its own loop and trains on meanwhile. Source: arXiv:2604.02525, 30 steps and a majority vote.
"""

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from adahop_jax._formats import FormatName
from adahop_jax._observe import PROBE, LayerStatistics, merge_layer, zero_probe
from adahop_jax._patterns import CODES, matrix_statistics, pattern_code
from adahop_jax._plan import Level, Pattern, Patterns, Plan, PlanError
from adahop_jax._strategy import check_format, check_level, layer_plan
from adahop_jax.nn import Dense

Statistics = dict[str, LayerStatistics]
Labels = dict[str, Any]
"""Path -> int32[..., 3]: codes of the patterns of X, W and dY, or negative where they are void."""

_REPEATED, _UNREACHED = -1, -2

_trace_id = itertools.count()


class LayerInfo(NamedTuple):
    """A `Dense` layer of a model.

    Attributes:
      path: of the module.
      tokens: rows of X in one call.
      in_features, out_features: the kernel's dims.
      copies: layers that share the path, their kernels stacked (`nn.scan`).
    """

    path: str
    tokens: int
    in_features: int
    out_features: int
    copies: int = 1


def layers(fn: Callable[..., Any], *args: Any) -> tuple[LayerInfo, ...]:
    """Every `adahop_jax.Dense` that `fn(*args)` calls, in the order of the calls.

    Args:
      fn: calls a Flax model; traced, never run.
      *args: arrays, or `jax.ShapeDtypeStruct`s in their place. Copies of stacked layers are counted
        where the first is the model's variables.
    """
    found: dict[str, LayerInfo] = {}

    def record(next_fn: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if isinstance(module, Dense) and context.method_name == "prepare":
            path = "/".join(module.path)
            *leading, in_features = jnp.shape(args[0] if args else kwargs["inputs"])
            found[path] = LayerInfo(path, math.prod(leading), in_features, module.features)
        return next_fn(*args, **kwargs)

    # Within `fn` may stand jitted functions traced before, which would not call their layers
    # again; a trace under metadata of its own is never found in their cache.
    with nn.intercept_methods(record), set_xla_metadata(adahop_layers=str(next(_trace_id))):
        jax.eval_shape(fn, *args)
    params = args[0].get("params") if args and isinstance(args[0], Mapping) else None
    if params is None:
        return tuple(found.values())
    return tuple(
        layer._replace(copies=math.prod(_kernel(params, layer.path).shape[:-2]))
        for layer in found.values()
    )


def observe(
    loss_fn: Callable[..., jax.Array],
) -> Callable[..., tuple[jax.Array, Any, Statistics]]:
    """Like `jax.value_and_grad`, and the statistics of every layer besides.

    Args:
      loss_fn: loss_fn(variables, *args) -> scalar; passes `variables` to `model.apply` whole.

    Returns:
      A pure function of the same arguments that returns the loss, its gradient by
      `variables["params"]`, and {path: `LayerStatistics`}. Every product runs in full.

    Raises:
      PlanError: `loss_fn` calls no `adahop_jax.Dense`.
    """

    def observed(variables: Mapping[str, Any], *args: Any) -> tuple[jax.Array, Any, Statistics]:
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise PlanError(
                "calibrate: variables have no collection 'params'; pass what model.init returned, "
                "and have loss_fn pass it to model.apply whole"
            )
        found = layers(loss_fn, variables, *args)
        if not found:
            raise PlanError(
                "calibrate: loss_fn calls no adahop_jax.Dense; use it in place of nn.Dense, and "
                "have loss_fn pass the variables it is given to model.apply"
            )
        params = variables["params"]
        probes = {layer.path: _probe(layer, _kernel(params, layer.path)) for layer in found}

        def loss(params: Mapping[str, Any], probes: Statistics) -> jax.Array:
            for path, probe in probes.items():
                params = _inserted(params, (*_names(path), PROBE), probe)
            return loss_fn({**variables, "params": params}, *args)

        value, (gradients, statistics) = jax.value_and_grad(loss, argnums=(0, 1))(params, probes)
        return value, gradients, statistics

    return observed


def merge_statistics(a: Statistics, b: Statistics) -> Statistics:
    """Statistics of two micro-batches of one step; the same as of both in one batch."""
    return {path: merge_layer(a[path], b[path]) for path in a}


def label(variables: Mapping[str, Any], statistics: Statistics) -> Labels:
    """Pattern codes of X, W and dY of every layer in one step; pure, for use under jit.

    Args:
      variables: those that the statistics were made with.
      statistics: from `observe`, micro-batches merged.

    Returns:
      {path: int32[..., 3]}, with the leading dims of stacked kernels (`nn.scan`).
    """
    return {
        path: _label(_kernel(variables["params"], path), seen) for path, seen in statistics.items()
    }


def plan_from_labels(
    labels: Sequence[Labels],
    *,
    layers: Sequence[LayerInfo],
    level: Level = 1,
    fwd: FormatName = "mxfp6",
) -> Plan:
    """The plan that the labels of all steps vote for.

    Args:
      labels: one for each step, from `label`.
      layers: of the model, from `layers`.
      level: of the strategy table.
      fwd: format of the quantized forward products; "mxfp4" is the authors'.

    Returns:
      A plan with an entry for every layer. Layers stacked by `nn.scan` vote together. A tied vote
      is NONE.

    Raises:
      ValueError: no labels, or an unknown level or format.
      PlanError: a layer has no label, or ran more than once in an evaluation.
    """
    check_level(level)
    check_format(fwd)
    if not labels:
        raise ValueError("calibrate: no steps were observed; pass at least one batch")
    entries = []
    for layer in layers:
        if any(layer.path not in step for step in labels):
            raise PlanError(
                f"calibrate: layer {layer.path!r} has no statistics in some step; "
                "every step must run every layer"
            )
        codes = np.stack([np.asarray(step[layer.path]) for step in labels])
        if (codes == _REPEATED).any():
            raise PlanError(
                f"calibrate: layer {layer.path!r} runs more than once in an evaluation of the "
                "loss, so its statistics cannot be told apart; evaluate micro-batches one by one "
                "(accumulate=), and give repeated layers parameters of their own"
            )
        if (codes == _UNREACHED).any():
            raise PlanError(
                f"calibrate: no gradient reaches layer {layer.path!r}, so its dY has no pattern; "
                "calibrate without stop_gradient, or give frozen layers a plan by hand"
            )
        x, w, dy = (_vote(codes[..., i].ravel()) for i in range(3))
        entry = layer_plan(
            Patterns(x=x, w=w, dy=dy),
            level=level,
            in_features=layer.in_features,
            out_features=layer.out_features,
        )
        entries.append((layer.path, entry))
    plan = Plan(layers=tuple(entries), level=level)
    # MXFP4 is what the table says, but for level 3, which keeps its own cell.
    return plan if fwd == "mxfp4" else plan.with_format(fwd, products=("fwd",))


def calibrate(
    loss_fn: Callable[..., jax.Array],
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    steps: int = 30,
    level: Level = 1,
    fwd: FormatName = "mxfp6",
    accumulate: int = 1,
) -> Plan:
    """A plan for a model from a few batches, its variables staying as they are.

    Args:
      loss_fn: loss_fn(variables, batch) -> scalar; passes `variables` to `model.apply` whole.
      variables: of the model, with "params".
      batches: at least steps * accumulate of them, all of one shape.
      steps: how many votes there are.
      level: how the column-column pair runs: 1 with outliers extracted, 2 in full, 3 in MXFP6.
      fwd: format of the quantized forward products: "mxfp6", which trains closest to BF16, or
        "mxfp4", the authors'.
      accumulate: micro-batches that make up a step; the plan is the same as from whole batches.

    Returns:
      A plan with an entry for every `adahop_jax.Dense` that loss_fn calls.

    Raises:
      ValueError: too few batches, steps or accumulate below 1, an unknown level or format.
      PlanError: loss_fn calls no `adahop_jax.Dense`, or one more than once.
    """
    if steps < 1 or accumulate < 1:
        raise ValueError(f"calibrate: steps {steps}, accumulate {accumulate}; wanted at least 1")
    check_level(level, where="calibrate: ")
    check_format(fwd, where="calibrate: ")
    statistics_of = jax.jit(lambda variables, batch: observe(loss_fn)(variables, batch)[2])
    merge = jax.jit(merge_statistics)
    label_of = jax.jit(label)
    remaining = iter(batches)
    labels = []
    found: tuple[LayerInfo, ...] = ()
    for step in range(steps):
        micro = list(itertools.islice(remaining, accumulate))
        if len(micro) < accumulate:
            raise ValueError(
                f"calibrate: batches ran out in step {step + 1} of {steps}; wanted "
                f"{steps * accumulate} (steps x accumulate); pass more, or lower steps"
            )
        found = found or layers(loss_fn, variables, micro[0])
        seen = statistics_of(variables, micro[0])
        for batch in micro[1:]:
            seen = merge(seen, statistics_of(variables, batch))
        labels.append(jax.device_get(label_of(variables, seen)))
    return plan_from_labels(labels, layers=found, level=level, fwd=fwd)


def _label(kernel: jax.Array, seen: LayerStatistics) -> jax.Array:
    if jnp.ndim(seen.calls):
        return jax.vmap(_label)(kernel, seen)
    codes = jnp.stack(
        [
            pattern_code(seen.x),
            pattern_code(matrix_statistics(kernel.T)),  # W as (out, in)
            pattern_code(seen.dy),
        ]
    )
    void = jnp.where(seen.calls > 1, _REPEATED, _UNREACHED)
    return jnp.where(seen.calls == 1, codes, void)


def _probe(layer: LayerInfo, kernel: jax.Array) -> LayerStatistics:
    *stacked, in_features, out_features = kernel.shape
    if (in_features, out_features) != (layer.in_features, layer.out_features):
        raise PlanError(
            f"calibrate: layer {layer.path!r} multiplies by ({layer.in_features}, "
            f"{layer.out_features}) and its kernel is {kernel.shape}; stack kernels along their "
            "first axes: variable_axes={'params': 0}"
        )
    return zero_probe(in_features, out_features, tuple(stacked))


def _vote(codes: np.ndarray) -> Pattern:
    (first, votes), *others = collections.Counter(codes.tolist()).most_common(2)
    tied = bool(others) and others[0][1] == votes
    return Pattern.NONE if tied else CODES[first]


def _kernel(params: Mapping[str, Any], path: str) -> jax.Array:
    node: Any = params
    for name in (*_names(path), "kernel"):
        node = node[name]
    return nn.meta.unbox(node)


def _names(path: str) -> list[str]:
    """Module names along a path; the model itself has the path ""."""
    return path.split("/") if path else []


def _inserted(tree: Mapping[str, Any], path: Sequence[str], leaf: Any) -> dict[str, Any]:
    """A copy of a tree of dicts with `leaf` at `path`."""
    name, *rest = path
    return {**tree, name: _inserted(tree[name], rest, leaf) if rest else leaf}
