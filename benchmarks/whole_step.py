"""The memory of whole training steps: what the loss keeps, what the compiled step takes, its peak.

A Llama of `train.model`'s blocks in one `nn.scan`, so that compiling takes as long at any depth,
under AdamW with float32 parameters.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import adahop_jax as ah
from benchmarks import timing
from benchmarks.kept import GIB, kept, size
from benchmarks.report import Table
from train.configs import Attention, ModelConfig, OptimConfig
from train.model import Block, _rotation, linear
from train.optim import make_optimizer

PATHS = {"query": "attn", "key": "attn", "value": "attn", "out": "attn"} | dict.fromkeys(
    ("gate", "up", "down"), "mlp"
)
"""The sub-module of a block in which each linear stands."""

MEASURED = ModelConfig(layers=16, width=2048, heads=16, kv_heads=4, mlp_width=8192)
MEASURED_SIZES = {"batch": 16, "sequence": 1024, "vocab_size": 32_768}
LARGEST = ModelConfig(layers=1, width=4096, heads=32, kv_heads=8, mlp_width=14_336)
LARGEST_SIZES = {"batch": 1, "sequence": 4096, "vocab_size": 128_256}
MEMORY = 139 * GIB
"""Of an H200."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model and what becomes of its activations.

    Attributes:
      name: of plan and policy.
      config: of the model.
      plan: of its blocks.
      policy: of `jax.checkpoint` around each block; None keeps everything.
      batch, sequence: of a step: how many sequences, and their tokens.
      vocab_size: number of token ids.
    """

    name: str
    config: ModelConfig
    plan: ah.Plan
    policy: Callable[..., Any] | None
    batch: int
    sequence: int
    vocab_size: int

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        """A batch: ids with the token after the last."""
        return jax.ShapeDtypeStruct((self.batch, self.sequence + 1), jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a recipe's loss keeps for its backward pass, parameters left out.

    Attributes:
      recipe: its name.
      bytes: of everything.
      kinds: (dtype and shape, how many, bytes of all), the largest first.
    """

    recipe: str
    bytes: int
    kinds: tuple[tuple[str, int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A whole training step on a device, in bytes.

    Attributes:
      recipe: its name.
      state: parameters, optimizer's state and batch.
      compiled: what the compiled step takes, the state included.
      peak: the device's; None if a step before took more, which hides it.
    """

    recipe: str
    state: int
    compiled: int
    peak: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The deepest model of a recipe whose step fits.

    Attributes:
      recipe: its name.
      layers, parameters: of that model.
      compiled: bytes that its step takes.
    """

    recipe: str
    layers: int
    parameters: int
    compiled: int


class _Body(nn.Module):
    config: ModelConfig
    plan: ah.Plan

    @nn.compact
    def __call__(self, x: jax.Array, rotation: Any) -> tuple[jax.Array, None]:
        return Block(self.config, linear(self.config, self.plan), name="block")(x, rotation), None


class Scanned(nn.Module):
    """`train.model.Llama` with its blocks in one scan: ids (B, T) to float32 logits (B, T, V)."""

    recipe: Recipe

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns float32 logits."""
        config, vocab_size = self.recipe.config, self.recipe.vocab_size
        x = nn.Embed(vocab_size, config.width, dtype=config.dtype, name="embed")(tokens)
        body = _Body if self.recipe.policy is None else nn.remat(_Body, policy=self.recipe.policy)
        blocks = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True, "quantize": True},
            in_axes=nn.broadcast,
            length=config.layers,
        )
        rotation = _rotation(tokens.shape[1], config)
        x, _ = blocks(config, self.recipe.plan, name="layers")(x, rotation)
        x = nn.RMSNorm(epsilon=config.norm_eps, dtype=config.dtype, name="final_norm")(x)
        head = nn.Dense(vocab_size, use_bias=False, dtype=config.dtype, name="head")
        return head(x).astype(jnp.float32)


def recipes(
    plan: ah.Plan,
    config: ModelConfig = MEASURED,
    sizes: Mapping[str, int] = MEASURED_SIZES,
    *,
    attention: Attention = "xla",
) -> list[Recipe]:
    """BF16 and a plan (of benchmarks.make_plan), each under the policies that suit it.

    Args:
      plan: with paths as "d2048/query", for the width of the model.
      config: of the model.
      sizes: batch, sequence, vocab_size.
      attention: what computes it: "xla" keeps arrays of tokens x tokens; "cudnn" keeps none, and
        can be traced on a GPU only.
    """
    config = dataclasses.replace(config, attention=attention)
    ours = ah.Plan(
        layers=tuple(
            (f"layers/block/{module}/{linear}", plan[f"d{config.width}/{linear}"])
            for linear, module in PATHS.items()
        )
    )
    full, policies = ah.Plan.full(), jax.checkpoint_policies
    name = f"level {plan.level}"
    cases: tuple[tuple[str, ah.Plan, Any], ...] = (
        ("bf16", full, None),
        (name, ours, None),
        ("bf16, remat but products", full, policies.dots_with_no_batch_dims_saveable),
        (f"{name}, remat but save_quantized", ours, ah.save_quantized),
        ("bf16, remat", full, policies.nothing_saveable),
        (f"{name}, remat", ours, policies.nothing_saveable),
    )
    return [Recipe(name=n, config=config, plan=p, policy=c, **sizes) for n, p, c in cases]


def held(recipe: Recipe) -> Held:
    """Counts what the loss keeps; nothing is computed."""
    tokens = np.zeros(recipe.tokens.shape, np.int32)
    variables = jax.eval_shape(Scanned(recipe).init, jax.random.key(0), tokens[:, :-1])
    found = kept(lambda variables: _loss(recipe, variables, tokens), variables)
    count = collections.Counter(aval.str_short(short_dtypes=True) for aval in found)
    bytes_of = {aval.str_short(short_dtypes=True): size(aval) for aval in found}
    kinds = sorted(((n, c, c * bytes_of[n]) for n, c in count.items()), key=lambda kind: -kind[2])
    return Held(recipe=recipe.name, bytes=sum(kind[2] for kind in kinds), kinds=tuple(kinds))


def initial(recipe: Recipe) -> tuple[Any, Any]:
    """The state of a training run: variables and the optimizer's moments."""
    tokens = jnp.zeros((recipe.batch, recipe.sequence), jnp.int32)
    variables = Scanned(recipe).init(jax.random.key(0), tokens)
    return variables, _optimizer().init(variables)


def compiled_step(recipe: Recipe) -> tuple[Any, Any]:
    """A compiled step with its state donated, and the state's shapes; nothing is allocated.

    Returns:
      The step, (state, tokens) -> (state, loss); and the state as `jax.ShapeDtypeStruct`s.
    """
    optimizer = _optimizer()
    state = jax.eval_shape(functools.partial(initial, recipe))

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        variables, moments = state
        loss, gradients = jax.value_and_grad(functools.partial(_loss, recipe))(variables, tokens)
        updates, moments = optimizer.update(gradients, moments, variables)
        return (optax.apply_updates(variables, updates), moments), loss

    lowered = jax.jit(step, donate_argnums=0).lower(state, recipe.tokens)
    # Autotuning takes memory of its own, which would count in the device's peak.
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}
    return lowered.compile(compiler_options=options), state


def taken(compiled: Any) -> int:
    """Bytes that a compiled function takes: arguments, results that reuse none, and scratch."""
    found = compiled.memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )


