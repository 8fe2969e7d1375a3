"""Write the tables of README.md, docs/results.md and benchmarks/results/README.md from the results files of benchmarks.

    python scripts/readme_table.py [--check]

Published results are copies of runs/benchmark/NAME/results.json: benchmarks/results/NAME.json, or NAME-SECTION.json if
that section was run alone. `--check` changes nothing and fails where a table is not what the files say.
"""

import json
import re
import sys
from os.path import commonprefix
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: scripts/readme_table.py -->", "<!-- end of results -->"


UNSAID = " ..."  # follows a command whose other settings were not recorded
NOT_RECORDED = " Dots after a command: its other settings were not recorded, and may not be the default ones."
LOST = "Lost: "  # beginning of a note on what another does better
POSITIVE = 1e-9  # target of claims that a value lies above zero, such as the end of an interval
# What the front page shows of each benchmark: the first claim that contains each of these texts.
FRONT = {
    "quickstart": [
        "CRPS lower than that of the raw 10",
        "CRPS lower than that of the best",
        "RMSE of predicted spread over that of size-corrected",
    ],
    "skill": [
        "5 members through the net: spread RMSE below spread regression's",
        "one trajectory through the net",
        "1, 2, 3, 5, 10 members in: CRPS over raw improves",
    ],
}
HEAD = ["| claim | measured | target | holds |", "|---|---|---|---|"]


def row(claim: dict, figures: dict) -> str:
    """Return the line of a claim: its words, the measured value with its range, the target, and whether it holds."""
    value, target = shown(claim["value"]), "above 0" if claim["target"] == POSITIVE else shown(claim["target"])
    if value == target and claim["value"] != claim["target"]:
        value = f"{claim['value']:.5g}"
    said, unit = claim["claim"].replace("|", "\\|"), claim["unit"]
    if unit in ("yes", "true"):  # the claim is true or false
        value, target, unit = "yes" if claim["value"] else "no", "yes", ""
    holds, ends = "yes" if claim["holds"] else "**no**", reach(claim, figures)
    measured = f"{value} {unit}".rstrip()
    if ends:
        measured += f" ({shown(ends[0])} to {shown(ends[1])})"
        holds += ", not throughout" if ends[0] < claim["target"] < ends[1] else ""
    return f"| {said} | {measured} | {target} | {holds} |"


def reach(claim: dict, figures: dict) -> tuple[float, float] | None:
    """Return the range of the figure whose median is the value of a claim in the same unit; None without a range.

    Of several such figures, as many counts are zero, it is the one with the words of the claim.
    """
    alike = {n: f for n, f in figures.items() if (f["median"], f["unit"]) == (claim["value"], claim["unit"])}
    own = alike.get(claim["claim"]) or (next(iter(alike.values())) if len(alike) == 1 else {"min": None, "max": None})
    ends = own["min"], own["max"]
    return ends if None not in ends and ends[0] < ends[1] else None


def shown(value: float | str | None) -> str:
    """Return a number as the table shows it."""
    if value is None:
        return "none"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def command(name: str, content: dict) -> str:
    """Return the command that made a file of results, with paths cut to their last part, and no output or workspace."""
    if content.get("command"):
        words = [word for word in content["command"] if not word.startswith(("output=", "workspace="))]
        shown = (re.sub(r"(?<==)\S*/(?=[^/\s])", "", word) for word in words)
        return " ".join(f"'{word}'" if set(word) & set(" []{}") else word for word in shown)
    benchmark, _, section = name.partition("-")
    if name == "quickstart":
        return "scripts/quickstart.sh"
    only = f" only=[{section}]" if section else ""
    return f"ensemble-ml benchmark benchmark={benchmark}{only}{UNSAID}"


def commit(content: dict) -> str:
    """Return the commit that was measured, with a + if files differed from it."""
    whole = content["commit"]
    return whole[:7] + "+" * whole.endswith("+")


def rows(claims: list[dict], figures: dict) -> list[str]:
    """Return a line for each claim. Equal lines are given once, because older files hold some claims twice."""
    return list(dict.fromkeys(row(claim, figures) for claim in claims))


