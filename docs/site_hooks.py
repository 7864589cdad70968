"""Hooks of the documentation site: pages from the repository's root, and links out of docs/.

mkdocs takes pages from one folder. The READMEs, CHANGELOG.md and CONTRIBUTING.md are added to it as they are; a link to
any other file of the repository becomes plain text, since that file is not on the site.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ADDED = {
    "README.md": "about.md",
    "README.zh.md": "about.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)]+)\)")


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any) -> Any:
    """Show mkdocstrings the packages under the names that they are installed by, without importing them."""
    source = Path(tempfile.mkdtemp()) / "evener"
    source.mkdir()
    for package in ("trainer", "strategies"):
        (source / package).symlink_to(ROOT / package)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(source.parent)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root."""
    for name, page in ADDED.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to their pages on the site, and drop those that have none."""
    sources = {page: name for name, page in ADDED.items()}
    folder = ROOT if page.file.src_uri in sources else ROOT / "docs"

    def lead(match: re.Match[str]) -> str:
        text, link = match[1], match[2]
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else path
        found = ADDED.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if found is None or not (found in sources or (ROOT / "docs" / found).is_file()):
            return text
        return f"[{text}]({found}{anchor and '#'}{anchor})"

    return _LINK.sub(lead, markdown)
