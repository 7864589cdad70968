"""Run the command `evener`: its first word says what to do, and `train` is `train.py`.

Nothing here needs torch or Lightning before a run does.
"""

import argparse
import re
import runpy
import shlex
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from ..config.composing import PACKAGE, Source
from ..job.result import new_table, print_table
from . import main as command

WORDS = {
    "train": "train, validate, test, predict, compare or plan: the options of `python train.py`",
    "new": "make a project of your own: evener new my_project",
    "strategies": "list the strategies",
    "proof": "try on this machine what Evener claims, beside what else is installed, and write proof.html",
}


def main() -> None:
    """Run the command `evener`."""
    words = sys.argv[1:]
    parser = argparse.ArgumentParser(
        prog="evener", description="Train any LightningModule on any set of devices; the strategy is one word."
    )
    parser.add_argument("--version", action="version", version=f"evener {version('evener')}")
    commands = parser.add_subparsers(dest="word", metavar="COMMAND", title="commands")
    others = {"train": train, "proof": proof}  # which read the rest of the command line
    for word, meaning in WORDS.items():
        added = commands.add_parser(word, help=meaning, description=meaning, add_help=word not in others)
        if word == "new":
            added.add_argument("folder", help="the project's folder, which must not exist; its name is the project's")
    if words and words[0] in others:
        return others[words[0]](words[1:])
    given = parser.parse_args(words)
    if given.word == "new":
        return new(Path(given.folder))
    return strategies() if given.word == "strategies" else parser.print_help()


def train(words: list[str]) -> None:
    """Run `train.py` of the current folder if it is this package's, otherwise the package's own configuration."""
    script = Path("train.py").absolute()
    if script.is_file() and "evener" in script.read_text(encoding="utf-8"):
        sys.argv = [str(script), *words]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.argv = ["evener train", *words]
        command.main()


def proof(words: list[str]) -> None:
    """Run `benchmarks/proof.py` of the clone that this package is."""
    program = Path(__file__).resolve().parents[2] / "benchmarks" / "proof.py"
    if not program.is_file():
        sys.exit("Error: evener proof runs the benchmarks of a clone, which the installed package does not have. "
                 "Clone the repository, run pip install -e . there, and then evener proof.")  # fmt: skip
    sys.argv = ["evener proof", *words]
    runpy.run_path(str(program), run_name="__main__")


def new(folder: Path) -> None:
    """Copy the template of a project into a folder, whose name becomes that of the project's runs."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"Error: {folder} exists already. Give the name of a new folder, such as evener new {folder}_2.")
    name = folder.absolute().name
    template = Path(__file__).parents[2] / "examples" / "user_project"
    try:
        shutil.copytree(template, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "logs"))
    except OSError as exc:
        sys.exit(f"Error: {folder} can't be written ({exc.strerror}). Give a folder in a writable directory.")
    for file in (folder / "README.md", folder / "conf" / "project.yaml"):
        file.write_text(file.read_text(encoding="utf-8").replace("my_project", name), encoding="utf-8")
    sys.stdout.write(
        f"{folder} is ready. Next:\n"
        f"  cd {shlex.quote(str(folder))}\n"
        "  python train.py                                          # about 20 s on a CPU\n"
        "  python train.py strategy=ddp devices=2 accelerator=cpu   # two processes\n"
        "  python train.py --help\n"
        "Under ddp batch_size is each process's; strategy.batch_size_is=global trains exactly as one device.\n"
    )


def strategies() -> None:
    """Print the table of strategies, those of a project in the current folder included."""
    source = Source(str(Path("conf").absolute()), "project") if Path("conf/strategy").is_dir() else PACKAGE
    table = new_table("Strategies", headings := ("strategy=", "what it does"), folded=headings)
    for name in source.files("strategy"):
        # the comment that the file opens with, up to its first full stop or command
        comment = re.match(r"(?:# @.*\n)*((?:#(?!  ).*\n)*)", source.text(f"strategy/{name}"))
        told = " ".join(line.lstrip("# ") for line in (comment[1] if comment else "").splitlines())
        table.add_row(name, re.split(r"(?<=[a-z)\]\d])\.(?:\s|$)|: `", told)[0].strip(": "))
    print_table(table, ["The options of one: evener train --help strategy=ddp. Which one? evener train mode=compare"])
