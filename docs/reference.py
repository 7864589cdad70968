"""Make tables of all options from the comments in conf/, for the documentation site's page on configuration."""

from evener.trainer.config.descriptions import Option, bases, options, summary
from evener.trainer.config.group_files import PACKAGE


def tables() -> str:
    """The root keys, then every file of every group."""
    parts = ["## Root keys\n", table("train")]
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
