"""The command line: pages, errors in one line, statuses."""

import logging
import os
import signal

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import ensemble_ml
from ensemble_ml import cli
from ensemble_ml.compose import in_quotes
from ensemble_ml.distributed import meeting
from ensemble_ml.distributed.world import World
from ensemble_ml.errors import Stopped
from ensemble_ml.signals import StopRequest, leave_gone
from ensemble_ml.tasks import TASKS, Task


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_overview_names_every_task(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(f"  {task}" in out for task in TASKS)


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"ensemble-ml {ensemble_ml.__version__}\n", "")


@pytest.mark.parametrize("text", ["it's", "a\\", "a\\\\", "\\'b", "a\\'", "c:\\d\\e", "", "'", '"'])
def test_hydra_reads_a_quoted_text_unchanged(text):
    assert OverridesParser.create().parse_override(f"key={in_quotes(text)}").value() == text


@pytest.mark.parametrize("task", list(TASKS))
def test_help_explains_every_setting(capsys, task):
    status, out, _ = run(capsys, task, "--help")
    assert status == 0
    for key, _, doc in cli.schema.setting_lines(cli.schema.SCHEMAS[task]):
        assert key in out and doc and doc in out


@pytest.mark.parametrize(
    ("task", "key", "value"),
    [
        ("plan", "parallel.lat", "auto"),
        ("simulate", "norm", "0.9"),
        ("train", "parallel.lat", "1"),
        ("train", "run", "???"),
    ],
)
def test_help_shows_the_defaults_that_conf_puts_in_force(capsys, task, key, value):
    assert f"  {key}={value} " in run(capsys, task, "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian"], "trian: no such task; did you mean train?"),
        (["train", "data.stroe=x"], "data.stroe: no such setting of train; did you mean data.store"),
        (["train", "modle.depth=3"], "modle.depth: no such setting of train; did you mean model.depth"),
        (["train", "experiment=nothing"], "experiment=nothing: no such file in conf; there are"),
        (["train", "experiment=2024"], "experiment=2024: no such file in conf; there are"),
        (["train", "optim=null"], "optim=null: no such file in conf; there are"),
        (["train"], "data.store, run: must be given"),
        (["train", "run=a", "data.store=x", "steps=many"], "steps: Value 'many' of type 'str' could not be converted"),
        (["train", "run=a", "data.store=x", "optim.lr=-1"], "optim.lr=-1.0: must be above 0"),
        (
            ["train", "run=a", "data.store=x", "model=poet", "model.max_hidden=50"],
            "model.max_hidden=50: model.name=poet",
        ),
        (["train", "run=a", "data.store=x", "model.depth=9"], "model.depth=9: 0 to 6 poolings are allowed"),
        (["train", "run=a", "data.store=x", "data.train=[soon]"], "data.train=soon: write a year"),
        (["train", "run=a/b", "data.store=x"], "run=a/b: letters, digits"),
        (["train", "run=a", "data.store=x", f"seed={2**63}"], f"seed={2**63}: must be below 2^63"),
        (["train", "run=a", "data.store=x", "optim.clip=-1"], "optim.clip=-1.0: must be 0 or more"),
        (
            ["train", "run=a", "data.store=x", "optim.clip_by=bucket"],
            "optim.clip_by=bucket: exchange=allreduce averages gradients, so clip holds their total; use clip_by=total",
        ),
        (["train", "run=a", "data.store=x", "optim.quorum=3"], "optim.quorum=3: exchange=allreduce ignores it"),
        (
            ["train", "run=a", "data.store=x", "optim.exchange=vote", "optim.quorum=3", "parallel.lat=auto"],
            "optim.quorum=3: the planner may split a sample over ranks",
        ),
        (["benchmark", "benchmark=stragglers", "stragglers.steps=5"], "stragglers.steps=5: must be a multiple of"),
        (["train", "run=a", "data.store=x", "model.families=5"], "model.families=5: give a distribution by variable"),
        (["train", "run=a", "data.store=x", "model.families={q: wide}"], "model.families.q=wide: normal, "),
        (["simulate", "output=a", "windows=[02-29]"], "windows=02-29: write month and day"),
        (["evaluate", "forecast=a", "ensemble=b", "output=c", "regions=5"], "regions=5: give boxes by name"),
        (["evaluate", "forecast=a", "ensemble=b", "output=c", "fit=[soon]"], "fit=soon: write a year"),
        (["benchmark", "benchmark=skill", "skill.sizes=[0,5]"], "skill.sizes=0: must be 1 or more"),
        (["benchmark", "benchmark=stations", "only=[tokyo]"], "only=tokyo: sections are innsbruck, era5"),
        (["prepare", "input=a", "output=b", "packing=int8"], "packing: Invalid value 'int8', expected one of"),
        (["benchmark", "benchmark=nothing"], "benchmark=nothing: known are"),
        (["prepare", "input=a", "output=b", "dates=[]"], "dates=[]: chooses nothing; null keeps all"),
        (["benchmark", "benchmark=verification", "only=[foo]"], "only=foo: this benchmark has no sections"),
        (["inspect", "--verbose"], "--verbose: no such option; settings are given as key=value"),
        (["prepare", "input=a", "output=b", "-v"], "-v: no such option"),
        (
            ["predict", "checkpoint=a", "input=b", "output=c", "+member_in=5"],
            "member_in: no such setting of predict; did you mean members_in",
        ),
        (
            ["train", "run=a", "data.store=x", "++model.hiden=5"],
            "model.hiden: no such setting of train; did you mean model.hidden",
        ),
        (["train", "run=a", "data.store=x", "data.train=2001"], "data.train: a list is wanted: data.train=[...]"),
        (["train", "run=a", "data.store=x", "loading.timeline=a.jpgg"], "loading.timeline=a.jpgg: is written as .png"),
        (["predict", "checkpoint=a", "input=b", "output=c", "thresholds=3"], "thresholds=3: give lists of values"),
        (
            ["predict", "checkpoint=a", "output=c", "input=a.grib,b.grib"],
            "input=a.grib,b.grib: is several values; write a list, 'input=[a.grib,b.grib]', or sweep over them with -m",
        ),
        (["predict", "thresholds={tp:", "[0.001]}"], "thresholds={tp:: cannot be read; write key=value"),
        (
            ["evaluate", "forecast=[a,", "b]"],
            "forecast=[a,: cannot be read; write key=value, with no blank around =, and quote what holds blanks",
        ),
        (["prepare", "input", "=", "a"], "input: cannot be read; write key=value, with no blank around ="),
        (
            ["evaluate", "regions=a(1)"],
            "regions=a(1): cannot be read; write key=value, with no blank around =, and a value that holds ( ) =",
        ),
        (
            ["prepare", "input=data/{a,b}.grib", "output=c"],
            "input=data/{a,b}.grib: braces are not expanded here; write a list, 'input=[data/a.grib,data/b.grib]'",
        ),
        (
            ["prepare", "input=[a.grib,b[1].grib]", "output=c"],
            "input=[a.grib,b[1].grib]: cannot be read; write key=value, with no blank around =, and each part of a"
            " list that holds brackets in quotes of its own: \"input=['first','second']\"",
        ),
        (["train", "--cfg", "jab"], "--cfg jab: job, hydra, all are allowed"),
        (["train", "--cfg", "job", "--info"], "--cfg and --info: each shows something of its own; leave one of them"),
        (["train", "--package"], "--package: needs a value, as in --package model"),
        (["train", "--package", "optim"], "--package: belongs to --cfg; use ensemble-ml train --cfg job --package"),
        (["train", "--resolve", "-m"], "--resolve: belongs to --cfg; use ensemble-ml train --cfg job --resolve"),
        (["train", "--config-dir", "nowhere"], "--config-dir nowhere: no such folder; give one that holds files like"),
        (
            ["train", "--config-name", "mine"],
            "--config-name: cannot be chosen: the task has its own; give files of yours",
        ),
        (["-sc", "install=tcsh"], "--shell-completion: name the shell: eval"),
        (["train", "-sc"], "--shell-completion: name the shell: eval"),
        (
            ["evaluate", "forecast=a", "ensemble=b", "output=c", "members_in=[1,2]"],
            "members_in=[1, 2]: give the number of members of the raw ensemble",
        ),
        (
            ["train", "run=..", "data.store=x"],
            "run=..: letters, digits, '.', '_' and '-' are allowed, and not dots alone",
        ),
        (["train", "run=a", "data.store=x", "optim.clip=inf"], "optim.clip=inf: must be a finite number"),
        (["train", "run=a", "data.store=x", "max_minutes=inf"], "max_minutes=inf: must be a finite number"),
        (["train", "run=a", "data.store=x", "parallel.lat=true"], "parallel.lat=True: auto or a number from 1 up"),
        (["train", "run=a", "data.store=x", "resume=1"], "resume=1: true, false and auto are allowed"),
        (["predict", "checkpoint=${oc.env:NOT_THERE}", "input=b", "output=c"], "checkpoint: "),
        (["predict", "checkpoint=a", "input=b", "output="], "output: is not given; give output=..."),
        (["evaluate", "forecast=a", "ensemble=", "output=c"], "ensemble: is not given; give ensemble=..."),
        (["simulate", "size=tiny", "output=a"], "size=tiny: is only the name of the chosen size; use simulate="),
        (["simulate", "members=1", "output=a"], "members=1: at least 2 are needed for breeding"),
        (["simulate", "members=256", "output=a"], "members=256: at most 255: GRIB edition 1 has an octet"),
        (["simulate", "levels=[500,850,500]", "output=a"], "levels=[500, 850, 500]: give each once"),
        (["inspect", "store=a", "hydra/launcher=cluster"], "hydra/launcher=cluster: belongs to a sweep; add -m"),
        (["train", "run=a", "data.store=b", "hydra.run.dir=x"], "hydra.run.dir=x: belongs to a sweep; add -m"),
        (["predict", "-m", "--cfg", "output=a,b"], "--cfg: shows one configuration; leave out -m"),
        (["predict", "model=emos"], "model: no such setting of predict; ensemble-ml predict --help lists all"),
        (
            ["predict", "checkpoint=a", "input=b", "output=c", "quantiles=[2]"],
            "quantiles=2.0: must lie between 0 and 1",
        ),
        (
            ["evaluate", "forecast=a", "ensemble=b", "output=c", "regions={x: [480, 5, 440, 16]}"],
            "regions.x=[480, 5, 440, 16]: give [north, west, south, east], degrees",
        ),
        (
            ["evaluate", "forecast=a", "ensemble=b", "output=c", "regions={x: [60, true, 40, 16]}"],
            "regions.x=[60, True, 40, 16]: give [north, west, south, east], degrees",
        ),
        (["evaluate", "forecast=a", "ensemble=b", "output=c", "confidence=95"], "confidence=95.0: must lie between 0"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(capsys, arguments, text):
    status, out, err = run(capsys, *arguments)
    assert status == cli.STATUS_USER
    assert not out
    assert err.startswith(f"ensemble-ml: {text}") and err.count("\n") == 1, err


@pytest.mark.parametrize("place", [0, 2], ids=["before the settings", "between them"])
def test_mistakes_in_a_sweep_have_their_lines(capsys, tmp_path, monkeypatch, place):
    """Each run its own, and the others go on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ensemble-ml"])
    settings = ["run=a", "data.store=nothing", "seed=0,1", "hydra.sweep.dir=sweep"]
    status, _, err = run(capsys, "train", *settings[:place], "-m", *settings[place:])
    assert status == cli.STATUS_USER and "Traceback" not in err
    assert err.count(f"ensemble-ml: store {tmp_path}/nothing: no such folder") == 2
    assert err.splitlines()[-1].startswith("ensemble-ml: 2 of the sweep's runs failed; the last: store")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["predict", "member_in=1,3", "output=x"], "member_in: no such setting of predict; did you mean members_in"),
        (["train", "optim=nope,lion", "run=a"], "optim=nope: no such file in conf; there are"),
        (["train", "hydra/launcher=nope", "seed=0,1"], "hydra/launcher=nope: no such file in conf; there are"),
        (["train", "run=a", "data.store=b", "seed=a,b"], "seed: Value 'a' of type 'str' could not be converted"),
    ],
)
def test_settings_of_a_sweep_that_do_not_exist_end_in_one_line(capsys, tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ensemble-ml"])
    status, _, err = run(capsys, arguments[0], "-m", *arguments[1:], "hydra.sweep.dir=sweep")
    assert status == cli.STATUS_USER
    assert err.startswith(f"ensemble-ml: {text}") and err.count("\n") == 1, err


def test_a_sweep_whose_folder_cannot_be_made(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ensemble-ml"])
    (tmp_path / "file").write_text("")
    status, _, err = run(capsys, "train", "-m", "run=a", "data.store=b", "seed=0,1", "hydra.sweep.dir=file/sweep")
    assert status == cli.STATUS_USER
    assert err.startswith("ensemble-ml: the sweep's folder cannot be made (") and err.count("\n") == 1, err


@pytest.mark.parametrize("task", ["benchmark", "plan"])
def test_an_output_that_cannot_be_is_told_before_the_work(capsys, tmp_path, task):
    (tmp_path / "file").write_text("")
    given = {"benchmark": ["benchmark=step"], "plan": ["data.store=a", "run=b"]}[task]
    status, _, err = run(capsys, task, *given, f"output={tmp_path}/file")
    assert status == cli.STATUS_USER
    assert err == f"ensemble-ml: output={tmp_path}/file: {tmp_path}/file is a file; give a folder\n"


def test_a_mistake_of_several_ranks_ends_their_sweep(capsys, tmp_path, monkeypatch):
    """The others have left by it, and the next run would wait for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ensemble-ml"])
    monkeypatch.setattr(meeting, "_meetings", {World(0, 2): meeting.Meeting("localhost", 1)})
    with pytest.raises(SystemExit) as ended:
        run(capsys, "train", "-m", "run=a", "data.store=nothing", "seed=0,1", "hydra.sweep.dir=sweep")
    assert ended.value.code == cli.STATUS_USER
    assert capsys.readouterr().err.count("ensemble-ml: store") == 1


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_of_a_sweep_that_was_stopped(capsys, tmp_path, monkeypatch, alone):
    """In a job of its own, which submitit began, it ends with the status that says so; here it ends the sweep."""

    def stopped(_):
        raise Stopped(True, True, "SIGUSR2: stopped after step 9; go on with resume=true")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ensemble-ml"])
    monkeypatch.setattr(cli, "_goes_on", lambda: not alone)
    task = TASKS["train"]
    monkeypatch.setitem(TASKS, "train", Task(stopped, task.example, task.leaves))
    settings = "train", "-m", "run=a", "data.store=b", "seed=0,1", "hydra.sweep.dir=sweep"
    if alone:
        with pytest.raises(SystemExit) as ended:
            run(capsys, *settings)
        status, err = ended.value.code, capsys.readouterr().err
    else:
        status, _, err = run(capsys, *settings)
    assert status == cli.STATUS_REQUEUE
    assert err.count("ensemble-ml: SIGUSR2: stopped after step 9; go on with resume=true") == 1


def test_inspect_takes_any_name(capsys, tmp_path, monkeypatch):
    """Also one that looks like a setting; and a folder with the plan of a training is no store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q 1=5.zarr").mkdir()
    (tmp_path / "q 1=5.zarr" / "plan.json").write_text("{}")
    status, _, err = run(capsys, "inspect", "q 1=5.zarr")
    assert status == cli.STATUS_USER
    assert err.startswith("ensemble-ml: q 1=5.zarr: holds no archive file (.grib, "), err


@pytest.mark.parametrize("folder", [".", "/"])
def test_inspect_takes_a_folder_without_a_name(capsys, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ensemble_ml.tasks._look_at", lambda paths: ({}, lambda _: f"seen {paths[0]}"))
    assert run(capsys, "inspect", folder)[:2] == (0, f"seen {folder}\n")


def test_inspect_takes_what_a_pattern_of_the_shell_gives(capsys, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setitem(TASKS, "inspect", Task(lambda config: seen.append(config), "", ""))
    assert run(capsys, "inspect", "a b.grib", "c[1].grib", "format=json")[0] == 0
    assert run(capsys, "inspect", "store=d.zarr")[0] == 0
    assert [one.store for one in seen] == [["a b.grib", "c[1].grib"], "d.zarr"] and seen[0].format.value == "json"


@pytest.mark.parametrize("given", ["null", "[]"])
def test_inspect_of_nothing(capsys, given):
    status, _, err = run(capsys, "inspect", f"store={given}")
    assert status == cli.STATUS_USER and err.count("\n") == 1
    assert err.startswith(f"ensemble-ml: store={given}: names nothing; give a tensor store, an archive"), err


def test_inspect_takes_a_list_that_is_longer_than_a_path(capsys, monkeypatch):
    seen = []
    monkeypatch.setitem(TASKS, "inspect", Task(lambda config: seen.append(config.store), "", ""))
    paths = [f"archive/forecast_{number}.grib" for number in range(400)]
    assert run(capsys, "inspect", f"store=[{','.join(paths)}]")[0] == 0 and seen == [paths]
    monkeypatch.undo()
    for long in ("a" * 5000, "(" + "{a,b}" + "a" * 5000):
        status, _, err = run(capsys, "inspect", f"store={long}")
        assert status == cli.STATUS_USER and err.count("\n") == 1


@pytest.fixture
def _own_logging(monkeypatch):
    """Hydra's options take away the handlers of the whole process."""
    monkeypatch.setattr("sys.argv", ["ensemble-ml"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize("cfg", [["--cfg"], ["--cfg", "job"], ["-c", "job"], ["--cfg=job"]])
def test_cfg_prints_what_would_run(capsys, cfg):
    status, out, _ = run(capsys, "train", *cfg, "experiment=quickstart", "data.store=x")
    composed = cli.compose_config("train", ["experiment=quickstart", "data.store=x"])
    assert status == 0 and out == cli.OmegaConf.to_yaml(composed)
    assert "store: x" in out and "run: quickstart" in out


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cfg", "job", "--package", "optim"], "# @package optim\nname: adamw\n"),
        (["--cfg", "job", "-p", "optim.lr", "optim.lr=0.5"], "0.5\n"),
        (["--cfg", "job", "run=a${seed}", "seed=3", "--resolve", "--package", "run"], "a3\n"),
        (["--cfg", "hydra", "--package", "hydra.job.name"], "cli\n"),
        (["--info", "defaults"], "| experiment/quickstart "),
        (["-i", "searchpath", "--config-dir", "CONF"], "| command-line | file://CONF "),
        (["--cfg", "--config-dir", "CONF", "experiment=mine"], "seed: 77\n"),
        (["--hydra-help"], "--multirun,-m : Run multiple jobs"),
    ],
)
def test_options_of_hydra_show_what_they_show_elsewhere(capsys, tmp_path, arguments, text):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 77\n")
    given = [item.replace("CONF", str(tmp_path)) for item in arguments]
    status, out, err = run(capsys, "train", "experiment=quickstart", *given)
    lines = out + err
    assert status == 0 and text.replace("CONF", str(tmp_path)) in lines
    assert lines.count(text.replace("CONF", str(tmp_path))) == 1


def test_a_folder_of_ones_own_files_is_looked_through(capsys, tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 77\n")
    seen = []
    monkeypatch.setitem(TASKS, "train", Task(lambda config: seen.append(config.seed), "", ""))
    given = ["train", "--config-dir", str(tmp_path), "experiment=mine", "run=a", "data.store=b"]
    assert run(capsys, *given)[0] == 0 and run(capsys, *given, "--run")[0] == 0 and seen == [77, 77]
    (tmp_path / "experiment" / "2024.yaml").write_text("# @package _global_\nseed: 78\n")
    assert run(capsys, *given[:3], "experiment=2024", *given[4:])[0] == 0 and seen[2:] == [78]


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ensemble-ml ", set(TASKS)),
        ("ensemble-ml pre", {"prepare", "predict"}),
        ("ensemble-ml train model=e", {"model=emos", "model=ens10_unet"}),
        ("ensemble-ml train run=a data.sto", {"data.store="}),
        ("/usr/bin/ensemble-ml predict checkpo", {"checkpoint="}),
        ("ensemble-ml nothing a", set()),
    ],
)
def test_the_shell_completes_tasks_and_settings(capsys, monkeypatch, line, words):
    monkeypatch.setenv("COMP_LINE", line)
    status, out, _ = run(capsys, "-sc", "query=bash")
    assert status == 0 and set(out.split()) == words


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize("before", [[], ["train"]])
def test_completion_is_installed_for_the_program(capsys, before):
    status, out, _ = run(capsys, *before, "-sc", "install=bash")
    assert status == 0 and out.rstrip().endswith("-F hydra_bash_completion ensemble-ml")


