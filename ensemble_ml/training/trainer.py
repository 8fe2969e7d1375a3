"""Train a model: the loop over steps, validations and checkpoints, from a configuration to a run folder.

    runs/NAME/config.yaml, log.jsonl, tensorboard/, checkpoints/{step_..., last, best}

Several trainers of one job write runs/NAME/trainer_00/log.jsonl, .../checkpoints and so on, and the links in
runs/NAME/checkpoints lead to the best of them.

The folder appears when the data, the climate and the model have been checked, and is removed if the run ends before its
first checkpoint, at step 0. So a mistake in the settings leaves nothing behind.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from ensemble_ml.config import MomentumKept, Nonfinite, TrainConfig
from ensemble_ml.distributed import Session, start
from ensemble_ml.distributed.choice import own_state
from ensemble_ml.distributed.communicator import Communicator, sharing_cores
from ensemble_ml.distributed.mesh import dissolve
from ensemble_ml.distributed.quorum import QuorumVote
from ensemble_ml.distributed.sharding import local, split_groups
from ensemble_ml.errors import Stopped, UserError
from ensemble_ml.loading import Batch
from ensemble_ml.loading.run_loader import RunLoader
from ensemble_ml.models.speed import Running
from ensemble_ml.optim import build
from ensemble_ml.pulse import Pulse
from ensemble_ml.signals import StopRequest
from ensemble_ml.store import open_store
from ensemble_ml.training import agreement, setup, tournament
from ensemble_ml.training.assemble import Run, assemble, told_of_memory
from ensemble_ml.training.checkpoint import Checkpoint
from ensemble_ml.training.exchanges import VoteLog, first_line, read_votes, run_exchange
from ensemble_ml.training.feed import beside, open_loader
from ensemble_ml.training.judge import Judge
from ensemble_ml.training.keeper import Keeper, Snapshot
from ensemble_ml.training.mllog import MUTE, Mute, RunLog, run_log
from ensemble_ml.training.progress import SHARE_OF_FITS, Progress
from ensemble_ml.training.state import State
from ensemble_ml.training.stepper import OTHERWISE, NotFinite, Stepper, only_losses
from ensemble_ml.training.tracking import Silent, Tracker
from ensemble_ml.training.validation import NotFiniteForecast, Validation
from ensemble_ml.training.widths import filled

log = logging.getLogger(__name__)

_TIMED_STEPS = 3
_LEAST_LEFT = 0.15  # of `max_minutes`: if less is left after the fits, there is no time to time a step ...
_ENOUGH = 60.0  # ... unless so many seconds are left
_HEAR = 1.0  # seconds between two questions whether another trainer has stopped
_MARGIN = 0.95  # fraction of the time that is planned; checkpoints and a busy machine take the rest


def train(config: TrainConfig, begin: Checkpoint | None = None) -> Path:
    """Train a model. The docstring of this module lists the files of a run.

    Args:
        config: the settings of `ensemble-ml train`.
        begin: the state that a new run begins with (`training.compact`); None makes the fits for it.

    Returns:
        The run folder.

    Raises:
        UserError: the settings or the data are wrong; another process trains in the run folder; memory does not
            suffice; or a loss, gradient or forecast is not finite. After a loss or gradient that is not finite,
            `checkpoints/last` holds the state before that step, or an older one if weights are not finite in it.
        Stopped: a signal arrived; `checkpoints/last` holds the state after the current step. SIGUSR1 and SIGUSR2 raise
            it before the first step, too, where there may be no checkpoint yet.
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP arrived before the first step, or a second SIGINT or SIGTERM; or
            SIGUSR1 or SIGUSR2 arrived before the first step of a run without a checkpoint, after three restarts.
    """
    with start(config.parallel) as session, setup.claimed_run(config, session):
        session.agree(agreement.common_settings(config))
        for line in config.without_effect() if session.first else ():
            log.warning("%s", line)
        return _train(config, session, begin)


def _train(config: TrainConfig, session: Session, begin: Checkpoint | None) -> Path:
    """Open the run and its data, fit the climate or load the checkpoint, and run the steps on this rank."""
    began = time.perf_counter()
    whole = Path(config.output) / config.run
    there = whole.exists()
    folder, checkpoint = setup.open_on_all(config, session)
    with StopRequest(kept=checkpoint is not None, first=session.first) as stop, ExitStack() as stack:
        # The checkpoint holds the number of threads of rank 0.
        was = checkpoint.meta["threads"] if checkpoint and session.first else None
        threads = setup.use_threads(config, was, sharing_cores(session.mesh.world, session.device))
        mllog = run_log(config, session, resumed=checkpoint is not None)
        mllog.reads_data()
        source = open_store(config.data.store)
        # The path of the store may differ between hosts, so its contents are compared.
        session.agree({"contents of data.store": source.fingerprint()})
        known = checkpoint or begin
        spec = known.spec if known else setup.build_spec(config, source)
        setup.refuse_unreachable(config, spec)
        config = setup.with_depth(config, spec)
        if config.parallel.planned:
            # This import takes a second, and most runs do not need it.
            from ensemble_ml.training.plan import shared_out

            config = shared_out(config, spec, session, checkpoint.meta["config"] if checkpoint else None)
        if "auto" in (config.parallel.shard, config.model.recompute):
            from ensemble_ml.training.plan import settled

            config, spec = settled(config, spec, session)
        spec = replace(spec, config=replace(spec.config, recompute=config.model.recompute))
        known = replace(known, spec=spec) if known else None
        reader, left = setup.open_reader(config, source, spec), 60 * config.max_minutes - (time.perf_counter() - began)
        progress = Progress(SHARE_OF_FITS * left if config.max_minutes else None)
        if session.first:
            stack.enter_context(Pulse(progress.text))
        run = assemble(config, reader, known, threads, session, progress)
        at_work = Trainer(run, folder, mllog)
        if checkpoint is None and config.max_minutes and at_work.state.steps:
            progress.doing("validation and steps are timed, for max_minutes")
            at_work.plan_steps(60 * config.max_minutes - (time.perf_counter() - began))
        elif checkpoint and session.first and config.max_minutes not in (0, checkpoint.meta["config"]["max_minutes"]):
            text = "max_minutes=%g: the steps were settled when the run began: %d, of which %d are done"
            log.warning(text, config.max_minutes, at_work.state.steps, at_work.state.step)
        state = at_work.state
        progress.doing(lambda: f"at work: {state.step} of {state.steps} steps are done")
        try:
            at_work.run(stop, resumed=checkpoint is not None)
        finally:
            # A run that ended before its first checkpoint leaves no folder. A folder with checkpoints stays, even if
            # the link `last` leads nowhere at present.
            if session.first and not at_work.kept and not (folder / "checkpoints" / "last").exists():
                setup.forget(whole, there=there)
    return whole


class Trainer:
    """The loop over the steps of a run, on one rank of its job. Only the first rank of each model logs.

    Args:
        run: the model, the data and the ranks, ready to train.
        folder: the run folder.
        mllog: the log of MLPerf, which is mute unless this rank writes one.
    """

    def __init__(self, run: Run, folder: Path, mllog: RunLog | Mute = MUTE):
        self.setup, self.folder, self.session = run, folder, run.session
        self.state, self._several = run.state, run.session.topology.trainer > 1
        self.stepper, self.judge, self.mllog = Stepper(run), Judge(run), mllog
        self._votes: VoteLog | None = None
        if isinstance(self.state.exchange, QuorumVote):
            self.state.exchange.milestone = self._milestone
        world, minutes = run.session.mesh.model, run.config.checkpoint_minutes
        self.keeper = Keeper(folder / "checkpoints", world, minutes, run.session.meet_model)
        self.kept = False  # whether a checkpoint of the run is on disk, from this process or an earlier one
        self._kept: int | None = None  # the step of checkpoints/last
        self._request = StopRequest()
        self._written = 0  # the step of the latest tournament that all trainers are known to have kept
        self._heard = 0.0  # when this trainer last asked whether another has stopped
        self._until = math.inf  # time by which the last step has to be done, on the clock of `time.perf_counter`
        self.loader: RunLoader | None = None  # until it is opened, each batch is read when it is needed

    @property
    def config(self) -> TrainConfig:
        """Return the settings, in which a tournament may change what varies between trainers."""
        return self.setup.config

    def run(self, stop: StopRequest, *, resumed: bool) -> None:
        """Train to the last step, or to the first step after a request to stop.

        Raises:
            Stopped: a stop was requested; the state is in `checkpoints/last`.
            UserError: a loss, gradient or forecast is not finite, or memory does not suffice.
        """
        done = resumed and self.state.step >= self.state.steps
        self.kept, self._request = resumed, stop
        with closing(self.keeper), self._tracker(resumed) as tracker, ExitStack() as stack:
            try:
                if not done and (votes := self._open_votes()) is not None:
                    self._votes = stack.enter_context(closing(votes))
                if not done:
                    self.loader = stack.enter_context(closing(open_loader(self.setup, self.folder, resumed=resumed)))
                    tracker.counters = self.loader.counters
                if resumed:
                    self._kept = self.state.step
                    tracker.say(f"resumed after step {self.state.step} of {self.state.steps}")
                else:
                    if self.session.first:
                        (self.run_folder / "config.yaml").write_text(agreement.as_yaml(self.setup.base))
                    self._keep(tracker, due=True)
                    self.keeper.finish()
                    self.kept = True
                    # No trainer takes a step before all can be resumed.
                    if self._several:
                        self.session.meet()
                        self._point()
                stop.arm()
                if resumed and self._several:
                    self._hold_again(tracker)
                self._loop(tracker, stop)
                self.keeper.finish()
                if self._several:
                    self._settle_best(tracker)
            # The other ranks hear of the error now. Closing the loader and the keeper may wait for them, or for
            # storage.
            except BaseException as error:
                self.session.report(error)
                raise
            if not self._several:
                self._say_end(tracker)
            # The process may train again, and the hub of a quorum would keep this model and its connections.
            self.state.exchange.close()

    def _milestone(self, step: int) -> bool:
        """Return whether all ranks have to meet after `step` steps, to validate or to write a checkpoint."""
        every = self.config.validate_every, self.config.checkpoint_every
        return step >= self.state.steps or any(step % steps == 0 for steps in every)

    def _open_votes(self) -> VoteLog | None:
        """Open the record of who is in each vote, and read one to be repeated, if votes need not wait for all ranks."""
        exchange = self.state.exchange
        if not isinstance(exchange, QuorumVote):
            return None
        first = first_line(self.config, self.setup.facts["data_fingerprint"], exchange)
        if self.config.optim.replay is not None:
            exchange.script = read_votes(Path(self.config.optim.replay), first, exchange.meets)
        if not self.session.first:
            return None
        exchange.record = votes = VoteLog(self.folder, first, self.state.step)
        return votes

    def _tracker(self, resumed: bool) -> Tracker | Silent:
        """Return the log of the run; on all ranks but the first, one that stays silent."""
        if not self.session.first_of_model:
            return Silent()
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted, state = self.config.tracking, self.state
        dates = len(self.setup.train_dates), len(self.setup.validation_dates)
        self.mllog.knows_data(self.session.topology.size, *dates, self.setup.steps_per_epoch)
        return Tracker(
            self.folder, steps=state.steps, start_step=state.step, resumed=resumed, every=wanted.log_every,
            tensorboard=wanted.tensorboard, unwritten=self.setup.facts.get("unwritten"), mllog=self.mllog,
            shown=self.session.first,
        )  # fmt: skip

    def plan_steps(self, seconds: float) -> None:
        """Reduce the number of steps to what fits into a time limit.

        The time of a validation and of a step is measured, without a change of the run itself. If steps take longer
        later, the run ends with the first step that leaves time for the last validation alone. If the fits have left
        almost no time, the run has one step, and nothing is measured.

        Args:
            seconds: the time that is left, including the last validation.
        """
        start, whole = time.perf_counter(), 60 * self.config.max_minutes
        if self.session.once(lambda: seconds < min(_LEAST_LEFT * whole, _ENOUGH)):
            log.warning("max_minutes=%g: the fits before the first step took nearly all of it", self.config.max_minutes)
            self._settle(1)
            return
        self.judge.scores(self.loader)
        # A validation that is the best so far measures these as well, so their time is part of a validation's.
        self.judge.measure_widths_by_size()
        per_validation = time.perf_counter() - start if len(self.setup.validation_dates) else 0.0
        per_step = self._seconds_a_step()
        # Time for two validations is set aside: one at step 0 and one after the last step.
        left = _MARGIN * seconds - (time.perf_counter() - start) - 2 * per_validation
        fitting = math.floor(left / (per_step + per_validation / self.config.validate_every))
        steps = self.session.once(lambda: max(1, min(self.config.steps, fitting)))
        if fitting < 1:
            log.warning("max_minutes=%g: the fits before the first step took all of it", self.config.max_minutes)
        self._until = start + seconds - per_validation
        log.info("max_minutes=%g: %.3g s a step, so %d steps", self.config.max_minutes, per_step, steps)
        self._settle(steps)

    def _settle(self, steps: int) -> None:
        """Set the number of steps of the run, with the schedule of the learning rate that belongs to it."""
        self.state.steps = steps
        self.state.schedule = build(self.config.optim, self.state.model.param_groups(), steps)[1]

    def _seconds_a_step(self) -> float:
        """Return the median seconds from one step to the next, measured by steps with a learning rate of zero.

        These leave all weights as they are, because sharded ones could not be copied and put back.
        """
        model, running = self.state.model, Running(self.state.model)
        made: list[Communicator] = []
        exchange = run_exchange(self.config, self.session, made)
        optimizer, _ = build(self.config.optim, split_groups(model.param_groups()), self.config.steps, exchange)
        state = State(model, optimizer, lambda _: 0.0, self.config.steps, self.state.spread_error, exchange=exchange)
        trial = Trainer(replace(self.setup, state=state), self.folder)
        # The first steps on a GPU load its kernels and record a pass, so they are not typical.
        warm = 1 if self.session.device.type == "cpu" else 4
        times, reads, batches = [], [], iter(self.setup.batches(0, warm + _TIMED_STEPS))
        start = time.perf_counter()
        for batch in batches:
            read = time.perf_counter()
            trial._step(self.judge.moved(batch))
            end = time.perf_counter()
            reads.append(read - start)
            times.append(end - read)
            start = end
        exchange.close()
        dissolve(made, self.session.mesh.world)
        optimizer.zero_grad(set_to_none=True)
        running.put_back()
        return beside(float(np.median(times[warm:])), float(np.median(reads[warm:])), self.config.loading)

    def _loop(self, tracker: Tracker | Silent, stop: StopRequest) -> None:
        """Run step after step, with the validations and checkpoints that fall due between them."""
        state = self.state
        state.model.train()
        self.mllog.trains(state.step)
        batches = self.loader.train() if self.loader is not None else iter(())
        while state.step < state.steps:
            start = time.perf_counter()
            with told_of_memory(self.config, self.session):  # batches wait on the GPU, whose memory may not suffice
                batch = self.judge.moved(next(batches))
            waited = time.perf_counter() - start
            sent, before = self.stepper.bytes_sent, state.step
            try:
                losses = self._step(batch, stop)
            except NotFinite as error:
                raise self._given_up(tracker, error.where) from error
            for step, (values, skipped) in self.stepper.missed.items():
                tracker.step(
                    step, samples=int(values["samples"]), waited=0.0, lr=state.schedule(step - 1),
                    loss=only_losses(values), skipped=skipped,
                )  # fmt: skip
            # The loader has batches of the steps that this rank has missed as well.
            for _ in range(state.step - before - 1):
                next(batches)
            meets = state.exchange.meets(state.step)
            # A checkpoint gets its name only when all ranks have written their parts.
            if meets:
                self.keeper.follow(losses["written"] == self.session.mesh.model.size)
            lr = state.optimizer.param_groups[0]["lr"]
            tracker.step(
                state.step, samples=int(losses["samples"]), waited=waited, lr=lr, loss=only_losses(losses),
                sent=self.stepper.bytes_sent - sent, exchanged=self.stepper.waited, skipped=self.stepper.skipped > 0,
            )  # fmt: skip
            # Whatever all ranks do together has to wait until they meet.
            if not meets:
                continue
            stopped, due, late = losses["stop"], losses["due"], losses.get("late", 0.0)
            if late and state.step < state.steps:
                text = "max_minutes=%g: steps took longer than was planned, so step %d of %d is the last"
                self._end_here(tracker, text % (self.config.max_minutes, state.step, state.steps))
            if self.stepper.noted:
                tracker.note(state.step, self.stepper.noted)
            self._keep(tracker, due=bool(due))
            # A single rank need not wait for the flag that steps exchange: it reads its own request.
            if self.session.topology.size == 1:
                stopped = stop.vote
            if stopped and state.step < state.steps:
                self._stop(tracker, stopped)

    def _stop(self, tracker: Tracker | Silent, votes: float, *, before: bool = False) -> NoReturn:
        """Keep the state and end the run after the current step by `Stopped`. All ranks of the model call this.

        `votes` is the sum of the votes on stopping, and `before` is true if the tournament after the step was not held.
        """
        state = self.state
        self.session.leave(votes)
        # Momenta that were not due to be averaged stay as they are on each rank, so that the resumed run equals one
        # that was not stopped.
        if self._kept != state.step or self.config.optim.momentum_kept is MomentumKept.mean:
            self._save(tracker, best=False, kept=MomentumKept.ranks, before=before)
        self.keeper.finish()
        who = self._request.requested or f"another {'trainer' if self._several else 'rank'}"
        tracker.say(f"{who}: stopped after step {state.step}; go on with resume=true")
        # Other trainers may still write, and need the store that the first rank serves.
        if self._several:
            self.session.meet()
        raise Stopped(requeue=StopRequest.requeue(votes), first=self.session.first)

    def _end_here(self, tracker: Tracker | Silent, why: str) -> None:
        """Make the current step the last one of the run, and log the reason. All ranks call this."""
        tracker.write_line()
        tracker.say(why)
        self.state.steps = self.state.step
        # The loader planned its validations for other steps. Without it, the last one is read directly.
        self.loader = None

    def _step(self, batch: Batch, stop: StopRequest | None = None) -> dict[str, float]:
        """Run one optimizer step.

        Also return flags that are summed over ranks: stop requested, checkpoint shard written, checkpoint due and, if
        the run has a time limit, limit reached by the clock of rank 0.
        """

        def says() -> dict[str, float]:
            written, due = float(self.keeper.done), float(self.keeper.due)
            own = {"stop": (stop.vote or self._left()) if stop else 0.0, "written": written, "due": due}
            if self._until == math.inf:
                return own
            return own | {"late": float(self.session.first and time.perf_counter() > self._until)}

        return self.stepper(batch, says)

    def _left(self) -> float:
        """Return the votes with which another trainer has stopped, or zero. Ask for them at most once a second."""
        if not self._several or not self.session.first_of_model or time.monotonic() - self._heard < _HEAR:
            return 0.0
        self._heard = time.monotonic()
        return self.session.left()

    def _given_up(self, tracker: Tracker | Silent, where: str) -> UserError:
        """Save the state before a step that is not finite, and return an error that says how to continue.

        All ranks call this.
        """
        bad = sum(float(not local(p).isfinite().all()) for p in self.state.model.parameters())
        total = torch.tensor(bad, dtype=torch.float64, device=self.session.device)
        self.session.mesh.model.all_reduce(total)
        # A checkpoint with weights that are not finite would only replace a useful one.
        if total:
            self.keeper.finish()
            return UserError(
                f"{where}; weights are not finite before it, so checkpoints/last is older: begin anew {OTHERWISE}"
            )
        # A checkpoint of this step stays as it is: after a resume on another number of ranks, the momenta in memory are
        # no longer those of the file. A new one keeps each rank's own momenta, because an average would not be the
        # state before the step.
        if self._kept != self.state.step:
            self._save(tracker, best=False, kept=MomentumKept.ranks)
        self.keeper.finish()
        skips = self.config.optim.nonfinite is Nonfinite.skip
        how = "" if skips else "go on without this step by resume=true optim.nonfinite=skip, or "
        return UserError(f"{where}; checkpoints/last is the state before: {how}begin anew {OTHERWISE}")

    def _keep(self, tracker: Tracker | Silent, *, due: bool) -> None:
        """Validate, and write a checkpoint, if the step or the clock asks for it."""
        step, last = self.state.step, self.state.step == self.state.steps
        better = self._validated(tracker) if last or step % self.config.validate_every == 0 else False
        if not last and self.state.stalled(self.config.patience, self.config.validate_every):
            text = f"patience={self.config.patience}: no validation was better than that of step"
            self._end_here(tracker, f"{text} {self.state.best_step}, so step {step} of {self.state.steps} is the last")
            last = True
        last = self._end_where_solved(tracker) or last
        competed = tournament.due(self.setup.base, step, self.state.steps)
        planned = better or last or competed or step % self.config.checkpoint_every == 0
        if planned or due:
            # Averaging momenta changes the steps that follow. A clock may not do this, or runs would not be
            # reproducible.
            self._save(tracker, best=better, kept=None if planned else MomentumKept.ranks)
            tracker.restart_clock()

    def _end_where_solved(self, tracker: Tracker | Silent) -> bool:
        """Make the current step the last one if it was validated and reached the score of `until`; return whether."""
        state, until = self.state, self.config.until
        reached = state.validated == state.step and state.scores.get("crps_ratio", math.inf) <= until
        if reached and state.step < state.steps:
            self._end_here(tracker, f"until={until:g}: reached, so step {state.step} of {state.steps} is the last")
        return reached

    def _validated(self, tracker: Tracker | Silent) -> bool:
        """Score the validation dates, hold the tournament that is due, and return whether the score is the best."""
        self.mllog.validates(self.state.step)
        try:
            found = self.judge.scores(self.loader)
        except NotFiniteForecast:
            if not self._several:
                raise
            found = Validation({"score": math.nan})  # it loses the next tournament, and the others go on
        state, scores = self.state, found.scores
        if not scores and self._several:
            raise UserError("data.validation: holds nothing to score, by which trainers compete; give other init times")
        if not scores:
            self.mllog.validated(state.step, scores)
            return False
        # A score that is not finite must not become the best: no later score would be below it.
        finite = all(map(math.isfinite, scores.values()))
        state.scores, state.widths = (scores, filled(found.widths, state.widths)) if finite else ({}, None)
        state.validated = state.step if finite else None
        return self._judged(tracker, scores)

    def _judged(self, tracker: Tracker | Silent, scores: dict[str, float]) -> bool:
        """Hold a tournament if one is due. Return whether the score after it is better than all before."""
        state = self.state
        due = tournament.due(self.setup.base, state.step, state.steps)
        lost = due and self._compete(tracker, scores["score"])
        better = bool(state.scores) and (state.best is None or state.scores["score"] < state.best["score"])
        if better:
            state.best = {"step": state.step, **state.scores}
        # Factors that were measured with a trainer's own weights do not hold for those that it has taken over.
        if better or lost:
            self.judge.measure_widths_by_size()
        tracker.validation(state.step, scores, best=better)
        tracker.restart_clock()
        return better

    def _compete(self, tracker: Tracker | Silent, score: float) -> bool:
        """Hold a tournament, or stop because another trainer has. All ranks of the job call this.

        Return whether this trainer lost, and has another one's weights now.
        """
        state, start = self.state, time.perf_counter()
        texts = self.session.hear_trainers(f"tournament/{state.step}", repr(score))
        if texts is None:
            self._stop(tracker, self.session.left(), before=True)
        heard = time.perf_counter()
        held = tournament.compete(self.setup, [float(text) for text in texts])
        seconds = {"waited": heard - start, "swapped": time.perf_counter() - heard}
        if not (state.rounds and state.rounds[-1]["step"] == state.step):
            state.rounds.append(held)
            tracker.tournament(held, tournament.in_words(held), seconds)
        own = self.session.topology.place.trainer
        return bool(held["from"][own] != own)

    def _hold_again(self, tracker: Tracker | Silent) -> None:
        """Hold the tournament that the job had not finished when it was killed or stopped."""
        needed, had = tournament.pending(self.setup)
        if needed and had:
            score = self.state.rounds[-1]["scores"][self.session.topology.place.trainer]
            self._compete(tracker, math.nan if score is None else score)
        elif needed:
            self._save(tracker, best=self._judged(tracker, self.state.scores or {"score": math.nan}))

    def _settle_best(self, tracker: Tracker | Silent) -> None:
        """Take the best trainer, or the mean of all if that is better. All ranks of the job call this at the end."""
        if not tournament.take_best(self.setup, self.judge, self.run_folder, tracker.say):
            self._stop(tracker, self.session.left())
        self.session.meet()

    @property
    def run_folder(self) -> Path:
        """Return the folder of the run, which holds those of its trainers if there are several."""
        return self.folder.parent if self._several else self.folder

    def _point(self) -> None:
        """Let the links of the run lead to the best trainer."""
        if self.session.first:
            tournament.point_to_best(self.run_folder)

    def _save(
        self, tracker: Tracker | Silent, *, best: bool, kept: MomentumKept | None = None, before: bool = False
    ) -> None:
        """Start to write a checkpoint of the current step. All ranks call this."""
        start = time.perf_counter()
        if self._votes is not None:
            self._votes.flush()
        # The previous checkpoint is completed first, so that no two lie in memory.
        self.keeper.finish()
        self._await_others()
        self.state.complete()
        own = own_state(self.state.exchange, kept or self.config.optim.momentum_kept)  # all ranks take part in this
        first = self.session.first_of_model
        state_dict, training, parts = self.state.tensors(keep=first)  # and in this
        meta = {**self.setup.facts, **self.state.meta(), "unwritten": tracker.unwritten} if first else {}
        self.keeper.begin(Snapshot(self.state.step, state_dict, training, meta, parts or own, best, before))
        self._kept = self.state.step
        tracker.checkpoint(self.state.step, time.perf_counter() - start)

    def _await_others(self) -> None:
        """Wait until all trainers have a checkpoint of the latest tournament, before this trainer's is replaced."""
        rounds = self.state.rounds
        step = rounds[-1]["step"] if rounds else 0
        if self._written < step < self.state.step:
            tournament.await_written(self.run_folder, self.session.topology.trainer, step)
            self._point()
            self._written = step

    def _say_end(self, tracker: Tracker | Silent) -> None:
        """Log where the model is, and why there is no best checkpoint if there is none."""
        best = self.state.best
        if best is None:
            some = len(self.setup.validation_dates)
            why = "validation dates have no truth or spread to be scored with" if some else "no validation date"
            why = "the best checkpoint is gone" if self.state.scores else why
            tracker.say(f"done: {why}, so {self.folder}/checkpoints/last is the model")
        else:
            where, score = f"{self.folder}/checkpoints/best", f"{best['score']:.4f}"
            start = "the model as it was cut" if "compacted" in self.setup.facts else "the fits to the training dates"
            if best["step"]:
                tracker.say(f"done: best at step {best['step']}, score {score}: {where}")
            elif not self.state.step:
                tracker.say(f"done: {start} without any step, score {score}: {where}")
            else:
                tracker.say(
                    f"done: no validation after a step was better than that of the start, score {score}, so the best"
                    f" model is the start, {start} without any step: {where}"
                )
