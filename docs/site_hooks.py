"""Hooks of the documentation site: pages from the repository's root, links out of docs/, and drawings without network.

mkdocs takes pages from one folder. The READMEs, CHANGELOG.md and CONTRIBUTING.md are added to it as they are, README.md
as the first page; a link to any other file of the repository becomes plain text, since that file is not on the site.
Mermaid's blocks become the pictures that `drawings.py` has drawn of them. The page on configuration gets the files of
conf/, which `reference.py` reads.
"""

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]  # so that the site is built without installing the package

from drawings import BLOCK, name_of  # noqa: E402
from reference import files as files_of_conf  # noqa: E402

ADDED = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "README.zh.md": "about.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_IMAGES = "images/drawings"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)]+)\)")


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any) -> Any:
    """Show mkdocstrings the packages without importing them."""
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(ROOT / "src")]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, and give docs/README.md another name than the first page's."""
    files.remove(next(file for file in files if file.src_uri == "README.md"))
    for name, page in ADDED.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to their pages on the site, drop those that have none, and add the files of conf/ to their page."""
    sources = {page: name for name, page in ADDED.items()}
    folder = (ROOT / sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    if folder == ROOT:
        markdown = markdown.replace("](docs/images/", "](images/")
    markdown = BLOCK.sub(
        lambda block: f'![]({_IMAGES}/{name_of(block[1])}.svg){{: style="background: white" }}', markdown
    )

    def lead(match: re.Match[str]) -> str:
        text, link = match[1], match[2]
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else path
        found = ADDED.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if found is None or not (found in sources or (ROOT / "docs" / found).is_file()):
            return text
        link = os.path.relpath(found, PurePosixPath(page.file.src_uri).parent)
        return f"[{text}]({link}{anchor and '#'}{anchor})"

    return _LINK.sub(lead, markdown) + ("\n" + files_of_conf() if page.file.src_uri == "configuration.md" else "")
