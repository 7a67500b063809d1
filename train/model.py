"""A Llama-style decoder whose blocks are built from `adahop_jax.Dense`.

RMSNorm before each sub-layer, rotary positions, grouped-query attention, SwiGLU, no biases. The
head and the embedding stay outside the plan: their products run in the model's `dtype`.

Shape suffixes: B batch, T tokens of a sequence, D width, H attention heads, G key and value heads,
K dims of a head, F hidden features of the MLP, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import adahop_jax as ah
from train.configs import ModelConfig

PyTree = Any


class Llama(nn.Module):
    """The decoder: token ids in, float32 logits of the next token out.

    Attributes:
      config: shape of the model and dtype of its products.
      vocab_size: number of token ids.
      plan: how each of the blocks' products runs. Paths are "block_3/attn/query" and the like.
      dot_general_cls: makes the product of the blocks' layers, for recipes that have one of their
        own (`train.recipes`); None for those of the plan.
    """

    config: ModelConfig
    vocab_size: int
    plan: ah.Plan = ah.Plan.full()
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns float32 logits of shape (B, T, V) for int32 ids of shape (B, T)."""
        config = self.config
        embed = nn.Embed(
            self.vocab_size,
            config.width,
            dtype=config.dtype,
            embedding_init=nn.initializers.normal(0.02),
            name="embed",
        )
        x_BTD = embed(tokens_BT)
        rotation = _rotation(tokens_BT.shape[1], config)
        dense = linear(config, self.plan, self.dot_general_cls)
        for i in range(config.layers):
            x_BTD = Block(config, dense, name=f"block_{i}")(x_BTD, rotation)
        x_BTD = _norm(config, "final_norm")(x_BTD)
        if config.tie_embeddings:
            logits_BTV = embed.attend(x_BTD)
        else:
            head = nn.Dense(
                self.vocab_size,
                use_bias=False,
                dtype=config.dtype,
                kernel_init=nn.initializers.normal(0.02),
                name="head",
            )
            logits_BTV = head(x_BTD)
        return logits_BTV.astype(jnp.float32)


def linear(
    config: ModelConfig, plan: ah.Plan, dot_general_cls: Any = None
) -> functools.partial[ah.Dense]:
    """Returns what makes the blocks' layers, as `Block` takes it; attributes as of `Llama`."""
    return functools.partial(
        ah.Dense,
        use_bias=False,
        dtype=config.dtype,
        plan=plan,
        dot_general_cls=dot_general_cls,
    )


def next_token_loss(model: Llama) -> Callable[[PyTree, tuple[jax.Array, jax.Array]], jax.Array]:
    """Returns the mean cross-entropy of each next token, in nats, as a function.

    Its arguments are the model's variables and a batch: int32 ids of shape (B, T + 1) with the key
    that stochastic rounding draws from.
    """

    def loss_fn(variables: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, key = batch
        logits = model.apply(variables, tokens[:, :-1], rngs={"quantize": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


class Block(nn.Module):
    """One decoder block.

    Attributes:
      config: shape of the model.
      dense: makes a linear layer from its features and name.
    """

    config: ModelConfig
    dense: functools.partial[ah.Dense]

    @nn.compact
    def __call__(self, x_BTD: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns the residual stream after attention and MLP."""
        h_BTD = _norm(self.config, "attn_norm")(x_BTD)
        x_BTD = x_BTD + Attention(self.config, self.dense, name="attn")(h_BTD, rotation)
        h_BTD = _norm(self.config, "mlp_norm")(x_BTD)
        return x_BTD + Mlp(self.config, self.dense, name="mlp")(h_BTD)


class Attention(nn.Module):
    """Causal attention; groups of H / G query heads share a key and value head."""

    config: ModelConfig
    dense: functools.partial[ah.Dense]

    @nn.compact
    def __call__(self, x_BTD: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns what attention adds to the residual stream, (B, T, D)."""
        config, dense = self.config, self.dense
        heads = (*x_BTD.shape[:2], -1, config.head_dim)
        projections = ah.dense_group(
            x_BTD,
            dense(config.width, name="query"),
            dense(config.kv_heads * config.head_dim, name="key"),
            dense(config.kv_heads * config.head_dim, name="value"),
        )
        q_BTHK, k_BTGK, v_BTGK = (projection.reshape(heads) for projection in projections)
        out_BTHK = jax.nn.dot_product_attention(
            _rotate(q_BTHK, rotation),
            _rotate(k_BTGK, rotation),
            v_BTGK,
            is_causal=True,
            implementation=config.attention,
        )
        out = dense(config.width, kernel_init=_residual_init(config), name="out")
        return out(out_BTHK.reshape(x_BTD.shape))


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    config: ModelConfig
    dense: functools.partial[ah.Dense]

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what the MLP adds to the residual stream, (B, T, D)."""
        dense = self.dense
        gate_BTF, up_BTF = ah.dense_group(
            x_BTD,
            dense(self.config.mlp_width, name="gate"),
            dense(self.config.mlp_width, name="up"),
        )
        down = dense(self.config.width, kernel_init=_residual_init(self.config), name="down")
        return down(nn.silu(gate_BTF) * up_BTF)


def _norm(config: ModelConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=config.norm_eps, dtype=config.dtype, name=name)


def _residual_init(config: ModelConfig) -> nn.initializers.Initializer:
    # Each of the 2 * layers writers adds its share of the residual stream's variance.
    return nn.initializers.variance_scaling(0.5 / config.layers, "fan_in", "truncated_normal")


def _rotation(length: int, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles, float32 of shape (T, 1, K / 2)."""
    pairs = jnp.arange(config.head_dim // 2, dtype=jnp.float32)
    frequencies = config.rope_theta ** (-2.0 * pairs / config.head_dim)
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), frequencies)[:, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x_BTHK: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns pairs (i, i + K / 2), the half-split convention of Hugging Face's Llama."""
    cos, sin = (angle[None] for angle in rotation)
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)
