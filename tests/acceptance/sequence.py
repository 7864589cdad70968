"""Time series and speech."""

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from .case import Lit, Rows, both, case, ints, mlp, normal, ragged

series = both(lambda n, s: Rows(normal(n, 10, 2, seed=s), normal(n, 3, seed=s + 1)))


@case(series)
class Forecaster(Lit):
    """An LSTM whose first state is made for the batch; MAE by torchmetrics' functional."""

    def build(self, hidden: int = 8):
        self.hidden = hidden
        self.lstm, self.linear = nn.LSTM(2, hidden, num_layers=2, batch_first=True), nn.Linear(hidden, 3)

    def forward(self, x):
        h0, c0 = (torch.zeros(2, x.size(0), self.hidden, device=x.device).requires_grad_() for _ in range(2))
        out, _ = self.lstm(x, (h0.detach(), c0.detach()))
        return self.linear(out[:, -1, :])

    def step(self, batch):
        y_hat = self(batch[0])
        if not self.training:
            self.log("val_mae", torchmetrics.functional.mean_absolute_error(y_hat, batch[1]))
        return nn.MSELoss()(y_hat, batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


@case(both(lambda n, s: Rows(ragged(n, 6, lambda k, seed: normal(k, 2, seed=seed), s), ints(3, n, seed=s)),
           collate_fn=lambda b: ([x for x, _ in b], torch.stack([y for _, y in b]))))  # fmt: skip
class PackedSequences(Lit):
    """Sequences of different lengths come as a list and are packed in the step."""

    def build(self):
        self.gru, self.fc = nn.GRU(2, 8), nn.Linear(8, 3)

    def step(self, batch):
        sequences, y = batch
        _, hidden = self.gru(pack_sequence(sequences, enforce_sorted=False))
        return F.cross_entropy(self.fc(hidden[-1]), y)


def speech(batch):
    spectrograms, labels = zip(*batch, strict=True)
    lengths = torch.tensor([len(x) for x in spectrograms]), torch.tensor([len(y) for y in labels])
    return pad_sequence(spectrograms, batch_first=True), pad_sequence(labels, batch_first=True), *lengths


def spoken(n, s):
    x = ragged(n, 14, lambda k, seed: normal(k, 3, seed=seed), s, shortest=9)
    return Rows(x, ragged(n, 4, lambda k, seed: ints(5, k, seed=seed, low=1), s))


@case(both(spoken, collate_fn=speech))
class SpeechCTC(Lit):
    """CTC, each utterance's loss divided by its length (the default reduction).

    The backward direction reads the padding first, whose length is that of the longest utterance of the part.
    """

    def build(self):
        self.rnn, self.fc = nn.GRU(3, 8, batch_first=True, bidirectional=True), nn.Linear(16, 5)
        self.criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def step(self, batch):
        spectrograms, labels, input_lengths, label_lengths = batch
        output = F.log_softmax(self.fc(self.rnn(spectrograms)[0]), dim=2).transpose(0, 1)
        return self.criterion(output, labels, input_lengths, label_lengths)


@case(series)
class Quantiles(Lit):
    """The pinball loss of three quantiles."""

    def build(self):
        self.net = nn.Sequential(nn.Flatten(), mlp(20, 16, 9))

    def step(self, batch):
        x, y = batch
        preds = self.net(x).view(-1, 3, 3)
        errors = [(q, y - preds[..., i]) for i, q in enumerate([0.1, 0.5, 0.9])]
        return torch.stack([torch.max((q - 1) * e, q * e) for q, e in errors], dim=-1).sum(-1).mean()


def time_first(batch):
    x, y = zip(*batch, strict=True)
    return torch.stack(x, dim=1), torch.stack(y)


@case(both(lambda n, s: Rows(normal(n, 10, 2, seed=s), ints(3, n, seed=s)), collate_fn=time_first))
class TimeFirst(Lit):
    """Samples are dimension 1 of the inputs, as torch's recurrent layers have it by default."""

    def build(self):
        self.rnn, self.fc = nn.LSTM(2, 8), nn.Linear(8, 3)

    def step(self, batch):
        x, y = batch
        return F.cross_entropy(self.fc(self.rnn(x)[0][-1]), y)


@case(both(lambda n, s: Rows(normal(n, 8, 2, seed=s), ints(2, n, seed=s))))
class Anomalies(Lit):
    """An autoencoder; the threshold of the epoch's errors comes from two lists."""

    optimizer = torch.optim.RMSprop

    def build(self):
        self.encoder, self.decoder = nn.GRU(2, 6, batch_first=True), nn.GRU(6, 2, batch_first=True)

    def errors(self, x):
        _, h = self.encoder(x)
        return (self.decoder(h[-1].unsqueeze(1).expand(-1, x.size(1), -1))[0] - x).pow(2).mean((1, 2))

    def step(self, batch):
        return self.errors(batch[0]).mean()

    def on_validation_epoch_start(self):
        self.scores, self.labels = [], []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.scores.append(self.errors(x).cpu())
        self.labels.append(y.cpu())

    def on_validation_epoch_end(self):
        scores, labels = torch.cat(self.scores), torch.cat(self.labels)
        found = scores > scores.quantile(0.6)
        self.log("val_threshold", scores.quantile(0.6))
        self.log("val_precision", (labels[found] == 1).double().mean())
