"""Add to the documentation site what stands elsewhere: the commands' settings, the design, and the changes.

`mkdocs.yml` names this file as a hook. `commands.md` is made from the schema, as `ensemble-ml TASK --help` is.
`design.md` and `changes.md` are ARCHITECTURE.md and CHANGELOG.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from ensemble_ml.cli import help_page
from ensemble_ml.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the pages of the site with the generated ones (mkdocs calls this)."""
    pages = {"commands.md": commands(), "design.md": read("ARCHITECTURE.md"), "changes.md": read("CHANGELOG.md")}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def commands() -> str:
    """Return the page of all commands and their settings, in Markdown."""
    head = (
        "# Commands\n\nEvery command is `ensemble-ml TASK key=value ...`. A key that does not exist, or a value that"
        " does not fit, ends in one line and status 2. What `ensemble-ml TASK --help` prints:\n"
    )
    parts = [f"## {task}\n\n```text\n{help_page(task)}\n```\n" for task in TASKS]
    return "\n".join([head, *parts])


def read(name: str) -> str:
    """Return a page of the top folder, with links to docs/ as they are within the site."""
    return re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
