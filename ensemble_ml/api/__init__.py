"""What Python programs use: `open`, `prepare`, `load`, `calibrate`, `verify` of the package; see docs/python.md.

The tasks of the command line are made of the same functions: both open inputs by `inputs`, and give the same bits.
"""
