"""Lesson 22: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson22 import AVERAGE, DISPATCH

# ---------------------------------------------------------------------- 22.1

BY_FUNCTIONAL = """\
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.send, ctx.receive, ctx.group = list(send), list(receive), group
        out = torch.empty(sum(receive), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        work = dist.all_to_all_single(out, rows.detach().contiguous(), receive, send, group=group, async_op=True)
        work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(
            out, grad.contiguous(), output_split_sizes=ctx.send, input_split_sizes=ctx.receive, group=ctx.group
        )
        return (out, *3 * (None,))


def dispatch(x, chosen, experts, group):
    N, rank = dist.get_world_size(group), dist.get_rank(group)
    order = chosen.sort(stable=True).indices
    counts = torch.bincount(chosen, minlength=experts)
    everybody = [torch.empty_like(counts) for _ in range(N)]
    dist.all_gather(everybody, counts, group=group)
    mine = torch.stack(everybody).view(N, N, -1)[:, rank]  # by source and local expert
    send, receive = counts.view(N, -1).sum(1).tolist(), mine.sum(1).tolist()
    rows = functional.all_to_all_single_autograd(x[order], receive, send, group)
    local = torch.cat([torch.full((n,), e) for row in mine.tolist() for e, n in enumerate(row)])
    return functional.wait_tensor(rows), local, {"order": order, "send": send, "receive": receive, "group": group}


def combine(rows, way):
    back = Exchange.apply(rows, way["receive"], way["send"], way["group"])
    return torch.zeros_like(back).index_copy(0, way["order"], back)
"""

BY_MESSAGES = """\
import torch
import torch.distributed as dist


def exchange(rows, send, receive, group):
    me, out = dist.get_rank(group), rows.new_empty(sum(receive), *rows.shape[1:])
    goes, comes = [part.contiguous() for part in rows.split(send)], out.split(receive)
    comes[me].copy_(goes[me])
    ops = []
    for other in range(len(send)):
        if other != me and len(goes[other]):
            ops.append(dist.P2POp(dist.isend, goes[other], group=group, group_peer=other))
        if other != me and len(comes[other]):
            ops.append(dist.P2POp(dist.irecv, comes[other], group=group, group_peer=other))
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return out


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.save_for_backward()
        ctx.there, ctx.here, ctx.group = send, receive, group
        return exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.here, ctx.there, ctx.group), None, None, None


def dispatch(x, chosen, experts, group):
    N = group.size()
    each = experts // N
    places = [(chosen == e).nonzero().flatten() for e in range(experts)]
    counts = torch.tensor([len(place) for place in places])
    coming = torch.zeros(experts, dtype=torch.int64)
    dist.all_to_all(list(coming.split(each)), list(counts.split(each)), group=group)
    order = torch.cat(places)
    send = [int(part.sum()) for part in counts.split(each)]
    receive = [int(part.sum()) for part in coming.split(each)]
    local = torch.tensor([e % each for e, n in enumerate(coming.tolist()) for _ in range(n)], dtype=torch.int64)
    return Exchange.apply(x.index_select(0, order), send, receive, group), local, (order, receive, send, group)


