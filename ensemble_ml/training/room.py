"""What to do where a step does not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ensemble_ml.config import TrainConfig
from ensemble_ml.distributed import Session
from ensemble_ml.errors import UserError

# torch has no exception of its own for memory of the host; oneDNN says the second where it finds no room to compile.
# A GPU's libraries ask for memory of their own.
_WORDS = ("can't allocate memory", "could not create a primitive", "STATUS_ALLOC_FAILED")


@contextmanager
def told_of_memory(config: TrainConfig, session: Session) -> Iterator[None]:
    """Within it, a lack of memory becomes a line that says what would need less.

    Raises:
        UserError: there is not enough memory, on the host or the GPU.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # Other kinds are no lack of memory: NCCL's of a rank that is gone, which has to be told from the others.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(t in str(error) for t in _WORDS):
            raise
        topology, where = session.topology, session.topology.place
        shared = topology.lat * topology.lon
        less = f"parallel.lat={2 * topology.lat} (a sample over {2 * shared} ranks)"
        if config.batch_size > topology.data:
            less = f"batch_size={topology.data} (now {config.batch_size}), or {less}"
        cause = (str(error) or type(error).__name__).splitlines()[0][:120]  # NumPy and Python may say nothing more
        raise UserError(
            f"step {session.step}: rank {topology.rank} has not enough memory for its part of a batch (data"
            f" {where.data}, lat {where.lat}, lon {where.lon}: {cause}); try {less}; ensemble-ml plan says what each"
            " would need"
        ) from error
