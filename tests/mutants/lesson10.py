"""Lesson 10: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson10 import CHECKPOINTED, HOST

from .sources import edit

# ---------------------------------------------------------------------- 10.1

BY_GRAD_OF_INPUT = """\
import contextlib

import torch


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, call, state, modes):
        ctx.x, ctx.call, ctx.state, ctx.modes = x, call, state, modes
        with torch.no_grad():
            return call(x)

    @staticmethod
    def backward(ctx, *grads):
        here = torch.get_rng_state()
        x = ctx.x.detach()
        x.requires_grad = ctx.x.requires_grad
        try:
            torch.set_rng_state(ctx.state)
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(True))
                stack.enter_context(torch.autocast("cpu", dtype=ctx.modes[1], enabled=ctx.modes[0]))
                out = ctx.call(x)
        finally:
            torch.set_rng_state(here)
        out.backward(grads[0])
        ctx.x = ctx.call = None
        return x.grad, None, None, None, None


def checkpointed(block, x, **kwargs):
    token = torch.zeros((), requires_grad=True)
    modes = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return Again.apply(x, token, lambda value: block(value, **kwargs), torch.random.get_rng_state(), modes)
"""

BY_HOOKS = """\
import torch
from torch.autograd.graph import saved_tensors_hooks


def checkpointed(block, x, **kwargs):
    state = torch.get_rng_state()
    autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    places, again = [], []

    def pack(tensor):
        places.append(None)
        return len(places) - 1

    def unpack(place):
        if not again:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", *autocast):
                torch.set_rng_state(state)
                keep = lambda tensor: again.append(tensor.detach()) or len(again) - 1
                with saved_tensors_hooks(keep, lambda place: again[place]):
                    block(x.detach().requires_grad_(x.requires_grad), **kwargs)
        tensor, again[place] = again[place], None
        if all(tensor is None for tensor in again):
            again.clear()
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return block(x, **kwargs)
"""

BY_CLOSURE = """\
import torch


def checkpointed(block, x, **kwargs):
    asks = torch.ones(1, requires_grad=True)
    random, device = torch.get_rng_state(), x.device.type
    autocast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, asks):
            ctx.save_for_backward(x)
            return block(x, **kwargs)

        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[0])
            after = torch.get_rng_state()
            torch.set_rng_state(random)
            with torch.enable_grad(), torch.autocast(device, **autocast):
                torch.autograd.backward(block(x, **kwargs), grad)
            torch.set_rng_state(after)
            return x.grad, None

    return Once.apply(x, asks)
