"""The claims of the quickstart, made of its scores."""
