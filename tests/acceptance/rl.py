"""Reinforcement learning from recorded and replayed experience."""

import copy
from collections import deque

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

import evener

from .case import WHOLE, Lit, Rows, both, case, ints, mlp, normal, remedy, uniform

rollouts = both(lambda n, s: Rows(normal(n, 4, seed=s), ints(3, n, seed=s + 1), normal(n, seed=s + 2)))


@case(rollouts, "remedy")
class Reinforce(Lit):
    """Policy gradient with advantages that are centred over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = mlp(4, 8, 3)

    def step(self, batch):
        states, actions, returns = batch
        return self.loss(Categorical(logits=self.policy(states)).log_prob(actions), returns)

    def loss(self, log_probs, returns):
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        return -(log_probs * advantages).mean()


@remedy()
class ReinforceOverBatch(Reinforce):
    def loss(self, log_probs, returns):
        return evener.over_batch(super().loss)(log_probs, returns)


class Replay(IterableDataset):
    """Transitions from a buffer that an agent has filled."""

    def __init__(self, num: int, seed: int) -> None:
        rows = zip(
            normal(40, 4, seed=seed),
            ints(3, 40, seed=seed),
            uniform(40, seed=seed),
            normal(40, 4, seed=seed + 1),
            strict=True,
        )
        self.buffer, self.num = deque(rows, maxlen=32), num

    def __iter__(self):
        for i in range(self.num):
            yield self.buffer[(7 * i) % len(self.buffer)]


@case(
    lambda: (DataLoader(Replay(21, 0), batch_size=8), DataLoader(Replay(13, 3), batch_size=8)),
    remedies=WHOLE,
    max_epochs=2,
)
class DQN(LightningModule):
    """An iterable dataset over a replay buffer; a target network that is copied every second step."""

    def __init__(self, gamma: float = 0.9, sync_rate: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.target_net = mlp(4, 8, 3), mlp(4, 8, 3)

    def dqn_mse_loss(self, batch):
        states, actions, rewards, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
        return nn.MSELoss()(values, next_values * self.hparams.gamma + rewards)

    def training_step(self, batch, batch_idx):
        loss = self.dqn_mse_loss(batch)
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.dqn_mse_loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


experience = both(
    lambda n, s: Rows(
        normal(n, 4, seed=s), ints(3, n, seed=s), -uniform(n, seed=s), normal(n, seed=s), normal(n, seed=s + 1)
    )
)


@case(experience, "remedy")
class PPO(LightningModule):
    """The clipped objective, advantages normalised over the mini-batch; two optimizers by hand."""

    def __init__(self, clip: float = 0.2) -> None:
        super().__init__()
        self.clip, self.automatic_optimization = clip, False
        self.actor, self.critic = mlp(4, 8, 3), mlp(4, 8, 1)

    def actor_loss(self, state, action, logp_old, adv):
        return self.clipped(Categorical(logits=self.actor(state)).log_prob(action), logp_old, adv)

    def clipped(self, logp, logp_old, adv):
        ratio = torch.exp(logp - logp_old)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        return -torch.min(ratio * adv, torch.clamp(ratio, 1 - self.clip, 1 + self.clip) * adv).mean()

    def training_step(self, batch, batch_idx):
        state, action, logp_old, adv, ret = batch
        opt_actor, opt_critic = self.optimizers()
        for _ in range(2):
            loss_actor = self.actor_loss(state, action, logp_old, adv)
            opt_actor.zero_grad()
            self.manual_backward(loss_actor)
            opt_actor.step()
            loss_critic = (ret - self.critic(state).squeeze(-1)).pow(2).mean()
            opt_critic.zero_grad()
            self.manual_backward(loss_critic)
            opt_critic.step()
        self.log_dict({"train_actor": loss_actor, "train_critic": loss_critic}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.log("val_critic", (batch[4] - self.critic(batch[0]).squeeze(-1)).pow(2).mean())

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.actor, self.critic)]


@remedy()
class PPOOverBatch(PPO):
    def clipped(self, logp, logp_old, adv):
        return evener.over_batch(super().clipped)(logp, logp_old, adv)


@case(
    both(
        lambda n, s: Rows(
            normal(n, 4, seed=s), uniform(n, 2, seed=s), normal(n, 1, seed=s + 1), normal(n, 4, seed=s + 2)
        )
    ),
)
class TD3(LightningModule):
    """Two critics, a delayed actor and soft target updates, by hand."""

    def __init__(self, tau: float = 0.1) -> None:
        super().__init__()
        self.tau, self.automatic_optimization = tau, False
        self.actor, self.critics = mlp(4, 8, 2), nn.ModuleList([mlp(6, 8, 1), mlp(6, 8, 1)])
        self.actor_target, self.critics_target = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_target.requires_grad_(False), self.critics_target.requires_grad_(False)

    def critic_loss(self, batch):
        state, action, reward, next_state = batch
        with torch.no_grad():
            following = torch.cat([next_state, self.actor_target(next_state)], 1)
            target = reward + 0.9 * torch.min(*(q(following) for q in self.critics_target))
        return sum(F.mse_loss(q(torch.cat([state, action], 1)), target) for q in self.critics)

    def training_step(self, batch, batch_idx):
        opt_actor, opt_critic = self.optimizers()
        critic_loss = self.critic_loss(batch)
        opt_critic.zero_grad()
        self.manual_backward(critic_loss)
        opt_critic.step()
        self.log("train_critic", critic_loss)
        if batch_idx % 2 == 0:
            state = batch[0]
            actor_loss = -self.critics[0](torch.cat([state, self.actor(state)], 1)).mean()
            opt_actor.zero_grad()
            self.manual_backward(actor_loss)
            opt_actor.step()
            for net, target in ((self.actor, self.actor_target), (self.critics, self.critics_target)):
                for p, t in zip(net.parameters(), target.parameters(), strict=True):
                    t.data.mul_(1 - self.tau).add_(self.tau * p.data)

    def validation_step(self, batch, batch_idx):
        self.log("val_critic", self.critic_loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.actor.parameters(), 1e-2), torch.optim.Adam(self.critics.parameters(), 1e-2)
