"""What the command line may say, and how it becomes a run's configuration."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from adahop_jax._formats import FormatName, Rounding
from adahop_jax._plan import Level
from train.configs import (
    PRESETS,
    Attention,
    ComputeDtype,
    Preset,
    Quant,
    RunConfig,
    UserError,
    get,
    replace,
)
from train.data import is_token_file
from train.recipes import RECIPES

# An option that is not said has no default to show: its preset's value holds.
_UNSAID = tyro.conf.arg(help_behavior_hint="")


def _read_by(
    parse: Callable[[str], Any], metavar: str, choices: tuple[str, ...] | None = None
) -> PrimitiveConstructorSpec[Any]:
    # None means "not said"; tyro's own reading of `X | None` would take and offer the word "None".
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
        choices=choices,
    )


def _one_of(literal: Any) -> PrimitiveConstructorSpec[Any]:
    values = {str(value): value for value in get_args(literal)}
    return _read_by(values.__getitem__, "{" + ",".join(values) + "}", tuple(values))


Int = Annotated[int | None, _UNSAID, _read_by(int, "INT")]
Float = Annotated[float | None, _UNSAID, _read_by(float, "FLOAT")]
Str = Annotated[str | None, _UNSAID, _read_by(str, "STR")]
_ELSEWHERE = ("plan", "run_dir", "cache_dir", "resume")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Trains a Llama-style decoder with its matrix products in MXFP4.

    Options that are not given come from the preset, or with --resume from the run itself.
    """

    quant: Annotated[Quant | None, _UNSAID, _one_of(Quant)] = None
    """recipe, see train/recipes: how the blocks' matrix products run (adahop's calibrated plan)"""
    level: Annotated[Level | None, _UNSAID, _one_of(Level)] = None
    """adahop: column-column products extract outliers (1, default), are in BF16 (2) or MXFP6 (3)"""
    fwd: Annotated[FormatName | None, _UNSAID, _one_of(FormatName)] = None
    """format of quantised forward products (mxfp6 where calibration makes the plan, else mxfp4)"""
    preset: Annotated[Preset | None, _UNSAID, _one_of(Preset)] = None
    """sizes and schedule; nano, the default, suits two CPU cores"""
    data: Str = None
    """text file or folder, token file (.u16, .u32) or hf:NAME; by default Shakespeare's plays"""
    tokenizer: Str = None
    """bytes, bpe (byte-level, trained on the text and cached), or the path of a tokenizer.json"""
    vocab_size: Int = None
    """size of the vocabulary to train with --tokenizer bpe, or of a token file's"""
    plan: Str = None
    """plan.json of an earlier calibration, used in place of a new one; control mirrors it"""
    calibration_steps: Int = None
    """adahop: first steps that run in BF16 and decide the plan (30)"""
    dy_rounding: Annotated[Rounding | None, _UNSAID, _one_of(Rounding)] = None
    """rounding of the output gradients dY in quantised products (nearest)"""
    run_dir: Str = None
    """folder of the run; by default an unused runs/PRESET-QUANT-seedN"""
    cache_dir: str = "~/.cache/adahop_jax"
    """folder of trained tokenizers and datasets"""
    resume: bool = False
    """continue the run in --run-dir from its last checkpoint"""
    seed: Int = None
    """seed of the initial weights, the data order and stochastic rounding"""
    steps: Int = None
    """optimizer steps"""
    batch: Int = None
    """sequences per optimizer step"""
    seq_len: Int = None
    """tokens per sequence"""
    accumulate: Int = None
    """micro-batches that a step is split into"""
    lr: Float = None
    """peak learning rate"""
    warmup: Int = None
    """steps of linear warm-up"""
    weight_decay: Float = None
    """AdamW's decay of the matrices"""
    clip: Float = None
    """largest global norm of the gradients"""
    layers: Int = None
    """decoder blocks"""
    width: Int = None
    """features of the residual stream"""
    heads: Int = None
    """attention heads"""
    kv_heads: Int = None
    """key and value heads, shared by groups of attention heads"""
    mlp_width: Int = None
    """hidden features of the MLP"""
    dtype: Annotated[ComputeDtype | None, _UNSAID, _one_of(ComputeDtype)] = None
    """dtype of what is not quantised (bfloat16; on a CPU float32, which XLA runs faster there)"""
    attention: Annotated[Attention | None, _UNSAID, _one_of(Attention)] = None
    """what computes attention (xla); cudnn, on a GPU, is faster and adds in no fixed order"""
    heldout_batches: Int = None
    """batches of held-out text in an evaluation"""
    eval_every: Int = None
    """steps between evaluations"""
    checkpoint_every: Int = None
    """steps between checkpoints"""
    log_every: Int = None
    """steps between log lines"""

    def given(self) -> dict[str, Any]:
        """Returns the configuration fields that were said, by name; paths are made absolute.

        Raises:
          UserError: a path that can't be one.
        """
        names = (field.name for field in dataclasses.fields(self) if field.name not in _ELSEWHERE)
        said = {name: getattr(self, name) for name in names}
        return {
            name: _absolute(name, value) if name in ("data", "tokenizer") else value
            for name, value in said.items()
            if value is not None
        }