"""

_SECOND = "with torch.random.fork_rng(devices=[]), torch.enable_grad(), autocast:"
_APPLY = "Recompute.apply(torch.empty(0, requires_grad=True), block, x, kwargs)"
_DETACH = "kept.detach().requires_grad_(kept.requires_grad)"

CHECKPOINTED_MUTANTS = {
    "nothing checkpointed": (edit(CHECKPOINTED, _APPLY, "block(x, **kwargs)"), "the block's activations are kept"),
    "recorded in forward": (
        edit(
            CHECKPOINTED,
            "        return block(x, **kwargs)\n",
            "        with torch.enable_grad():\n            ctx.y = block(x, **kwargs)\n"
            "        return ctx.y.detach()\n",
        ),
        "the block's activations are kept",
    ),
    "the output kept": (
        edit(CHECKPOINTED, "return block(x, **kwargs)", "ctx.y = block(x, **kwargs)\n        return ctx.y"),
        "the output is kept as well",
    ),
    "a copy of the input": (
        edit(
            CHECKPOINTED,
            "save_for_backward(x)",
            "save_for_backward(x.clone())",
            _DETACH,
            "kept.detach().requires_grad_(ctx.needs_input_grad[2])",
        ),
        "a copy of the input",
    ),
    "recomputed without recording": (
        edit(CHECKPOINTED, "torch.enable_grad(), ", ""),
        "nothing was recorded",
    ),
    "no random state": (
        edit(CHECKPOINTED, "            torch.set_rng_state(ctx.random)\n", ""),
        "drew other random numbers",
    ),
    "the state taken afterwards": (
        edit(
            CHECKPOINTED,
            "        ctx.random = torch.get_rng_state()\n",
            "",
            "        return block(x, **kwargs)\n",
            "        y = block(x, **kwargs)\n        ctx.random = torch.get_rng_state()\n        return y\n",
        ),
        "drew other random numbers",
    ),
    "the generator moved": (
        edit(CHECKPOINTED, "torch.random.fork_rng(devices=[]), ", ""),
        "the second run has moved the generator",
    ),
    "without dropout": (
        edit(CHECKPOINTED, "y = ctx.block(x", "y = ctx.block.eval()(x"),
        "dropout was off in the second run",
    ),
    "the block saved as a tensor": (
        edit(CHECKPOINTED, "ctx.save_for_backward(x)", "ctx.save_for_backward(x, block)"),
        "takes tensors alone",
    ),
    "a fixed seed": (
        edit(
            CHECKPOINTED,
            "ctx.random = torch.get_rng_state()",
            "torch.manual_seed(0)\n        ctx.random = torch.get_rng_state()",
        ),
        "leave the generator alone in forward",
    ),
    "not detached": (edit(CHECKPOINTED, _DETACH, "kept"), "x.detach()"),
    "the input's gradient lost": (
        edit(CHECKPOINTED, "return None, None, x.grad, None", "return None, None, None, None"),
        "the input's gradient is lost",
    ),
    "detached without a gradient": (edit(CHECKPOINTED, _DETACH, "kept.detach()"), "the input's gradient is lost"),
    "parameters by grad()": (
        edit(
            CHECKPOINTED,
            "torch.autograd.backward(y, grad)\n        return None, None, x.grad, None",
            "(gx,) = torch.autograd.grad(y, [x], grad)\n        return None, None, gx, None",
        ),
        "the parameters' gradients are lost",
    ),
    "backward twice": (
        edit(
            CHECKPOINTED,
            "torch.autograd.backward(y, grad)\n",
            "torch.autograd.backward(y, grad, retain_graph=True)\n"
            "        for p, g in zip(*[iter(())] * 2):\n            pass\n"
            "        params = [p for p in ctx.block.parameters() if p.requires_grad]\n"
            "        for p, g in zip(params, torch.autograd.grad(y, params, grad, allow_unused=True)):\n"
            "            if g is not None:\n                p.grad += g\n",
        ),
        "the parameters' gradients count twice",
    ),
    "run twice in forward": (
        edit(
            CHECKPOINTED,
            "        return block(x, **kwargs)\n",
            "        block(x, **kwargs)\n        return block(x, **kwargs)\n",
        ),
        "run twice in forward",
    ),
    "run twice in backward": (
        edit(
            CHECKPOINTED,
            "            y = ctx.block",
            "            ctx.block(x, **ctx.kwargs)\n            torch.set_rng_state(ctx.random)\n"
            "            y = ctx.block",
        ),
        "run more than once in backward",
    ),
    "kept on the block": (
        edit(
            CHECKPOINTED,
            "ctx.save_for_backward(x)",
            "block.kept = x",
            "(kept,) = ctx.saved_tensors",
            "kept = ctx.block.kept",
        ),
        "keep what a call needs",
    ),
    "a list of inputs": (
        edit(
            CHECKPOINTED,
            "ctx.save_for_backward(x)",
            "INPUTS.append(x)",
            "(kept,) = ctx.saved_tensors",
            "kept = INPUTS.pop()",
            "class Recompute",
            "INPUTS = []\n\n\nclass Recompute",
        ),
        "keep what a call needs",
    ),
    "keyword arguments lost": (
        edit(CHECKPOINTED, "y = ctx.block(x, **ctx.kwargs)", "y = ctx.block(x)"),
        "the keyword arguments are lost",
    ),
    "keyword arguments lost at once": (
        edit(CHECKPOINTED, "return block(x, **kwargs)", "return block(x)"),
        "the keyword arguments are lost",
    ),
    "an input without a gradient": (
        edit(CHECKPOINTED, "torch.empty(0, requires_grad=True)", "torch.empty(0)"),
        "apply() looks at its own tensor arguments",
    ),
    "makes the input need a gradient": (
        edit(CHECKPOINTED, _APPLY, "Recompute.apply(torch.empty(0), block, x.requires_grad_(), kwargs)"),
        "the caller's tensor",
    ),
    "autocast lost": (
        edit(CHECKPOINTED, "torch.enable_grad(), autocast:", "torch.enable_grad():"),
        "autocast was on in forward",
    ),
    "autocast of another dtype": (
        edit(CHECKPOINTED, "*ctx.autocast", "torch.bfloat16, ctx.autocast[1]"),
        "autocast has another dtype",
    ),
    "autocast only if it was on": (
        edit(
            CHECKPOINTED,
            "autocast = torch.autocast(x.device.type, *ctx.autocast)",
            "autocast = torch.autocast(x.device.type, *ctx.autocast) if ctx.autocast[1] else torch.enable_grad()",
        ),
        "autocast was off in forward",
    ),
    "autocast always": (
        edit(CHECKPOINTED, "*ctx.autocast", "torch.bfloat16"),
        "autocast was off in forward",
    ),
    "float32 alone": (
        edit(CHECKPOINTED, "return block(x, **kwargs)", "return block(x, **kwargs).float()"),
        "must keep the input's dtype",
    ),
    "the gradient not used": (
        edit(CHECKPOINTED, "torch.autograd.backward(y, grad)", "y.backward(torch.ones_like(y))"),
        "starts from it",
    ),
    "a sum outside of what is recorded": (
        edit(CHECKPOINTED, "torch.autograd.backward(y, grad)", "(y * grad).sum().backward()"),
        "whatever you compute from its result",
    ),
    "the gradient passed on": (
        edit(CHECKPOINTED, "return None, None, x.grad, None", "return None, None, grad, None"),
        "the gradient of the block's output",
    ),
    "in another order": (
        edit(CHECKPOINTED, "return None, None, x.grad, None", "return x.grad, None, None, None"),
        "in the order of forward()'s arguments",
    ),
    "a tuple taken for the tensor": (
        edit(CHECKPOINTED, "(kept,) = ctx.saved_tensors", "kept = ctx.saved_tensors"),
        "is a tuple",
    ),
    "too few gradients": (
        edit(CHECKPOINTED, "return None, None, x.grad, None", "return x.grad"),
        "one value for each argument",
    ),
    "gradients overwritten": (
        edit(
            CHECKPOINTED,
            "        torch.autograd.backward(y, grad)\n",
            "        for param in ctx.block.parameters():\n            param.grad = None\n"
            "        torch.autograd.backward(y, grad)\n",
        ),
        "gradients add up",
    ),
    "the parameters as arguments": (
        """\