def published() -> dict[str, dict]:
    """Return the contents of all results files by their names.

    Raises:
        SystemExit: A file is not of size=full.
    """
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    for name, content in found.items():
        if content.get("size", "full") != "full":
            raise SystemExit(f"benchmarks/results/{name}.json: of size={content['size']}; targets are of size=full")
    return found


def front(found: dict[str, dict]) -> list[str]:
    """Return the table of the front page: the first claim that contains each text of `FRONT`."""
    lines = ["| simulated ensemble | claim | measured | target | holds |", "|---|---|---|---|---|"]
    for name, beginnings in FRONT.items():
        claims, figures = found[name]["claims"], found[name]["figures"]
        for beginning in beginnings:
            claim = next(one for one in claims if beginning in one["claim"])
            text = claim["claim"].removeprefix(
                "from 5 of 10 members at 48 h, geometric mean over variables and levels: "
            )
            lines.append(f"| {name} {row(claim | {'claim': text}, figures)}")
    return lines


def summary(found: dict[str, dict]) -> list[str]:
    """Return the tables of quickstart and skill, of the number of claims that hold, and of those that fail.

    A list of what others do better follows.
    """
    lines = []
    for name in ("quickstart", "skill"):
        claims, figures = found[name]["claims"], found[name]["figures"]
        common = commonprefix([claim["claim"] for claim in claims])  # noqa: RUF071 (no paths)
        common = common[: common.rfind(": ") + 2]
        short = [claim | {"claim": claim["claim"].removeprefix(common)} for claim in claims]
        said = f": {common.removesuffix(': ')}" if common else ""
        lines += [f"Of `{command(name, found[name])}`{said}:", "", *HEAD, *rows(short, figures), ""]
    lines += ["| shown by | claims that hold | measured at | on |", "|---|---|---|---|"]
    for name, content in found.items():
        if content["claims"]:
            held, all_ = (len(rows(some, {})) for some in (_held(content), content["claims"]))
            where = f"{commit(content)} | {content['machine'].get('accelerator') or content['machine']['processor']}"
            lines.append(f"| `{command(name, content)}` | {held} of {all_} | {where} |")
    lines += ["", "A + after a commit: with changes that were not committed yet." + NOT_RECORDED]
    lines += ["", "What does not hold:", "", HEAD[0] + " of |", HEAD[1] + "---|"]
    for name, content in found.items():
        missed = [claim for claim in content["claims"] if not claim["holds"]]
        lines += [f"{line} {name.partition('-')[0]} |" for line in rows(missed, content["figures"])]
    lines += ["", "Where another does better:", ""]
    for name, content in found.items():
        lost = [note.removeprefix(LOST) for note in content.get("notes", []) if note.startswith(LOST)]
        lines += [f"- {note} (`{command(name, content)}`)" for note in lost]
    return lines


def _held(content: dict) -> list[dict]:
    """Return the claims that hold."""
    return [claim for claim in content["claims"] if claim["holds"]]


def everything(found: dict[str, dict]) -> list[str]:
    """Return the tables of all claims of all benchmarks, each folded under its command."""
    lines = []
    for name, content in found.items():
        if content["claims"]:
            lines += [f"<details><summary><code>{command(name, content)}</code></summary>", "", *HEAD]
            lines += [*rows(content["claims"], content["figures"]), "", "</details>", ""]
    return lines[:-1]


def main() -> int:
    """Write the tables, or with --check print the pages whose tables are out of date. Return the exit status."""
    found, wrong = published(), False
    pages = {
        ROOT / "README.md": front(found),
        ROOT / "docs" / "results.md": summary(found),
        RESULTS / "README.md": everything(found),
    }
    for path, lines in pages.items():
        text = path.read_text()
        before, _, rest = text.partition(BEGIN)
        new = "\n".join([before + BEGIN, *lines, END]) + rest.partition(END)[2]
        if "--check" not in sys.argv:
            path.write_text(new)
        elif new != text:
            print(
                f"{path.relative_to(ROOT)}: its table is not what benchmarks/results says; run scripts/readme_table.py"
            )
            wrong = True
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
