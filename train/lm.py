"""Trains a language model: `python -m train.lm --quant adahop`.

Reads from top to bottom: `main` catches what the user can put right, `train` is the run and
`make_step` the one step function, which calibrates or trains. Everything random is a function of
(seed, step), the order of the data and the rounding of gradients alike, so that a resumed run gives
the same bits, unless cuDNN computes attention: its gradients are sums in no fixed order.
"""

import contextlib
import dataclasses
import functools
import itertools
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from numpy.typing import NDArray

import adahop_jax as ah
from train import calibrate, data, report
from train.checkpoint import RunFolder, Snapshot, fingerprint
from train.compare import recipe_name
from train.configs import RunConfig, UserError
from train.evaluate import Heldout, make_evaluate
from train.log import RunLog
from train.model import Llama, next_token_loss
from train.optim import accumulate, make_optimizer, make_schedule
from train.options import Options, contradictions, resolve
from train.recipes import RECIPES
from train.recipes.execution import Execution, execution

PyTree = Any


class TrainState(flax.struct.PyTreeNode):
    """What a step changes: parameters (float32), optimizer state and the steps done."""

    step: jax.Array
    params: PyTree
    opt_state: PyTree


StepFn = Callable[[TrainState, NDArray[np.int32]], tuple[TrainState, PyTree, PyTree]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run ended with. `heldout` is None for a run that was interrupted."""

    job: "Job"
    step: int
    plan: ah.Plan | None
    heldout: Heldout | None

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.job.folder.path


Watch = Mapping[int, Callable[["Job", PyTree, int], Mapping[str, Any]]]
"""Steps done -> what then looks at (run, parameters, steps done) and says what is logged of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code: 0, 2 for bad input, 130 if interrupted."""
    options = tyro.cli(Options, args=argv, prog="python -m train.lm")
    try:
        result = train(options)
    except (UserError, data.DataError, ah.PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if result.heldout is None:
        print(f"interrupted; step {result.step} is saved. To continue:")
        print(f"  {resume_command(options, result.run_dir)}")
        return 130
    return 0


def train(
    options: Options, *, stop: Callable[[], bool] = lambda: False, watch: Watch | None = None
) -> Result:
    """Trains as `options` say, from the start or from a run folder's last checkpoint.

    Args:
      options: of the command line.
      stop: asked after every step; True saves and interrupts the run.
      watch: called after those steps, outside the clock, its answers logged as lines of metrics.

    Raises:
      UserError, data.DataError, ah.PlanError: bad input; nothing that was there is changed.
    """
    job = prepare(options)
    config, watch = job.config, watch or {}
    with catch_interrupts() as interrupted:
        start = resume(job) if options.resume else begin(job)
        state, votes, done = start.state, start.votes, start.step
        describe(job, state)
        phase = enter_phase(job, start.plan)
        name = recipe_name(config)

        def save() -> None:
            now = Snapshot(step=done, state=state, plan=phase.plan, votes=votes)
            job.folder.save(now, data=fingerprint(job.corpus))

        with RunLog(job.folder.metrics_file, config, start=done) as log:
            log.execution(done, name, phase.execution)
            while done < config.steps and not (interrupted() or stop()):
                batch = next_batch(job.corpus, config, step=done)
                state, metrics, labels = phase.step(state, batch)
                log.step(done, phase=phase.name, metrics=metrics)
                done += 1
                if phase.name == "calibrate":
                    votes.append(jax.device_get(labels))
                    if done == config.calibration_steps:
                        with log.paused():
                            phase = enter_phase(job, calibrate.decide(votes, job.layers, config))
                            votes = []
                            log.execution(done, name, phase.execution)
                if done % config.eval_every == 0 and done < config.steps:
                    with log.paused():
                        log.heldout(done, phase.evaluate(state.params), unigram=job.unigram)
                if done in watch and done < config.steps:
                    with log.paused():
                        log.watched(done, watch[done](job, state.params, done))
                if done % config.checkpoint_every == 0:
                    with log.paused():
                        save()
            with log.paused():
                save()
            if done < config.steps:
                return Result(job=job, step=done, plan=phase.plan, heldout=None)
            if done in watch:  # what takes long has the run saved behind it
                log.watched(done, watch[done](job, state.params, done))
            heldout = phase.evaluate(state.params)
            log.heldout(done, heldout, unigram=job.unigram)
    report.draw_loss(job.folder.metrics_file, job.folder.path / "loss.png", unigram=job.unigram)
    print(f"the run is in {job.folder.path}")
    return Result(job=job, step=done, plan=phase.plan, heldout=heldout)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run made ready: everything read and checked, nothing written.

    Attributes:
      config: resolved.
      folder: of the run.
      corpus: tokens to train on and held out.
      batches: the held-out batches of every evaluation.
      unigram: entropy of the held-out tokens, nats per token; a model must get below.
      model: the decoder, with nothing quantised.
      layers: its planned layers.
      plan: the plan of a new run; None if the run calibrates its own, or is emulated.
    """

    config: RunConfig
    folder: RunFolder
    corpus: data.Corpus
    batches: Sequence[NDArray[np.int32]]
    unigram: float
    model: Llama
    layers: Sequence[ah.LayerInfo]
    plan: ah.Plan | None


class Phase(NamedTuple):
    """What the steps of a run do: calibrate, or train.

    Attributes:
      name: "calibrate" or "train".
      plan: in force; None while calibrating, and where the recipe is emulated and has none.
      execution: where products run, and their share in `dtype`.
      step, evaluate: functions of the phase.
    """

    name: str
    plan: ah.Plan | None
    execution: Execution
    step: StepFn
    evaluate: Callable[[PyTree], Heldout]


def prepare(options: Options) -> Job:
    """Reads and checks all that a run needs."""
    config, folder = open_run(options)
    corpus = data.load_tokens(
        config.data,
        tokenizer=config.tokenizer,
        vocab_size=config.vocab_size,
        cache_dir=Path(options.cache_dir).expanduser(),
    )
    next_batch(corpus, config, step=0)  # too little text shows before the folder is made
    model = Llama(config.model, corpus.vocab_size)
    if options.plan is None:
        plan = calibrate.uniform_plan(config)
    else:
        plan, config = calibrate.load_plan(Path(options.plan), model, config, level=options.level)
    return Job(
        config=config,
        folder=folder,
        corpus=corpus,
        batches=data.heldout_batches(
            corpus.heldout,
            batch=config.batch // config.accumulate,
            seq_len=config.seq_len,
            limit=config.heldout_batches,
        ),
        unigram=data.unigram_entropy(corpus),
        model=model,
        layers=calibrate.find_layers(model, config),
        plan=plan,
    )


def begin(job: Job) -> Snapshot:
    """Makes the folder of a new run and returns its start."""
    state = init_state(job.model, job.config)
    job.folder.create(job.config)
    return Snapshot(step=0, state=state, plan=job.plan, votes=[])


def resume(job: Job) -> Snapshot:
    """Returns the last checkpoint of a run."""
    blank = jax.eval_shape(lambda: init_state(job.model, job.config))
    return job.folder.restore(blank, data=fingerprint(job.corpus))


def enter_phase(job: Job, plan: ah.Plan | None) -> Phase:
    """Returns the phase that trains by `plan`, or that calibrates, and says what it does.

    Args:
      job: what runs.
      plan: in force; None before calibration, and for an emulated recipe.
    """
    recipe = RECIPES[job.config.quant]
    if plan is None and recipe.is_calibrated:
        print(f"calibrating: {job.config.calibration_steps} steps with nothing quantised")
        step_fn = make_step(job.model, job.config, calibrating=True)
        in_full = execution(job.model.plan, job.layers)
        return Phase("calibrate", None, in_full, step_fn, make_evaluate(job.model, job.batches))
    print(f"{recipe_name(job.config)}: {recipe.summary}")
    runs = execution(plan, job.layers)
    if plan is not None:
        print(report.plan_tables(plan, job.layers), end="\n\n")
        plan.save(job.folder.plan_file)
        report.draw_plan(plan, job.layers, job.folder.path / "plan.png")
    print(runs)
    model = recipe.applied(job.model, plan)
    step_fn = make_step(model, job.config, calibrating=False)
    return Phase("train", plan, runs, step_fn, make_evaluate(model, job.batches))


def make_step(model: Llama, config: RunConfig, *, calibrating: bool) -> StepFn:
    """Returns the step: (state, tokens) -> (state, metrics, labels).

    `tokens` are int32 of shape (batch, T + 1). Metrics are loss, gradient norm and learning rate.
    Labels are the patterns that a calibrating step saw, {} otherwise. The state passed in is used
    up. Compiles once.
    """
    loss_fn = next_token_loss(model)
    optimizer = make_optimizer(config.optim, steps=config.steps)
    schedule = make_schedule(config.optim, steps=config.steps)
    observe = ah.observe(loss_fn)

    def gradients(params: PyTree, micro: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        if calibrating:
            return observe({"params": params}, micro)
        loss, grads = jax.value_and_grad(lambda params: loss_fn({"params": params}, micro))(params)
        return loss, grads, {}

    def step(
        state: TrainState, tokens: jax.Array, rounding: jax.Array
    ) -> tuple[TrainState, PyTree, PyTree]:
        key = jax.random.fold_in(rounding, state.step)
        micros = (
            tokens.reshape(config.accumulate, -1, tokens.shape[-1]),
            jax.random.split(key, config.accumulate),
        )
        loss, grads, statistics = accumulate(gradients, ah.merge_statistics, state.params, micros)
        labels = ah.label({"params": state.params}, statistics) if calibrating else {}
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norm = optax.tree.norm(grads)
        metrics = {"loss": loss, "grad_norm": norm, "lr": schedule(state.step)}
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics, labels

    # The key is an argument, so that runs which differ in their seed alone compile to one program.
    return functools.partial(jax.jit(step, donate_argnums=0), rounding=_keys(config).rounding)


def init_state(model: Llama, config: RunConfig) -> TrainState:
    """Returns the state before the first step; the same seed gives the same parameters."""

    def init(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        opt_state = make_optimizer(config.optim, steps=config.steps).init(params)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state)

    return jax.jit(init)(_keys(config).init)


def next_batch(corpus: data.Corpus, config: RunConfig, *, step: int) -> NDArray[np.int32]:
    """Returns the tokens of `step`, counted from 0: int32 of shape (batch, seq_len + 1)."""
    return data.batch(
        corpus.train, seed=config.seed, step=step, batch=config.batch, seq_len=config.seq_len
    )


def open_run(options: Options) -> tuple[RunConfig, RunFolder]:
    """Returns the run's configuration and folder; reads at most `config.json`, writes nothing."""
    if not options.resume:
        config = resolve(options, platform=jax.default_backend())
        if options.run_dir is None:
            return config, unused_folder(f"{config.preset}-{config.quant}-seed{config.seed}")
        folder = RunFolder(Path(options.run_dir))
        folder.refuse_used(config)
        return config, folder
    if options.run_dir is None:
        raise UserError("run: --resume needs the --run-dir of the run to continue")
    if options.plan is not None:
        raise UserError("run: a resumed run keeps its own plan; leave out --plan")
    folder = RunFolder(Path(options.run_dir))
    config = folder.read_config()
    if wrong := contradictions(options, config):
        raise UserError(
            f"run folder {folder.path} holds another run than asked for: {'; '.join(wrong)}; "
            "leave these out to continue it, or start a new run in another --run-dir"
        )
    return config, folder


def unused_folder(name: str) -> RunFolder:
    """Returns the first of runs/name, runs/name-2, ... that is not there."""
    paths = (Path("runs", name if i == 1 else f"{name}-{i}") for i in itertools.count(1))
    return RunFolder(next(path for path in paths if not path.exists()))


def describe(job: Job, state: TrainState) -> None:
    """Prints what is about to run."""
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(job.config.to_json(), end="")
    print(f"data: {job.corpus.description}")
    print(f"held-out unigram entropy: {job.unigram:.4f} nats per token")
    print(f"model: {count:,} parameters, on {jax.devices()[0].device_kind}")


def resume_command(options: Options, run_dir: Path) -> str:
    """Returns the command line that continues a run."""
    command = ["python", "-m", "train.lm", "--resume", "--run-dir", str(run_dir)]
    if options.cache_dir != Options().cache_dir:
        command += ["--cache-dir", options.cache_dir]
    return shlex.join(command)


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into an answer of True; a second Ctrl-C stops at once."""
    caught = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal caught
        if caught and signum == signal.SIGINT:
            raise KeyboardInterrupt
        caught = True
        print("stopping after this step; Ctrl-C again stops without saving", file=sys.stderr)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Keys(NamedTuple):
    init: jax.Array
    rounding: jax.Array


def _keys(config: RunConfig) -> _Keys:
    return _Keys(*jax.random.split(jax.random.key(config.seed)))


if __name__ == "__main__":
    sys.exit(main())
