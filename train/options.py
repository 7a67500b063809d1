"""What the command line may say, and how it becomes a run's configuration."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from train.configs import (
    PRESETS,
    ComputeDtype,
    Quant,
    Rounding,
    RunConfig,
    UserError,
    get,
    replace,
)

_ELSEWHERE = ("plan", "run_dir", "cache_dir", "resume")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Trains a Llama-style decoder with its matrix products in MXFP4.

    Options that are not given come from the preset, or with --resume from the run itself.
    """

    quant: Quant | None = None
    """recipe: bf16, naive mxfp4, iht everywhere, or adahop's calibrated plan (the default)"""
    level: Literal[1, 2] | None = None
    """adahop: column-column products run with outlier extraction (1) or in BF16 (2, the default)"""
    preset: Literal["nano", "60m", "125m", "350m", "1b"] | None = None
    """sizes and schedule; nano, the default, suits two CPU cores"""
    data: str | None = None
    """text file or folder, token file (.u16, .u32) or hf:NAME; by default Shakespeare's plays"""
    tokenizer: str | None = None
    """bytes, bpe (byte-level, trained on the text and cached), or the path of a tokenizer.json"""
    vocab_size: int | None = None
    """size of the vocabulary to train with --tokenizer bpe"""
    plan: str | None = None
    """plan.json of an earlier calibration, used in place of a new one"""
    calibration_steps: int | None = None
    """adahop: first steps that run in BF16 and decide the plan (30)"""
    dy_rounding: Rounding | None = None
    """rounding of the output gradients dY in quantised products (nearest)"""
    run_dir: str | None = None
    """folder of the run; by default an unused runs/PRESET-QUANT-seedN"""
    cache_dir: str = "~/.cache/adahop_jax"
    """folder of trained tokenizers and datasets"""
    resume: bool = False
    """continue the run in --run-dir from its last checkpoint"""
    seed: int | None = None
    """seed of the initial weights, the data order and stochastic rounding"""
    steps: int | None = None
    """optimizer steps"""
    batch: int | None = None
    """sequences per optimizer step"""
    seq_len: int | None = None
    """tokens per sequence"""
    accumulate: int | None = None
    """micro-batches that a step is split into"""
    lr: float | None = None
    """peak learning rate"""
    warmup: int | None = None
    """steps of linear warm-up"""
    weight_decay: float | None = None
    """AdamW's decay of the matrices"""
    clip: float | None = None
    """largest global norm of the gradients"""
    layers: int | None = None
    """decoder blocks"""
    width: int | None = None
    """features of the residual stream"""
    heads: int | None = None
    """attention heads"""
    kv_heads: int | None = None
    """key and value heads, shared by groups of attention heads"""
    mlp_width: int | None = None
    """hidden features of the MLP"""
    dtype: ComputeDtype | None = None
    """dtype of what is not quantised (bfloat16; on a CPU float32, which XLA runs faster there)"""
    heldout_batches: int | None = None
    """batches of held-out text in an evaluation"""
    eval_every: int | None = None
    """steps between evaluations"""
    checkpoint_every: int | None = None
    """steps between checkpoints"""
    log_every: int | None = None
    """steps between log lines"""

    def given(self) -> dict[str, Any]:
        """Returns the configuration fields that were said, by name."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in _ELSEWHERE)
        said = {name: getattr(self, name) for name in names}
        return {
            name: str(Path(value).resolve()) if _is_path(name, value) else value
            for name, value in said.items()
            if value is not None
        }


def _is_path(name: str, value: object) -> bool:
    if name == "data":
        return isinstance(value, str) and not value.startswith("hf:")
    return name == "tokenizer" and str(value).endswith(".json")


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
    if config.quant != "adahop":
        for name in ("level", "calibration_steps", "plan"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"run: --{name.replace('_', '-')} belongs to --quant adahop, and --quant is "
                    f"{config.quant}; leave one of them out"
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