def measured(of: Iterable[Recipe]) -> list[Step]:
    """Compiles every step and runs it twice, those that take least first.

    A device's peak never falls, so that a step shows only if it takes more than all before it.
    """
    device = jax.devices()[0]
    recipes = list(of)
    steps_of = timing.concurrently(lambda recipe: compiled_step(recipe)[0], recipes)
    compiled = sorted(zip(recipes, steps_of, strict=True), key=lambda pair: taken(pair[1]))
    steps, highest = [], 0
    for recipe, step in compiled:
        if taken(step) > MEMORY:
            peak = highest
        else:
            state = jax.jit(functools.partial(initial, recipe))()
            tokens = jnp.zeros(recipe.tokens.shape, jnp.int32)
            for _ in range(2):
                state, loss = step(state, tokens)
            loss.block_until_ready()
            del state
            peak = device.memory_stats()["peak_bytes_in_use"]
        steps.append(
            Step(
                recipe=recipe.name,
                state=step.memory_analysis().argument_size_in_bytes,
                compiled=taken(step),
                peak=peak if peak > highest else None,
            )
        )
        highest = max(highest, peak)
    return steps


def largest_model(recipe: Recipe, limit: int = MEMORY) -> Largest:
    """The most layers, whatever `recipe.config` has, whose step fits into `limit` bytes."""

    @functools.cache
    def step(layers: int) -> tuple[int, int]:
        """Bytes that it takes, and parameters."""
        config = dataclasses.replace(recipe.config, layers=layers)
        compiled, (variables, _) = compiled_step(dataclasses.replace(recipe, config=config))
        return taken(compiled), sum(leaf.size for leaf in jax.tree.leaves(variables))

    layers = most(lambda layers: step(layers)[0], limit)
    compiled, parameters = step(layers) if layers else (0, 0)
    return Largest(recipe=recipe.name, layers=layers, parameters=parameters, compiled=compiled)


