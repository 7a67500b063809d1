"""Markdown tables of what `train.smollm2` finds."""

import importlib.metadata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

import adahop_jax as ah
from benchmarks.report import markdown
from train.column_column import CELL, Trial
from train.product_error import KEPT_X, Measurement

MARK = "<!-- Below: written by `python -m train.smollm2`. -->"
PRODUCTS = {"fwd": "Y = X·W", "dgrad": "dX = dY·Wᵀ", "wgrad": "dW = Xᵀ·dY"}
KINDS = ("query", "key", "value", "out", "gate", "up", "down")
Case = tuple[str, str]
"""Path and product."""

SIX_BITS = "iht mxfp6"
UNIFORM = {"BF16": "full", "MXFP4": "mxfp4", "IHT": "iht", "IHT in MXFP6": SIX_BITS}

# Another implementation's counts, in PyTorch and float32, on other articles of the same collection.
OTHER_PATTERNS = {
    "x": {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), "column 30"),
        "out": "column 28, none 2",
        "down": "column 23, none 7",
    },
    "w": {
        "query": "row 21, none 9",
        "key": "row 29, none 1",
        "value": "none 24, row 4, column 2",
        "out": "none 27, row 3",
        "gate": "row 24, none 6",
        "up": "none 27, row 3",
        "down": "row 28, none 2",
    },
    "dy": {
        "query": "column 19, none 11",
        "key": "none 28, column 2",
        "value": "row 29, none 1",
        "out": "row 29, none 1",
        "gate": "row 18, none 11, column 1",
        "up": "none 18, row 10, column 2",
        "down": "row 29, column 1",
    },
}
OTHER_KEYS = {
    "fwd": "column-column 105, column-none 94, none-column 7, column-row 2, none-none 2",
    "dgrad": "row-none 69, none-row 51, row-row 44, none-none 19, column-row 17, column-none 8, "
    "row-column 2",
    "wgrad": "column-column 106, none-column 70, row-column 25, column-none 9",
}


