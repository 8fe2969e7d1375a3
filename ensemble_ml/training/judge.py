"""Scores of the present model of a run on its validation dates, and calibration factors measured on these dates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ensemble_ml.distributed.sharding import idle_pass
from ensemble_ml.loading import Batch, batches_by_size, fixed_batches
from ensemble_ml.loading.run_loader import RunLoader
from ensemble_ml.models import EnsembleModel
from ensemble_ml.training.assemble import Run, told_of_memory
from ensemble_ml.training.feed import validation_size
from ensemble_ml.training.validation import Scoring, Validation, validate
from ensemble_ml.training.widths import widths_by_size


class Judge:
    """The validation of one run. All ranks of a model must call the same methods together."""

    def __init__(self, run: Run):
        self.setup, self.state, self.session, self.area = run, run.state, run.session, run.loss.area
        self._sized: int | None = None  # the step at which factors were measured for other numbers of members

    def scores(self, loader: RunLoader | None) -> Validation:
        """Return the scores of the validation dates. Without a loader, each batch is read when it is needed.

        Raises:
            NotFiniteForecast: a forecast is not finite.
            UserError: there is not enough memory.
        """
        with self.state.predicting() as model, told_of_memory(self.setup.config, self.session):
            size = self.setup.reader.full_size
            return validate(model, self._batches(loader), full_size=size, area=self.area, mesh=self.session.mesh)

    def _scores_by_size(self, batches: Iterable[tuple[int, Batch]], sizes: Sequence[int]) -> dict[int, Validation]:
        """Return the scores of batches, separately for each number of members."""
        with self.state.predicting() as model, told_of_memory(self.setup.config, self.session):
            full, mesh = self.setup.reader.full_size, self.session.mesh
            scoring = {size: Scoring(model, full_size=full, area=self.area, mesh=mesh) for size in sizes}
            for size, batch in batches:
                scoring[size].add(self.moved(batch))
            return {size: one.found() for size, one in scoring.items()}

    def measure_widths_by_size(self, *, anew: bool = False) -> None:
        """Measure the calibration factors for other numbers of members. If none can be measured, the old ones stay.

        If this was done at this step, it is done again only if `anew`, because weights may have changed since.

        Raises:
            NotFiniteForecast: a forecast is not finite.
            UserError: there is not enough memory.
        """
        if self._sized == self.state.step and not anew:
            return
        run = self.setup
        widths = widths_by_size(
            run.config.data, run.reader, run.validation_dates, self._batches_by_size, self._scores_by_size
        )
        self.state.by_size, self._sized = widths or self.state.by_size, self.state.step

    def _batches(self, loader: RunLoader | None) -> Iterator[Batch]:
        """Yield this rank's batches of the validation dates, from the loader if there is one."""
        run = self.setup
        if loader is not None:
            yield from map(self.moved, loader.validation(self.state.step))
        else:
            members = np.arange(min(run.config.data.validation_members, run.reader.most))
            size = validation_size(run.config, run.share[1])
            batches = fixed_batches(run.reader, run.validation_dates, members, batch_size=size, share=run.share)
            yield from map(self.moved, batches)
        self._help_others(len(run.validation_dates))

    def _batches_by_size(self, dates: np.ndarray, sizes: Sequence[int]) -> Iterator[tuple[int, Batch]]:
        """Yield this rank's batches of some dates for each of several numbers of members, as (members, batch)."""
        run = self.setup
        size = validation_size(run.config, run.share[1])
        yield from batches_by_size(run.reader, dates, sizes, batch_size=size, share=run.share)
        for _ in sizes:
            self._help_others(len(dates))

    def _help_others(self, dates: int) -> None:
        """Take part in gathering sharded weights while other ranks score one more batch of `dates` than this one."""
        which, parts = self.setup.share
        batches = -(-dates // validation_size(self.setup.config, parts))
        model = self.state.model
        if isinstance(model, EnsembleModel) and self.state.shards[1] > 1 and which >= batches % parts > 0:
            idle_pass(model)

    def moved(self, batch: Batch) -> Batch:
        """Move a batch to the device and the precision of the run."""
        return batch.to(self.setup.device, self.setup.dtype)
