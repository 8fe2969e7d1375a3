"""Ranks in one process, as the product has them."""

from types import SimpleNamespace

from benchmarks.common.simulated import Room, SimulatedCommunicator, on_mesh, on_ranks

__all__ = ["Room", "SimulatedCommunicator", "on_mesh", "on_ranks", "run_threads"]


def run_threads(function, *args, **degrees):
    """Call `function(session, *args)` on ranks that are threads; return what each returns, in rank order.

    Faster than `run_ranks` where ranks meet often, and equal to it: two ranks bit for bit (test_partition_model.py).
    Only for
    functions that change nothing that is global in the process. The session has a mesh and a topology, no more.
    """
    return on_mesh(lambda mesh: function(SimpleNamespace(mesh=mesh, topology=mesh.topology), *args), **degrees)
