"""The exceptions that end a command without a traceback.

Everything that a user can correct (a path, a key, a damaged file) is raised as `UserError`. The command line prints its
text as one line and exits with status 2. Anything else is a defect of the program and keeps its traceback.
"""

import re

STATUS_REQUEUE = 75  # exit status after SIGUSR1; the same command continues the work (`train` needs resume=true)


class UserError(ValueError):
    """An error that the user can correct. Its text names the thing, its value, what is allowed, and the remedy.

    Args:
        message: the text; line breaks become single blanks, so that it is one line.
    """

    def __init__(self, message: str):
        # Other runs of blanks stay as they are, because they may belong to a path.
        super().__init__(re.sub(r"\s*[\r\n]\s*", " ", str(message)).strip())


class Stopped(KeyboardInterrupt):
    """A stop that a signal asked for. The state of the run is kept if it had any.

    Args:
        requeue: whether the signal asked for a restart.
        first: whether this is the rank that exits with the requeue status. srun ends all tasks at the first exit status
            that is not 0.
        why: the reason, for the message.
        together: whether all ranks stop at the same step; otherwise the other ranks must be notified.
    """

    def __init__(self, requeue: bool = False, first: bool = True, why: str = "", *, together: bool = True):
        super().__init__(why)
        self.requeue, self.first, self.together = requeue, first, together
