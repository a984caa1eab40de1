"""Lesson 10: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson10 import CHECKPOINTED, HOST, IN_ORDER, ONE_FOR_EACH

# ---------------------------------------------------------------------- 10.1

# The reference without its Moment: what can go wrong with random numbers and autocast is an edit of this.
BY_HAND = """\
import torch
from torch import Tensor, nn


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, asks: Tensor, block: nn.Module, x: Tensor, kwargs: dict) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block, ctx.kwargs, device = block, kwargs, x.device.type
        ctx.random = torch.get_rng_state()
        ctx.autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return block(x, **kwargs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (kept,) = ctx.saved_tensors
        x = kept.detach().requires_grad_(kept.requires_grad)
        autocast = torch.autocast(x.device.type, *ctx.autocast)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), autocast:
            torch.set_rng_state(ctx.random)
            y = ctx.block(x, **ctx.kwargs)
        torch.autograd.backward(y, grad)
        return None, None, x.grad, None


def checkpointed(block: nn.Module, x: Tensor, **kwargs) -> Tensor:
    return Recompute.apply(torch.empty(0, requires_grad=True), block, x, kwargs)
"""

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

# A copy of the input in backward, and one function of a single argument.
BY_PARTIAL = """\
import torch
from functools import partial


class Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flag, run):
        ctx.run, ctx.state = run, torch.random.get_rng_state()
        ctx.mode = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = saved.detach().clone()
            leaf.requires_grad = saved.requires_grad
            now = torch.random.get_rng_state()
            torch.random.set_rng_state(ctx.state)
            enabled, dtype = ctx.mode
            with torch.amp.autocast("cpu", enabled=enabled, dtype=dtype):
                y = ctx.run(leaf)
            torch.random.set_rng_state(now)
            (y * grad).sum().backward()
        return leaf.grad, None, None


def checkpointed(block, x, **kwargs):
    return Rerun.apply(x, torch.ones((), requires_grad=True), partial(block, **kwargs))
