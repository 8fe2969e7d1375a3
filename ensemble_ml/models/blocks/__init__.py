"""Building blocks of the network."""
