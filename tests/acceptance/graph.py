"""Graph networks: batches are one large graph, or padded molecules."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from .case import Net, Rows, Staged, both, case, ints, normal


class Data:
    """A graph: features of nodes, edges, and targets."""

    def __init__(self, **tensors):
        self.__dict__.update(tensors)

    def to(self, *args, **kwargs):
        return type(self)(**{k: v.to(*args, **kwargs) if torch.is_tensor(v) else v for k, v in vars(self).items()})


class Batch(Data):
    """Graphs side by side, which knows how to come apart."""

    @classmethod
    def from_data_list(cls, graphs):
        nums = [len(g.x) for g in graphs]
        starts = [sum(nums[:i]) for i in range(len(nums))]
        return cls(
            x=torch.cat([g.x for g in graphs]), y=torch.cat([g.y for g in graphs]), num_graphs=len(graphs),
            edge_index=torch.cat([g.edge_index + start for g, start in zip(graphs, starts, strict=True)], dim=1),
            batch=torch.cat([torch.full((num,), i) for i, num in enumerate(nums)]),
        )  # fmt: skip

    def to_data_list(self):
        found = []
        for i in range(self.num_graphs):
            nodes = (self.batch == i).nonzero().flatten()
            edges = self.edge_index[:, self.batch[self.edge_index[0]] == i] - nodes[0]
            y = self.y[nodes] if len(self.y) == len(self.x) else self.y[i : i + 1]
            found.append(Data(x=self.x[nodes], edge_index=edges, y=y))
        return found


def graphs(of_nodes):
    def rows(n, s):
        nums = ints(7, n, seed=s, low=3).tolist()
        return [
            Data(
                x=normal(k, 4, seed=s + i),
                edge_index=ints(k, 2, 2 * k, seed=s + i),
                y=ints(3, k if of_nodes else 1, seed=i),
            )
            for i, k in enumerate(nums)
        ]

    return both(rows, collate_fn=Batch.from_data_list)


class GraphConv(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, x, edge_index):
        summed = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return F.relu(self.own(x) + self.neighbours(summed))


class GraphNet(Staged):
    """A convolution, and classes of its nodes."""

    def build(self):
        self.conv, self.lin = GraphConv(4, 8), nn.Linear(8, 3)

    def forward(self, data):
        return self.lin(self.conv(data.x, data.edge_index))


@case(graphs(of_nodes=False))
class GraphClassifier(GraphNet):
    """Nodes are averaged over their graph."""

    def build(self):
        super().build()
        self.conv2 = GraphConv(8, 8)

    def forward(self, data):
        x = self.conv2(self.conv(data.x, data.edge_index), data.edge_index)
        pooled = x.new_zeros(data.num_graphs, x.size(1)).index_add(0, data.batch, x)
        counts = torch.bincount(data.batch, minlength=data.num_graphs).unsqueeze(1)
        return self.lin(pooled / counts)

    def shared_step(self, data, stage):
        out = self(data)
        loss = F.cross_entropy(out, data.y)
        self.log(f"{stage}_loss", loss, batch_size=data.num_graphs)
        if stage == "val":
            self.log("val_acc", (out.argmax(-1) == data.y).double().mean(), batch_size=data.num_graphs)
        return loss


@case(graphs(of_nodes=True))
class NodeClassifier(GraphNet):
    """Each graph has as many targets as nodes, so that the mean is over nodes."""

    def shared_step(self, data, stage):
        loss = F.cross_entropy(self(data), data.y)
        self.log(f"{stage}_loss", loss, batch_size=data.x.size(0))
        return loss


@case(both(lambda n, s: Rows(normal(n, 4, 3, seed=s), normal(n, seed=s + 1), normal(n, 4, 3, seed=s + 2))))
class ForceField(Net):
    """Forces are the energy's gradient by the positions, which training differentiates again."""

    sizes = (12, 16, 1)

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            loss = self.step(batch)
        self.log("val_loss", loss.detach())

    def step(self, batch):
        positions, energy, forces = batch
        positions = positions.clone().requires_grad_(True)
        predicted = self.net(positions.flatten(1)).squeeze(-1)
        [gradient] = torch.autograd.grad(predicted.sum(), positions, create_graph=True)
        return F.mse_loss(predicted, energy) + 0.5 * F.mse_loss(-gradient, forces)


def one_graph():
    x, edges = normal(12, 4), ints(12, 2, 30)
    data = Data(x=x, edge_index=edges, y=ints(3, 12), train=torch.arange(12) < 7, val=torch.arange(12) >= 7)
    return tuple(DataLoader([data], batch_size=1, collate_fn=lambda b: b[0]) for _ in range(2))


@case(one_graph, max_epochs=3)
class Transductive(NodeClassifier):
    """One graph is the only batch, with masks of training and validation nodes: nothing can be cut."""

    def shared_step(self, data, stage):
        out, mask = self(data), getattr(data, stage)
        self.log(f"{stage}_acc", (out.argmax(1)[mask] == data.y[mask]).double().mean(), batch_size=1)
        loss = F.cross_entropy(out[mask], data.y[mask])
        self.log(f"{stage}_loss", loss, batch_size=1)
        return loss
