"""The building blocks of the network."""
