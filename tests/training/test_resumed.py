"""What a run that goes on says and keeps: of limits, of checkpoints that cannot be read, of runs that hardly began."""

from dataclasses import replace

from ensemble_ml.training import train


def test_a_limit_that_comes_too_late_is_told_of(config_of, caplog):
    """The steps are settled when a run begins: a run that goes on takes as long as they take."""
    config = config_of(steps=4, validate_every=4, max_minutes=60.0)
    train(config)
    for minutes, told in ((60.0, False), (0.0, False), (0.001, True)):
        caplog.clear()
        train(replace(config, resume=True, max_minutes=minutes))
        assert (
            "max_minutes=0.001: the steps were settled when the run began: 4, of which 4 are done" in caplog.text
        ) == told
