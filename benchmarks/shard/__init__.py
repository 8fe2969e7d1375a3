"""Parts of `benchmark=shard`: what a rank measures of sharded weights, and pretraining on members."""
