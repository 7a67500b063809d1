"""What a run says while it runs: metrics.jsonl, and a progress bar or a line per interval."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from train.configs import RunConfig, UserError
from train.evaluate import Heldout
from train.recipes.execution import Execution


class Diverged(UserError):
    """The loss is no longer finite."""


class RunLog:
    """Writes a run's metrics to a file and shows them.

    Metrics stay on the device until an interval ends, so that logging never stalls the device. The
    clock for tokens per second leaves out the first step of a phase, which compiles, and whatever
    runs inside `paused`.
    """

    def __init__(self, file: Path, config: RunConfig, *, start: int):
        self._file = file
        self._tokens_per_step = config.batch * config.seq_len
        self._every = config.log_every
        self._total = config.steps
        self._phase = ""
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._timed = 0
        self._clock = time.perf_counter()
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(
            "", completed=start, total=config.steps, loss=float("nan"), speed=0.0
        )
        _drop_after(file, start, total=config.steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def step(self, step: int, *, phase: str, metrics: dict[str, Any]) -> None:
        """Takes the metrics of step `step`, counted from 0, as device arrays."""
        self._pending.append((step, {"phase": phase, **metrics}))
        if phase != self._phase:
            self._phase = phase
            self.flush()
            return
        self._timed += 1
        if (step + 1) % self._every == 0 or step + 1 == self._total:
            self.flush()

    def flush(self) -> None:
        """Fetches the metrics held back, writes and shows them.

        Raises:
          Diverged: the loss is no longer finite.
        """
        if not self._pending:
            return
        pending, self._pending = jax.device_get(self._pending), []
        now = time.perf_counter()
        speed = self._timed * self._tokens_per_step / (now - self._clock)
        self._clock, self._timed = now, 0
        lines = [{"step": step, **_plain(metrics)} for step, metrics in pending]
        if speed:
            lines[-1]["tokens_per_second"] = round(speed, 1)
        self._write(lines)
        for line in lines:
            if not math.isfinite(line["loss"]):
                raise Diverged(
                    f"step {line['step']}: the loss is {line['loss']}, the run has diverged; its "
                    "last checkpoint is from before; start again with a lower --lr"
                )
        self._show(lines[-1], speed)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what runs inside out of the clock."""
        self.flush()
        yield
        self._clock = time.perf_counter()

    def execution(self, step: int, recipe: str, execution: Execution) -> None:
        """Takes how the products run from step `step` on; writes it unless it is written already.

        A resumed run says it again only if it is not as it was, as on another machine.
        """
        facts = {"recipe": recipe, **execution._asdict()}
        said = [line for line in read_metrics(self._file) if "recipe" in line]
        if not said or {k: v for k, v in said[-1].items() if k != "step"} != facts:
            self._write([{"step": step, **facts}])

    def heldout(self, step: int, losses: Heldout, *, unigram: float) -> None:
        """Takes the held-out losses after `step` steps; `unigram` is the entropy to beat."""
        self._write(
            [
                {
                    "step": step,
                    "heldout": losses.recipe,
                    "heldout_full": losses.full,
                    "unigram": unigram,
                }
            ]
        )
        self.note(
            f"step {step}: held-out loss {losses.recipe:.4f}, with nothing quantised "
            f"{losses.full:.4f}; unigram entropy {unigram:.4f}"
        )

    def watched(self, step: int, seen: Mapping[str, Any]) -> None:
        """Takes what was seen of the run after `step` steps, as plain JSON values."""
        self._write([{"step": step, **seen}])

    def note(self, text: str) -> None:
        """Prints `text`, above the progress bar where there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show(self, line: dict[str, Any], speed: float) -> None:
        self._progress.update(
            self._task,
            description=line["phase"],
            completed=line["step"] + 1,
            loss=line["loss"],
            speed=speed,
        )
        if self._console.is_terminal:
            return
        rate = ""
        if speed:
            left = (self._total - line["step"] - 1) * self._tokens_per_step / speed
            rate = f"  {speed:,.0f} tokens/s  {left:,.0f} s left"
        self.note(
            f"{line['phase']} {line['step'] + 1}/{self._total}  loss {line['loss']:.4f}  "
            f"lr {line['lr']:.2e}  grad norm {line['grad_norm']:.2f}{rate}"
        )

    def _write(self, lines: list[dict[str, Any]]) -> None:
        with self._file.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl; a last line cut short is left out.

    Raises:
      UserError: the file is damaged.
    """
    if not file.exists():
        return []
    metrics = []
    for number, text in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):
            break
        try:
            line = json.loads(text)
            if type(line["step"]) is not int:
                raise TypeError(f"step is {line['step']!r}")
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{file}, line {number}: not a line of metrics ({error!r}); remove the line: "
                "a resumed run only adds to the file"
            ) from error
        metrics.append(line)
    return metrics


def _drop_after(file: Path, start: int, *, total: int) -> None:
    """Takes out what came after the checkpoint that a run resumes from, and the last evaluation."""
    if not file.exists():
        return
    kept = [
        line
        for line in read_metrics(file)
        if line["step"] < start
        or (
            line["step"] == start
            and "loss" not in line
            and (start < total or "heldout" not in line)
        )
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, str) else float(v) for k, v in metrics.items()}
