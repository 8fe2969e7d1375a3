"""The functions that Python programs use: `open`, `prepare`, `train`, `load`, `calibrate` and `verify` of the package.

docs/python.md shows how they work together. The tasks of the command line are made of the same functions. Both open
their inputs through `inputs`, so both give the same results bit for bit.
"""

from ensemble_ml.machine import let_waiting_threads_sleep

# The command line does the same before it loads torch. On two cores at a load of 18, fits took 115 s; where
# waiting threads looked for work, 2 % of the longest one were done after as much time.
let_waiting_threads_sleep()
