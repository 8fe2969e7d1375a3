"""Tools of several benchmarks: sections, races by turns, entrants in their own processes, jobs of ranks, hosts."""
