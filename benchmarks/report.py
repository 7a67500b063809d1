"""Tables as Markdown, results as JSON, and on which machine and versions they were made."""

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
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
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        parts = [f"## {self.title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
        return "\n\n".join([*parts, self.note] if self.note else parts) + "\n"


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
        "versions": {"python": platform.python_version(), **_versions()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
    }


def to_json(circumstances: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Everything as JSON; dataclasses become objects."""
    document = {"kind": "adahop_jax benchmark", "version": 1, **circumstances, **results}
    return json.dumps(document, indent=1, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"benchmark: {type(value).__name__} has no place in JSON")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    """Of the checkout, marked if files in it were changed; None without one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
