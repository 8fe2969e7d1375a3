"""The rules that decide which GRIB messages are a field of one model run. All other messages are left out and listed.

A message bears the parameter of its variable whether it holds a member, a percentile, a probability, an ensemble mean
or a climate. So nothing is concluded from the parameter alone: every key that could make the message another quantity
must have a value that is listed here. The codes are those of the WMO Manual on Codes (WMO-No. 306, Volume I.2) and of
ECMWF's MARS, as ecCodes spells them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from data_prep.grib_sections import MEMBER_TEMPLATES
from data_prep.records import MEMBER_TYPES, OF_STEP_TYPE, other_step_type
from ensemble_ml.fields import Field

Get = Callable[..., Any]  # (key, default, kind) -> value of the key in one message

PRODUCT_TEMPLATES = {  # edition 2, code table 4.0: a deterministic run or one ensemble member, on a level
    0: "analysis or forecast at a point in time",
    1: "member of an ensemble at a point in time",
    8: "analysis or forecast over an interval of time",
    11: "member of an ensemble over an interval of time",
    60: "member of an ensemble of reforecasts at a point in time",
    61: "member of an ensemble of reforecasts over an interval of time",
}
PROCESSED_DATA = ("an", "fc", "af", "cf", "pf", "cp")  # edition 2, code table 1.4, codes 0 to 5
_MISSING = 255  # the missing value of any code of one octet
# Code table 4.3: analyses and forecasts; from 192 on, codes of local use, and a missing one.
GENERATING_PROCESSES = (0, 1, 2, 3, 4, 11, 12, 13, 14, 15, *range(192, 256))
REFERENCE_TIMES = (0, 1)  # code table 1.2: an analysis, or the start of a forecast
TIME_INCREMENTS = (2, 255)  # code table 4.11: successive times of one run; the others combine several runs
STREAMS = (  # MARS streams of one run or ensemble; others are monthly means, anomalies, hindcast statistics
    "oper", "scda", "dcda", "lwda", "wave", "scwv", "enfo", "enfh", "efov", "efhc", "eefo", "eefh", "enda", "elda",
    "waef", "enwh", "mofc", "mnfc", "mnfh", "seas", "mmsf",
)  # fmt: skip
# Local definitions by centre: section 1 from octet 41 on in edition 1, section 2 in edition 2. A message without one is
# read, too. In edition 2, ecCodes knows those of ECMWF and a few other centres; one that it does not know is ignored.
LOCAL_DEFINITIONS = {
    "ecmf": (1, 15, 26, 30, 36),  # MARS labels: ensemble, seasonal, hindcast, variable resolution, 4D-Var
    "edzw": (253, 254),  # DWD: ensembles; deterministic runs
}
UNSTATED_SUBCENTRES = ("255", "65535")  # the missing values of editions 1 and 2
GUST_HOURS = {123: 6, 228028: 3}  # ECMWF's parameters of the largest gust in the last hours: 10fg6, 10fg3
_COLUMN = ("surface", "entireAtmosphere", "atmosphere", "atmosphereSingleLayer")
_AT_2_M = ("surface", "heightAboveGround 2")
_AT_10_M = ("surface", "heightAboveGround 10")
_AT_100_M = ("surface", "heightAboveGround 100")
LEVELS = {  # the kinds of level on which each surface variable lies, with the height if there is one
    "t2m": _AT_2_M,
    "msl": ("surface", "meanSea"),
    "u10": _AT_10_M,
    "v10": _AT_10_M,
    "ws10": _AT_10_M,
    "fg10": _AT_10_M,
    "u100m": _AT_100_M,
    "v100m": _AT_100_M,
    "ws100m": _AT_100_M,
    "d2m": _AT_2_M,
    "r2m": _AT_2_M,
    "tcw": _COLUMN,
    "tcwv": _COLUMN,
    "tcc": (*_COLUMN, "meanSea"),
    "cape": _COLUMN,
    "lcc": ("surface", "lowCloudLayer"),
    "mcc": ("surface", "middleCloudLayer", "mediumCloudLayer"),
    "hcc": ("surface", "highCloudLayer"),
    "swh": ("surface", "meanSea"),
    "orog": ("surface", "ground"),
}
_AT_THE_SURFACE = ("surface",)
PRESSURE_LEVELS = ("isobaricInhPa", "isobaricInPa")


def levels_of(field: Field) -> tuple[str, ...]:
    """Return ecCodes' typeOfLevel of the levels on which a message can hold `field`, some with a height in m."""
    return LEVELS.get(field.name, _AT_THE_SURFACE) if field.surface or field.static else PRESSURE_LEVELS


