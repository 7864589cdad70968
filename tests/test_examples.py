"""The examples train on real data, and what they log is what it says."""

import inspect
import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hydra.utils import get_class, instantiate
from tiny import quiet

from evener.examples import digits
from evener.examples.char_lm import CharLM
from evener.examples.digits import DigitsClassifier, DigitsDataModule, load_digits
from evener.examples.gan import DigitsGAN, energy_score
from evener.examples.stdlib_text import PAD, UNKNOWN, VOCABULARY_SIZE, StdlibTextDataModule, collate, cut, encode
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


def test_a_missing_scikit_learn_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "sklearn", None)
    with pytest.raises(ConfigError, match=r"pip install 'evener\[examples\]'"):
        DigitsDataModule().setup()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_batches_are_pinned_where_there_is_a_gpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    data = DigitsDataModule()
    data.setup("fit")
    assert data.train_dataloader().pin_memory == has_gpu


# char_lm


def test_text_is_encoded_and_cut_into_consecutive_sequences_of_unequal_length() -> None:
    newline, tab, space, tilde = 2, 3, 4, VOCABULARY_SIZE - 1
    assert encode("\n\t ~é").tolist() == [newline, tab, space, tilde, UNKNOWN]
    pieces = cut(torch.arange(1000), 16, torch.Generator().manual_seed(0))
    num = sum(map(len, pieces))
    assert torch.cat(pieces).tolist() == list(range(num))
    assert 1000 - num < 4
    assert {len(piece) for piece in pieces} == set(range(4, 17)) | {len(pieces[-1])}


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


def test_padding_and_later_characters_change_nothing() -> None:
    torch.manual_seed(0)
    module = CharLM(width=8, num_blocks=2, num_heads=2).double()
    alone = module(encode("import")[None])
    padded = module(collate([encode("import os"), encode("import")]))
    torch.testing.assert_close(padded[0, :6], alone[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(padded[1, :6], alone[0], rtol=0, atol=1e-12)


def test_char_lm_learns_more_than_the_frequencies_of_characters() -> None:
    pl.seed_everything(42, verbose=False)
    module = CharLM(width=32, num_blocks=2, num_heads=2, max_length=64, lr=5e-3, warmup_steps=20)
    data = StdlibTextDataModule(max_length=64, max_chars=500_000)
    trainer = quiet(limit_train_batches=150, limit_val_batches=20, num_sanity_val_steps=0)
    trainer.fit(module, data)
    loss, bits = (trainer.callback_metrics[key].item() for key in ("val/loss", "val/bits_per_char"))
    assert loss < data.unigram_loss() - 0.3
    assert bits == pytest.approx(loss / math.log(2), rel=1e-5)


def test_unigram_loss_is_the_cross_entropy_of_frequencies() -> None:
    data = StdlibTextDataModule()
    data.train_set, data.val_set = [encode("aab")], [encode("abc")]
    # Counts + 1 of 99 ids: a 3, b 2, c 1, of 102 in all; "b" and "c" are predicted.
    assert data.unigram_loss() == pytest.approx(-(math.log(2 / 102) + math.log(1 / 102)) / 2)


class Unweighted(CharLM):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx)["loss"]


def three_steps(kind: type[CharLM], **options: Any) -> torch.Tensor:
    """All weights after three batches of 7 sequences, which have unequal numbers of characters."""
    torch.manual_seed(0)
    module = kind(width=8, num_blocks=2, num_heads=2, max_length=32)
    data = StdlibTextDataModule(batch_size=7, max_length=32, max_chars=200_000)
    quiet(limit_train_batches=3, limit_val_batches=0, precision="64-true", **options).fit(module, data)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_weighing_by_characters_is_the_training_of_one_device() -> None:
    one_device = three_steps(CharLM, devices=1)
    # by what the loss divides is found where no weight says it
    for kind, strategy in ((CharLM, "dp"), (CharLM, "model_parallel"), (Unweighted, "dp")):
        spread = three_steps(kind, strategy=strategy, devices=2)
        torch.testing.assert_close(spread, one_device, rtol=0, atol=1e-10)


# gan


def test_each_gan_optimizer_moves_its_own_network_once_per_batch() -> None:
    trainer, module = quiet(limit_train_batches=7, limit_val_batches=1), DigitsGAN()
    trainer.fit(module, DigitsDataModule())
    assert trainer.global_step == 2 * 7
    owned = [{id(p) for group in one.param_groups for p in group["params"]} for one in trainer.optimizers]
    assert owned == [{id(p) for p in network.parameters()} for network in (module.generator, module.discriminator)]


def test_energy_score_by_hand() -> None:
    generated, real = torch.tensor([[0.0], [4.0]]), torch.tensor([[1.0], [6.0]])
    # E|x - y| = (1 + 3 + 6 + 2) / 4 = 3 and E|x - x'| = 4.
    assert energy_score(generated, real).item() == pytest.approx(3 - 4 / 2)


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


@pytest.mark.parametrize("name", ["digits", "char_lm", "gan", "two_devices"])
def test_an_experiment_composes_into_its_module_and_data(name: str) -> None:
    cfg = compose([f"experiment={name}"])
    assert (cfg.name, cfg.monitor, cfg.monitor_mode) == (name, "val/loss", "min")
    assert isinstance(instantiate(cfg.module), pl.LightningModule)
    assert isinstance(instantiate(cfg.data), pl.LightningDataModule)


@pytest.mark.parametrize(
    "file", ["data/digits", "data/char_lm", "module/digits", "module/char_lm", "module/gan", "module/two_devices"]
)
def test_a_config_lists_every_option_with_the_default_of_its_class(file: str) -> None:
    group, _, name = file.partition("/")
    cfg = compose([f"{group}={name}", *(["data=char_lm"] if name == "char_lm" else [])])[group]
    parameters = inspect.signature(get_class(cfg["_target_"])).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert {key: value for key, value in cfg.items() if key != "_target_"} == defaults