"""

# The input always gets a gradient, which autograd drops where nobody needs it.
ALWAYS_A_GRADIENT = edit(BY_HAND, "requires_grad_(kept.requires_grad)", "requires_grad_()")

_APPLY = "Recompute.apply(torch.empty(0, requires_grad=True), block, x, kwargs)"
_DETACH = "kept.detach().requires_grad_(kept.requires_grad)"


KEPT = (
    "the block's activations are kept: run it without recording in forward (inside an "
    "autograd.Function's forward nothing is recorded), and again in backward"
)

NOT_RECORDED = (
    "nothing was recorded: backward runs with gradients switched off. Run the block, and whatever you"
    " compute from its result, under torch.enable_grad()"
)

DRAWN = (
    "the block drew other random numbers the second time: keep their state (a Moment) in forward, before the block "
    "runs, and run it in backward under that Moment's again()"
)

NO_INPUT = (
    "the input's gradient is lost: what comes before the block learns nothing. Give the detached "
    "input requires_grad, and return its .grad"
)

OTHERS_INPUT = (
    "the second forward's input was used for both backwards: keep what a call needs with that call "
    "(ctx), not on the block or in a global variable"
)

NO_KWARGS = "the keyword arguments are lost: keep them, and pass them again in backward"

AUTOCAST_ON = (
    "autocast was off in forward, so the second run must be without it, even if backward is called "
    "under autocast: a Moment's again() switches it off, as torch.autocast(device, dtype, enabled=False) does"
)

UNDER_ZERO = (
    "right without an engine, wrong under ZeRO: there the block has its parameters only while it is "
    "called. Don't touch block.parameters(); call block(x, ...) in forward and again in backward, and"
    " let the gradients add up"
)

TORCHS = "torch.utils.checkpoint is what you are building: write it yourself"

RUN_TWICE = "run more than once in backward: one run gives all gradients"

OFF = "dropout was off in the second run: leave the block in the mode it is in"

STAYS = "still there after it is over: keep what a call needs on ctx, which goes with the graph"

MOVED = (
    "the second run has moved the generator: whatever is drawn next differs from a run without "
    "checkpointing. Put its state back, as a Moment's again() and torch.random.fork_rng() do"
)

OVERWRITTEN = "the gradient that was there is lost: gradients add up in .grad until zero_grad()"

ONE_DTYPE = "right in float32 only: keep the dtype of the input and of the gradient, and make no tensors of a fixed one"

AUTOCAST_DTYPE = (
    "autocast has another dtype in the second run: it is a part of a Moment made in forward, and "
    "torch.autocast(device, dtype, enabled) takes it"
)

CHECKPOINTED_MISTAKES = {
    "nothing checkpointed": Mistake(
        edit(BY_HAND, _APPLY, "block(x, **kwargs)"),
        KEPT,
    ),
    "recorded in forward": Mistake(
        edit(
            BY_HAND,
            "        return block(x, **kwargs)\n",
            "        with torch.enable_grad():\n            ctx.y = block(x, **kwargs)\n"
            "        return ctx.y.detach()\n",
        ),
        KEPT,
    ),
    "the output kept": Mistake(
        edit(BY_HAND, "return block(x, **kwargs)", "ctx.y = block(x, **kwargs)\n        return ctx.y"),
        "the output is kept as well: backward computes it again, so save the input alone",
    ),
    "a copy of the input": Mistake(
        edit(
            BY_HAND,
            "save_for_backward(x)",
            "save_for_backward(x.clone())",
            _DETACH,
            "kept.detach().requires_grad_(ctx.needs_input_grad[2])",
        ),
        ("a copy of the input is kept besides the input itself: save x, which costs nothing while its maker keeps it"),
    ),
    "recomputed without recording": Mistake(
        edit(BY_HAND, "torch.enable_grad(), ", ""),
        NOT_RECORDED,
    ),
    "no random state": Mistake(
        edit(BY_HAND, "            torch.set_rng_state(ctx.random)\n", ""),
        DRAWN,
    ),
    "the state taken afterwards": Mistake(
        edit(
            BY_HAND,
            "        ctx.random = torch.get_rng_state()\n",
            "",
            "        return block(x, **kwargs)\n",
            "        y = block(x, **kwargs)\n        ctx.random = torch.get_rng_state()\n        return y\n",
        ),
        DRAWN,
    ),
    "a moment of backward": Mistake(
        edit(CHECKPOINTED, "ctx.moment.again()", "Moment(x.device.type).again()"),
        DRAWN,
    ),
    "a moment too late": Mistake(
        edit(
            CHECKPOINTED,
            "ctx.moment = block, kwargs, Moment(x.device.type)\n        return block(x, **kwargs)",
            "ctx.moment = block, kwargs, None\n        y = block(x, **kwargs)\n"
            "        ctx.moment = Moment(x.device.type)\n        return y",
        ),
        DRAWN,
    ),
    "the generator moved": Mistake(
        edit(BY_HAND, "torch.random.fork_rng(devices=[]), ", ""),
        MOVED,
    ),
    "without dropout": Mistake(
        edit(BY_HAND, "y = ctx.block(x", "y = ctx.block.eval()(x"),
        OFF,
    ),
    "the block saved as a tensor": Mistake(
        edit(BY_HAND, "ctx.save_for_backward(x)", "ctx.save_for_backward(x, block)"),
        "save_for_backward() takes tensors alone; anything else is an attribute, ctx.block",
    ),
    "a fixed seed": Mistake(
        edit(
            BY_HAND,
            "ctx.random = torch.get_rng_state()",
            "torch.manual_seed(0)\n        ctx.random = torch.get_rng_state()",
        ),
        "the first run draws as it would without checkpointing: leave the generator alone in forward",
    ),
    "not detached": Mistake(
        edit(BY_HAND, _DETACH, "kept"),
        (
            "the inner backward went on into what comes before the block: it has to stop at the input. Start "
            "from x.detach().requires_grad_()"
        ),
    ),
    "the input's gradient lost": Mistake(
        edit(BY_HAND, "return None, None, x.grad, None", "return None, None, None, None"),
        NO_INPUT,
    ),
    "detached without a gradient": Mistake(
        edit(BY_HAND, _DETACH, "kept.detach()"),
        NO_INPUT,
    ),
    "parameters by grad()": Mistake(
        edit(
            BY_HAND,
            "torch.autograd.backward(y, grad)\n        return None, None, x.grad, None",
            "(gx,) = torch.autograd.grad(y, [x], grad)\n        return None, None, gx, None",
        ),
        (
            "the parameters' gradients are lost: torch.autograd.backward(y, grad) adds them up in .grad; "
            "torch.autograd.grad() only returns those that it is asked for"
        ),
    ),
    "backward twice": Mistake(
        edit(
            BY_HAND,
            "torch.autograd.backward(y, grad)\n",
            "torch.autograd.backward(y, grad, retain_graph=True)\n"
            "        for p, g in zip(*[iter(())] * 2):\n            pass\n"
            "        params = [p for p in ctx.block.parameters() if p.requires_grad]\n"
            "        for p, g in zip(params, torch.autograd.grad(y, params, grad, allow_unused=True)):\n"
            "            if g is not None:\n                p.grad += g\n",
        ),
        (
            "the parameters' gradients count twice: they are added up by the inner backward, and must not be "
            "returned or added again"
        ),
    ),
    "run twice in forward": Mistake(
        edit(
            BY_HAND,
            "        return block(x, **kwargs)\n",
            "        block(x, **kwargs)\n        return block(x, **kwargs)\n",
        ),
        "run twice in forward: the second run belongs into backward",
    ),
    "run twice in backward": Mistake(
        edit(
            BY_HAND,
            "            y = ctx.block",
            "            ctx.block(x, **ctx.kwargs)\n            torch.set_rng_state(ctx.random)\n"
            "            y = ctx.block",
        ),
        RUN_TWICE,
    ),
    "a trial run in backward": Mistake(
        edit(
            CHECKPOINTED,
            "            y = ctx.block",
            "            ctx.block(x, **ctx.kwargs)\n            y = ctx.block",
        ),
        RUN_TWICE,
    ),
    "the first run under again()": Mistake(
        edit(
            CHECKPOINTED,
            "        return block(x, **kwargs)\n",
            "        with ctx.moment.again():\n            return block(x, **kwargs)\n",
        ),
        (
            "the first run put the generator back as well, so that the next block draws the same numbers: in "
            "forward call the block as it is, and use again() in backward alone"
        ),
    ),
    "kept on the block": Mistake(
        edit(
            BY_HAND,
            "ctx.save_for_backward(x)",
            "block.kept = x",
            "(kept,) = ctx.saved_tensors",
            "kept = ctx.block.kept",
        ),
        OTHERS_INPUT,
    ),
    "a list of inputs": Mistake(
        edit(
            BY_HAND,
            "ctx.save_for_backward(x)",
            "INPUTS.append(x)",
            "(kept,) = ctx.saved_tensors",
            "kept = INPUTS.pop()",
            "class Recompute",
            "INPUTS = []\n\n\nclass Recompute",
        ),
        OTHERS_INPUT,
    ),
    "keyword arguments lost": Mistake(
        edit(BY_HAND, "y = ctx.block(x, **ctx.kwargs)", "y = ctx.block(x)"),
        NO_KWARGS,
    ),
    "keyword arguments lost at once": Mistake(
        edit(BY_HAND, "return block(x, **kwargs)", "return block(x)"),
        NO_KWARGS,
    ),
    "an input without a gradient": Mistake(
        edit(BY_HAND, "torch.empty(0, requires_grad=True)", "torch.empty(0)"),
        (
            "apply() looks at its own tensor arguments, and here x needs no gradient; the block's parameters "
            "still do. Give it one more argument, a tensor of no elements with requires_grad=True"
        ),
    ),
    "makes the input need a gradient": Mistake(
        edit(BY_HAND, _APPLY, "Recompute.apply(torch.empty(0), block, x.requires_grad_(), kwargs)"),
        "the caller's tensor: work on x.detach(), which has a requires_grad of its own",
    ),
    "autocast lost": Mistake(
        edit(BY_HAND, "torch.enable_grad(), autocast:", "torch.enable_grad():"),
        (
            "autocast was on in forward, and backward runs without it: keep its state (a Moment) in forward, and run "
            "the block in backward under that Moment's again()"
        ),
    ),
    "autocast of another dtype": Mistake(
        edit(BY_HAND, "*ctx.autocast", "torch.bfloat16, ctx.autocast[1]"),
        AUTOCAST_DTYPE,
    ),
    "autocast only if it was on": Mistake(
        edit(
            BY_HAND,
            "autocast = torch.autocast(x.device.type, *ctx.autocast)",
            "autocast = torch.autocast(x.device.type, *ctx.autocast) if ctx.autocast[1] else torch.enable_grad()",
        ),
        AUTOCAST_ON,
    ),
    "autocast always": Mistake(
        edit(BY_HAND, "*ctx.autocast", "torch.bfloat16"),
        AUTOCAST_ON,
    ),
    "float32 alone": Mistake(
        edit(BY_HAND, "return block(x, **kwargs)", "return block(x, **kwargs).float()"),
        ONE_DTYPE,
    ),
    "the gradient not used": Mistake(
        edit(BY_HAND, "torch.autograd.backward(y, grad)", "y.backward(torch.ones_like(y))"),
        "the gradient that arrives is not used: torch.autograd.backward(y, grad) starts from it",
    ),
    "a sum outside of what is recorded": Mistake(
        edit(BY_HAND, "torch.autograd.backward(y, grad)", "(y * grad).sum().backward()"),
        NOT_RECORDED,
    ),
    "the gradient passed on": Mistake(
        edit(BY_HAND, "return None, None, x.grad, None", "return None, None, grad, None"),
        "that is the gradient of the block's output, as it arrived: return the gradient of its input, x.grad",
    ),
    "in another order": Mistake(
        edit(BY_HAND, "return None, None, x.grad, None", "return x.grad, None, None, None"),
        IN_ORDER,
    ),
    "a tuple taken for the tensor": Mistake(
        edit(BY_HAND, "(kept,) = ctx.saved_tensors", "kept = ctx.saved_tensors"),
        "ctx.saved_tensors is a tuple, even of one tensor: (x,) = ctx.saved_tensors",
    ),
    "too few gradients": Mistake(edit(BY_HAND, "return None, None, x.grad, None", "return x.grad"), ONE_FOR_EACH),
    "gradients overwritten": Mistake(
        edit(
            BY_HAND,
            "        torch.autograd.backward(y, grad)\n",
            "        for param in ctx.block.parameters():\n            param.grad = None\n"
            "        torch.autograd.backward(y, grad)\n",
        ),
        OVERWRITTEN,
    ),
    "the parameters as arguments": Mistake(
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
        UNDER_ZERO,
    ),
    "torch's own": Mistake(
        "from torch.utils.checkpoint import checkpoint\n\n\n"
        "def checkpointed(block, x, **kwargs):\n    return checkpoint(block, x, use_reentrant=False, **kwargs)\n",
        TORCHS,
    ),
    "torch's other": Mistake(
        "from torch.utils.checkpoint import checkpoint\n\n\n"
        "def checkpointed(block, x, **kwargs):\n"
        "    return checkpoint(lambda x: block(x, **kwargs), x, use_reentrant=True)\n",
        TORCHS,
    ),
    "keeps every input": Mistake(
        edit(
            BY_HAND,
            "ctx.save_for_backward(x)",
            "ctx.save_for_backward(x)\n        ALL.append(x)",
            "class Recompute",
            "ALL = []\n\n\nclass Recompute",
        ),
        STAYS,
    ),
    "nothing returned": Mistake(
        edit(BY_HAND, f"return {_APPLY}", _APPLY),
        "the function returns nothing: `return` is missing",
    ),
    "seeded again in backward": Mistake(
        edit(BY_HAND, "torch.set_rng_state(ctx.random)", "torch.manual_seed(torch.initial_seed())"),
        DRAWN,
    ),
    "in eval mode": Mistake(
        edit(BY_HAND, "        return block(x, **kwargs)\n\n", "        return block.eval()(x, **kwargs)\n\n"),
        OFF,
    ),
    "keyword arguments that are tensors lost": Mistake(
        edit(
            BY_HAND,
            "**ctx.kwargs",
            "**{name: value for name, value in ctx.kwargs.items() if not isinstance(value, Tensor)}",
        ),
        NO_KWARGS,
    ),
    "the output's gradient added": Mistake(
        edit(BY_HAND, "None, None, x.grad, None", "None, None, x.grad + grad, None"),
        (
            "the gradient of the block's output was added once more: x.grad is all of the input's gradient, "
            "residual path and all"
        ),
    ),
    "the gradient divided": Mistake(
        edit(BY_HAND, "backward(y, grad)", "backward(y, grad / grad.numel())"),
        "the gradient that arrives was changed on its way in: torch.autograd.backward(y, grad) starts from it as it is",
    ),
    "a first block not checkpointed": Mistake(
        edit(
            BY_HAND,
            "    return Recompute",
            "    if not x.requires_grad:\n        return block(x, **kwargs)\n    return Recompute",
        ),
        (
            "a block whose input needs no gradient was run as always, and its activations are kept: its "
            "parameters need "
            "gradients, so it is to be checkpointed too"
        ),
    ),
    "the second run kept": Mistake(
        edit(BY_HAND, "backward(y, grad)\n", "backward(y, grad, retain_graph=True)\n        ctx.y = y\n"),
        STAYS,
    ),
    "the state of forward left behind": Mistake(
        edit(
            BY_HAND,
            "torch.random.fork_rng(devices=[]), ",
            "",
            "**ctx.kwargs)\n",
            "**ctx.kwargs)\n        torch.set_rng_state(ctx.random)\n",
        ),
        MOVED,
    ),
    "a copy of the block": Mistake(
        "import copy\n" + edit(BY_HAND, "y = ctx.block(x", "y = copy.deepcopy(ctx.block)(x"),
        "a copy of the block ran again, and its parameters got the gradients: call the block itself",
    ),
    "gradients assigned": Mistake(
        edit(
            BY_HAND,
            "        torch.autograd.backward(y, grad)\n        return None, None, x.grad, None",
            "        params = [param for param in ctx.block.parameters() if param.requires_grad]\n"
            "        inputs = [x, *params] if x.requires_grad else params\n"
            "        grads = torch.autograd.grad(y, inputs, grad, allow_unused=True)\n"
            "        for param, found in zip(inputs, grads):\n            param.grad = found\n"
            "        return None, None, x.grad, None",
        ),
        OVERWRITTEN,
    ),
    "in training mode alone": Mistake(
        edit(
            BY_HAND,
            "    return Recompute",
            "    if not block.training:\n        return block(x, **kwargs)\n    return Recompute",
        ),
        "in eval mode the activations are kept: whether to checkpoint does not depend on the block's mode",
    ),
    "kept on the class": Mistake(
        edit(BY_HAND, "ctx.random = ", "Recompute.random = ", "(ctx.random)", "(Recompute.random)"),
        OTHERS_INPUT,
    ),
    "keyword arguments on the class": Mistake(
        edit(
            BY_HAND,
            "ctx.block, ctx.kwargs, device = block, kwargs, x.device.type",
            "ctx.block, Recompute.kwargs, device = block, kwargs, x.device.type",
            "**ctx.kwargs",
            "**Recompute.kwargs",
        ),
        OTHERS_INPUT,
    ),
    "a part of it kept": Mistake(
        edit(
            BY_HAND,
            "        return block(x, **kwargs)\n\n",
            "        ctx.first = next(block.children())(x)\n        return block(x, **kwargs)\n\n",
        ),
        KEPT,
    ),
    "by way of float32": Mistake(
        edit(BY_HAND, "backward(y, grad)", "backward(y, grad.float())"),
        ONE_DTYPE,
    ),
    "autocast in float16": Mistake(
        edit(BY_HAND, "torch.get_autocast_dtype(device), torch", "torch.float16, torch"),
        AUTOCAST_DTYPE,
    ),
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

HOST_PIECES = """\
import torch


