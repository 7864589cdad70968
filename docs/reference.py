"""Write docs/configuration.md from the comments in conf/: `python docs/reference.py`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration reference

Made from `conf/` by `python docs/reference.py`; a test fails when it is not current.
Choose a file of a group with `group=file`, set an option with `group.option=value`.
"""


def page() -> str:
    """The whole page: the root keys, then every file of every group."""
    conf = ROOT / "conf"
    parts = [HEAD, "## Root keys\n", table(conf / "train.yaml")]
    for group in sorted(path for path in conf.iterdir() if path.is_dir() and not path.name.startswith("_")):
        parts.append(f"## {group.name}\n")
        for file in sorted(group.glob("*.yaml")):
            parts.append(f"### `{group.name}={file.stem}`\n\n{summary(file)}\n")
            parts.append(table(file))
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


def table(file: Path) -> str:
    """Options with their defaults, and the comments above or beside them."""
    rows = options(file)
    if not rows:
        return ""
    body = "\n".join(f"| `{key}` | `{value}` | {comment} |" for key, value, comment in rows)
    return f"| option | default | meaning |\n|---|---|---|\n{body}\n"


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