def combine(rows, way):
    order, *back = way
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return Exchange.apply(rows, *back).index_select(0, inverse)
"""

NO_GRADIENT = (
    "no gradient finds its way back: rows travel with Exchange.apply, since dist's collectives know nothing of "
    "autograd, and nothing on their way is detached"
)
SWAP = "on the way back what was received is sent: `receive` and `send` change places, in backward and in combine"
UNSORTED = (
    "an all-to-all cuts the rows into pieces, one for each rank, so rows for one rank must lie together: put x in the "
    "order of the experts first"
)
BY_EXPERT = (
    "the rows lie in another order than the counts say: from each rank by expert, and those for one expert in the "
    "order of x, torch.argsort(chosen, stable=True)"
)
UNDO = "the rows are back, and lie as they were sent: put each where its token was, back[torch.argsort(order)]"
LOCAL = "`local` counts this rank's own experts, from 0: expert e is number e % (experts / N) on its rank"
LOCAL_ORDER = "`local` has another order than the rows: from each rank first all rows for expert 0, then those for 1"
WORLD = "that went over all processes: pass group=..., and ask the group for its size"
ARRIVE = "other ranks send other numbers of rows: exchange the counts before the rows"
MINLENGTH = "experts that nobody here has chosen count, too, with 0: bincount(chosen, minlength=experts)"
CONTIGUOUS = "a gradient may be an expanded or transposed tensor, which a collective refuses: grad.contiguous()"
SCALED = (
    "the tokens' gradients were divided: each token's gradient belongs to that token alone, so they travel as they "
    "are. Averaging is for parameters"
)
ON_THE_CLASS = "the way back was kept on the class, where the next exchange overwrites it: keep it in ctx"
NONES = "backward returns a value for each argument of forward: the gradient of the rows, and None three times"
EMPTY = (
    "a rank that has nothing to send, or gets nothing, makes the same calls as the others, in backward too: they wait "
    "for it"
)
ADDED_UP = "nothing is added up here: a row's gradient goes back to the rank that sent the row, and to no other"
TOO_MUCH = "every rank was sent everything: a token goes to the one rank that has its expert"

_SEND = "dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)"
_BACK = "        return Exchange.apply(grad, *ctx.back), None, None, None\n"
_ORDER = "order = torch.argsort(chosen, stable=True)"
_ROWS = "    rows = Exchange.apply(x[order], send, receive, group)\n"
_LOCAL = "torch.arange(experts // N).repeat(N).repeat_interleave(arrive)"
_COUNTS = "    dist.all_to_all_single(arrive, counts, group=group)  # by rank, then by local expert\n"
_HOME = "    back = Exchange.apply(rows, receive, send, group)\n"
_PLAIN = (
    "    rows = x.new_empty(sum(receive), x.shape[1])\n"
    "    dist.all_to_all_single(rows, x[order].detach(), receive, send, group=group)\n"
)

DISPATCH_MISTAKES = {
    "no way back": Mistake(edit(DISPATCH, _BACK, "        return grad, None, None, None\n"), SWAP),
    "backward as forward": Mistake(
        edit(DISPATCH, "ctx.back = receive, send, group", "ctx.back = send, receive, group"), SWAP
    ),
    "combine as dispatch": Mistake(
        edit(DISPATCH, "Exchange.apply(rows, receive, send, group)", "Exchange.apply(rows, send, receive, group)"), SWAP
    ),
    "splits exchanged": Mistake(
        edit(DISPATCH, "rows.contiguous(), receive, send, group", "rows.contiguous(), send, receive, group"),
        "all_to_all_single takes first the rows that come from each rank, and then those that go: receive, send",
    ),
    "without autograd": Mistake(edit(DISPATCH, _ROWS, _PLAIN), NO_GRADIENT),
    "back without autograd": Mistake(
        edit(
            DISPATCH,
            _HOME,
            "    back = rows.new_empty(sum(send), rows.shape[1])\n"
            "    dist.all_to_all_single(back, rows.detach(), send, receive, group=group)\n",
        ),
        NO_GRADIENT,
    ),
    "made of nothing": Mistake(
        edit(DISPATCH, "Exchange.apply(rows, receive", "Exchange.apply(rows.detach(), receive"), NO_GRADIENT
    ),
    "no tokens, no calls": Mistake(
        edit(
            DISPATCH,
            "    N = dist.get_world_size(group)\n",
            "    N = dist.get_world_size(group)\n    if len(x) == 0:\n        return x, chosen, None\n",
            "    order, send, receive, group = way\n",
            "    if way is None:\n        return rows\n    order, send, receive, group = way\n",
        ),
        EMPTY,
    ),
    "no tokens, no way back": Mistake(
        edit(DISPATCH, _HOME, f"    if len(order) == 0:\n        return rows.new_zeros(0, rows.shape[1])\n{_HOME}"),
        EMPTY,
    ),
    "no rows, no way back": Mistake(
        edit(
            DISPATCH,
            _HOME,
            f"    if len(rows) == 0:\n        return rows.new_zeros(len(order), rows.shape[1])\n{_HOME}",
        ),
        EMPTY,
    ),
    "no rows, no gradients": Mistake(
        edit(
            DISPATCH,
            "        return Exchange.apply(grad, *ctx.back), None",
            "        if len(grad) == 0:\n"
            "            return grad.new_zeros(sum(ctx.back[1]), *grad.shape[1:]), None, None, None\n"
            "        return Exchange.apply(grad, *ctx.back), None",
        ),
        EMPTY,
    ),
    "nothing sent, no call": Mistake(edit(DISPATCH, _SEND, f"if sum(send):\n            {_SEND}"), EMPTY),
    "no rows, no call": Mistake(edit(DISPATCH, _SEND, f"if sum(send) or sum(receive):\n            {_SEND}"), EMPTY),
    "unsorted": Mistake(edit(DISPATCH, _ORDER, "order = torch.arange(len(chosen))"), UNSORTED),
    "sorted by rank": Mistake(
        edit(DISPATCH, _ORDER, "order = torch.argsort(chosen // (experts // N), stable=True)"), BY_EXPERT
    ),
    "sorted by rank, experts sent along": Mistake(
        edit(
            DISPATCH,
            _ORDER,
            "order = torch.argsort(chosen // (experts // N), stable=True)",
            f"    local = {_LOCAL}\n",
            "    local = chosen.new_empty(len(rows))\n"
            "    dist.all_to_all_single(local, chosen[order] % (experts // N), receive, send, group=group)\n",
        ),
        BY_EXPERT,
    ),
    "the last first": Mistake(
        edit(DISPATCH, _ORDER, "order = len(chosen) - 1 - torch.argsort(chosen.flip(0), stable=True)"), BY_EXPERT
    ),
    "descending": Mistake(edit(DISPATCH, "(chosen, stable=True)", "(chosen, stable=True, descending=True)"), BY_EXPERT),
    "left as sent": Mistake(edit(DISPATCH, "return back[torch.argsort(order)]", "return back"), UNDO),
    "sorted again": Mistake(edit(DISPATCH, "return back[torch.argsort(order)]", "return back[order]"), UNDO),
    "numbers of all experts": Mistake(
        edit(DISPATCH, _LOCAL, f"{_LOCAL} + dist.get_rank(group) * (experts // N)"), LOCAL
    ),
    "local of all sources": Mistake(
        edit(DISPATCH, _LOCAL, "torch.arange(experts // N).repeat_interleave(arrive.view(N, -1).sum(dim=0))"),
        LOCAL_ORDER,
    ),
    "local by expert": Mistake(
        edit(DISPATCH, _LOCAL, "torch.arange(experts // N).repeat_interleave(N).repeat_interleave(arrive)"), LOCAL_ORDER
    ),
    "local from what goes": Mistake(edit(DISPATCH, "repeat_interleave(arrive)", "repeat_interleave(counts)"), ARRIVE),
    "sources": Mistake(
        edit(DISPATCH, _LOCAL, "torch.arange(N).repeat_interleave(experts // N).repeat_interleave(arrive)"),
        "that is the rank from which each row came: asked for is the expert for which it is",
    ),
    "as many come as go": Mistake(edit(DISPATCH, _COUNTS, "    arrive.copy_(counts)\n"), ARRIVE),
    "no minlength": Mistake(edit(DISPATCH, "bincount(chosen, minlength=experts)", "bincount(chosen)"), MINLENGTH),
    "experts dealt out": Mistake(
        edit(
            DISPATCH,
            _ORDER,
            "each = experts // N\n    chosen = chosen % N * each + chosen // N\n    " + _ORDER,
        ),
        "experts were dealt out in turn: neighbours are on one rank, expert e on e // (experts / N)",
    ),
    "rows of all": Mistake(edit(DISPATCH, _SEND, _SEND.replace(", group=group", "")), WORLD),
    "counts of all": Mistake(edit(DISPATCH, "(arrive, counts, group=group)", "(arrive, counts)"), WORLD),
    "the size of all": Mistake(edit(DISPATCH, "N = dist.get_world_size(group)", "N = dist.get_world_size()"), WORLD),
    "no group at all": Mistake(
        edit(
            DISPATCH,
            _SEND,
            _SEND.replace(", group=group", ""),
            "(arrive, counts, group=group)",
            "(arrive, counts)",
            "get_world_size(group)",
            "get_world_size()",
        ),
        WORLD,
    ),
    "not contiguous": Mistake(edit(DISPATCH, "rows.contiguous()", "rows"), CONTIGUOUS),
    "divides tokens": Mistake(
        edit(
            DISPATCH,
            "return Exchange.apply(grad, *ctx.back),",
            "return Exchange.apply(grad, *ctx.back) / len(ctx.back[0]),",
        ),
        SCALED,
    ),
    "gradients added up": Mistake(
        edit(
            DISPATCH,
            "        return Exchange.apply(grad, *ctx.back), None",
            "        grad = Exchange.apply(grad, *ctx.back)\n"
            "        dist.all_reduce(grad, group=ctx.back[2])\n"
            "        return grad, None",
        ),
        ADDED_UP,
    ),
    "in a global": Mistake(
        edit(
            DISPATCH,
            "    return rows, local, (order, send, receive, group)\n",
            "    global kept\n    kept = order, send, receive, group\n    return rows, local, None\n",
            "receive, group = way",
            "receive, group = kept",
        ),
        "two layers are under way at once, and the second dispatch overwrites what the first had kept: return it as "
        "the third value, and use `way`",
    ),
    "local first": Mistake(
        edit(DISPATCH, "return rows, local, (order", "return local, rows, (order"),
        "dispatch returns the rows first, then `local`, then what combine needs",
    ),
    "on the class": Mistake(
        edit(
            DISPATCH,
            "ctx.back = receive, send, group",
            "Exchange.back = receive, send, group",
            "*ctx.back",
            "*Exchange.back",
        ),
        ON_THE_CLASS,
    ),
    "one value": Mistake(edit(DISPATCH, "*ctx.back), None, None, None", "*ctx.back)"), NONES),
    "a value too few": Mistake(edit(DISPATCH, "*ctx.back), None, None, None", "*ctx.back), None, None"), NONES),
    "not waited for": Mistake(
        edit(DISPATCH, _SEND, _SEND.replace("group=group", "group=group, async_op=True")),
        "with async_op=True the rows come later: keep what the call returns, and wait() for it",
    ),
    "everything to all": Mistake(
        edit(
            DISPATCH,
            "        output = rows.new_empty(sum(receive), *rows.shape[1:])\n        " + _SEND + "\n",
            "        N, rank = dist.get_world_size(group), dist.get_rank(group)\n"
            "        sizes = [torch.zeros(N, dtype=torch.int64) for _ in range(N)]\n"
            "        dist.all_gather(sizes, torch.tensor(send), group=group)\n"
            "        most = max(int(size.sum()) for size in sizes)\n"
            "        padded = rows.new_zeros(most, *rows.shape[1:])\n"
            "        padded[: len(rows)] = rows\n"
            "        parts = [torch.empty_like(padded) for _ in range(N)]\n"
            "        dist.all_gather(parts, padded, group=group)\n"
            "        output = torch.cat([part[: int(size.sum())].split(size.tolist())[rank] "
            "for part, size in zip(parts, sizes)])\n",
        ),
        TOO_MUCH,
    ),
    "by expert, and back": Mistake(
        edit(
            DISPATCH,
            "    return rows, local, (order, send, receive, group)\n",
            "    by = torch.argsort(local, stable=True)\n"
            "    return rows[by], local[by], (order, send, receive, group, by)\n",
            "    order, send, receive, group = way\n",
            "    order, send, receive, group, by = way\n    rows = rows[torch.argsort(by)]\n",
        ),
        "the rows were sorted by expert after they came: leave them as they came, rank by rank; `local` says which "
        "expert each is for",
    ),
    "in the order of the result": Mistake(
        edit(
            DISPATCH,
            "    return rows, local, (order",
            "    return rows[torch.argsort(local, stable=True)], local, (order",
        ),
        "the rows were sorted again after they came, and neither `local` nor the way back knows of it: leave them as "
        "they came, rank by rank",
    ),
}

# ---------------------------------------------------------------------- 22.2

IN_A_BUCKET = """\
import torch
import torch.distributed as dist