def test_what_is_given_twice_is_told(caplog, capsys):
    """As the shell makes it of input={a,b}.grib."""
    run(capsys, "prepare", "input=a.grib", "input=b.grib", "output=o", "output=o")
    told = [line for line in caplog.messages if "more than once" in line]
    assert told == ["input: is given more than once, and only the last counts, input=b.grib"]


def test_ones_own_files_do_not_have_the_names_of_others(capsys, tmp_path):
    """They would not be taken, in silence; a copy that is the same does no harm."""
    shipped = cli.conf_folder() / "experiment" / "quickstart.yaml"
    own = tmp_path / "experiment" / "quickstart.yaml"
    own.parent.mkdir()
    own.write_bytes(shipped.read_bytes())
    given = ["train", "--config-dir", str(tmp_path), "run=a", "data.store=missing"]
    assert "missing" in run(capsys, *given)[2]
    own.write_text("# @package _global_\nseed: 77\n")
    for more in ([], ["-m"], ["--cfg", "job"]):
        status, _, err = run(capsys, *given, *more)
        assert status == cli.STATUS_USER
        assert err.strip() == (
            f"ensemble-ml: --config-dir {tmp_path}: experiment/quickstart.yaml has the name of a file in conf, which"
            " wins; rename yours"
        )


def test_tables_of_settings_take_keys():
    given = ["run=a", "data.store=x", "model.families={q: lognormal}"]
    assert cli.build_config("train", cli.compose_config("train", given)).model.families == {"q": "lognormal"}
    given = ["forecast=a", "ensemble=b", "output=c", "regions={alps: [48, 5, 44, 16]}"]
    assert cli.build_config("evaluate", cli.compose_config("evaluate", given)).regions == {"alps": [48, 5, 44, 16]}


