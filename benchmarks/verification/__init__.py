"""The benchmark of the sums behind scores."""
