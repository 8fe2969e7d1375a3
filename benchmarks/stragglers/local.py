"""Local SGD, a competitor: ranks step alone and average their weights at times (Stich 2019, arXiv:1805.09767)."""

from __future__ import annotations

from typing import Any

from ensemble_ml.distributed import Communicator
from ensemble_ml.distributed.momentum import average
from ensemble_ml.optim import Exchange


class LocalSteps(Exchange):
    """An exchange that averages weights over ranks every `every` steps, and nothing else.

    Args:
        group: the ranks.
        every: number of steps between averages.
        clip: largest norm of a rank's own gradient; 0 for none.
    """

    def __init__(self, group: Communicator, every: int, clip: float = 0.0):
        super().__init__(clip)
        self._group, self._every, self._step = group, every, 0

    @property
    def slack(self) -> int:
        """Return how many steps ranks may be apart."""
        return self._every

    def meets(self, step: int) -> bool:
        """Return whether weights have been averaged when `step` steps are done."""
        return step % self._every == 0

    def begin(self, step: int) -> None:
        """Note the number of the step."""
        self._step = step

    def after_step(self) -> dict[str, Any]:
        """Average the weights where it is time."""
        if self.meets(self._step + 1):
            average([p.data for p in self.params], self._group)
        return {}