class HostOptimizer:
    def __init__(self, shard, make_optimizer, link):
        self.shard, self.link = shard, link
        self.masters = list(link.to_host(shard).float().split(100))
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = make_optimizer(self.masters)

    def receive(self, start, grad):
        came, at = self.link.to_host(grad).float(), 0
        for master in self.masters:
            first, last = max(start, at), min(start + len(came), at + len(master))
            if first < last:
                master.grad[first - at : last - at] += came[first - start : last - start]
            at += len(master)

    def step(self):
        self.optimizer.step()
        self.link.to_device(self.shard, torch.cat(self.masters).to(self.shard.dtype))
        for master in self.masters:
            master.grad.zero_()
"""

HOST_BY_PART = """\
import torch


class HostOptimizer:
    def __init__(self, shard, make_optimizer, link):
        self._link, self._target = link, shard
        self._master = link.to_host(shard).to(dtype=torch.float, copy=True)
        self._optimizer = make_optimizer([self._master])
        self._sums = {}

    def receive(self, start, grad):
        arrived = self._link.to_host(grad).to(torch.float)
        key = start, grad.numel()
        self._sums[key] = self._sums[key] + arrived if key in self._sums else arrived

    def step(self):
        self._master.grad = torch.zeros_like(self._master)
        for (start, size), value in self._sums.items():
            self._master.grad[start : start + size] += value
        self._sums.clear()
        self._optimizer.step()
        self._master.grad = None
        self._link.to_device(self._target, self._master.to(self._target.dtype))