import torch


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, kwargs, random, autocast, x, *params):
        ctx.save_for_backward(x, *params)
        ctx.rest = block, kwargs, random, autocast
        return block(x, **kwargs)

    @staticmethod
    def backward(ctx, grad):
        kept, *params = ctx.saved_tensors
        block, kwargs, random, autocast = ctx.rest
        x = kept.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", *autocast):
            torch.set_rng_state(random)
            y = block(x, **kwargs)
        gx, *grads = torch.autograd.grad(y, [x, *params], grad, allow_unused=True)
        return None, None, None, None, gx if kept.requires_grad else None, *grads


def checkpointed(block, x, **kwargs):
    autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    params = [param for param in block.parameters() if param.requires_grad]
    return Recompute.apply(block, kwargs, torch.get_rng_state(), autocast, x, *params)
""",
        "wrong under ZeRO",
    ),
    "torch's own": (
        "from torch.utils.checkpoint import checkpoint\n\n\n"
        "def checkpointed(block, x, **kwargs):\n    return checkpoint(block, x, use_reentrant=False, **kwargs)\n",
        "write it yourself",
    ),
    "torch's other": (
        "from torch.utils.checkpoint import checkpoint\n\n\n"
        "def checkpointed(block, x, **kwargs):\n"
        "    return checkpoint(lambda x: block(x, **kwargs), x, use_reentrant=True)\n",
        "write it yourself",
    ),
    "keeps every input": (
        edit(
            CHECKPOINTED,
            "ctx.save_for_backward(x)",
            "ctx.save_for_backward(x)\n        ALL.append(x)",
            "class Recompute",
            "ALL = []\n\n\nclass Recompute",
        ),
        "goes with the graph",
    ),
    "nothing returned": (edit(CHECKPOINTED, f"return {_APPLY}", _APPLY), "`return` is missing"),
}

# ---------------------------------------------------------------------- 10.2

HOST_PARAMETER = """\
import torch


