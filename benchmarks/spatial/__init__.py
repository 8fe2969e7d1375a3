"""Tools of the benchmark of the spatial partition."""
