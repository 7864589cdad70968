"""Show all options as the files in conf/ have them, for the documentation site's page on configuration."""

from evener.trainer.config.composing import PACKAGE


def files() -> str:
    """The root configuration, then every file of every group."""
    parts = ["## Root keys", block("train")]
    for group in PACKAGE.groups():
        parts.append(f"## {group}")
        for name in PACKAGE.files(group):
            parts += [f"### `{group}={name}`", block(f"{group}/{name}")]
    return "\n\n".join(parts)


def block(name: str) -> str:
    """The text of a file."""
    return f"```yaml\n{PACKAGE.text(name).rstrip()}\n```"
