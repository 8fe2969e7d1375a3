"""One rank of a training whose first step may take no more than LIMIT bytes beyond what the process held before it.

`python limited_training.py CONFIG LIMIT`: CONFIG a pickled TrainConfig; LIMIT 0 sets none and prints what a step took.
A program of its own, so that no memory that other tests freed is at hand. What is counted is the kernel's VmData, which
RLIMIT_DATA limits.
"""

import pickle
import resource
import sys
import threading
import time
from pathlib import Path

from benchmarks.common.status import process_bytes
from ensemble_ml.errors import UserError
from ensemble_ml.training import setup, train, trainer


def held() -> int:
    return process_bytes("VmData")


def settle() -> None:
    """Wait until the loading threads have what they read ahead: their memory is not the step's."""
    last, since = held(), time.monotonic()
    while time.monotonic() - since < 1:
        time.sleep(0.02)
        if (now := held()) != last:
            last, since = now, time.monotonic()


class Largest(threading.Thread):
    """The largest `held` of each millisecond from now on."""

    def __init__(self):
        super().__init__(daemon=True)
        self.begun, self.ended = threading.Event(), threading.Event()

    def run(self):
        self.first = self.bytes = held()  # with this thread's own stack
        self.begun.set()
        while not self.ended.wait(0.001):
            self.bytes = max(self.bytes, held())


def main(path: Path, limit: int) -> None:
    step = trainer.Trainer._step
    setup.keep_freed_memory = lambda: None  # what the process holds is then what it uses, and the limit means something

    def first(self, batch, stop=None):
        if self.state.step:
            return step(self, batch, stop)
        settle()
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (held() + limit, resource.RLIM_INFINITY))
            return step(self, batch, stop)
        largest = Largest()
        largest.start()
        largest.begun.wait()
        done = step(self, batch, stop)
        largest.ended.set()
        print(largest.bytes - largest.first)
        return done

    trainer.Trainer._step = first
    try:
        train(pickle.loads(path.read_bytes()))
    except UserError as error:
        sys.exit(str(error))


main(Path(sys.argv[1]), int(sys.argv[2]))