def most(needs: Callable[[int], int], limit: int) -> int:
    """The largest n >= 0 with needs(n) <= limit, where needs grows about linearly from n = 1."""
    first, second = needs(1), needs(2)
    if first > limit:
        return 0
    n = 1 + (limit - first) // max(second - first, 1)
    while needs(n) > limit:
        n -= 1
    while needs(n + 1) <= limit:
        n += 1
    return n


def held_table(found: Iterable[Held]) -> Table:
    """A line for every recipe."""
    return Table(
        title=f"What the whole loss keeps, parameters left out: {_model()}",
        head=("recipe", "GiB", "the largest, GiB"),
        rows=tuple(
            (
                row.recipe,
                f"{row.bytes / GIB:.2f}",
                ", ".join(f"{n} x {kind} {b / GIB:.2f}" for kind, n, b in row.kinds[:4]),
            )
            for row in found
        ),
    )


def steps_table(found: Iterable[Step]) -> Table:
    """A line for every recipe."""
    return Table(
        title=f"A training step on this GPU, GiB: {_model()}, cuDNN's attention, float32 "
        "parameters, AdamW",
        head=("recipe", "parameters, moments, batch", "compiled step", "measured peak"),
        rows=tuple(
            (
                row.recipe,
                *(f"{b / GIB:.2f}" for b in (row.state, row.compiled)),
                "-" if row.peak is None else f"{row.peak / GIB:.2f}",
            )
            for row in found
        ),
        note="Compiled step: arguments, results and scratch by XLA's memory analysis. A peak is "
        "shown where it is above those of the steps before it; what does not fit is not run.",
    )


def largest_table(found: Iterable[Largest]) -> Table:
    """A line for every recipe."""
    return Table(
        title=f"The deepest Llama of d {LARGEST.width} that trains in {MEMORY / GIB:.0f} GiB: "
        + "cuDNN's attention, sequence {sequence:,}, batch {batch}, vocabulary {vocab_size:,}, "
        "float32 parameters, AdamW".format(**LARGEST_SIZES),
        head=("recipe", "blocks", "parameters", "step, GiB"),
        rows=tuple(
            (
                row.recipe,
                str(row.layers),
                f"{row.parameters / 1e9:.2f}B",
                f"{row.compiled / GIB:.2f}",
            )
            for row in found
        ),
        note="By XLA's memory analysis of the compiled step.",
    )


def _optimizer() -> Any:
    return make_optimizer(OptimConfig(lr=1e-4, warmup=10), steps=100)


def _model() -> str:
    sizes = "{batch} x {sequence:,} tokens, vocabulary {vocab_size:,}".format(**MEASURED_SIZES)
    return f"d {MEASURED.width}, {MEASURED.layers} blocks, {sizes}"


def _loss(recipe: Recipe, variables: Any, tokens: Any) -> jax.Array:
    logits = Scanned(recipe).apply(variables, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
