"""Write docs/configuration.md from the comments in conf/: `python docs/reference.py`."""

from pathlib import Path

from evener.trainer.config.descriptions import Option, bases, options, summary
from evener.trainer.config.group_files import PACKAGE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration reference

Made from `conf/` by `python docs/reference.py`; a test fails when it is not current.
Choose a file of a group with `group=file`, set an option with `group.option=value`.
A file that builds on another one of its group names that file's options under "Inherits".
"""


def page() -> str:
    """The whole page: the root keys, then every file of every group."""
    parts = [HEAD, "## Root keys\n", table("train")]
    for group in PACKAGE.groups():
        parts.append(f"## {group}\n")
        parts.extend(section(f"{group}/{name}") for name in PACKAGE.files(group))
    return "\n".join(part for part in parts if part)


def section(name: str) -> str:
    """One file: what it is, its own options, and the names of those it inherits."""
    parts = (f"### `{title(name)}`\n\n{summary(PACKAGE.text(name))}\n", table(name), inherited(name))
    return "\n".join(part for part in parts if part)


def inherited(name: str) -> str:
    """One line per file that a file inherits, with the names of its options and a link to their table."""
    named = {option.name for option in options(PACKAGE.text(name))}
    lines: list[str] = []
    for base in bases(PACKAGE, name):
        new = [option.name for option in options(PACKAGE.text(base)) if option.name not in named]
        named.update(new)
        if new:
            lines.append(f"- {', '.join(f'`{key}`' for key in new)} from {link(base)}")
    return "\n".join(["Inherits", "", *lines, ""]) if lines else ""


def title(name: str) -> str:
    """The heading of a file's section."""
    return name.replace("/", "=")


def link(name: str) -> str:
    """A link to a file's section, by the anchor that GitHub makes of its heading."""
    return f"[`{title(name)}`](#{title(name).replace('=', '')})"


def table(name: str) -> str:
    """Options with their types and defaults, and the comments above or beside them."""
    rows = [row(option) for option in options(PACKAGE.text(name))]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows, ""]) if rows else ""


def row(option: Option) -> str:
    """One option in a line of a table."""
    comment = option.comment.replace("|", "\\|").replace("<", "&lt;")  # of place holders, which HTML would eat
    return f"| `{option.name}` | `{option.default}` | {comment} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
