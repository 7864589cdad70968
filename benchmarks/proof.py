"""Try on this machine what Evener claims, beside the frameworks that are installed, and write one page about it.

    evener proof [--out proof.html] [--minutes 10] [--only NAME ...]        (or: python benchmarks/proof.py)

It runs from a clone, whose benchmarks and tests it starts in short forms, each within its share of the time:

    parity       modules as people write them, under several strategies, against one device (tests/acceptance)
    silent_bugs  what trainers are known to get wrong without a word (benchmarks/silent_bugs)
    resuming     killed after some of its steps, a training ends as if it had not been (benchmarks/resume_table.py)
    survival     kills, freezes and stops of runs, and damaged checkpoints (benchmarks/survival.py)
    wall_time    a GPT by hand and with each framework (benchmarks/real_models.py)
    gpus         what only GPUs show (benchmarks/gpu_check.py), on machines that have some

The page has the tables, the machine, the versions, and what could not be run and why.
"""

import argparse
import html
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "evener", "torch", "pytorch-lightning", "torchmetrics", "accelerate", "transformers", "pytorch-ignite", "numpy",
)  # fmt: skip
PEERS = {
    "pytorch_lightning": "Lightning",
    "accelerate": "Accelerate",
    "transformers": "transformers",
    "ignite": "Ignite",
}


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        title: its heading.
        command: the words behind `python`; SECONDS stands for four fifths of its time.
        share: of the time.
        needs: packages without which it can't run, by the words of pip that install them.
    """

    title: str
    command: str
    share: float
    needs: tuple[str, str] = ("torch", "torch")


SECTIONS = {
    "parity": Section(
        "Modules as people write them train as on one device",
        "tests/acceptance/run.py --strategies dp,ddp,model_parallel,fsdp --table docs "
        "--only LitDigits,OneCycle,GraphClassifier,Quantiles,BestMetric,LabelSmoothing,Housing,CLIP",
        0.2,
        ("pytest psutil", '-e ".[test]"'),
    ),
    "silent_bugs": Section(
        "Silent bugs of trainers",
        "benchmarks/silent_bugs/run.py --seconds SECONDS --only control accumulated_tokens ranks_sum ranks_tokens "
        "ranks_uneven ranks_same_noise resume_random_numbers resume_second_epoch validation_padding",
        0.3,
    ),
    "resuming": Section(
        "Killed and resumed",
        "benchmarks/resume_table.py --every 3 --strategies one_device --loaders noisy_workers",
        0.15,
    ),
    "survival": Section(
        "Kills, freezes, stops and damaged checkpoints",
        "benchmarks/survival.py --kills 3 --commands 1 --per-run 2 --jobs 2 --files 200",
        0.15,
    ),
    "wall_time": Section(
        "Wall time of a GPT of 10 million parameters",
        "benchmarks/real_models.py --models GPT --ranks 1 --rounds 3 --steps 8 --seconds SECONDS",
        0.2,
    ),
    "gpus": Section("What only GPUs show", "benchmarks/gpu_check.py", 1.0),
}


def missing(name: str, section: Section) -> str:
    """Why a section can't run here; empty if it can."""
    packages, words = section.needs
    if absent := [package for package in packages.split() if not find_spec(package)]:
        return f"without {', '.join(absent)} (pip install {words})"
    if name == "gpus":
        import torch

        return "" if torch.cuda.is_available() else "this machine has no GPU that torch can use"
    return "not on Windows" if not hasattr(os, "fork") else ""


def run(command: str, limit_s: float) -> tuple[str, str]:
    """Run a section's program; returns its output, with errors if it did not end well, and how it ended."""
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen(
        [sys.executable, *command.split()], cwd=ROOT, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit_s)
        ended = f"exit status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        ended = f"ended after {limit_s:.0f} s, its share of the time"
    return output + errors * bool(ended), ended


def inline(text: str) -> str:
    """Markdown of one cell or line as HTML."""
    text = html.escape(text)
    text = re.sub(r"\[([^]]+)\]\((https:[^)]+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def body(output: str) -> str:
    """The tables of an output as tables, and the rest as it is."""
    found: list[str] = []
    for is_table, lines in _runs(output.strip().splitlines()):
        if not is_table:
            text = "\n".join(lines[-60:]).strip()
            found.append(f"<pre>{html.escape(text)}</pre>" if text else "")
            continue
        rows = [[inline(cell.strip()) for cell in line.strip("|").split("|")] for line in lines if "|---" not in line]
        cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
        found.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    return "\n".join(found)


def _runs(lines: list[str]) -> list[tuple[bool, list[str]]]:
    runs: list[tuple[bool, list[str]]] = []
    for line in lines:
        if not runs or runs[-1][0] != line.startswith("|"):
            runs.append((line.startswith("|"), []))
        runs[-1][1].append(line)
    return runs


def machine() -> list[str]:
    """What the numbers were measured on."""
    import torch

    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return [
        f"{platform.platform()}; {os.cpu_count()} cores{load}; {', '.join(gpus) or 'no GPU'}",
        f"Python {platform.python_version()}, {', '.join(versions)}",
        time.strftime("%Y-%m-%d %H:%M %Z"),
    ]


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td{border:1px solid #bbb;padding:.2em .6em;vertical-align:top}"
    "tr:first-child td{font-weight:600}pre{background:#f4f4f4;padding:.6em;overflow-x:auto;font-size:12px}"
    ".bad{color:#a00}"
)


def page(parts: list[str], about: list[str]) -> str:
    """The page, of its parts and what is said of the machine."""
    peers = [name for package, name in PEERS.items() if not find_spec(package)]
    absent = f"<p>Not compared with {', '.join(peers)}: not installed.</p>" if peers else ""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in about)
    top = f"<!doctype html><html lang=en><meta charset=utf-8><title>Evener: proof</title><style>{STYLE}</style>"
    return f"{top}<h1>What Evener claims, tried on this machine</h1><ul>{lines}</ul>{absent}\n" + "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("proof.html"), help="file for the page")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all but GPUs, which may take as long again")
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    given = parser.parse_args()
    about, parts, status = machine(), list[str](), 0
    spare_s = 0.0
    for name in given.only:
        section, since = SECTIONS[name], time.monotonic()
        limit_s = section.share * 60 * given.minutes + spare_s
        command = section.command.replace("SECONDS", f"{0.8 * limit_s:.0f}")
        reason = missing(name, section)
        output, ended = ("", f"not run: {reason}") if reason else run(command, limit_s)
        took_s = time.monotonic() - since
        spare_s = max(0.0, limit_s - took_s)
        status |= bool(ended) and not reason
        print(f"{name:12s} {took_s:5.0f} s  {ended or 'done'}", flush=True)
        said = f'<p class="bad">{html.escape(ended)}</p>' if ended else ""
        parts.append(
            f"<h2>{html.escape(section.title)}</h2><p><code>python {html.escape(command)}</code>, "
            f"{took_s:.0f} s</p>{said}\n{body(output)}"
        )
        given.out.write_text(page(parts, about), encoding="utf-8")
    print(f"{given.out} is written.")
    return status


if __name__ == "__main__":
    sys.exit(main())
