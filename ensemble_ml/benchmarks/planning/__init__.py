"""Parts of the benchmark of the planner."""
