"""Pretrained Llama weights and their tokenizer, read from a GGUF file into the trainer's model."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from train.configs import ComputeDtype, ModelConfig
from train.model import Llama
from train.tokenizer import BPETokenizer, DataError

_CONTROL_TOKEN = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model that was trained elsewhere.

    Attributes:
      config: its shape.
      variables: {"params": ...} for `Llama(config, vocab_size)`, float32.
      tokenizer: its own.
    """

    config: ModelConfig
    variables: Mapping[str, Any]
    tokenizer: BPETokenizer


def load_gguf(path: Path, *, dtype: ComputeDtype = "bfloat16") -> Pretrained:
    """Reads a Llama model from a GGUF file; quantised weights are dequantised.

    Raises:
      DataError: it isn't a GGUF file, not of a Llama model, or its tensors aren't the model's.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise DataError(
            f"weights: {path} can't be read as a GGUF file ({error}); download it again"
        ) from error
    field = _fields(path, reader)
    architecture = field("general.architecture")
    if architecture != "llama":
        raise DataError(
            f'weights: {path} holds a model of the kind "{architecture}"; wanted "llama"'
        )
    tensors = {t.name: t for t in reader.tensors}
    config = ModelConfig(
        layers=field("llama.block_count"),
        width=field("llama.embedding_length"),
        heads=field("llama.attention.head_count"),
        kv_heads=field("llama.attention.head_count_kv"),
        mlp_width=field("llama.feed_forward_length"),
        rope_theta=field("llama.rope.freq_base"),
        norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        dtype=dtype,
    )
    vocab_size = len(field("tokenizer.ggml.tokens"))
    shapes = _expected(config, vocab_size)
    names = {_gguf_name(keys): keys for keys in shapes}
    missing, unknown = sorted(names.keys() - tensors), sorted(tensors.keys() - names)
    if missing or unknown:
        raise DataError(
            f"weights: {path}: missing {missing or 'nothing'}, not the model's "
            f"{unknown or 'nothing'}; wanted a Llama without biases, shaped as its fields say"
        )
    params: dict[str, Any] = {}
    for name, keys in names.items():
        value = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        if keys[-1] == "kernel":
            heads = {"query": config.heads, "key": config.kv_heads}.get(keys[-2])
            value = (half_split(value, heads=heads) if heads else value).T
        if value.shape != shapes[keys]:
            raise DataError(
                f"weights: {path}: {name} has the shape {value.shape[::-1]}, wanted "
                f"{shapes[keys][::-1]} as the file's own fields say; download it again"
            )
        inner = params
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = jnp.asarray(value, jnp.float32)
    return Pretrained(
        config=config, variables={"params": params}, tokenizer=_tokenizer(field, path.stem)
    )


def half_split(rows: NDArray[np.floating], *, heads: int) -> NDArray[np.floating]:
    """Reorders a head's rows from rotary pairs (2 i, 2 i + 1) to pairs (i, i + K / 2).

    Args:
      rows: (heads * K, in), as GGUF keeps the query and key projections of a Llama.
    """
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _fields(path: Path, reader: gguf.GGUFReader) -> Callable[[str], Any]:
    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise DataError(f"weights: {path} has no field {name}; wanted a whole Llama model")
        return found.contents()

    return field


def _expected(config: ModelConfig, vocab_size: int) -> dict[tuple[str, ...], tuple[int, ...]]:
    model = Llama(config, vocab_size)
    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}


def _gguf_name(keys: tuple[str, ...]) -> str:
    names = {
        "embed": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "attn_norm": "attn_norm",
        "mlp_norm": "ffn_norm",
        "query": "attn_q",
        "key": "attn_k",
        "value": "attn_v",
        "out": "attn_output",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    }
    block = f"blk.{keys[0].removeprefix('block_')}." if keys[0].startswith("block_") else ""
    return f"{block}{names[keys[-2]]}.weight"


def _tokenizer(field: Callable[[str], Any], name: str) -> BPETokenizer:
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    kind = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DataError(
            f"weights: {name}: the tokenizer is {kind}; wanted ('gpt2', 'smollm'), a byte-level "
            "BPE that splits digits, the only kind read here"
        )
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    control = [t for t, kind_ in zip(tokens, kinds, strict=True) if kind_ == _CONTROL_TOKEN]
    inner.add_special_tokens(control)
    return BPETokenizer(inner, name)
