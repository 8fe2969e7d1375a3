"""What several benchmarks use: sections, races by turns, jobs of several ranks, hosts and the links between them."""
