"""A process of its own for what counts threads and descriptors: other tests leave some that may end meanwhile."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def in_fresh_process(function, *args):
    """The result of a function of a module; what it raises is raised here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(function, *args).result()
