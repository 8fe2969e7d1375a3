"""Tools of the benchmark of ranks that do not wait (`benchmarks.stragglers.benchmark`)."""
