"""torch.autograd.grad into sums of its own, which are added to p.grad at the end."""

import itertools

import torch


def schedule(rank, ranks, micro):
    behind = ranks - 1 - rank
    forwards = [("F", i) for i in range(micro)]
    backwards = [None] * behind + [("B", i) for i in range(micro)]
    pairs = itertools.zip_longest(forwards, backwards)
    return [action for pair in pairs for action in pair if action is not None]


def train_step(stage, actions, batches, loss_fn, total, link):
    params = [p for p in stage.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in params]
    graphs = {}
    for kind, number in actions:
        if kind == "F":
            x, y = batches[number]
            if not link.is_first:
                x = link.recv_forward()
                x.requires_grad_(True)
            result = stage(x)
            if link.is_last:
                result = loss_fn(result, y)
            else:
                link.send_forward(result)
            graphs[number] = (x, result)
            del result
            continue
        x, result = graphs.pop(number)
        wanted = params if link.is_first else [*params, x]
        given = result.new_tensor(1 / total) if link.is_last else link.recv_backward()
        found = torch.autograd.grad(result, wanted, given)
        if not link.is_first:
            link.send_backward(found[-1])
        for one, gradient in zip(sums, found, strict=False):
            one += gradient
    for p, one in zip(params, sums, strict=True):
        p.grad = one if p.grad is None else p.grad + one