class HostOptimizer:
    def __init__(self, shard, make_optimizer, link):
        self.shard, self.link = shard, link
        self.param = torch.nn.Parameter(link.to_host(shard).to(torch.float32))
        self.optim = make_optimizer([self.param])

    def receive(self, start, grad):
        if self.param.grad is None:
            self.param.grad = torch.zeros_like(self.param)
        arrived = self.link.to_host(grad)
        self.param.grad.narrow(0, start, arrived.numel()).add_(arrived)

    @torch.no_grad()
    def step(self):
        self.optim.step()
        self.optim.zero_grad(set_to_none=True)
        self.link.to_device(self.shard, self.param.to(self.shard.dtype))
"""

HOST_PARTS = """\
import torch


class HostOptimizer:
    def __init__(self, shard, make_optimizer, link):
        self.shard, self.link, self.make = shard, link, make_optimizer
        self.masters = torch.empty(shard.shape, dtype=torch.float32)
        self.masters.copy_(link.to_host(shard))
        self.gradients = torch.zeros(shard.numel())
        self.optimizer = None

    def receive(self, start, grad):
        self.gradients[start : start + grad.numel()].add_(self.link.to_host(grad).to(torch.float32))

    def step(self):
        if self.optimizer is None:
            self.optimizer = self.make([self.masters])
        self.masters.grad = self.gradients
        self.optimizer.step()
        half = torch.empty_like(self.shard, device="cpu").copy_(self.masters)
        self.link.to_device(self.shard, half)
        self.gradients.fill_(0.0)
"""

HOST_LATER = """\
import torch


class HostOptimizer:
    def __init__(self, shard, make_optimizer, link):
        self.shard, self.link = shard, link
        self.master = link.to_host(shard).float()
        self.optimizer = make_optimizer([self.master])
        self.came = []

    def receive(self, start, grad):
        self.came.append((start, self.link.to_host(grad)))

    def step(self):
        self.master.grad = torch.zeros_like(self.master)
        while self.came:
            start, grad = self.came.pop(0)
            self.master.grad[start : start + grad.shape[0]] += grad
        self.optimizer.step()
        self.master.grad = None
        first = self.master.bfloat16() if self.shard.dtype == torch.bfloat16 else self.master.to(self.shard.dtype)
        middle = len(first) // 2
        self.link.to_device(self.shard[:middle], first[:middle])
        self.link.to_device(self.shard[middle:], first[middle:])
