"""What several benchmarks use: sections, races by turns, entrants in processes of their own, jobs of several ranks,
hosts and the links between them."""