def average(dense, experts, everyone, replicas):
    for grads, group in [(dense, everyone), (experts, replicas)]:
        flat = torch.cat([grad.flatten() for grad in grads]) / everyone.size()
        dist.all_reduce(flat, group=group)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))
"""

BY_AVG = """\
import torch.distributed as dist


def average(dense, experts, everyone, replicas):
    N, R = dist.get_world_size(everyone), dist.get_world_size(replicas)
    works = []
    for grad in dense:
        works.append(dist.all_reduce(grad, dist.ReduceOp.AVG, group=everyone, async_op=True))
    for grad in experts:
        works.append(dist.all_reduce(grad, dist.ReduceOp.AVG, group=replicas, async_op=True))
    for work in works:
        work.wait()
    for grad in experts:
        grad.mul_(R / N)
"""

REPLICAS = (
    "the experts' gradients were divided by their replicas. But the tokens came from all ranks, and each rank's loss "
    "counts 1/N: divide by the number of all ranks. Otherwise they are too large, as many times as ranks share the "
    "experts out"
)
MIXED = (
    "the experts' gradients were added up over all ranks: other ranks have *other* experts at this place. Only the "
    "replicas have the same"
)
EXPERTS_ALONE = "the experts' gradients were not added up over their replicas, which have had other tokens"
NOT_DIVIDED = (
    "the losses are averaged, so the gradients are: divide the sums by the number of all ranks, and in place, as "
    "`grad /= ...` does. `grad = grad / ...` makes another tensor"
)
DENSE = "every rank has the dense parameters, and its own tokens' gradient for them: add up over everyone"
IN_PLACE = "the lists that came in still hold the old gradients: change the tensors themselves, in place"
LARGEST = (
    "ReduceOp.MAX keeps the largest of the ranks' numbers, and the others' are lost: gradients add up, which is what "
    "an all-reduce does if it is told nothing else"
)
TWICE = "divided once too often: the number of all ranks has the replicas in it already"
PROCESSES = "that was all processes, and not `everyone`: pass group=..., and ask it for its size"

_LOOP = "((dense, everyone), (experts, replicas))"
AVERAGE_MISTAKES = {
    "divided by the replicas": Mistake(edit(AVERAGE, "grad /= ranks", "grad /= dist.get_world_size(group)"), REPLICAS),
    "an average of the replicas": Mistake(
        edit(
            AVERAGE,
            "            dist.all_reduce(grad, group=group)\n            grad /= ranks\n",
            "            dist.all_reduce(grad, dist.ReduceOp.AVG, group=group)\n",
        ),
        REPLICAS,
    ),
    "experts not divided": Mistake(
        edit(AVERAGE, "grad /= ranks", "grad /= ranks if group is everyone and grads is dense else 1"),
        "the experts' gradients are sums over the losses of all ranks, and their mean is asked for: divide them, too",
    ),
    "dense not divided": Mistake(
        edit(AVERAGE, "grad /= ranks", "grad /= 1 if grads is dense else ranks"),
        "the dense gradients are sums over the ranks' losses, and their mean is asked for: divide them, too",
    ),
    "divided by the expert group": Mistake(
        edit(AVERAGE, "grad /= ranks", "grad /= ranks if grads is dense else ranks // dist.get_world_size(group)"),
        "the experts' gradients were divided by the number of ranks that share the experts out. But one process "
        "divides by the number of losses, all ranks'",
    ),
    "the largest": Mistake(edit(AVERAGE, "grad, group=group", "grad, dist.ReduceOp.MAX, group=group"), LARGEST),
    "the largest of the dense": Mistake(
        edit(
            AVERAGE,
            "grad, group=group",
            "grad, dist.ReduceOp.MAX if grads is dense else dist.ReduceOp.SUM, group=group",
        ),
        LARGEST,
    ),
    "the largest of the experts": Mistake(
        edit(
            AVERAGE,
            "grad, group=group",
            "grad, dist.ReduceOp.SUM if grads is dense else dist.ReduceOp.MAX, group=group",
        ),
        LARGEST,
    ),
    "for the first alone": Mistake(
        edit(AVERAGE, "dist.all_reduce(grad, group=group)", "dist.reduce(grad, group=group, group_dst=0)"),
        "dist.reduce leaves the sum on one rank: all need it, and get it from an all-reduce",
    ),
    "the first's experts": Mistake(
        edit(
            AVERAGE,
            "            dist.all_reduce(grad, group=group)\n",
            "            if grads is dense:\n"
            "                dist.all_reduce(grad, group=group)\n"
            "            else:\n"
            "                dist.broadcast(grad, group=group, group_src=0)\n",
        ),
        "the first replica's gradient was given to all: what the others' tokens said is lost. Add them up",
    ),
    "nothing where it is zero": Mistake(
        edit(
            AVERAGE,
            "            dist.all_reduce",
            "            if not grad.any():\n                continue\n            dist.all_reduce",
        ),
        "a gradient that is zero on this rank may not be zero on the others: they wait in an all-reduce that this rank "
        "leaves out",
    ),
    "new lists": Mistake(
        edit(
            AVERAGE,
            "    for grads, group",
            "    dense, experts = ([grad.clone() for grad in grads] for grads in (dense, experts))\n"
            "    for grads, group",
        )
        + "    return dense, experts\n",
        IN_PLACE,
    ),
    "zipped": Mistake(
        edit(
            AVERAGE,
            "    for grads, group in ((dense, everyone), (experts, replicas)):\n        for grad in grads:\n",
            "    for pair in zip(dense, experts):\n        for grad, group in zip(pair, (everyone, replicas)):\n",
        ),
        "zip ends with the shorter list, and the rest of the longer one was left as it was",
    ),
    "in float32": Mistake(
        edit(
            AVERAGE,
            "            dist.all_reduce(grad, group=group)\n            grad /= ranks\n",
            "            sums = grad.float()\n"
            "            dist.all_reduce(sums, group=group)\n"
            "            grad.copy_(sums / ranks)\n",
        ),
        "the sums went through float32, which has seven digits: keep the gradients' dtype",
    ),
    "nothing divided": Mistake(edit(AVERAGE, "            grad /= ranks\n", ""), NOT_DIVIDED),
    "all over everyone": Mistake(edit(AVERAGE, _LOOP, "((dense, everyone), (experts, everyone))"), MIXED),
    "experts left out": Mistake(edit(AVERAGE, _LOOP, "((dense, everyone),)"), EXPERTS_ALONE),
    "experts only divided": Mistake(
        edit(AVERAGE, _LOOP, "((dense, everyone),)") + "    for grad in experts:\n        grad /= ranks\n",
        EXPERTS_ALONE,
    ),
    "dense left out": Mistake(edit(AVERAGE, _LOOP, "((experts, replicas),)"), DENSE),
    "dense over the replicas": Mistake(edit(AVERAGE, "(dense, everyone)", "(dense, replicas)"), DENSE),
    "groups exchanged": Mistake(edit(AVERAGE, _LOOP, "((dense, replicas), (experts, everyone))"), MIXED),
    "new tensors": Mistake(
        edit(AVERAGE, "            grad /= ranks\n", "            grad = grad / ranks\n"), NOT_DIVIDED
    ),
    "copies": Mistake(
        edit(AVERAGE, "            dist.all_reduce", "            grad = grad.clone()\n            dist.all_reduce"),
        IN_PLACE,
    ),
    "experts divided twice": Mistake(
        edit(AVERAGE, "grad /= ranks", "grad /= ranks * (1 if grads is dense else dist.get_world_size(replicas))"),
        TWICE,
    ),
    "in the lists": Mistake(
        edit(
            AVERAGE,
            "for grad in grads:",
            "for i, grad in enumerate(grads):",
            "grad /= ranks",
            "grads[i] = grad / ranks",
        ),
        NOT_DIVIDED,
    ),
    "divided twice": Mistake(
        edit(AVERAGE, "grad /= ranks", "grad /= ranks * dist.get_world_size(replicas)"),
        TWICE,
    ),
    "all processes": Mistake(edit(AVERAGE, "dist.get_world_size(everyone)", "dist.get_world_size()"), PROCESSES),
    "over all processes": Mistake(edit(AVERAGE, _LOOP, "((dense, None), (experts, replicas))"), PROCESSES),
    "not waited for": Mistake(
        edit(AVERAGE, "group=group)", "group=group, async_op=True)"),
        "with async_op=True the sum comes later, and the division hits what was there before: wait() first",
    ),
}

RIGHT = {
    "22.1": [BY_FUNCTIONAL, BY_MESSAGES],
    "22.2": [IN_A_BUCKET, BY_AVG],
}
MISTAKES = {"22.1": DISPATCH_MISTAKES, "22.2": AVERAGE_MISTAKES}
