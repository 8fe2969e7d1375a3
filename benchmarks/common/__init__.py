"""Tools of several benchmarks: results, sections, races by turns, processes of their own, jobs of ranks, hosts."""