def tables(
    measured: Sequence[Measurement],
    trials: Sequence[Trial],
    plan: ah.Plan,
    explained: Mapping[int, ah.Explanation],
    *,
    perplexity: float,
) -> str:
    """Returns all tables as Markdown.

    Args:
      measured: of some or all layers.
      trials: of candidates for the column-column cell, in some layers.
      plan: with the layers' patterns.
      explained: level -> what that level's plan does, for all layers.
      perplexity: of the model on the text.
    """
    version = importlib.metadata.version("jax")
    paths = dict.fromkeys(m.path for m in measured)
    products = [trial.product for trial in trials]
    scope = "all" if len(paths) == len(plan.paths) else f"the first {len(paths)} of"
    parts = [
        f"SmolLM2-135M-Instruct (4-bit weights, dequantised), "
        f"4 × 512 tokens of Wikipedia summaries, products in BF16: perplexity {perplexity:.2f}. "
        f"Errors of {scope} {len(plan.paths)} linears. JAX {version}.",
        "## Patterns\n\nX as tokens × in, W as out × in, dY as tokens × out. In brackets: another "
        "implementation, in PyTorch and float32, on other articles.\n",
        _patterns(plan),
        "## Keys\n\nPatterns of the left and right operand, as the strategy table is read.\n",
        _keys(explained[2]),
        "## Errors\n\nRelative Frobenius error against the float64 product, mean over linears; "
        "after the stroke the median over the result's rows of each row's own relative error, "
        "which a few large rows don't decide. The share is of multiply-adds in BF16.\n",
        *(_product(name, measured, explained) for name in PRODUCTS),
        "## Recipes\n\nMean error of each product over the linears, and the share of all "
        "multiply-adds in BF16.\n",
        _recipes(measured, explained),
        "## Candidates for the column-column cell\n\nErrors as above, in one block of three. Inner "
        "k: of the contracted dim (features in the forward, tokens in wgrad) the k with the "
        "largest norms in X, or products of their norms in both operands, are multiplied in BF16 "
        "and are zeros in the quantised operands.\n",
        *(_candidates(name, trials, explained[2]) for name in dict.fromkeys(products)),
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _patterns(plan: ah.Plan) -> str:
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for path, layer in plan:
        if layer.patterns is not None:
            for tensor in OTHER_PATTERNS:
                counts[path.rpartition("/")[2], tensor][getattr(layer.patterns, tensor)] += 1
    rows = [
        [
            kind,
            *(f"{_counted(counts[kind, t])} ({OTHER_PATTERNS[t][kind]})" for t in OTHER_PATTERNS),
        ]
        for kind in KINDS
    ]
    return markdown(["linear", "X", "W", "dY"], rows)


def _keys(explanation: ah.Explanation) -> str:
    rows = [
        [name, _counted(Counter(row.why for row in explanation.rows if row.product == name)), other]
        for name, other in OTHER_KEYS.items()
    ]
    return markdown(["product", "here", "the other implementation"], rows)


def _product(
    name: str, measured: Sequence[Measurement], explained: Mapping[int, ah.Explanation]
) -> str:
    here = [m for m in measured if m.product == name]
    strategies = list(dict.fromkeys(m.strategy for m in here))
    keys = {row.path: row.why for row in explained[2].rows if row.product == name}
    chosen = {
        level: {row.why: row.strategy for row in explanation.rows if row.product == name}
        for level, explanation in explained.items()
    }
    rows = []
    linears = Counter(keys[path] for path in {m.path for m in here})
    for key, count in linears.most_common():
        cells = [
            _errors(m for m in here if m.strategy == s and keys[m.path] == key) for s in strategies
        ]
        others = (f", level {n} {chosen[n][key]}" for n in (2, 3))
        levels = others if chosen[2][key] == "full" else ()
        rows.append([key, str(count), *cells, chosen[1][key] + "".join(levels)])
    total = [_errors(m for m in here if m.strategy == s) for s in strategies]
    rows.append(["all", str(linears.total()), *total, ""])
    shares = [f"{np.mean([m.share for m in here if m.strategy == s]):.1%}" for s in strategies]
    rows.append(["share in BF16", "", *shares, ""])
    head = ["key", "linears", *strategies, "the table's choice"]
    return f"### {name}: {PRODUCTS[name]}\n\n{markdown(head, rows)}"


def _recipes(measured: Sequence[Measurement], explained: Mapping[int, ah.Explanation]) -> str:
    by_case: dict[Case, dict[str, Measurement]] = defaultdict(dict)
    for m in measured:
        by_case[m.path, m.product][m.strategy] = m
    recipes = {label: dict.fromkeys(by_case, strategy) for label, strategy in UNIFORM.items()}
    for level, explanation in explained.items():
        recipes[f"AdaHOP level {level}"] = {
            (row.path, row.product): row.strategy for row in explanation.rows
        }
    recipes["least error of MXFP4, case by case"] = {
        case: _best(found.values()) for case, found in by_case.items()
    }
    rows = []
    for label, chosen in recipes.items():
        picked = [found[chosen[case]] for case, found in by_case.items()]
        means = [_errors(m for m in picked if m.product == name) for name in PRODUCTS]
        share = sum(m.share * m.work for m in picked) / sum(m.work for m in picked)
        rows.append([label, *means, f"{share:.1%}"])
    return markdown(["recipe", *PRODUCTS, "share in BF16"], rows)


def _candidates(name: str, trials: Sequence[Trial], explanation: ah.Explanation) -> str:
    here = [t for t in trials if t.product == name]
    keys = {row.path: row.why for row in explanation.rows if row.product == name}
    scopes = {CELL: [t for t in here if keys[t.path] == CELL], "all": here}
    if len(scopes[CELL]) in (0, len(here)):
        del scopes["all" if scopes[CELL] else CELL]
    rows = []
    for label in dict.fromkeys(t.strategy for t in here):
        picked = [[t for t in scope if t.strategy == label] for scope in scopes.values()]
        share, bits = (np.mean([getattr(t, f) for t in picked[0]]) for f in ("share", "saved_bits"))
        saved = f"{bits:.2f}" if bits else "-"
        rows.append([label, *map(_errors, picked), f"{share:.1%}", saved])
    counts = [f"{scope} ({len({t.path for t in ts})})" for scope, ts in scopes.items()]
    head = ["", *counts, "share in BF16", "bits of the saved X"]
    return f"### {name}\n\n{markdown(head, rows)}"


def _best(measured: Iterable[Measurement]) -> str:
    offered = (m for m in measured if m.strategy not in ("full", KEPT_X, SIX_BITS))
    return min(offered, key=lambda m: m.error).strategy


def _errors(measured: Iterable[Measurement]) -> str:
    errors, row_errors = zip(*((m.error, m.row_error) for m in measured), strict=True)
    return f"{np.mean(errors):.3f} / {np.mean(row_errors):.3f}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
