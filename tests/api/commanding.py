"""Tasks as the command line runs them, and settings of a training of seconds."""

from ensemble_ml import cli

QUICK = [
    "steps=2",
    "threads=1",
    "model.hidden=8",
    "model.max_hidden=16",
    "model.points=16",
    "model.precision=float32",
    "tracking.tensorboard=false",
    "data.validation_members=2",
    "data.members=[1,2,3]",
    "max_minutes=0",
]


def command(task: str, *arguments: object) -> None:
    """Run a task as the command line does."""
    assert cli.main([task, *map(str, arguments)]) == 0
