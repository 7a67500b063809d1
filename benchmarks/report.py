"""Tables as Markdown, results as JSON, and on which machine and versions they were made."""

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("adahop-jax", "jax", "jaxlib", "jax-triton", "triton", "flax")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table to print.

    Attributes:
      title: above it.
      head: of the columns.
      rows: of as many cells.
      note: below it.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __str__(self) -> str:
        parts = [f"## {self.title}", markdown(self.head, self.rows)]
        return "\n\n".join([*parts, self.note] if self.note else parts) + "\n"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def circumstances(commit: str | None = None) -> dict[str, Any]:
    """Machine, versions, date and commit.

    Args:
      commit: of the sources, where they lie in no git checkout.
    """
    device = jax.devices()[0]
    return {
        "machine": {
            "device": device.device_kind,
            "architecture": str(getattr(device, "compute_capability", "")),
            "processors": getattr(device, "core_count", None),
            "platform": device.client.platform_version,
            "host": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or checkout("--abbrev=40"),
    }


def to_json(circumstances: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Everything as JSON; dataclasses become objects."""
    document = {"kind": "adahop_jax benchmark", "version": 1, **circumstances, **results}
    return json.dumps(document, indent=1, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"benchmark: {type(value).__name__} has no place in JSON")


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of packages, by name; None of those that are not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def checkout(*options: str) -> str | None:
    """The commit that is checked out, marked if files in it were changed; None without one.

    Args:
      options: of `git describe`, besides those for that.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", *options]
    try:
        run = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
