"""Turn a lack of memory in a step into an error that names settings which need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ensemble_ml.config import TrainConfig
from ensemble_ml.distributed import Session
from ensemble_ml.errors import UserError

# Torch has no exception class for a lack of host memory, only the first of these texts. The second is from oneDNN if it
# cannot allocate memory for a primitive. The third is from a GPU's libraries, which allocate memory of their own.
_WORDS = ("can't allocate memory", "could not create a primitive", "STATUS_ALLOC_FAILED")


@contextmanager
def told_of_memory(config: TrainConfig, session: Session) -> Iterator[None]:
    """Turn a lack of memory within the context into an error that names settings which need less.

    Args:
        config: settings of the run.
        session: the ranks of the job.

    Raises:
        UserError: there is not enough memory, on the host or on the GPU.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # Other errors pass through unchanged: other code recognises some, such as NCCL's about a rank that is gone.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(t in str(error) for t in _WORDS):
            raise
        topology, where = session.topology, session.topology.place
        shared = topology.lat * topology.lon
        less = f"parallel.lat={2 * topology.lat} (a sample over {2 * shared} ranks)"
        if config.batch_size > topology.data:
            less = f"batch_size={topology.data} (now {config.batch_size}), or {less}"
        cause = (str(error) or type(error).__name__).splitlines()[0][:120]  # NumPy and Python may give no text
        raise UserError(
            f"step {session.step}: rank {topology.rank} has not enough memory for its shard of a batch (data"
            f" {where.data}, lat {where.lat}, lon {where.lon}: {cause}); try {less}; ensemble-ml plan shows the"
            " memory that each needs"
        ) from error
