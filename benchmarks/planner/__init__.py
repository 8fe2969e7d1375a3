"""Tools of the benchmark of the planner."""
