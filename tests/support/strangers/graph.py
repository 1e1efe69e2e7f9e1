"""A loop over a graph: neighbourhoods of random nodes, whose class a small GNN predicts."""

import torch
from torch import nn

NODES, EDGES, CLASSES = 2000, 12_000, 5


class Neighbourhoods:
    """Sampled nodes with the edges between them: the loader of the loop."""

    def __init__(self, x, edges, y):
        self.x, self.edges, self.y = x, edges, y

    def __iter__(self):
        for nodes in torch.randperm(NODES).split(500):
            place = torch.full((NODES,), -1)
            place[nodes] = torch.arange(len(nodes))
            inside = self.edges[:, (place[self.edges] >= 0).all(0)]
            yield {"x": self.x[nodes], "edges": place[inside], "labels": self.y[nodes]}


class GNN(nn.Module):
    """Two rounds of messages: a node's own features, and the mean of its neighbours'."""

    def __init__(self):
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, CLASSES)])
        self.others = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, CLASSES)])

    def forward(self, x, edges, labels=None):
        sources, targets = edges
        degree = torch.bincount(targets, minlength=len(x)).clamp(min=1)[:, None]
        for own, others in zip(self.own, self.others, strict=True):
            message = torch.zeros_like(x).index_add(0, targets, x[sources]) / degree
            x = own(x) + others(message)
            x = x if own is self.own[-1] else x.relu()
        loss = None if labels is None else nn.functional.cross_entropy(x, labels)
        return {"loss": loss, "logits": x}


def make(device, seed):
    y = torch.randint(CLASSES, (NODES,))
    x = torch.randn(NODES, 32)
    x[:, :CLASSES] += 2 * nn.functional.one_hot(y, CLASSES)
    edges = torch.randint(NODES, (2, EDGES))

    def evaluate(model):
        right = model(x.to(device), edges.to(device))["logits"].argmax(1) == y.to(device)
        return right.float().mean()

    return GNN(), Neighbourhoods(x, edges, y), None, {"evaluate": evaluate}