@pytest.mark.parametrize(
    ("task", "given", "key", "value"),
    [
        ("predict", "output=20240101_00", "output", "20240101_00"),
        ("predict", "checkpoint=1e5", "checkpoint", "1e5"),
        ("predict", "input=20240101_00", "input", "20240101_00"),
        ("predict", "+input=[20240101_00, 1.10,'2.20',\"1,3_0\",a b 1_0]", "input",
         ["20240101_00", "1.10", "2.20", "1,3_0", "a b 1_0"]),
        ("predict", "static=True", "static", "True"),
        ("predict", "static=null", "static", None),
        ("predict", "dates=[2001,2002-01]", "dates", ["2001", "2002-01"]),
        ("predict", "members_in=1_0", "members_in", 10),
        ("evaluate", "forecast=[20240101_00,fc]", "forecast", ["20240101_00", "fc"]),
        ("evaluate", "truth=null", "truth", None),
        ("prepare", "input=data/[ab]*.grib", "input", "data/[ab]*.grib"),
        ("prepare", "input=['data/[ab]*.grib',c.grib]", "input", ["data/[ab]*.grib", "c.grib"]),
        ("prepare", "input='data/[ab]*.grib'", "input", "data/[ab]*.grib"),
        ("prepare", "input=[0-9]*.grib", "input", "[0-9]*.grib"),
        ("prepare", "input=[a]/x.grib", "input", "[a]/x.grib"),
        ("prepare", "input=[ab]*.gri[b]", "input", "[ab]*.gri[b]"),
        ("prepare", "input=[ab]", "input", ["ab"]),
        ("prepare", "input={a}/x.grib", "input", "{a}/x.grib"),
        ("prepare", "output=it's (1)=.zarr", "output", "it's (1)=.zarr"),
        ("prepare", "output=1_0", "output", "1_0"),
        ("prepare", "regrid=1.50", "regrid", 1.5),
        ("train", "run=1.10", "run", "1.10"),
        ("train", "run=seed${seed}", "run", "seed0"),
        ("train", "data.store=1_0", "data.store", "1_0"),
    ],
)  # fmt: skip
def test_texts_and_paths_that_look_like_numbers_stay_as_they_are_written(task, given, key, value):
    composed = cli.compose_config(task, [given])
    assert cli.OmegaConf.select(composed, key) == value