def _absolute(name: str, value: str) -> str:
    """Returns `value` with the path in it made absolute, if there is one."""
    if value == "" or (name == "tokenizer" and not value.endswith(".json")):
        return value
    try:
        if name == "data" and value.startswith("hf:"):
            folder, colon, split = value.removeprefix("hf:").partition(":")
            # The datasets library, too, takes a folder of that name before it asks the network.
            return f"hf:{Path(folder).resolve()}{colon}{split}" if os.path.isdir(folder) else value
        return str(Path(value).resolve())
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"run: --{name} {value!r} can't be a path ({error}); check its spelling"
        ) from error


def resolve(options: Options, *, platform: str) -> RunConfig:
    """Puts the given options over their preset.

    Args:
      options: of the command line.
      platform: "cpu" or another; decides the default of `dtype`.

    Raises:
      UserError: options that contradict each other, or values that can't be.
    """
    given = options.given()
    if platform == "cpu":
        given.setdefault("dtype", "float32")
    config = replace(PRESETS[given.pop("preset", "nano")], given)
    if options.fwd is None and options.plan is None and RECIPES[config.quant].is_calibrated:
        config = dataclasses.replace(config, fwd="mxfp6")
    if platform == "cpu" and config.model.dtype == "float16":
        raise UserError(
            "run: --dtype float16 is not to be had on a CPU, where XLA lacks its products; "
            "choose float32 or bfloat16"
        )
    if config.model.attention == "cudnn" and (platform != "gpu" or config.model.dtype == "float32"):
        raise UserError(
            "run: --attention cudnn needs a GPU and 16 bits, and this is a "
            f"{platform} with --dtype {config.model.dtype}; choose xla"
        )
    if options.vocab_size is not None and config.tokenizer != "bpe":
        if not is_token_file(config.data) or config.tokenizer != "bytes":
            raise UserError(
                f"run: --vocab-size is the size of a BPE to train or of a token file's vocabulary, "
                f"and the tokenizer is {config.tokenizer}; leave it out, or add --tokenizer bpe"
            )
    if not RECIPES[config.quant].is_calibrated:
        calibrated = " or ".join(name for name in RECIPES if RECIPES[name].is_calibrated)
        for name in ("level", "calibration_steps", "plan"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"run: --{name.replace('_', '-')} belongs to --quant {calibrated}, and --quant "
                    f"is {config.quant}; leave one of them out"
                )
    elif options.plan is not None and options.calibration_steps is not None:
        raise UserError(
            "run: --plan skips the calibration that --calibration-steps sizes; leave one out"
        )
    elif options.plan is None and config.calibration_steps >= config.steps:
        raise UserError(
            f"run: --steps {config.steps} leaves nothing to train after {config.calibration_steps} "
            "calibration steps; raise --steps, lower --calibration-steps, or give a --plan"
        )
    return config


def contradictions(options: Options, config: RunConfig) -> list[str]:
    """Lists the given options that say something else than `config`, for a resumed run."""
    return [
        f"--{name.replace('_', '-')} {value} (the run has {get(config, name)})"
        for name, value in options.given().items()
        if value != get(config, name)
    ]
