"""One process trains in a run folder at a time, from before the fits to the end."""

import errno
import fcntl
import logging
import os
import socket
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from parallel.ranks import run_ranks

from ensemble_ml.errors import UserError
from ensemble_ml.store import folder
from ensemble_ml.store.folder import claimed, claimed_once
from ensemble_ml.training import load_checkpoint, setup, train, trainer


@pytest.fixture
def lock(config_of):
    """The file that keeps others away from the run of `config_of`."""
    path = Path(config_of().output) / ".a.lock"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(setup, "_PATIENCE", 0.3)


@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_a_second_process_is_refused_before_its_fits(config_of, lock, impatient, monkeypatch, resume):
    monkeypatch.setattr("ensemble_ml.training.assemble.kept_fit", lambda *_: pytest.fail("the fits began"))
    held_by = rf"host and process: {socket.gethostname()} {os.getpid()}"
    with claimed_once(lock) as held, pytest.raises(UserError, match=rf"run=a: another process trains in .*{held_by}"):
        assert held
        train(config_of(resume=resume))
    assert not list(lock.parent.iterdir())


def test_a_lock_file_that_leads_nowhere_is_refused(config_of, lock, impatient):
    lock.symlink_to(lock.parent / "absent" / "lock")
    with pytest.raises(UserError, match=r"run=a: its lock file .*\.a\.lock cannot be made \(No such file"):
        train(config_of())


def test_a_run_is_claimed_while_it_goes_on_and_leaves_no_lock(config_of, lock, monkeypatch):
    seen, step = [], trainer.Trainer._step

    def meanwhile(self, *given):
        with claimed_once(lock) as held:
            seen.append(held)
        return step(self, *given)

    monkeypatch.setattr(trainer.Trainer, "_step", meanwhile)
    train(config_of(steps=1))
    assert seen == [False] and not list(lock.parent.glob(".*.lock"))
    train(config_of(run="b", steps=1))
    assert seen == [False, True]  # of another run


def test_a_requeued_job_waits_for_the_end_of_the_one_before(config_of, lock, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    train(config_of(steps=2))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ended, taken = threading.Event(), threading.Event()

    def before():
        with claimed_once(lock):
            taken.set()
            ended.wait(0.5)

    other = threading.Thread(target=before)
    other.start()
    taken.wait()
    run = train(config_of(steps=2, resume="auto"))
    other.join()
    assert caplog.text.count("waiting 15 s for its end") == 1
    assert load_checkpoint(run / "checkpoints" / "last").meta["step"] == 2


def test_a_file_system_without_locks_ends_no_run(config_of, lock, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    train(config_of(steps=1))
    assert caplog.text.count("no lock keeps other processes from training there (Function not implemented)") == 1
    assert not lock.exists()


def test_a_claim_is_of_the_file_that_is_there(tmp_path, monkeypatch):
    """Whoever had it before may remove it between our opening and locking it."""
    path, real, tries = tmp_path / "lock", folder._lock, []

    def removed(descriptor, of, how):
        if not tries:
            of.unlink()
        tries.append(of)
        real(descriptor, of, how)

    monkeypatch.setattr(folder, "_lock", removed)
    with claimed_once(path) as held:
        assert held and len(tries) == 2 and path.read_text().split()[1] == str(os.getpid())
        with claimed_once(path) as again:
            assert not again
        assert path.exists()
    assert not path.exists()


def test_a_process_that_was_forked_does_not_hold_the_lock(tmp_path):
    """A worker of a data loader may outlive a trainer that was killed."""
    path, (ours, theirs), (ready, begun) = tmp_path / "lock", os.pipe(), os.pipe()
    with claimed(path) as held:
        child = os.fork()
        if not child:
            os.close(theirs)
            os.write(begun, b"b")
            os.read(ours, 1)  # until the other end is closed
            os._exit(0)
        os.read(ready, 1)
        with claimed(path) as again:
            assert held and not again
    try:
        with claimed(path) as held:
            assert held
    finally:
        os.close(theirs)
        os.waitpid(child, 0)
        for end in (ours, ready, begun):
            os.close(end)


def _refused(session, config):
    trainer.start = lambda _: nullcontext(session)
    with pytest.raises(UserError) as told:
        train(config)
    return str(told.value)


def test_all_ranks_say_so(config_of, lock):
    with claimed_once(lock):
        told = run_ranks(_refused, 2, config_of(), data=2)
    assert told[0] == told[1] and told[0].startswith("run=a: another process trains in")
