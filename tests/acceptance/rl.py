"""Reinforcement learning from recorded and replayed experience."""

import copy
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

from .case import WHOLE, ByHand, Lit, Rows, both, case, ints, mlp, normal, uniform


@case(
    both(lambda n, s: Rows(normal(n, 4, seed=s), ints(3, n, seed=s + 1), normal(n, seed=s + 2))), "remedy", "loss"
)  # fmt: skip
class Reinforce(Lit):
    """Policy gradient with advantages that are centred over the batch."""

    def build(self):
        self.policy = mlp(4, 8, 3)

    def step(self, batch):
        states, actions, returns = batch
        return self.loss(Categorical(logits=self.policy(states)).log_prob(actions), returns)

    def loss(self, log_probs, returns):
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        return -(log_probs * advantages).mean()


class Replay(IterableDataset):
    """Transitions from a buffer that an agent has filled."""

    def __init__(self, num: int, seed: int) -> None:
        states, following = normal(40, 4, seed=seed), normal(40, 4, seed=seed + 1)
        rows = zip(states, ints(3, 40, seed=seed), uniform(40, seed=seed), following, strict=True)
        self.buffer, self.num = deque(rows, maxlen=32), num

    def __iter__(self):
        for i in range(self.num):
            yield self.buffer[(7 * i) % len(self.buffer)]


def replayed():
    return DataLoader(Replay(21, 0), batch_size=8), DataLoader(Replay(13, 3), batch_size=8)


@case(replayed, remedies=WHOLE, max_epochs=2)
class DQN(Lit):
    """An iterable dataset over a replay buffer; a target network that is copied every second step."""

    def __init__(self, gamma: float = 0.9, sync_rate: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.target_net = mlp(4, 8, 3), mlp(4, 8, 3)

    def step(self, batch):
        states, actions, rewards, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
        return nn.MSELoss()(values, next_values * self.hparams.gamma + rewards)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


class ActorCritic(ByHand):
    """An optimizer each for the actor and for what judges it."""

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.actor, self.critic)]


def played(n, s):
    state, action, return_ = normal(n, 4, seed=s), ints(3, n, seed=s), normal(n, seed=s + 1)
    return Rows(state, action, -uniform(n, seed=s), normal(n, seed=s), return_)


@case(both(played), "remedy", over_batch="clipped")
class PPO(ActorCritic):
    """The clipped objective, advantages normalised over the mini-batch; two optimizers by hand."""

    clip = 0.2

    def build(self):
        self.actor, self.critic = mlp(4, 8, 3), mlp(4, 8, 1)

    def clipped(self, logp, logp_old, adv):
        ratio = torch.exp(logp - logp_old)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        return -torch.min(ratio * adv, torch.clamp(ratio, 1 - self.clip, 1 + self.clip) * adv).mean()

    def training_step(self, batch, batch_idx):
        state, action, logp_old, adv, ret = batch
        opt_actor, opt_critic = self.optimizers()
        for _ in range(2):
            logp = Categorical(logits=self.actor(state)).log_prob(action)
            loss_actor = self.clipped(logp, logp_old, adv)
            self.update(opt_actor, loss_actor)
            loss_critic = (ret - self.critic(state).squeeze(-1)).pow(2).mean()
            self.update(opt_critic, loss_critic)
        self.log_dict({"train_actor": loss_actor, "train_critic": loss_critic}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.log("val_critic", (batch[4] - self.critic(batch[0]).squeeze(-1)).pow(2).mean())


def moves(n, s):
    return Rows(normal(n, 4, seed=s), uniform(n, 2, seed=s), normal(n, 1, seed=s + 1), normal(n, 4, seed=s + 2))


@case(both(moves))
class TD3(ActorCritic):
    """Two critics, a delayed actor and soft target updates, by hand."""

    tau = 0.1

    def build(self):
        self.actor, self.critic = mlp(4, 8, 2), nn.ModuleList([mlp(6, 8, 1), mlp(6, 8, 1)])
        self.actor_target = copy.deepcopy(self.actor).requires_grad_(False)
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)

    def critic_loss(self, batch):
        state, action, reward, next_state = batch
        with torch.no_grad():
            following = torch.cat([next_state, self.actor_target(next_state)], 1)
            target = reward + 0.9 * torch.min(*(q(following) for q in self.critic_target))
        return sum(F.mse_loss(q(torch.cat([state, action], 1)), target) for q in self.critic)

    def training_step(self, batch, batch_idx):
        opt_actor, opt_critic = self.optimizers()
        critic_loss = self.critic_loss(batch)
        self.update(opt_critic, critic_loss)
        self.log("train_critic", critic_loss)
        if batch_idx % 2 == 0:
            state = batch[0]
            self.update(opt_actor, -self.critic[0](torch.cat([state, self.actor(state)], 1)).mean())
            for net, target in ((self.actor, self.actor_target), (self.critic, self.critic_target)):
                for p, t in zip(net.parameters(), target.parameters(), strict=True):
                    t.data.mul_(1 - self.tau).add_(self.tau * p.data)

    def validation_step(self, batch, batch_idx):
        self.log("val_critic", self.critic_loss(batch))
