"""Run the command `evener`, whose first word says what to do, without torch or Lightning before a run needs them."""

import runpy
import shlex
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from . import main as command

USAGE = """\
Train any LightningModule on any set of devices; the strategy is one word.

  evener train [OPTIONS]    train, validate, test, predict, compare or plan: the options of `python train.py`
  evener new FOLDER         make a project of your own, named after its folder, which must be new or empty
  evener proof [OPTIONS]    try on this machine what Evener claims, beside what else is installed, and write proof.html
  evener --version
"""


def main() -> None:
    """Run the command `evener`."""
    word, *words = sys.argv[1:] or ["--help"]
    if word == "train":
        train(words)
    elif word == "proof":
        proof(words)
    elif word == "new" and len(words) == 1 and not words[0].startswith("-"):
        new(Path(words[0]))
    elif word == "--version":
        sys.stdout.write(f"evener {version('evener')}\n")
    elif {"-h", "--help"} & {word, *words}:
        sys.stdout.write(USAGE)
    else:
        sys.exit(f"Error: evener {shlex.join([word, *words])} is unknown.\n{USAGE}")


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
