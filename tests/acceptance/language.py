"""Language models, taggers and text classifiers."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from .case import Lit, Rows, both, case, ints, mlp, ragged, sentences

VOCAB, DIM = 11, 8


def padded(batch):
    """Tokens padded with 0."""
    return pad_sequence(list(batch), batch_first=True)


def padded_with_labels(batch):
    tokens, labels = zip(*batch, strict=True)
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


texts = both(sentences(), collate_fn=padded)


class Block(nn.Module):
    """A pre-norm transformer block with a causal mask."""

    def __init__(self, dim: int = DIM, heads: int = 2) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(dim), nn.LayerNorm(dim), heads
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = mlp(dim, 2 * dim, dim, act=nn.GELU)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (p.view(B, T, self.heads, -1).transpose(1, 2) for p in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int = VOCAB, longest: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, DIM), nn.Embedding(longest, DIM)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@case(both(lambda n, s: Rows(ints(VOCAB, n, 9, seed=s), make=lambda t: (t[:-1], t[1:]))), gradient_clip_val=1.0)
class CharGPT(Lit):
    """Blocks of characters without padding; weights that decay and those that don't; warm-up by step."""

    def build(self):
        self.model = GPT()

    def step(self, batch):
        x, y = batch
        logits = self.model(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@case(texts)
class PaddedLM(Lit):
    """Next tokens of padded sentences, padding ignored."""

    def build(self):
        self.model = GPT()
        self.criterion = nn.CrossEntropyLoss(ignore_index=0)

    def step(self, tokens):
        logits = self.model(tokens[:, :-1])
        return self.criterion(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


@case(texts)
class MaskedSumLM(Lit):
    """The same by a mask: the losses' sum over the number of tokens."""

    def build(self):
        self.embed, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)

    def step(self, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits = self.out(self.lstm(self.embed(inputs))[0])
        mask = (targets != 0).to(logits.dtype)
        loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (loss * mask).sum() / mask.sum()


@dataclass
class CausalLMOutput:
    loss: Tensor | None
    logits: Tensor


class CausalLM(nn.Module):
    """The interface of transformers' models: the loss comes out where labels go in, which it shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = GPT()

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits, loss = self.transformer(input_ids), None
        if labels is not None:
            shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            loss = F.cross_entropy(shift_logits.view(-1, VOCAB), shift_labels.view(-1), ignore_index=-100)
        return CausalLMOutput(loss, logits)


def instructed(n, s):
    """Tokens, and labels whose prompt is ignored."""
    tokens = sentences()(n, s)
    return [(t, torch.cat([torch.full((1,), -100), t[1:]])) for t in tokens]


@case(both(instructed, collate_fn=padded_with_labels))
class FineTunedLM(Lit):
    """Instruction tuning of a pretrained causal model."""

    def build(self):
        self.model = CausalLM()

    def forward(self, **inputs):
        return self.model(**inputs)

    def step(self, batch):
        return self(**batch).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, eps=1e-8)
        num_steps = self.trainer.estimated_stepping_batches
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / (num_steps + 1)))
        return [optimizer], [{"scheduler": decay, "interval": "step", "frequency": 1}]


def translations(batch):
    sources, targets = zip(*batch, strict=True)
    return padded(sources), padded(targets)


@case(both(lambda n, s: Rows(sentences()(n, s), sentences()(n, s + 5)), collate_fn=translations))
class Translation(Lit):
    """Encoder and decoder with padding masks; label smoothing, padding ignored."""

    def build(self):
        self.src, self.tgt = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.transformer = nn.Transformer(DIM, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(DIM, VOCAB)
        self.criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)

    def step(self, batch):
        src, tgt = batch
        tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
        causal = torch.triu(torch.ones(tgt_in.size(1), tgt_in.size(1), dtype=torch.bool, device=src.device), 1)
        out = self.transformer(
            self.src(src) * math.sqrt(DIM), self.tgt(tgt_in) * math.sqrt(DIM), tgt_mask=causal,
            src_key_padding_mask=src == 0, tgt_key_padding_mask=tgt_in == 0, memory_key_padding_mask=src == 0,
        )  # fmt: skip
        return self.criterion(self.generator(out).flatten(0, 1), tgt_out.flatten())


def masked_tokens(n, s):
    """(tokens, labels): every third or so is masked."""
    found = []
    for i, tokens in enumerate(sentences()(n, s)):
        hit = (ints(3, len(tokens), seed=s + i) == 0) | (torch.arange(len(tokens)) == 0)
        found.append((tokens.masked_fill(hit, VOCAB), tokens.masked_fill(~hit, -100)))
    return found


@case(both(masked_tokens, collate_fn=padded_with_labels))
class MaskedLM(Lit):
    """BERT's objective: labels are -100 but at the masked places."""

    def build(self):
        self.embeddings, self.cls = nn.Embedding(VOCAB + 1, DIM), nn.Linear(DIM, VOCAB)
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 1)

    def step(self, batch):
        hidden = self.encoder(self.embeddings(batch["input_ids"]), src_key_padding_mask=batch["attention_mask"] == 0)
        return F.cross_entropy(self.cls(hidden).view(-1, VOCAB), batch["labels"].view(-1))


def offsets(batch):
    labels, tokens = zip(*batch, strict=True)
    starts = torch.tensor([0, *(len(t) for t in tokens[:-1])]).cumsum(0)
    return torch.stack(labels), torch.cat(tokens), starts


@case(both(lambda n, s: Rows(ints(3, n, seed=s), sentences()(n, s)), collate_fn=offsets))
class BagOfWords(Lit):
    """All sentences in one row, with their offsets, for an EmbeddingBag."""

    def build(self):
        self.embedding, self.fc = nn.EmbeddingBag(VOCAB, DIM), nn.Linear(DIM, 3)

    def step(self, batch):
        label, *text = batch
        return F.cross_entropy(self.fc(self.embedding(*text)), label)


def tagged(n, s):
    return ragged(n, 7, lambda length, seed: (ints(VOCAB, length, seed=seed, low=1), ints(4, length, seed=seed + 1)), s)


@case(both(tagged, collate_fn=padded_with_labels))
class Tagger(Lit):
    """A bidirectional LSTM over packed sentences; accuracy over the tokens of the epoch from lists."""

    def build(self):
        self.embed, self.fc = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.Linear(2 * DIM, 4)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True, bidirectional=True)
        self.validation_step_outputs = []

    def forward(self, batch):
        lengths = batch["attention_mask"].sum(1).cpu()
        packed = pack_padded_sequence(self.embed(batch["input_ids"]), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=batch["input_ids"].size(1))
        return self.fc(hidden)

    def step(self, batch):
        logits, labels = self(batch), batch["labels"]
        if not self.training:
            known = labels != -100
            self.validation_step_outputs.append({"right": (logits.argmax(-1)[known] == labels[known]).float()})
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def on_validation_epoch_end(self):
        right = torch.cat([out["right"] for out in self.validation_step_outputs])
        self.log("val_token_acc", right.mean())
        self.validation_step_outputs.clear()


