"""The functions that Python programs use: `open`, `prepare`, `load`, `calibrate` and `verify` of the package.

docs/python.md shows how they work together. The tasks of the command line are made of the same functions. Both open
their inputs through `inputs`, so both give the same results bit for bit.
"""
