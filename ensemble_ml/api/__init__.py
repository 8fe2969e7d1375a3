"""The functions that Python programs use: `open`, `prepare`, `train`, `load`, `calibrate` and `verify` of the package.

docs/python.md shows how they work together. They run the same code as the tasks of the command
line, also to open their inputs. So both give the same results bit for bit.
"""

from ensemble_ml.machine import let_waiting_threads_sleep

# The command line does the same before it loads torch. On two cores at a load of 18, the fits took 115 s. With threads
# that look for work while they wait, only 2 % of the longest fit were done after that time.
let_waiting_threads_sleep()
