"""The list from a rule: backward whenever as much is under way as may be. Queues, no numbers."""

from collections import deque

import torch


def schedule(rank, ranks, micro):
    actions, forwards, backwards = [], 0, 0
    while backwards < micro:
        if forwards < micro and forwards - backwards < ranks - rank:
            actions.append(("F", forwards))
            forwards += 1
        else:
            actions.append(("B", backwards))
            backwards += 1
    return actions


def train_step(stage, actions, batches, loss_fn, total, link):
    inputs, outputs = deque(), deque()
    for kind, number in actions:
        if kind == "F":
            x = batches[number][0] if link.is_first else link.recv_forward()
            x = x.clone().requires_grad_(not link.is_first)
            y = stage(x)
            if not link.is_last:
                link.send_forward(y.detach())
            inputs.append(x)
            outputs.append((y, batches[number][1]))
            del y
        else:
            y, target = outputs.popleft()
            gradient = torch.ones((), dtype=y.dtype) / total
            if link.is_last:
                y = loss_fn(y, target)
            else:
                gradient = link.recv_backward()
            torch.autograd.backward(y, gradient)
            x = inputs.popleft()
            if not link.is_first:
                link.send_backward(x.grad)
            del x, y
