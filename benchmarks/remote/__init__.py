"""The benchmark of archives that are read by URL, and the server that they are read from."""
