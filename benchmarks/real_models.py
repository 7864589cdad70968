"""Measure samples per second of three usual models, by hand and with each framework, on one device and on two ranks.

    python benchmarks/real_models.py [--models NAME ...] [--ranks 1 2] [--rounds 5] [--steps 10] [--seconds S]
        [--device cuda]

| model | data |
|---|---|
| ResNet-18 (11 million parameters) | drawings of 32 × 32, cropped and flipped at random by a data worker |
| GPT (10 million parameters) | windows of 64 bytes of these docs |
| U-Net (2 million parameters) | drawings of 64 × 64 with a mask |

In every round each framework trains right after the loop by hand, in processes of its own (one thread each, a data
worker each), and the median time of its steps is compared with the loop's of that round. A row shows the median of the
rounds and, in brackets, the smallest and largest. With `--device cuda` batches have 64 samples from six workers, and
the mean time of all steps after the first tenth is compared; the host waits for the GPU at both ends only. Evener and
what else of Lightning, Accelerate and transformers is installed (the extra `benchmarks`); nothing logs but the loss of
the epoch, and nothing is saved.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from frameworks.attempt import attempt, installed, load
from frameworks.problem import Batch, Problem
from silent_bugs.run import machine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

CONTENDERS = ("by hand", "evener", "lightning", "accelerate", "transformers")
BATCH = {"cpu": 4, "cuda": 64}
"""Samples of a step, over all ranks."""
WORKERS = {"cpu": 1, "cuda": 6}
WARM_UP = 3
"""Steps that do not count: what is prepared in the first ones is paid once in a run."""


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.short(x)).relu()


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for before, after, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(before, after, stride), Block(after, after, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class GPT(nn.Module):
    """A decoder of bytes with six layers."""

    def __init__(self, width: int = 384, length: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.token(x) + self.place, mask=self.mask, is_causal=True))


def twice(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(8, after), nn.ReLU(),
        nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(8, after), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Three levels down and up again, with skip connections."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(twice, (3, *widths[:-1]), widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(deep, flat, 2, 2) for deep, flat in pairs)
        self.merge = nn.ModuleList(twice(2 * flat, flat) for _, flat in pairs)
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for down in self.down:
            x = down(F.max_pool2d(x, 2) if skipped else x)
            skipped.append(x)
        for up, merge, skip in zip(self.up, self.merge, skipped[-2::-1], strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)


class Drawings(Dataset[Any]):
    """Discs on noise: their number is the class, what they cover the mask."""

    def __init__(self, num: int, size: int, mask: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 10, (num,), generator=generator)
        centres = torch.rand(num, 9, 2, 1, 1, generator=generator) * size
        row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        near = (row - centres[:, :, 0]) ** 2 + (column - centres[:, :, 1]) ** 2 < (size / 8) ** 2
        near &= (torch.arange(9) < self.labels[:, None])[..., None, None]
        self.masks, noise = near.any(1), torch.randint(0, 60, (num, 3, size, size), generator=generator)
        self.images, self.mask = (noise + 150 * self.masks[:, None]).to(torch.uint8), mask

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Any:
        image = self.images[i].float() / 255
        if self.mask:
            return {"x": image, "labels": self.masks[i, None].float(), "i": torch.tensor(i)}
        top, left, flips = (int(torch.randint(0, most, ())) for most in (9, 9, 2))
        size = image.shape[-1]
        image = F.pad(image, (4, 4, 4, 4))[:, top : top + size, left : left + size]
        return {"x": image.flip(-1) if flips else image, "labels": self.labels[i], "i": torch.tensor(i)}


class Text(Dataset[Any]):
    """Windows of the docs, and the same one byte later."""

    def __init__(self, num: int, length: int = 64) -> None:
        pages = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
        self.bytes = torch.tensor(list(b"".join(page.read_bytes() for page in pages)))
        self.num, self.length = num, length

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        first = i * self.length % (len(self.bytes) - self.length)
        window = self.bytes[first : first + self.length + 1]
        return {"x": window[:-1], "labels": window[1:], "i": torch.tensor(i)}


def cross_entropy(net: Any, batch: Batch) -> Tensor:
    logits = net(batch["x"])
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def mask_loss(net: Any, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(net(batch["x"]), batch["labels"])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def problem(model: str, ranks: int, steps: int, device: str) -> Problem:
    """The training of a model."""
    num = BATCH[device] * steps
    net, loss, data = {
        "ResNet-18": (resnet18, cross_entropy, lambda: Drawings(num, 32, mask=False)),
        "GPT": (GPT, cross_entropy, lambda: Text(num)),
        "U-Net": (UNet, mask_loss, lambda: Drawings(num, 64, mask=True)),
    }[model]
    waits = () if device == "cpu" else (steps // 10, steps - 1)
    return Problem(
        net, loss, data, BATCH[device], ranks, shuffle=True, workers=WORKERS[device], optimizer=adamw,
        dtype=torch.float32, device=device, waits=waits,
    )  # fmt: skip


MODELS = ("ResNet-18", "GPT", "U-Net")


def serve(framework: str, steps: int, device: str, requests: Connection) -> None:
    """Train what is asked for, in forks of a process of one framework; answers seconds per step, wall and processor."""
    load(framework)
    folder = Path(tempfile.mkdtemp())
    while (asked := requests.recv()) is not None:
        model, ranks = asked
        task = problem(model, ranks, steps, device)
        made = attempt(framework, task, folder, limit_s=300)
        if not made.outcomes:
            requests.send(made.error or made.output[-300:] or "did not end")
            continue
        times = made.outcomes[0]["times"]
        if task.waits:
            first, last = task.waits
            requests.send([(times[last][i] - times[first][i]) / (last - first) for i in (0, 1)])
            continue
        times = times[WARM_UP:-1]  # the last step ends with the epoch
        requests.send([statistics.median(b[i] - a[i] for a, b in pairwise(times)) for i in (0, 1)])


def measure(
    names: list[str], models: list[str], ranks: list[int], rounds: int, steps: int, device: str, seconds: float
) -> Iterator[tuple[str, Any]]:
    """Yield each model on each number of ranks, and the seconds per step by framework; a text is an error."""
    context, servers = multiprocessing.get_context("fork"), {}
    for name in names:
        mine, theirs = context.Pipe()
        context.Process(target=serve, args=(name, steps, device, theirs), daemon=False).start()
        servers[name] = mine
    share_s = seconds / len(ranks) / len(models)
    for num, model in product(ranks, models):
        cell: dict[str, Any] = {name: [] for name in names}
        since, took_s = time.monotonic(), 0.0
        for done in range(rounds):
            if took_s * (done + 1) > share_s * max(1, done):  # another round would end too late
                break
            for name in names:
                servers[name].send((model, num))
                cell[name].append(servers[name].recv())
                print(f"{model}, {num} ranks, {name}: {cell[name][-1]}", file=sys.stderr)
            took_s = time.monotonic() - since
        yield f"{model}, {'one device' if num == 1 else f'{num} ranks'}", cell
    for server in servers.values():
        server.send(None)


def line(row: str, cell: dict[str, Any], batch: int) -> str:
    """A row of the table."""
    texts = []
    for name, times in cell.items():
        if errors := [value for value in times if isinstance(value, str)]:
            texts.append(f"failed: {errors[0][:80]}")
            continue
        text = f"{batch / statistics.median(wall for wall, _ in times):.1f}"
        for clock, word in enumerate(("", " processor")):
            ratios = [mine[clock] / hand[clock] for mine, hand in zip(times, cell["by hand"], strict=True)]
            text += f";{word} **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
        texts.append(text if name != "by hand" else text.partition(";")[0])
    return f"| {row} | " + " | ".join(texts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e6, help="for all; rounds that would end later are left out")
    parser.add_argument("--device", default="cpu", choices=BATCH)
    parser.add_argument("--json", type=Path, help="file for the seconds of every round")
    given = parser.parse_args()
    since, names, found = time.monotonic(), [name for name in CONTENDERS if name in installed()], {}
    print("| samples/s; multiple of the loop | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|", sep="\n")
    options = given.rounds, given.steps, given.device, given.seconds
    for row, cell in measure(names, given.models, given.ranks, *options):
        found[row] = cell
        print(line(row, cell, BATCH[given.device]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    name = torch.cuda.get_device_name() if given.device == "cuda" else machine()
    rounds = min(len(times) for cell in found.values() for times in cell.values())
    print(f"\n{name}. {rounds} rounds, {time.monotonic() - since:.0f} s.")


if __name__ == "__main__":
    main()
