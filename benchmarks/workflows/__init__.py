"""The cost of a task under workflow engines, and what they do after one that failed."""
