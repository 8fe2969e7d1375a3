"""Write the table of README.md from the results files of the benchmarks.

    python scripts/readme_table.py [--check]

Results to publish stand in scripts/results/NAME.json, or NAME-SECTION.json where a section was run alone, copies of
runs/benchmark/NAME/results.json. `--check` changes nothing and fails where the table is not what the files say.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: scripts/readme_table.py -->", "<!-- end of results -->"


def row(name: str, claim: dict) -> str:
    """One line of the table: what is claimed, what was measured, whether it holds, what shows it."""
    value = claim["value"]
    shown = f"{value:.3g}" if isinstance(value, int | float) else str(value)
    target = claim["target"]
    target = f"{target:.3g}" if isinstance(target, int | float) else str(target)
    held = "yes" if claim["holds"] else "**no**"
    benchmark, _, section = name.partition("-")
    only = f" only=[{section}]" if section else ""
    command = "scripts/quickstart.sh" if name == "quickstart" else f"ensemble-ml benchmark benchmark={benchmark}{only}"
    return f"| {claim['claim']} | {shown} {claim['unit']} | {target} | {held} | `{command}` |"


def table() -> str:
    """The whole table, one row a claim, files in order of their names."""
    lines = ["| claim | measured | target | holds | shown by |", "|---|---|---|---|---|"]
    for path in sorted((ROOT / "scripts" / "results").glob("*.json")):
        lines += [row(path.stem, claim) for claim in json.loads(path.read_text())["claims"]]
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
