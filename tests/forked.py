"""Forks of the test's process that stand for processes of their own, where what matters is how they end.

Each would import torch for some seconds otherwise. Processes that are to answer signals are no forks: a fork has the
handlers of its parent.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback

import torch
import torch._dynamo  # optimizers do: once here, not in each fork

_LEFT = (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)


class Forked:
    """A fork that calls a function and ends with the status that it returns; to the test it is as a `Popen`."""

    def __init__(self, function, *args, env=None):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.returncode = None
        self.pid = os.fork()
        if not self.pid:
            self._run(function, args, env)

    def _run(self, function, args, env):
        status = 1
        try:
            for number, handler in _LEFT:
                signal.signal(number, handler)
            sys.settrace(None)
            threading.settrace(None)
            os.dup2(self._errors.fileno(), 2)
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            logging.getLogger().handlers.clear()  # pytest's, with which the program's log would go nowhere
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            torch.set_num_threads(1)
            status = function(*args) or 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            sys.stderr.flush()
            os._exit(status)

    def poll(self):
        """Return the status, negative for a signal; None while it runs."""
        if self.returncode is None:
            done, code = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(code)
        return self.returncode

    def wait(self, timeout=300.0):
        """Return the status once there is one; the fork is killed where that takes too long."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                until = float("inf")
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout=300.0):
        """Return (None, text of stderr) once it has ended."""
        self.wait(timeout)
        self._errors.seek(0)
        return None, self._errors.read().decode()

    def send_signal(self, number):
        """Send a signal where the fork still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)
