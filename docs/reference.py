"""Write docs/configuration.md from the comments in conf/: `python docs/reference.py`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration reference

Made from `conf/` by `python docs/reference.py`; a test fails when it is not current.
Choose a file of a group with `group=file`, set an option with `group.option=value`.
An option that several files share is described once, and each of these files names it under "Inherits".
"""
SHARED = """## Shared options

Files in `conf/` that other files inherit by Hydra's defaults lists. They are not choices of a group: set their options
on the group that inherits them, as in `strategy.timeout_s=60`.
"""


def page() -> str:
    """The whole page: the root keys, every file of every group, then what several files share."""
    parts = [HEAD, "## Root keys\n", table(CONF / "train.yaml")]
    for group in sorted(path for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("_")):
        parts.append(f"## {group.name}\n")
        for file in sorted(group.glob("*.yaml")):
            parts.append(section(file))
    parts.append(SHARED)
    parts.extend(section(file) for file in sorted(CONF.glob("_*.yaml")))
    return "\n".join(part for part in parts if part)


def section(file: Path) -> str:
    """One file: what it is, its own options, and the names of those it inherits."""
    parts = (f"### `{title(file)}`\n\n{summary(file)}\n", table(file), inherited(file))
    return "\n".join(part for part in parts if part)


def summary(file: Path) -> str:
    """The comment that a file opens with."""
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @"):
            continue
        if not line.startswith("#"):
            break
        text = line.lstrip("# ")
        lines.append(f"`{text}`." if line.startswith("#   ") else text)  # indented: a command
    return " ".join(lines)


def bases(file: Path) -> list[Path]:
    """The files that a file inherits by its defaults list, and those that they inherit."""
    _, _, rest = file.read_text(encoding="utf-8").partition("defaults:\n")
    found: list[Path] = []
    for name in re.findall(r"^  - (/?[a-z_][\w/]*)(?:@_here_)?$", rest.partition("\n\n")[0], flags=re.MULTILINE):
        if name == "_self_":
            continue
        base = (CONF / name[1:] if name.startswith("/") else file.parent / name).with_suffix(".yaml")
        found += [base, *bases(base)]
    return found


def inherited(file: Path) -> str:
    """One line per file that a file inherits, with the names of its options and a link to their table."""
    named = {key for key, _, _ in options(file)}
    lines: list[str] = []
    for base in bases(file):
        new = [key for key, _, _ in options(base) if key not in named]
        named.update(new)
        if new:
            lines.append(f"- {', '.join(f'`{key}`' for key in new)} from {link(base)}")
    return "\n".join(["Inherits", "", *lines, ""]) if lines else ""


def title(file: Path) -> str:
    """The heading of a file's section."""
    return file.stem if file.parent == CONF else f"{file.parent.name}={file.stem}"


def link(file: Path) -> str:
    """A link to a file's section, by the anchor that GitHub makes of its heading."""
    return f"[`{title(file)}`](#{title(file).replace('=', '')})"


def table(file: Path) -> str:
    """Options with their defaults, and the comments above or beside them."""
    rows = [f"| `{key}` | `{value}` | {note} |" for key, value, note in options(file)]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows, ""]) if rows else ""


def options(file: Path) -> list[tuple[str, str, str]]:
    """List (option, default, comment); nested options are joined by dots."""
    rows: list[tuple[str, str, str]] = []
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
            continue
        found = re.match(r"( *)([\w/]+):(?: +([^#]*?))?(?: +# (.*))?$", line)
        if found:
            indent, key, value, beside = len(found[1]), found[2], found[3], found[4]
            path = [(i, k) for i, k in path if i < indent]
            if value and key != "_target_":
                name = ".".join([*(k for _, k in path), key])
                rows.append((name, value.strip(), (beside or " ".join(comment)).replace("|", "\\|")))
            path.append((indent, key))
        if not text or found:
            comment = []
    return [row for row in rows if not row[0].startswith(("defaults", "help", "hydra"))]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
