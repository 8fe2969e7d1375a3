"""Write the tables of README.md from the results files of the benchmarks.

    python scripts/readme_table.py [--check]

Results to publish stand in scripts/results/NAME.json, or NAME-SECTION.json where a section was run alone, copies of
runs/benchmark/NAME/results.json. `--check` changes nothing and fails where the table is not what the files say.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: scripts/readme_table.py -->", "<!-- end of results -->"


UNSAID = " ..."  # behind a command of which the results do not say with which other settings it was run
NOT_RECORDED = " Dots after a command: its other settings were not recorded, and may not be the default ones."
LOST = "Lost: "  # how a benchmark's note begins that tells where a rival is faster
POSITIVE = 1e-9  # the target of ends of intervals that are to lie above zero
HEAD = ["| claim | measured | target | holds |", "|---|---|---|---|"]


def row(claim: dict) -> str:
    """One line: what is claimed, what was measured, the target, whether it holds."""
    value, target = shown(claim["value"]), "above 0" if claim["target"] == POSITIVE else shown(claim["target"])
    if value == target and claim["value"] != claim["target"]:
        value = f"{claim['value']:.5g}"
    said, unit = claim["claim"].replace("|", "\\|"), claim["unit"]
    if unit in ("yes", "true"):  # of what is or is not
        value, target, unit = "yes" if claim["value"] else "no", "yes", ""
    return f"| {said} | {f'{value} {unit}'.rstrip()} | {target} | {'yes' if claim['holds'] else '**no**'} |"


def shown(value: float | str | None) -> str:
    """A number as the table has it."""
    if value is None:
        return "none"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def command(name: str, content: dict) -> str:
    """What was run for a file of results: folders by their last name, without that for the results themselves."""
    if content.get("command"):
        words = [word for word in content["command"] if not word.startswith(("output=", "workspace="))]
        shown = (re.sub(r"(?<==)\S*/(?=[^/\s])", "", word) for word in words)
        return " ".join(f"'{word}'" if " " in word else word for word in shown)
    benchmark, _, section = name.partition("-")
    if name == "quickstart":
        return "scripts/quickstart.sh"
    only = f" only=[{section}]" if section else ""
    return f"ensemble-ml benchmark benchmark={benchmark}{only}{UNSAID}"


def commit(content: dict) -> str:
    """The commit that was measured, with a + where files had changed since."""
    whole = content["commit"]
    return whole[:7] + "+" * whole.endswith("+")


def rows(claims: list[dict]) -> list[str]:
    """Lines of claims; what an older file says twice (at least, and at most) is said once."""
    return list(dict.fromkeys(map(row, claims)))


def table() -> str:
    """The quickstart's claims, how many of each benchmark hold, all that do not, losses, then all; by file names."""
    paths = sorted((ROOT / "scripts" / "results").glob("*.json"))
    found = {path.stem: json.loads(path.read_text()) for path in paths}
    small = [name for name, content in found.items() if content.get("size", "full") != "full"]
    if small:
        raise SystemExit(
            f"scripts/results/{small[0]}.json: of size={found[small[0]]['size']}; targets are of size=full"
        )
    claims = {name: content["claims"] for name, content in found.items() if content["claims"]}
    lines = [f"Of `{command('quickstart', found['quickstart'])}`:", "", *HEAD, *rows(claims["quickstart"])]
    lines += ["", "| shown by | claims that hold | measured at | on |", "|---|---|---|---|"]
    for name, some in claims.items():
        held = rows([claim for claim in some if claim["holds"]])
        machine = found[name]["machine"]
        where = f"{commit(found[name])} | {machine.get('accelerator') or machine['processor']}"
        lines.append(f"| `{command(name, found[name])}` | {len(held)} of {len(rows(some))} | {where} |")
    lines += ["", "A + after a commit: with changes that were not committed yet." + NOT_RECORDED]
    lines += ["", "What does not hold:", "", HEAD[0] + " of |", HEAD[1] + "---|"]
    for name, some in claims.items():
        lines += [f"{one} {name.partition('-')[0]} |" for one in rows([c for c in some if not c["holds"]])]
    lines += ["", "Where another is faster:", ""]
    for name, content in found.items():
        lost = [note.removeprefix(LOST) for note in content.get("notes", []) if note.startswith(LOST)]
        lines += [f"- {note} (`{command(name, content)}`)" for note in lost]
    for name, some in claims.items():
        lines += ["", f"<details><summary>All claims of <code>{command(name, found[name])}</code></summary>", "", *HEAD]
        lines += [*rows(some), "", "</details>"]
    return "\n".join(lines)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" in sys.argv:
        if new != text:
            print("README.md: its table is not what scripts/results says; run python scripts/readme_table.py")
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