def on_its_level(field: Field, kind: str, level: int) -> bool:
    """Return whether a variable lies on a level, by ecCodes' typeOfLevel and level, e.g. the height in m."""
    return kind in levels_of(field) or f"{kind} {level}" in levels_of(field)


def why_left_out(get: Get, field: Field) -> str:
    """Return why a message that bears the parameter of `field` is not a field of one run; empty if it is one."""
    kind, stream = get("dataType"), get("stream")
    if kind not in (None, *MEMBER_TYPES) and not _processed(get):
        return f"of type {kind}"
    if stream is not None and stream not in STREAMS:
        return f"of stream {stream}"
    other = _other_definition(get) or (_other_product(get) if get("edition") == 2 else "")
    return other or other_step_type(str(get("stepType", "")), field)


def is_control(get: Get) -> bool:
    """Return whether a message is the unperturbed member of an ensemble."""
    if get("dataType") == "cf":
        return True
    # Centres that do not label their messages for MARS state the control in code table 1.4.
    return _processed(get) and get("typeOfProcessedData", kind=int) == PROCESSED_DATA.index("cf")


def is_single_run(get: Get) -> bool:
    """Return whether a message is of ECMWF's operational deterministic forecast.

    From cycle 50r1 on, this is the control of the ensemble (see `data_prep.ensemble_of`).
    """
    labels = {"centre": "ecmf", "class": "od", "expver": "0001", "stream": "oper", "dataType": "fc"}
    return all(get(key) == value for key, value in labels.items())


def _processed(get: Get) -> bool:
    """Return whether the code table 1.4 value of an unlabelled edition 2 message allows it to be a field of a run.

    A message that does not state the code passes, too. The code is compared as a number, because its names differ
    between versions of ecCodes' tables.
    """
    if get("edition") != 2 or get("marsType") is not None:
        return False
    code = get("typeOfProcessedData", kind=int)
    return code == _MISSING or code in range(len(PROCESSED_DATA))


def _other_product(get: Get) -> str:
    """Return the reason why an edition 2 message is not a field of one run; empty if it is one."""
    template = get("productDefinitionTemplateNumber")
    if template not in PRODUCT_TEMPLATES:
        return f"of product template 4.{template}"
    if template in MEMBER_TEMPLATES and get("perturbationNumber") == _MISSING:
        return "of a member without a number"
    if get("typeOfGeneratingProcess") not in GENERATING_PROCESSES:
        return f"of generating process {get('typeOfGeneratingProcess')}"
    if get("significanceOfReferenceTime") not in REFERENCE_TIMES:
        return f"of reference time {get('significanceOfReferenceTime')}, which is no start"
    if get("numberOfTimeRange", 1) != 1:
        return f"statistics of {get('numberOfTimeRange')} nested time ranges"
    if get("typeOfTimeIncrement", _MISSING) not in TIME_INCREMENTS:
        return f"of time increment {get('typeOfTimeIncrement')}, over several runs"
    return ""


def _other_definition(get: Get) -> str:
    """Return the local definition that makes a message no field of a run; empty if none does."""
    number, centre = get("localDefinitionNumber"), get("centre")
    if number is None or not get("localUsePresent", 1) or number in LOCAL_DEFINITIONS.get(centre, ()):
        return ""
    # ecCodes applies ECMWF's local definitions to centres that have none of their own, and then finds MARS labels.
    as_ecmwf = centre not in LOCAL_DEFINITIONS and get("marsType") is not None
    if as_ecmwf and number in LOCAL_DEFINITIONS["ecmf"]:
        return ""
    return f"of local definition {number} of {centre}"


def method_of(get: Get) -> str:
    """Return the statistic over time that a message holds: "mean", "maximum" or "minimum"; empty for any other."""
    return OF_STEP_TYPE.get(str(get("stepType", "")), "")