"""

_RECEIVE = "self.master.grad[start : start + len(grad)] += self.link.to_host(grad).float()"
_SEND = "self.link.to_device(self.shard, self.master.to(self.shard.dtype))"


GRAD_BYPASS = (
    "the gradient did not come over the link when it was there: on a GPU it is on the device, which "
    "needs the memory; link.to_host(grad) copies it"
)

NEW_STATE = "the optimizer's state starts over in every step: make the optimizer once, in __init__, and keep it"

ON_THE_DEVICE = (
    "the optimizer works on the device's own shard, so its state would be there too: make it for the master, the copy "
    "that link.to_host() gave"
)

ONE_PART = "only one of the parts had an effect: every part of the gradient counts"

UP_EARLY = (
    "something goes up in receive(), before there is anything new: the masters change in step() alone, so send then"
)

EARLY = "updated before step(): receive() only takes the gradient, there may be more to come"

BF16_MASTERS = "the masters must be float32, whatever the shard is: small updates are lost in 16 bits (lesson 02)"

SCALED = "the gradient that arrives is the mean already: do not divide it again"

WIDE_DOWN = "cast before it was sent, so twice the bytes travel: send the gradient as it is, and cast on the host"

TOO_NARROW = "rounded to 16 bits, and this shard has more: cast to the shard's own dtype, self.shard.dtype"

RELOADED = (
    "the masters were loaded from the shard again, which has only their rounded values: the host's copy is the true one"
)

MUCH = "the host needs 16 bytes an element: masters, gradients and Adam's two averages in float32"

NO_UPDATE = "the masters are as before: the optimizer saw no gradient, or was not asked to step"

HOST_MISTAKES = {
    "masters in 16 bits": Mistake(
        edit(
            HOST,
            "self.master = link.to_host(shard).float()",
            "self.master = link.to_host(shard)",
            ".to_host(grad).float()",
            ".to_host(grad)",
        ),
        BF16_MASTERS,
    ),
    "the shard itself": Mistake(
        edit(HOST, "link.to_host(shard).float()", "shard"),
        ON_THE_DEVICE,
    ),
    "an optimizer of the shard": Mistake(
        edit(HOST, "make_optimizer([self.master])", "make_optimizer([shard])"), ON_THE_DEVICE
    ),
    "the shard updated": Mistake(
        edit(
            HOST,
            "make_optimizer([self.master])",
            "make_optimizer([shard])",
            "        self.optimizer.step()\n",
            "        self.shard.grad = self.master.grad.to(self.shard.dtype)\n        self.optimizer.step()\n",
            f"        {_SEND}\n",
            "",
        ),
        ON_THE_DEVICE,
    ),
    "masters made on the device": Mistake(
        edit(HOST, "link.to_host(shard).float()", "shard.float().clone()"),
        (
            "the masters did not come over the link: link.to_host(shard) copies the shard; anything else "
            "(.clone(), .float()) makes a copy where the shard is, on the device"
        ),
    ),
    "cast before it is sent": Mistake(
        edit(HOST, "self.link.to_host(grad).float()", "self.link.to_host(grad.float())"),
        WIDE_DOWN,
    ),
    "sent back in float32": Mistake(
        edit(HOST, "self.master.to(self.shard.dtype)", "self.master"),
        ("sent in float32, and rounded only on the device: cast to the shard's dtype on the host, and send half"),
    ),
    "the gradient past the link": Mistake(
        edit(HOST, "self.link.to_host(grad).float()", "grad.float()"),
        GRAD_BYPASS,
    ),
    "the result past the link": Mistake(
        edit(HOST, _SEND, "self.shard.copy_(self.master)"),
        ("the new values did not go over the link: link.to_device(shard, ...) copies them, in the shard's dtype"),
    ),
    "never sent back": Mistake(
        edit(HOST, f"        {_SEND}\n", ""),
        "the device never gets the new values: link.to_device(self.shard, ...) after the update",
    ),
    "sent before the update": Mistake(
        edit(
            HOST,
            f"        {_SEND}\n",
            "",
            "        self.optimizer.step()\n",
            f"        {_SEND}\n        self.optimizer.step()\n",
        ),
        "the values of the step before: the masters were sent before the optimizer had updated them",
    ),
    "not cleared": Mistake(
        edit(HOST, "        self.master.grad.zero_()\n", ""),
        "the last step's gradients are still in it: after a step begin with zeros",
    ),
    "cleared to None": Mistake(
        edit(HOST, "self.master.grad.zero_()", "self.optimizer.zero_grad()"),
        (
            "the gradient is None: zero_grad() sets it to None unless you say set_to_none=False. Keep a "
            "buffer of zeros, and zero it after a step"
        ),
    ),
    "overwritten": Mistake(
        edit(HOST, "] += self", "] = self"),
        "the second micro-batch's gradient has replaced the first one's: what comes before a step adds up",
    ),
    "start not used": Mistake(
        edit(HOST, "[start : start + len(grad)]", "[: len(grad)]"),
        "`start` is not used: the part belongs at shard[start : start + len(grad)]",
    ),
    "a new optimizer in every step": Mistake(
        edit(
            HOST,
            "        self.optimizer.step()",
            "        self.make([self.master]).step()",
            "self.optimizer = make_optimizer([self.master])",
            "self.make = make_optimizer",
        ),
        NEW_STATE,
    ),
    "its state dropped": Mistake(
        edit(HOST, "self.optimizer.step()\n", "self.optimizer.step()\n        self.optimizer.state.clear()\n"),
        NEW_STATE,
    ),
    "loaded again": Mistake(
        edit(
            HOST,
            "        self.optimizer.step()",
            "        self.master.copy_(self.link.to_host(self.shard))\n        self.optimizer.step()",
        ),
        RELOADED,
    ),
    "updates the masters in receive": Mistake(
        edit(
            HOST,
            "        self.optimizer.step()\n",
            "",
            _RECEIVE,
            f"{_RECEIVE}\n        self.optimizer.step()\n        self.master.grad.zero_()",
        ),
        EARLY,
    ),
    "sent in float16": Mistake(
        edit(HOST, "self.master.to(self.shard.dtype)", "self.master.half()"),
        "rounded to another 16-bit format on the way: cast to the shard's own dtype, self.shard.dtype",
    ),
    "kept on the device until the step": Mistake(
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
        GRAD_BYPASS,
    ),
    "updates in receive": Mistake(
        edit(HOST, _RECEIVE, f"{_RECEIVE}\n        self.step()"),
        EARLY,
    ),
    "the shard replaced": Mistake(
        edit(
            HOST,
            _SEND,
            "new = torch.empty_like(self.shard)\n"
            "        self.link.to_device(new, self.master.to(self.shard.dtype))\n        self.shard = new",
        ),
        (
            "self.shard is another tensor now: the model reads the old one. Copy into it, "
            "link.to_device(self.shard, ...)"
        ),
    ),
    "the whole gradient every time": Mistake(
        edit(
            HOST,
            _RECEIVE,
            "full = torch.zeros_like(self.shard)\n        full[start : start + len(grad)] = grad\n"
            "        self.master.grad += self.link.to_host(full).float()",
        ),
        "more travels than the part that came: send this part alone, when it comes",
    ),
    "added up in 16 bits": Mistake(
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
        "gradients were added up in the shard's 16 bits, which rounds: cast each to float32 first",
    ),
    "the caller's gradient": Mistake(
        edit(HOST, _RECEIVE, f"{_RECEIVE}\n        grad.zero_()"),
        "the gradient is the caller's: work on the copy",
    ),
    "Adam, whatever was asked": Mistake(
        edit(HOST, "make_optimizer([self.master])", "torch.optim.Adam([self.master], lr=3e-3)"),
        "make_optimizer([...]) makes the optimizer: it knows which kind, and with what settings",
    ),
    "one for the whole class": Mistake(
        edit(
            HOST,
            "self.master.grad = torch.zeros_like(self.master)",
            "self.master.grad = GRADS.setdefault(shard.dtype, torch.zeros_like(self.master))",
            "class HostOptimizer",
            "GRADS = {}\n\n\nclass HostOptimizer",
        ),
        "two HostOptimizers share something: keep it on self, not on the class or in a global variable",
    ),
    "everything kept twice": Mistake(
        edit(HOST, _SEND, f"self.before = self.master.clone()\n        {_SEND}"),
        MUCH,
    ),
    "divided": Mistake(
        edit(HOST, "self.link.to_host(grad).float()", "self.link.to_host(grad).float() / 2"),
        SCALED,
    ),
    "divided by the ranks": Mistake(
        edit(
            HOST,
            "self.link.to_host(grad).float()",
            "self.link.to_host(grad).float() / torch.distributed.get_world_size()",
        ),
        SCALED,
    ),
    "averaged over micro-batches": Mistake(
        edit(
            HOST,
            "        self.optimizer.step()\n",
            "        self.master.grad /= max(1, self.micros)\n        self.micros = 0\n        self.optimizer.step()\n",
            _RECEIVE,
            f"{_RECEIVE}\n        self.micros += start == 0",
            "        self.optimizer = make",
            "        self.micros = 0\n        self.optimizer = make",
        ),
        "the micro-batches were averaged: until step(), gradients add up; what arrives is divided already",
    ),
    "in order of arrival": Mistake(
        edit(
            HOST,
            _RECEIVE,
            "self.came.append(self.link.to_host(grad).float())",
            "        self.optimizer.step()\n",
            "        self.master.grad = torch.cat(self.came)\n        self.came = []\n        self.optimizer.step()\n",
            "        self.optimizer = make",
            "        self.came = []\n        self.optimizer = make",
        ),
        (
            "the shard's gradient has one element for each of the shard's: put each part at its place, and "
            "add up those of several micro-batches"
        ),
    ),
    "the device's gradient kept": Mistake(
        edit(HOST, _RECEIVE, f"self.last = grad\n        {_RECEIVE}"),
        (
            "the device cannot give its memory back while you keep the gradient itself: keep the copy that "
            "link.to_host(grad) returns"
        ),
    ),
    "differences sent": Mistake(
        edit(
            HOST,
            "        self.optimizer.step()\n",
            "        before = self.master.clone()\n        self.optimizer.step()\n",
            _SEND,
            "change = torch.empty_like(self.shard)\n"
            "        self.link.to_device(change, (self.master - before).to(self.shard.dtype))\n"
            "        self.shard += change",
        ),
        (
            "an update is too small for 16 bits to add it up there: send the masters' new values, which "
            "replace the shard's"
        ),
    ),
    "bfloat16 whatever the shard is": Mistake(
        edit(HOST, "self.master.to(self.shard.dtype)", "self.master.bfloat16()"),
        TOO_NARROW,
    ),
    "masters in float64": Mistake(
        edit(HOST, "link.to_host(shard).float()", "link.to_host(shard).double()"),
        "float32 is enough for the masters: float64 takes twice the host's memory",
    ),
    "a tensor, not a list": Mistake(
        edit(HOST, "make_optimizer([self.master])", "make_optimizer(self.master)"),
        "make_optimizer takes a list of tensors, as every optimizer does: make_optimizer([master])",
    ),
    "one part alone": Mistake(
        edit(
            HOST,
            _RECEIVE,
            "arrived = self.link.to_host(grad).float()\n        if start == 0:\n"
            "            self.master.grad[start : start + len(grad)] += arrived",
        ),
        ONE_PART,
    ),
    "cleared for every part": Mistake(
        edit(HOST, _RECEIVE, f"self.master.grad.zero_()\n        {_RECEIVE}"),
        ONE_PART,
    ),
    "another buffer": Mistake(
        edit(
            HOST,
            _RECEIVE,
            _RECEIVE.replace("self.master.grad[", "self.sum["),
            "        self.optimizer = make",
            "        self.sum = self.master.grad\n        self.optimizer = make",
            "self.master.grad.zero_()",
            "self.sum = torch.zeros_like(self.master)",
        ),
        (
            "after the first step the parts go into a new tensor, and the optimizer still reads the old one: zero the "
            "buffer that is the master's .grad, or make the new one its .grad"
        ),
    ),
    "scaled by the part's length": Mistake(
        edit(HOST, ".to_host(grad).float()", ".to_host(grad).float() * (len(grad) / len(self.shard))"),
        SCALED,
    ),
    "cleared before the step": Mistake(
        edit(HOST, "        self.optimizer.step()", "        self.master.grad.zero_()\n        self.optimizer.step()"),
        NO_UPDATE,
    ),
    "views of the masters": Mistake(
        edit(HOST, "make_optimizer([self.master])", "make_optimizer([self.master[:8], self.master[8:]])"),
        NO_UPDATE,
    ),
    "no step": Mistake(
        edit(HOST, "        self.optimizer.step()\n", ""),
        NO_UPDATE,
    ),
    "two steps": Mistake(
        edit(HOST, "self.optimizer.step()\n", "self.optimizer.step()\n        self.optimizer.step()\n"),
        "the optimizer made two steps with the same gradients: one in each step()",
    ),
    "subtracted": Mistake(
        edit(HOST, "] += self", "] -= self"),
        "the gradient was subtracted: the optimizer itself goes against it, so add what arrives",
    ),
    "parts sent up in receive": Mistake(
        edit(
            HOST,
            _RECEIVE,
            f"{_RECEIVE}\n        at = slice(start, start + len(grad))\n"
            "        self.link.to_device(self.shard[at], self.master[at].to(self.shard.dtype))",
        ),
        UP_EARLY,
    ),
    "all sent up in receive": Mistake(edit(HOST, _RECEIVE, f"{_RECEIVE}\n        {_SEND}"), UP_EARLY),
    "masters rounded after the step": Mistake(
        edit(HOST, _SEND, f"self.master.copy_(self.master.to(self.shard.dtype))\n        {_SEND}"),
        RELOADED,
    ),
    "gathered on the device": Mistake(
        edit(
            HOST,
            _RECEIVE,
            "self.sum[start : start + len(grad)] += grad",
            "        self.optimizer.step()\n",
            "        self.master.grad = self.link.to_host(self.sum).float()\n        self.sum.zero_()\n"
            "        self.optimizer.step()\n",
            "        self.optimizer = make",
            "        self.sum = torch.zeros_like(shard)\n        self.optimizer = make",
        ),
        GRAD_BYPASS,
    ),
    "the shard cast before it is sent": Mistake(
        edit(HOST, "link.to_host(shard).float()", "link.to_host(shard.float())"),
        (
            "the shard was cast before it was sent, so twice the bytes travel: link.to_host(shard).float() "
            "casts on the host"
        ),
    ),
    "half of it sent back": Mistake(
        edit(
            HOST,
            _SEND,
            "new = self.master.to(self.shard.dtype)[: len(self.shard) // 2]\n"
            "        self.link.to_device(self.shard[: len(new)], new)",
        ),
        "a part of the shard never gets its new values: send all of it after the step",
    ),
    "by way of float16": Mistake(
        edit(HOST, "self.master.to(self.shard.dtype)", "self.master.half().to(self.shard.dtype)"),
        TOO_NARROW,
    ),
    "clamped": Mistake(
        edit(
            HOST,
            "        self.optimizer.step()",
            "        self.master.grad.clamp_(-1, 1)\n        self.optimizer.step()",
        ),
        "the gradients were clipped, which nobody asked for: the optimizer takes them as they are",
    ),
    "waits for all parts": Mistake(
        edit(
            HOST,
            "        self.optimizer.step()",
            "        if not self.master.grad.all():\n            return\n        self.optimizer.step()",
        ),
        "no step was made while a part had no gradient: step() updates with what came, and the rest counts as zeros",
    ),
    "what came is kept": Mistake(
        edit(
            HOST, _RECEIVE, f"self.came = [*getattr(self, 'came', []), self.link.to_host(grad)]\n        {_RECEIVE}"
        ).replace("] += self.link.to_host(grad).float()", "] += self.came[-1].float()"),
        MUCH,
    ),
    "masters that begin at 0": Mistake(
        edit(HOST, "link.to_host(shard).float()", "torch.zeros_like(link.to_host(shard).float())"),
        (
            "the masters begin at 0, and training starts over: they begin with the shard's values, "
            "link.to_host(shard).float()"
        ),
    ),
    "gradients sent back": Mistake(
        edit(HOST, "self.master.to(self.shard.dtype)", "self.master.grad.to(self.shard.dtype)"),
        "the gradients went up, not the masters: the shard gets the masters' new values",
    ),
    "updates when all has come": Mistake(
        edit(
            HOST,
            _RECEIVE,
            f"{_RECEIVE}\n        self.came += len(grad)\n        if self.came >= len(self.shard):\n"
            "            self.came = 0\n            self.optimizer.step()\n            self.master.grad.zero_()",
            "    def step(self) -> None:\n        self.optimizer.step()\n",
            "    def step(self) -> None:\n",
            "        self.optimizer = make",
            "        self.came = 0\n        self.optimizer = make",
        ),
        EARLY,
    ),
    "magnitudes": Mistake(
        edit(HOST, ".to_host(grad).float()", ".to_host(grad).float().abs()"),
        "the gradient's sign is lost: add it as it comes",
    ),
    "a clone for the optimizer": Mistake(
        edit(HOST, "make_optimizer([self.master])", "make_optimizer([self.master.clone()])"),
        NO_UPDATE,
    ),
}

RIGHT = {
    "10.1": (BY_HAND, BY_GRAD_OF_INPUT, BY_HOOKS, BY_CLOSURE, BY_PARTIAL, ALWAYS_A_GRADIENT),
    "10.2": (HOST_PARAMETER, HOST_PARTS, HOST_LATER, HOST_PIECES, HOST_BY_PART),
}

MISTAKES = {
    "10.1": CHECKPOINTED_MISTAKES,
    "10.2": HOST_MISTAKES,
}
