"""The run folder and its checkpoints: enough to continue a run to the same bits.

    config.json    the resolved configuration
    plan.json      the plan in force, once there is one; emulated recipes have none
    metrics.jsonl  a line per step and per evaluation
    checkpoints/   parameters, optimizer state and step (Orbax), the votes amid calibration, and
                   a digest of every file of theirs
    loss.png, plan.png

The order of the data is a function of (seed, step), so the step is the data's whole state. With it
a checkpoint keeps digests of the tokens, the configuration and the plan: a run whose text or files
were changed meanwhile does not continue as if it were the same.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import adahop_jax as ah
from train.calibrate import Labels, votes_from_json, votes_to_json
from train.configs import RunConfig, UserError
from train.data import Corpus

PyTree = Any

_KEPT = 2
_FINGERPRINT_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run after `step` steps.

    Amid calibration `plan` is None and `votes` hold the labels; an emulated recipe has neither.
    """

    step: int
    state: PyTree
    plan: ah.Plan | None
    votes: list[Labels]


class RunFolder:
    """One run's folder. Nothing is created or changed before `create` or `save`."""

    def __init__(self, path: Path):
        self.path = path
        self._manager: ocp.CheckpointManager | None = None

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def plan_file(self) -> Path:
        """The plan in force."""
        return self.path / "plan.json"

    @property
    def metrics_file(self) -> Path:
        """A line per step and per evaluation."""
        return self.path / "metrics.jsonl"

    def refuse_used(self, config: RunConfig) -> None:
        """Raises a UserError unless a run of `config` can start here.

        It can in a new or empty folder, and where the same run ended before its first checkpoint.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"run folder {self.path} is a file; name a folder with --run-dir")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if self._steps():
            raise UserError(
                f"run folder {self.path} is not empty, and a new run would overwrite it; add "
                "--resume to continue that run, or name another folder with --run-dir"
            )
        if not self.config_file.exists() or self.read_config() != config:
            raise UserError(
                f"run folder {self.path} is not empty and holds no checkpoint to continue from; "
                "remove it, or name another folder with --run-dir"
            )

    def create(self, config: RunConfig) -> None:
        """Makes the folder of a new run and writes its configuration."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.config_file.write_text(config.to_json())
        except OSError as error:
            raise UserError(
                f"run folder {self.path} can't be written ({error.strerror}); name another "
                "with --run-dir"
            ) from error

    def read_config(self) -> RunConfig:
        """Returns the configuration of the run that is here."""
        try:
            text = self.config_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"run folder {self.path} holds no run to resume ({self.config_file.name} can't be "
                "read); check --run-dir, or leave out --resume to start one"
            ) from error
        return RunConfig.from_json(text, where=str(self.config_file))

    def save(self, snapshot: Snapshot, *, data: str) -> None:
        """Saves a snapshot, unless it is saved already; its plan must be in `plan_file`.

        Args:
          snapshot: what to save.
          data: fingerprint of the corpus.

        Raises:
          UserError: the disk is full or the folder can't be written.
        """
        manager = self._open()
        if manager.latest_step() == snapshot.step:
            return
        run = {
            "data": data,
            "config": _digest(self.config_file),
            "plan": None if snapshot.plan is None else _digest(self.plan_file),
            "votes": votes_to_json(snapshot.votes),
        }
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(snapshot.state), run=ocp.args.JsonSave(run)
        )
        try:
            manager.save(snapshot.step, args=arguments)
            self._digests_file(snapshot.step).write_text(json.dumps(self._digests(snapshot.step)))
        except OSError as error:
            raise UserError(
                f"run folder {self.path}: step {snapshot.step} can't be saved ({error}); make "
                "room, then continue from the checkpoint before with --resume"
            ) from error

    def restore(self, state: PyTree, *, data: str) -> Snapshot:
        """Restores the last checkpoint.

        Args:
          state: a state of the same shapes and dtypes, which only describes what to restore.
          data: fingerprint of the corpus that the run is about to continue on.

        Raises:
          UserError: no checkpoint, a damaged one, or one of other text, configuration or plan.
        """
        manager = self._open()
        step = manager.latest_step()
        if step is None:
            raise UserError(
                f"run folder {self.path} holds no checkpoint, the run ended before its first; "
                "start it again without --resume"
            )
        where = f"checkpoint {self._step_folder(step)}"
        try:
            self._check_files(step)
            run = manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
            self._check(self.config_file, run["config"])
            if run["data"] != data:
                raise UserError(
                    f"{where}: the run was on other text (fingerprint {run['data']}, now {data}); "
                    "restore the text that the run started on"
                )
            plan = None
            if run["plan"] is not None:
                plan = ah.Plan.load(self.plan_file)
                self._check(self.plan_file, run["plan"])
            arguments = ocp.args.Composite(state=ocp.args.StandardRestore(state))
            restored = manager.restore(step, args=arguments).state
        except ah.PlanError:
            raise
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(
                f"{where} can't be restored ({error}); it is damaged: remove it to continue from "
                "the one before, or start again in another --run-dir"
            ) from error
        return Snapshot(step=step, state=restored, plan=plan, votes=votes_from_json(run["votes"]))

    def _step_folder(self, step: int) -> Path:
        return self.path / "checkpoints" / str(step)

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to continue from."""
        return bool(self._steps())

    def _steps(self) -> list[int]:
        """Steps of the checkpoints that are here."""
        found = (self.path / "checkpoints").glob("*")
        return [int(path.name) for path in found if path.name.isdigit()]

    def _digests_file(self, step: int) -> Path:
        return self._step_folder(step) / "digests.json"

    def _digests(self, step: int) -> dict[str, str]:
        """Digest of every file of a checkpoint, but the one that keeps them."""
        folder = self._step_folder(step)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {
            str(file.relative_to(folder)): _digest(file)
            for file in files
            if file != self._digests_file(step)
        }

    def _check_files(self, step: int) -> None:
        """Raises a ValueError unless the checkpoint's files are as they were written.

        Orbax does not notice changed bytes, and says nothing that could be told from other faults
        where a file is cut short.
        """
        kept = json.loads(self._digests_file(step).read_text())
        here = self._digests(step)
        wrong = sorted(name for name in kept if kept[name] != here.get(name))
        if wrong:
            raise ValueError(f"{wrong[0]} is missing or was changed")

    def _check(self, file: Path, digest: str) -> None:
        if _digest(file) != digest:
            raise UserError(
                f"{file} was changed since the run's last checkpoint; put the run's own back, or "
                "start a new run in another --run-dir"
            )

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT, enable_async_checkpointing=False
            )
            directory = (self.path / "checkpoints").resolve()
            self._manager = ocp.CheckpointManager(directory, options=options)
        return self._manager


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(corpus: Corpus) -> str:
    """Returns a short digest of the corpus: its sizes and all of its tokens."""
    digest = hashlib.sha256()
    for tokens in (corpus.train, corpus.heldout):
        digest.update(str(len(tokens)).encode())
        for start in range(0, len(tokens), _FINGERPRINT_TOKENS):
            digest.update(tokens[start : start + _FINGERPRINT_TOKENS].astype("<u4").tobytes())
    return digest.hexdigest()[:16]