def test_a_sweep_over_names_that_look_like_numbers(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ensemble-ml"])
    seen = []
    monkeypatch.setitem(TASKS, "train", Task(lambda config: seen.append(config.run), "", ""))
    assert run(capsys, "train", "-m", "run=1.10,1_0,a", "data.store=1e5", "hydra.sweep.dir=sweep")[0] == 0
    assert seen == ["1.10", "1_0", "a"]


def test_an_interrupt_has_its_own_status(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    task = TASKS["prepare"]
    monkeypatch.setitem(TASKS, "prepare", Task(interrupted, task.example, task.leaves))
    status, _, err = run(capsys, "prepare", "input=a", "output=b")
    assert status == cli.STATUS_INTERRUPTED and "interrupted" in err


def test_a_signal_of_a_time_limit_asks_for_the_same_command_again(capsys, monkeypatch):
    task = TASKS["prepare"]
    build = lambda _: os.kill(os.getpid(), signal.SIGUSR1)  # noqa: E731
    monkeypatch.setitem(TASKS, "prepare", Task(build, task.example, task.leaves))
    status, _, err = run(capsys, "prepare", "input=a", "output=b")
    assert status == cli.STATUS_REQUEUE and "the same command goes on" in err


@pytest.mark.parametrize(
    ("kept", "restarts", "number", "status", "text"),
    [
        (True, 9, signal.SIGUSR1, cli.STATUS_REQUEUE, "SIGUSR1 before the first step; go on with resume=true"),
        (False, 0, signal.SIGUSR1, cli.STATUS_REQUEUE, "SIGUSR1 before the first step; the run has to begin anew"),
        (False, 2, signal.SIGUSR1, cli.STATUS_REQUEUE, "SIGUSR1 before the first step; the run has to begin anew"),
        (False, 3, signal.SIGUSR1, cli.STATUS_INTERRUPTED, "SIGUSR1 before the first step, after 3 restarts"),
        (True, 0, signal.SIGTERM, cli.STATUS_INTERRUPTED, "interrupted"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_a_signal_before_the_first_step(capsys, monkeypatch, kept, restarts, number, status, text, early):
    """In the fits, or `early`, while nobody knows yet whether there is a checkpoint; of two, one counts."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))

    def fits(_):
        if early:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        with StopRequest(kept=kept) as stop:
            try:
                os.kill(os.getpid(), number)
            finally:
                if number == signal.SIGUSR1:
                    os.kill(os.getpid(), number)
            stop.arm()

    task = TASKS["train"]
    monkeypatch.setitem(TASKS, "train", Task(fits, task.example, task.leaves))
    found, _, err = run(capsys, "train", "run=a", "data.store=b")
    assert found == status
    assert err.startswith(f"ensemble-ml: {text}") and err.count("\n") == 1


def test_a_missing_extra_is_named(capsys, monkeypatch):
    def lacks(_):
        raise ModuleNotFoundError("No module named 'eccodes'", name="eccodes")

    task = TASKS["prepare"]
    monkeypatch.setitem(TASKS, "prepare", Task(lacks, task.example, task.leaves))
    status, _, err = run(capsys, "prepare", "input=a", "output=b")
    assert status == cli.STATUS_USER and "pip install 'ensemble-ml[grib]'" in err


def test_a_signal_ahead_of_the_time_limit_may_come_twice():
    """A batch script passes on what SLURM has sent to its tasks, too; Ctrl-C then still ends the run at once."""
    with StopRequest() as stop:
        stop.arm()
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        assert stop.requested == "SIGUSR1" and stop.requeue(stop.vote)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_connection_that_breaks_ends_a_run_as_sigterm_does():
    """A shell that is hung up passes the signal on, so it may come twice; what nohup has started goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            stop.arm()
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested == "SIGHUP" and stop.vote and not stop.requeue(stop.vote)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert cli.main(["--help"]) == 0
        with StopRequest() as stop:
            stop.arm()
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_lines_for_a_terminal_that_is_gone_are_no_error():
    ours, theirs = os.openpty()
    try:
        leave_gone([theirs])
        os.write(theirs, b"seen")
        assert os.read(ours, 9) == b"seen"
        os.close(ours)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(theirs, b"lost")
        leave_gone([theirs])
        os.write(theirs, b"lost")
    finally:
        os.close(theirs)
