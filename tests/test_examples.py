"""The examples train on real data, and what they log is what it says."""

import inspect
import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hydra.utils import get_class
from tiny import quiet

from evener.examples.char_lm import CharLM
from evener.examples.digits import DigitsClassifier, DigitsDataModule, load_digits
from evener.examples.gan import DigitsGAN, energy_score
from evener.examples.stdlib_text import PAD, StdlibTextDataModule, collate, encode
from evener.strategies import ConfigError
from evener.trainer.cli.train import compose


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: DigitsClassifier().training_step(torch.zeros(2, 9, dtype=torch.long), 0),  # type: ignore[arg-type]
            r"got Tensor\. Choose data=digits, or the module that matches",
        ),
        (DigitsDataModule(num_val=1000, num_test=797).setup, "num_val=1000 and num_test=797 leave 0 of 1797 samples"),
        (lambda: CharLM(width=10, num_heads=4), "width=10 must be a multiple of num_heads=4"),
        (StdlibTextDataModule(max_chars=100).setup, "max_chars=100 covers only 1 files"),
    ],
)
def test_what_can_not_be_trained_is_refused_with_what_to_choose(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


# digits


def indices(data: DigitsDataModule) -> list[list[int]]:
    return [list(split.indices) for split in (data.train_set, data.val_set, data.test_set) if split is not None]


def test_digits_splits_share_no_sample_and_do_not_depend_on_the_seed_of_the_run() -> None:
    first, second, other = DigitsDataModule(), DigitsDataModule(), DigitsDataModule(split_seed=1)
    for seed, data in enumerate((first, second, other)):
        torch.manual_seed(seed)
        data.setup()
    assert [len(split) for split in indices(first)] == [1200, 297, 300]
    assert sorted(index for split in indices(first) for index in split) == list(range(1797))
    assert indices(first) == indices(second) != indices(other)


def test_digits_learns_more_than_95_percent_in_ten_epochs() -> None:
    pl.seed_everything(42, verbose=False)
    module, data = DigitsClassifier(), DigitsDataModule()
    trainer = quiet(max_epochs=10, num_sanity_val_steps=0)
    trainer.fit(module, data)
    [metrics] = trainer.test(module, data, verbose=False)
    assert metrics["test/acc"] > 0.95

    # Batches of 64, 64, 64, 64 and 44: what is logged must be the share of right answers, not a mean of means.
    predicted = torch.cat(trainer.predict(module, data))
    images, classes = load_digits()
    assert (images.shape, images.min().item(), images.max().item()) == ((1797, 1, 8, 8), 0.0, 1.0)
    right = predicted == classes[indices(data)[2]]
    assert metrics["test/acc"] == pytest.approx(right.double().mean().item(), abs=1e-6)


# char_lm


def test_loss_weight_is_the_number_of_predicted_characters() -> None:
    module = CharLM(width=8, num_blocks=1, num_heads=2)
    module.log = lambda *args, **kwargs: None  # no trainer here
    batch = collate([encode("abcde"), encode("fg"), encode("h")])
    assert batch.tolist()[1] == [*encode("fg").tolist(), PAD, PAD, PAD]
    output = module.training_step(batch, 0)
    # 4 after the first of "abcde", 1 after the first of "fg", none in "h".
    assert output["loss_weight"].item() == 5
    log_probs = module(batch[:, :-1]).log_softmax(dim=-1)
    rows, positions = [0, 0, 0, 0, 1], [0, 1, 2, 3, 0]
    expected = -log_probs[rows, positions, encode("bcdeg")].sum() / 5
    torch.testing.assert_close(output["loss"], expected)


def test_char_lm_learns_more_than_the_frequencies_of_characters() -> None:
    pl.seed_everything(42, verbose=False)
    module = CharLM(width=32, num_blocks=2, num_heads=2, max_length=64, lr=5e-3, warmup_steps=20)
    data = StdlibTextDataModule(max_length=64, max_chars=500_000)
    trainer = quiet(limit_train_batches=150, limit_val_batches=20, num_sanity_val_steps=0)
    trainer.fit(module, data)
    loss, bits = (trainer.callback_metrics[key].item() for key in ("val/loss", "val/bits_per_char"))
    assert loss < data.unigram_loss() - 0.3
    assert bits == pytest.approx(loss / math.log(2), rel=1e-5)


# gan


def test_gan_gets_better_than_the_mean_image() -> None:
    pl.seed_everything(42, verbose=False)
    module, data = DigitsGAN(), DigitsDataModule()
    trainer = quiet(max_epochs=40, num_sanity_val_steps=0, check_val_every_n_epoch=40)
    trainer.fit(module, data)
    images = load_digits()[0].flatten(1)
    train, val, _ = (images[rows] for rows in indices(data))
    mean_image, best = (val - train.mean(dim=0)).norm(dim=1).mean().item(), energy_score(train, val).item()
    assert (round(mean_image, 2), round(best, 2)) == (2.16, 1.51)  # as the class and the docs say
    assert best < trainer.callback_metrics["val/loss"].item() < mean_image


# configuration


@pytest.mark.parametrize("file", ["data/digits", "data/char_lm", "module/digits", "module/char_lm", "module/gan"])
def test_a_config_lists_every_option_with_the_default_of_its_class(file: str) -> None:
    group, _, name = file.partition("/")
    cfg = compose([f"{group}={name}", *(["data=char_lm"] if name == "char_lm" else [])])[group]
    parameters = inspect.signature(get_class(cfg["_target_"])).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert {key: value for key, value in cfg.items() if key != "_target_"} == defaults
