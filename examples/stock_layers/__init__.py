"""Partition a network of torch's stock layers, as `ensemble_ml.distributed.partition` does with the project's own one.

    from examples.stock_layers import partition

    with start(ParallelConfig(lat=2)) as session:  # of ensemble_ml.distributed, under torchrun, mpiexec or srun
        partition(network, session.mesh)  # from now on each rank computes its shard of the field
        result = network(part)  # part: the rank's own points, (B, C, Y, X, ...)

A network whose shards would differ from the whole is refused, with the name of the layer. Parameters and their names
stay as they are. The gradient of a parameter is each rank's part of a sum over the ranks.
"""

from examples.stock_layers.layers import partition
