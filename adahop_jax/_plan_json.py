"""Plans as JSON: versioned, readable, and checked on the way in with the place of every fault.

Fields that hold their default are left out.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from adahop_jax._formats import OperandSpec, is_integer
from adahop_jax._plan import (
    PRODUCTS,
    TENSORS,
    LayerPlan,
    Level,
    OutlierSpec,
    Pattern,
    Patterns,
    Plan,
    PlanError,
    ProductPlan,
)

KIND = "adahop_jax plan"
VERSION = 1


def to_json(plan: Plan) -> str:
    """The plan as JSON text."""
    document = {
        "kind": KIND,
        "version": VERSION,
        "level": plan.level,
        "default": None if plan.default is None else _plain(plan.default),
        "layers": {path: _plain(layer) for path, layer in plan.layers},
    }
    return json.dumps(document, indent=2) + "\n"


def from_json(text: str, *, where: str = "plan") -> Plan:
    """The plan that `to_json` wrote.

    Args:
      text: JSON.
      where: what error messages call the text, e.g. a file's name.

    Raises:
      PlanError: no plan, another version, or a value that cannot be.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: not JSON ({error}); pass a file that Plan.save wrote") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise PlanError(f"{where}: not a plan: no {KIND!r} in it; pass a file that Plan.save wrote")
    if not is_integer(document.get("version")) or document["version"] != VERSION:
        raise PlanError(
            f"{where}: plan version {document.get('version')!r}, this library reads {VERSION}; "
            "calibrate again, or use the library that wrote it"
        )
    _known(document, ("kind", "version", "level", "default", "layers"), where)
    level = document.get("level")
    if level is not None and not (is_integer(level) and level in get_args(Level)):
        raise PlanError(f"{where}: level is {level!r}; wanted 1, 2, 3 or null")
    layers = _object(document.get("layers"), f"{where}: layers")
    default = document.get("default")
    return Plan(
        layers=tuple((path, _layer(node, f"{where}: {path}")) for path, node in layers.items()),
        default=None if default is None else _layer(default, f"{where}: default"),
        level=level,
    )


def save(plan: Plan, file: str | os.PathLike) -> None:
    """Writes the plan to a file, whole or not at all."""
    path = Path(file)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(to_json(plan), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise PlanError(f"{file}: cannot write the plan ({error}); check the path") from error


def load(file: str | os.PathLike) -> Plan:
    """Reads a plan from a file; see `Plan.load`."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or no path at all
        raise PlanError(f"{file}: cannot read the plan ({error}); check the path") from error
    return from_json(text, where=str(file))


def _plain(node: Any) -> dict[str, Any]:
    """A dataclass as a dict of the fields that differ from their default."""
    return {
        field.name: _plain(value) if dataclasses.is_dataclass(value) else value
        for field in dataclasses.fields(node)
        if (value := getattr(node, field.name)) != field.default
    }


def _layer(node: Any, where: str) -> LayerPlan:
    fields = dict(_object(node, where))
    missing = [name for name in PRODUCTS if name not in fields]
    if missing:
        raise PlanError(f"{where}: no {', '.join(missing)}; wanted all of {', '.join(PRODUCTS)}")
    for name in PRODUCTS:
        fields[name] = _product(fields[name], f"{where}: {name}")
    if fields.get("patterns") is not None:
        fields["patterns"] = _patterns(fields["patterns"], f"{where}: patterns")
    for dim in ("in_features", "out_features"):
        if fields.get(dim) is not None and not is_integer(fields[dim]):
            raise PlanError(f"{where}: {dim} is {fields[dim]!r}; wanted an integer")
    return _build(LayerPlan, fields, where)


def _product(node: Any, where: str) -> ProductPlan:
    fields = dict(_object(node, where))
    makers = {"lhs": OperandSpec, "rhs": OperandSpec, "outliers": OutlierSpec}
    for name, maker in makers.items():
        if name in fields:
            place = f"{where}: {name}"
            fields[name] = _build(maker, dict(_object(fields[name], place)), place)
    return _build(ProductPlan, fields, where)


def _patterns(node: Any, where: str) -> Patterns:
    fields = _object(node, where)
    known = [pattern.value for pattern in Pattern]
    for name in TENSORS:
        if fields.get(name) not in known:
            raise PlanError(f"{where}: {name} is {fields.get(name)!r}; wanted one of {known}")
    return _build(Patterns, {name: Pattern(value) for name, value in fields.items()}, where)


def _build[T](maker: Callable[..., T], fields: dict[str, Any], where: str) -> T:
    _known(fields, [field.name for field in dataclasses.fields(maker)], where)  # type: ignore[arg-type]
    try:
        return maker(**fields)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from error


def _known(fields: dict[str, Any], known: list[str] | tuple[str, ...], where: str) -> None:
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise PlanError(f"{where}: unknown {', '.join(unknown)}; wanted {', '.join(known)}")


def _object(node: Any, where: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise PlanError(f"{where}: found {node!r}; wanted an object")
    return node


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named twice: {', '.join(twice)}")
    return dict(pairs)