"""

_RECEIVE = "self.master.grad[start : start + len(grad)] += self.link.to_host(grad).float()"
_SEND = "self.link.to_device(self.shard, self.master.to(self.shard.dtype))"

HOST_MUTANTS = {
    "masters in 16 bits": (
        edit(
            HOST,
            "self.master = link.to_host(shard).float()",
            "self.master = link.to_host(shard)",
            ".to_host(grad).float()",
            ".to_host(grad)",
        ),
        "the masters must be float32",
    ),
    "the shard itself": (
        edit(HOST, "link.to_host(shard).float()", "shard"),
        "the optimizer works on the device's own shard",
    ),
    "masters made on the device": (
        edit(HOST, "link.to_host(shard).float()", "shard.float().clone()"),
        "the masters did not come over the link",
    ),
    "cast before it is sent": (
        edit(HOST, "self.link.to_host(grad).float()", "self.link.to_host(grad.float())"),
        "cast before it was sent",
    ),
    "sent back in float32": (
        edit(HOST, "self.master.to(self.shard.dtype)", "self.master"),
        "sent in float32, and rounded only on the device",
    ),
    "the gradient past the link": (
        edit(HOST, "self.link.to_host(grad).float()", "grad.float()"),
        "the gradient did not come over the link when it was there",
    ),
    "the result past the link": (
        edit(HOST, _SEND, "self.shard.copy_(self.master)"),
        "the new values did not go over the link",
    ),
    "never sent back": (edit(HOST, f"        {_SEND}\n", ""), "the device never gets the new values"),
    "sent before the update": (
        edit(
            HOST,
            f"        {_SEND}\n",
            "",
            "        self.optimizer.step()\n",
            f"        {_SEND}\n        self.optimizer.step()\n",
        ),
        "the values of the step before",
    ),
    "not cleared": (edit(HOST, "        self.master.grad.zero_()\n", ""), "the last step's gradients are still in it"),
    "cleared to None": (
        edit(HOST, "self.master.grad.zero_()", "self.optimizer.zero_grad()"),
        "Keep a buffer of zeros",
    ),
    "overwritten": (edit(HOST, "] += self", "] = self"), "has replaced the first one's"),
    "start not used": (edit(HOST, "[start : start + len(grad)]", "[: len(grad)]"), "`start` is not used"),
    "a new optimizer in every step": (
        edit(
            HOST,
            "        self.optimizer.step()",
            "        self.make([self.master]).step()",
            "self.optimizer = make_optimizer([self.master])",
            "self.make = make_optimizer",
        ),
        "starts over in every step",
    ),
    "its state dropped": (
        edit(HOST, "self.optimizer.step()\n", "self.optimizer.step()\n        self.optimizer.state.clear()\n"),
        "starts over in every step",
    ),
    "loaded again": (
        edit(
            HOST,
            "        self.optimizer.step()",
            "        self.master.copy_(self.link.to_host(self.shard))\n        self.optimizer.step()",
        ),
        "loaded from the shard again",
    ),
    "updates the masters in receive": (
        edit(
            HOST,
            "        self.optimizer.step()\n",
            "",
            _RECEIVE,
            f"{_RECEIVE}\n        self.optimizer.step()\n        self.master.grad.zero_()",
        ),
        "updated before step()",
    ),
    "sent in float16": (edit(HOST, "self.master.to(self.shard.dtype)", "self.master.half()"), "another 16-bit format"),
    "kept on the device until the step": (
        edit(
            HOST,
            _RECEIVE,
            "self.came.append((start, grad))",
            "        self.optimizer.step()\n",
            "        for start, grad in self.came:\n"
            f"            {_RECEIVE}\n        self.came = []\n        self.optimizer.step()\n",
            "        self.optimizer = make",
            "        self.came = []\n        self.optimizer = make",
        ),
        "did not come over the link when it was there",
    ),
    "updates in receive": (
        edit(HOST, _RECEIVE, f"{_RECEIVE}\n        self.step()"),
        "updated before step()",
    ),
    "the shard replaced": (
        edit(
            HOST,
            _SEND,
            "new = torch.empty_like(self.shard)\n"
            "        self.link.to_device(new, self.master.to(self.shard.dtype))\n        self.shard = new",
        ),
        "self.shard is another tensor now",
    ),
    "the whole gradient every time": (
        edit(
            HOST,
            _RECEIVE,
            "full = torch.zeros_like(self.shard)\n        full[start : start + len(grad)] = grad\n"
            "        self.master.grad += self.link.to_host(full).float()",
        ),
        "more travels than the part that came",
    ),
    "added up in 16 bits": (
        edit(
            HOST,
            _RECEIVE,
            "self.sum[start : start + len(grad)] += self.link.to_host(grad)",
            "        self.optimizer.step()\n",
            "        self.master.grad = self.sum.float()\n        self.optimizer.step()\n        self.sum.zero_()\n",
            "self.master.grad = torch.zeros_like(self.master)",
            "self.sum = torch.zeros_like(shard)",
            "        self.master.grad.zero_()\n",
            "",
        ),
        "added up in the shard's 16 bits",
    ),
    "the caller's gradient": (
        edit(HOST, _RECEIVE, f"{_RECEIVE}\n        grad.zero_()"),
        "the gradient is the caller's",
    ),
    "Adam, whatever was asked": (
        edit(HOST, "make_optimizer([self.master])", "torch.optim.Adam([self.master], lr=3e-3)"),
        "make_optimizer([...]) makes the optimizer",
    ),
    "one for the whole class": (
        edit(
            HOST,
            "self.master.grad = torch.zeros_like(self.master)",
            "self.master.grad = GRADS.setdefault(shard.dtype, torch.zeros_like(self.master))",
            "class HostOptimizer",
            "GRADS = {}\n\n\nclass HostOptimizer",
        ),
        "two HostOptimizers share something",
    ),
    "everything kept twice": (
        edit(HOST, _SEND, f"self.before = self.master.clone()\n        {_SEND}"),
        "the host needs 16 bytes an element",
    ),
    "divided": (
        edit(HOST, "self.link.to_host(grad).float()", "self.link.to_host(grad).float() / 2"),
        "do not divide it again",
    ),
    "averaged over micro-batches": (
        edit(
            HOST,
            "        self.optimizer.step()\n",
            "        self.master.grad /= max(1, self.micros)\n        self.micros = 0\n        self.optimizer.step()\n",
            _RECEIVE,
            f"{_RECEIVE}\n        self.micros += start == 0",
            "        self.optimizer = make",
            "        self.micros = 0\n        self.optimizer = make",
        ),
        "the micro-batches were averaged",
    ),
    "in order of arrival": (
        edit(
            HOST,
            _RECEIVE,
            "self.came.append(self.link.to_host(grad).float())",
            "        self.optimizer.step()\n",
            "        self.master.grad = torch.cat(self.came)\n        self.came = []\n        self.optimizer.step()\n",
            "        self.optimizer = make",
            "        self.came = []\n        self.optimizer = make",
        ),
        "put each part at its place",
    ),
    "the device's gradient kept": (
        edit(HOST, _RECEIVE, f"self.last = grad\n        {_RECEIVE}"),
        "the device cannot give its memory back",
    ),
    "differences sent": (
        edit(
            HOST,
            "        self.optimizer.step()\n",
            "        before = self.master.clone()\n        self.optimizer.step()\n",
            _SEND,
            "change = torch.empty_like(self.shard)\n"
            "        self.link.to_device(change, (self.master - before).to(self.shard.dtype))\n"
            "        self.shard += change",
        ),
        "send the masters' new values",
    ),
    "bfloat16 whatever the shard is": (
        edit(HOST, "self.master.to(self.shard.dtype)", "self.master.bfloat16()"),
        "this shard has more",
    ),
    "masters in float64": (
        edit(HOST, "link.to_host(shard).float()", "link.to_host(shard).double()"),
        "float32 is enough",
    ),
    "a tensor, not a list": (
        edit(HOST, "make_optimizer([self.master])", "make_optimizer(self.master)"),
        "takes a list",
    ),
    "one part alone": (
        edit(
            HOST,
            _RECEIVE,
            "arrived = self.link.to_host(grad).float()\n        if start == 0:\n"
            "            self.master.grad[start : start + len(grad)] += arrived",
        ),
        "only one of the parts",
    ),
}

RIGHT = {
    "10.1": (BY_GRAD_OF_INPUT, BY_HOOKS, BY_CLOSURE),
    "10.2": (HOST_PARAMETER, HOST_PARTS, HOST_LATER),
}

WRONG = {
    "10.1": CHECKPOINTED_MUTANTS,
    "10.2": HOST_MUTANTS,
}