@case(both(lambda n, s: Rows(ints(VOCAB, n, 6, seed=s), ints(VOCAB, n, 6, seed=s + 1))))
class DirectPreference(Lit):
    """DPO against a frozen reference model; its rewards are logged."""

    def build(self, beta: float = 0.5):
        self.beta, self.policy, self.reference = beta, GPT(), GPT().requires_grad_(False)

    def log_probs(self, model, tokens):
        logp = model(tokens[:, :-1]).log_softmax(-1)
        return logp.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2).sum(1)

    def step(self, batch):
        chosen, rejected = batch
        policy = self.log_probs(self.policy, chosen) - self.log_probs(self.policy, rejected)
        with torch.no_grad():
            reference = self.log_probs(self.reference, chosen) - self.log_probs(self.reference, rejected)
        margins = self.beta * (policy - reference)
        self.log("reward_accuracy", (margins > 0).double().mean(), on_step=False, on_epoch=True)
        return -F.logsigmoid(margins).mean()


@case(texts)
class PerplexityLM(Lit):
    """Logs the perplexity of each validation batch, which is no mean over samples."""

    def build(self):
        self.model = GPT()

    def step(self, tokens):
        return F.cross_entropy(self.model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], ignore_index=0)

    def validation_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log_dict({"val_loss": loss, "val_ppl": torch.exp(loss)})
