"""The one exception that a user is meant to read.

Everything that a user can put right (a path, a key, a damaged file) is raised as `UserError`; the command line prints
its text as one line and exits with status 2. Anything else is a defect of the program and keeps its traceback.
"""

import re

STATUS_REQUEUE = 75  # stopped by SIGUSR1: start it again with resume=true, which goes on from what is kept


class UserError(ValueError):
    """A mistake that the user can mend: its text names the thing, its value, what is allowed, and the remedy."""

    def __init__(self, message: str):
        super().__init__(re.sub(r"\s*[\r\n]\s*", " ", str(message)).strip())  # a path may hold several blanks


class Stopped(KeyboardInterrupt):
    """A run that stopped as a signal asked, its state kept if it had any; `requeue` where it asked to be started again.

    `first`: whether this is the rank that says so by its status; srun ends all tasks at the first that is not 0.
    `together`: whether all ranks stop at one step; else the others have to be told.
    """

    def __init__(self, requeue: bool = False, first: bool = True, why: str = "", *, together: bool = True):
        super().__init__(why)
        self.requeue, self.first, self.together = requeue, first, together
