"""Configurations of a run, and the presets.

A preset is a whole `RunConfig`; `train.options` puts what the command line said over it. A run
folder keeps the result as `config.json`, and a resumed run reads it back from there.
"""

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from adahop_jax._formats import FormatName, Rounding
from adahop_jax._plan import Level
from train.recipes import RECIPES

if TYPE_CHECKING:
    Quant = str
else:
    Quant = Literal[tuple(RECIPES)]
Preset = Literal["nano", "60m", "125m", "350m", "1b"]
ComputeDtype = Literal["bfloat16", "float16", "float32"]
Attention = Literal["xla", "cudnn"]


class UserError(Exception):
    """Something that the user can put right; the message says where, what and how."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the decoder. Parameters are float32, products run in `dtype`.

    `attention` names what computes softmax(Q K^T) V, see `jax.nn.dot_product_attention`.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: ComputeDtype = "bfloat16"
    attention: Attention = "xla"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "mlp_width"):
            _at_least(self, name, 1)
        if self.width % self.heads:
            raise UserError(
                f"model: width {self.width} is not a multiple of heads {self.heads}; "
                "change --width or --heads"
            )
        if self.heads % self.kv_heads:
            raise UserError(
                f"model: heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; "
                "change --heads or --kv-heads"
            )
        if self.head_dim % 2:
            raise UserError(
                f"model: heads have width / heads = {self.head_dim} dims, an odd number, and "
                "rotary positions turn pairs; change --width or --heads"
            )

    @property
    def head_dim(self) -> int:
        """Dims of one attention head."""
        return self.width // self.heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up, cosine decay and clipping by the global norm."""

    lr: float
    warmup: int
    final_lr_share: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        _at_least(self, "warmup", 0)
        for name, low, high in (
            ("lr", 0.0, 10.0),
            ("clip", 0.0, float("inf")),
        ):
            value = getattr(self, name)
            if not low < value <= high:
                raise UserError(
                    f"optimizer: --{name} is {value}, wanted a value above {low}"
                    + (f" and at most {high}" if high < float("inf") else "")
                )
        if not 0.0 <= self.weight_decay < float("inf"):
            raise UserError(
                f"optimizer: --weight-decay is {self.weight_decay}, wanted 0 (none) or more"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a run's numbers.

    A step sees `batch` sequences in `accumulate` micro-batches; `data` None is Shakespeare; `plan`
    is the digest of the plan file that took the place of calibration.
    """

    preset: Preset
    model: ModelConfig
    optim: OptimConfig
    quant: Quant = "adahop"
    level: Level = 1
    fwd: FormatName = "mxfp4"
    dy_rounding: Rounding = "nearest"
    calibration_steps: int = 30
    plan: str | None = None
    data: str | None = None
    tokenizer: str = "bpe"
    vocab_size: int = 16_384
    seed: int = 0
    steps: int
    batch: int
    seq_len: int
    accumulate: int = 1
    heldout_batches: int = 16
    eval_every: int
    checkpoint_every: int
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "seq_len",
            "accumulate",
            "calibration_steps",
            "vocab_size",
        ) + ("heldout_batches", "eval_every", "checkpoint_every", "log_every"):
            _at_least(self, name, 1)
        if not 0 <= self.seed < 2**31:
            raise UserError(f"run: --seed is {self.seed}, wanted 0 to {2**31 - 1}")
        if self.batch % self.accumulate:
            raise UserError(
                f"run: --batch {self.batch} is not a multiple of --accumulate {self.accumulate}; "
                "every micro-batch holds batch / accumulate sequences"
            )
        if self.quant not in RECIPES:
            raise UserError(
                f"run: --quant {self.quant!r} is unknown; choose one of {', '.join(RECIPES)}"
            )
        adjustable = [name for name, recipe in RECIPES.items() if recipe.adjustable]
        for field, value, what in (
            ("dy_rounding", "stochastic", "nothing to round"),
            ("fwd", "mxfp6", "no format to change"),
        ):
            if getattr(self, field) == value and self.quant not in adjustable:
                raise UserError(
                    f"run: --{field.replace('_', '-')} {value} has {what} with --quant "
                    f"{self.quant}; leave it out or choose --quant {', '.join(adjustable)}"
                )

    def to_json(self) -> str:
        """Returns the configuration as JSON text, fields in order of definition."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> "RunConfig":
        """Reads `to_json`'s text back; `where` names the file in errors."""
        try:
            fields = json.loads(text)
            return _typed(
                cls,
                {
                    **fields,
                    "model": _typed(ModelConfig, fields["model"]),
                    "optim": _typed(OptimConfig, fields["optim"]),
                },
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(
                f"{where}: not a run configuration of this version ({error}); "
                "start a new run in another --run-dir"
            ) from error


def _typed[T](cls: Callable[..., T], fields: Mapping[str, Any]) -> T:
    """Returns cls(**fields), its fields' types checked; raises TypeError with the field's name."""
    hints = get_type_hints(cls)
    for name, value in fields.items():
        if name in hints and not _fits(value, hints[name]):
            raise TypeError(f"{name} is {value!r}")
    return cls(**fields)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(value == option and type(value) is type(option) for option in get_args(hint))
    if get_origin(hint) is types.UnionType:
        return any(_fits(value, option) for option in get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def replace(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Returns `config` with the named fields changed, wherever they nest."""
    model = {k: v for k, v in values.items() if k in _names(ModelConfig)}
    optim = {k: v for k, v in values.items() if k in _names(OptimConfig)}
    rest = {k: v for k, v in values.items() if k not in model and k not in optim}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        optim=dataclasses.replace(config.optim, **optim),
        **rest,
    )


def get(config: RunConfig, name: str) -> Any:
    """Returns the field `name`, wherever it nests."""
    for part in (config, config.model, config.optim):
        if name in _names(type(part)):
            return getattr(part, name)
    raise KeyError(name)


def _names(cls: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls))


def _at_least(config: Any, name: str, low: int) -> None:
    value = getattr(config, name)
    if value < low:
        raise UserError(
            f"{type(config).__name__.removesuffix('Config').lower()}: --{name.replace('_', '-')} "
            f"is {value}, wanted {low} or more"
        )


PRESETS: Mapping[Preset, RunConfig] = {
    # The demonstration: learns Shakespeare on two CPU cores in minutes.
    "nano": RunConfig(
        preset="nano",
        model=ModelConfig(layers=4, width=128, heads=4, kv_heads=2, mlp_width=352),
        optim=OptimConfig(lr=3e-3, warmup=40),
        tokenizer="bytes",
        vocab_size=2_048,
        steps=300,
        batch=16,
        seq_len=128,
        eval_every=100,
        checkpoint_every=100,
        heldout_batches=16,
    ),
    "60m": RunConfig(
        preset="60m",
        model=ModelConfig(layers=14, width=512, heads=8, kv_heads=4, mlp_width=1_408),
        optim=OptimConfig(lr=2e-3, warmup=200),
        steps=4_000,
        batch=64,
        seq_len=1_024,
        eval_every=500,
        checkpoint_every=1_000,
    ),
    "125m": RunConfig(
        preset="125m",
        model=ModelConfig(layers=16, width=768, heads=12, kv_heads=4, mlp_width=2_048),
        optim=OptimConfig(lr=1e-3, warmup=400),
        steps=10_000,
        batch=128,
        seq_len=1_024,
        accumulate=2,
        eval_every=1_000,
        checkpoint_every=1_000,
    ),
    "350m": RunConfig(
        preset="350m",
        model=ModelConfig(layers=28, width=1_024, heads=16, kv_heads=4, mlp_width=2_816),
        optim=OptimConfig(lr=6e-4, warmup=800),
        steps=20_000,
        batch=256,
        seq_len=1_024,
        accumulate=8,
        eval_every=1_000,
        checkpoint_every=1_000,
    ),
    "1b": RunConfig(
        preset="1b",
        model=ModelConfig(layers=22, width=2_048, heads=32, kv_heads=8, mlp_width=5_632),
        optim=OptimConfig(lr=4e-4, warmup=1_000),
        steps=40_000,
        batch=256,
        seq_len=2_048,
        accumulate=32,
        eval_every=1_000,
        checkpoint_every=1_000,
    ),
}
