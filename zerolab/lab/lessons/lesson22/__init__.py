"""Lesson 22: tokens that go to experts and back, and whose gradients are averaged with whom."""

from __future__ import annotations

import torch
from torch import Tensor

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene, in_groups

# ---------------------------------------------------------------------- 22.1


def exchanged(play: Play, by_one: bool = False, wide: bool = True, turned: bool = False) -> None:
    """Rank r sends rank s some 1 + r + 2s rows, or, by_one, only rank 0 does. turned: a transposed gradient."""
    here, N = play.rank, play.size

    def rows(source: int, to: int) -> int:
        return (1 + source + 2 * to) * (not by_one or source == 0)

    send, receive = [rows(here, to) for to in range(N)], [rows(source, here) for source in range(N)]
    width = (6,) if wide else ()
    base = play.base(40, *width, name="the rows")[: sum(send)]
    x = play.keep("`rows`", play.share(base, here).requires_grad_())
    got = play.call(
        "Exchange.apply(rows, send, receive, group)", play.code.Exchange.apply, x, send, receive, play.group
    )
    if not isinstance(got, Tensor) or got.grad_fn is None:
        return
    grad = play.share(play.base(60, *width)[: sum(receive)], here)
    grad = play.keep("the gradient that came back", grad.t().contiguous().t() if turned else grad)
    with play.event("Exchange's backward"):
        got.backward(grad)


class Routed:
    """Tokens of one rank, and the experts that they have chosen."""

    def __init__(self, play: Play, tokens: int, experts: int, choice: str, name: str = "", dtype=torch.float32) -> None:
        self.play, self.name, self.experts = play, name, experts * play.size
        random = torch.Generator().manual_seed(100 * play.rank + tokens)
        chosen = torch.randint(self.experts, (tokens,), generator=random)
        if choice == "the last":
            chosen = torch.full_like(chosen, self.experts - 1)
        elif choice == "only its own":
            chosen = chosen % experts + experts * play.rank
        elif choice == "backwards":
            chosen = (self.experts - 1 - torch.arange(tokens) * self.experts // max(1, tokens)).clamp(0)
        x = play.share(play.base(16, 12, name=f"the tokens{name}")[:tokens], play.rank).to(dtype)
        self.x = play.keep(f"`x`{name}", x.requires_grad_())
        self.chosen = play.keep(f"`chosen`{name}", chosen)

    def dispatch(self) -> None:
        with self.play.event(f"dispatch{self.name}", slack=64.0 * self.play.size) as event:
            self.rows, self.local, *self.rest = self.play.code.dispatch(
                self.x, self.chosen, self.experts, self.play.group
            )
        event.see("the rows", self.rows)
        event.see("`local`", self.local)
        event.said |= {
            "the rows": "rows lie by the rank they came from; of each rank by expert, then in the order of x",
            "`local`": "it has each row's expert, by its number on this rank, from 0",
        }

    def combine(self) -> None:
        made = self.rows * (1.0 + self.local[:, None]) * (2.0 + self.play.rank)  # what the experts make of them
        self.result = self.play.call(f"combine{self.name}", self.play.code.combine, made, *self.rest)
        self.play.tape[-1].said["the result"] = "it has a row for each token, in the order of x"

    def backward(self, plainly: bool = False) -> None:
        if not isinstance(self.result, Tensor) or self.result.grad_fn is None:
            return
        with self.play.event(f"the backward pass{self.name}"):
            if plainly:
                self.result.sum().backward()  # its gradient is one number, expanded
            else:
                self.result.backward(torch.ones_like(self.result) * (1.0 + torch.arange(len(self.x)))[:, None])


def routed(
    play: Play,
    tokens: int = 9,
    experts: int = 2,
    choice: str = "any",
    fewer: int = 2,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Rank r has `tokens` - `fewer` * r tokens."""
    made = Routed(play, max(0, tokens - fewer * play.rank), experts, choice, dtype=dtype)
    made.dispatch()
    made.combine()
    made.backward(plainly=choice == "backwards")


def two_layers(play: Play) -> None:
    """Two dispatches before both ways back."""
    first, second = Routed(play, 8, 2, "any", " of layer 1"), Routed(play, 5 + play.rank, 1, "any", " of layer 2")
    first.dispatch()
    second.dispatch()
    first.combine()
    second.combine()
    second.backward()
    first.backward()


def without_gradients(play: Play) -> None:
    with torch.no_grad():
        made = Routed(play, 7, 2, "any")
        made.dispatch()
        made.combine()


SPLITS = "every rank sends and receives another number of rows: send and receive change places on the way back"
KEEP_WAY = "keep what the way back needs in ctx, or in what dispatch returns: two layers are under way at once"
WORLD_ABOUT = "only some ranks take part: pass group=..., and take the number of ranks from it"
DISPATCH_BATTERY = (
    Scene("", exchanged),
    Scene("when only rank 0 sends", lambda play: exchanged(play, by_one=True), SPLITS, sizes=(2, 3)),
    Scene(
        "with a transposed gradient",
        lambda play: exchanged(play, turned=True),
        "the gradient may lie in any order in memory: contiguous()",
        sizes=(1, 2),
    ),
    Scene("with rows of one number", lambda play: exchanged(play, wide=False), "rows.shape[1:] may be empty"),
    Scene("", routed),
    Scene("with one expert on each rank", lambda play: routed(play, experts=1)),
    Scene("with three experts on each rank", lambda play: routed(play, experts=3, tokens=14)),
    Scene("with as many tokens on all ranks", lambda play: routed(play, fewer=0)),
    Scene(
        "when all tokens choose the last expert",
        lambda play: routed(play, choice="the last"),
        "some ranks send everything to one, and some receive nothing: all make the same calls",
    ),
    Scene(
        "when each token chooses an expert of its own rank",
        lambda play: routed(play, choice="only its own"),
        "a rank sends itself rows like any other",
        sizes=(2, 4),
    ),
    Scene("when the first tokens choose the last experts", lambda play: routed(play, choice="backwards")),
    Scene(
        "when the last ranks have no tokens",
        lambda play: routed(play, tokens=4, fewer=4),
        "a rank without tokens sends nothing, and its experts may get rows all the same",
        sizes=(2, 3),
    ),
    Scene("with two layers by turns", two_layers, KEEP_WAY, sizes=(2, 3)),
    Scene("in float64", lambda play: routed(play, dtype=torch.float64), "keep the dtype of the rows", sizes=(1, 2)),
    Scene("under torch.no_grad()", without_gradients, KEEP_WAY, sizes=(1, 2)),
    *in_groups(routed, WORLD_ABOUT),
)

DISPATCH_STUB = '''\
import torch
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


class Exchange(torch.autograd.Function):
    """Rows go to other ranks, and in backward their gradients come back."""

    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int], group):
        """(sum(send), ...) -> (sum(receive), ...): the first send[0] rows go to rank 0 of
        `group`, the next send[1] to rank 1; receive[r] rows come from rank r.
        """
        ctx.back = receive, send, group
        output = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Exchange.apply(grad, *ctx.back), None, None, None


def dispatch(x: Tensor, chosen: Tensor, experts: int, group):
    """Send each token to the rank that has its expert.

    x (T, C); chosen (T,), int64: each token's expert, from 0. There are `experts`, the same
    number on each of the N ranks of `group`, in order: expert e is on e // (experts / N).
    T differs from rank to rank, and may be 0.

    Returns three things. rows (R, C): what has come to this rank, first from rank 0, then
    from rank 1 ...; of each rank by expert, and those for one expert in their order in x.
    local (R,), int64: which of *this rank's* experts each row is for, from 0.
    And what `combine` below needs: (order, send, receive, group), where x[order] was sent.
    Apart from the rows, only counts are sent.
    """
    raise Todo("22.1")


def combine(rows: Tensor, way: object) -> Tensor:
    """The way back: what the experts made of `rows`, (R, C) -> (T, C), in the order of x.

    way: what dispatch returned last.
    """
    order, send, receive, group = way
    back = Exchange.apply(rows, receive, send, group)
    return back[torch.argsort(order)]
'''

DISPATCH = """\
import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int], group):
        ctx.back = receive, send, group
        output = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Exchange.apply(grad, *ctx.back), None, None, None


def dispatch(x: Tensor, chosen: Tensor, experts: int, group):
    N = dist.get_world_size(group)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=experts)  # of rows for each expert
    arrive = torch.empty_like(counts)
    dist.all_to_all_single(arrive, counts, group=group)  # by rank, then by local expert
    send, receive = (c.view(N, -1).sum(dim=1).tolist() for c in (counts, arrive))
    rows = Exchange.apply(x[order], send, receive, group)
    local = torch.arange(experts // N).repeat(N).repeat_interleave(arrive)
    return rows, local, (order, send, receive, group)


def combine(rows: Tensor, way: object) -> Tensor:
    order, send, receive, group = way
    back = Exchange.apply(rows, receive, send, group)
    return back[torch.argsort(order)]
"""

# ---------------------------------------------------------------------- 22.2


def averaged(
    play: Play, replicas: str, several: bool = True, idle: bool = False, dtype: torch.dtype = torch.float32
) -> None:
    """The gradients of a step. replicas: "all", "alone", or "columns" of 2 x 2: ranks with the same experts.

    idle: the first expert has got no tokens on odd ranks. In float64, no float32 has these values.
    """
    if replicas == "columns":
        column = play.rank % 2
        group = play.among([column, column + 2])
    else:
        group = play.group if replicas == "all" else play.among([play.rank])

    def gradients(name: str, *shapes: tuple[int, ...]) -> list[Tensor]:
        made = [
            play.share(play.base(*shape, name=name), play.rank).to(dtype) for shape in shapes[: 9 if several else 1]
        ]
        return [grad / 7 for grad in made] if dtype == torch.float64 else made

    dense = gradients("a dense gradient", (3, 4), (5,), (7, 2))
    experts = gradients("an expert's gradient", (2, 6), (4,))
    if idle and play.rank % 2:
        experts[0].zero_()
    tensors = [*dense], [*experts]  # an answer may put others in the lists
    where = {"alone": "each on one rank", "all": "all on every rank", "columns": "each on two ranks"}[replicas]
    play.call(f"average(), experts {where}", play.code.average, dense, experts, play.group, group)
    for name, seen in zip((f"`dense` (experts {where})", f"`experts` ({where})"), tensors, strict=True):
        play.see(name, seen)


def averaged_twice(play: Play) -> None:
    """In one scene: what is right for both is no mean over the replicas, nor over those that share the experts."""
    averaged(play, "alone")
    averaged(play, "all")


AVERAGE_BATTERY = (
    Scene("", averaged_twice),
    Scene(
        "",
        lambda play: averaged(play, "columns"),
        "an expert's gradient has come from the tokens of its expert group, and its replicas had those of other groups",
        sizes=(4,),
    ),
    Scene("with one gradient of each kind", lambda play: averaged(play, "alone", several=False), sizes=(1, 2)),
    Scene(
        "with an expert that got no tokens on some ranks",
        lambda play: averaged(play, "all", idle=True),
        "a gradient that is zero here may not be zero on a replica: all of them make the same calls",
        sizes=(2, 3),
    ),
    Scene(
        "in float64",
        lambda play: averaged(play, "all", dtype=torch.float64),
        "keep the dtype, all the way: float32 has seven digits",
        sizes=(1, 2),
    ),
    *in_groups(lambda play: averaged(play, "alone"), "only some ranks train this model: pass group=..., and ask it"),
)

AVERAGE_STUB = '''\
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def average(dense: list[Tensor], experts: list[Tensor], everyone, replicas) -> None:
    """Make of this rank's gradients, in place, those of one process: one whose loss is the
    mean of the losses of all ranks in `everyone`.

    dense: gradients of parameters that every rank has. experts: gradients of this rank's
    experts, which only the ranks of the process group `replicas` have. Each rank's loss is
    the mean over its own tokens, and backward has run: the way back of the tokens was the
    way back of gradients. No rank sends more than one all-reduce of each gradient does.
    """
    raise Todo("22.2")
'''

AVERAGE = """\
import torch.distributed as dist
from torch import Tensor


def average(dense: list[Tensor], experts: list[Tensor], everyone, replicas) -> None:
    ranks = dist.get_world_size(everyone)
    for grads, group in ((dense, everyone), (experts, replicas)):
        for grad in grads:
            dist.all_reduce(grad, group=group)
            grad /= ranks
"""

EXERCISES = [
    Exercise(
        id="22.1",
        title="tokens to experts, and back",
        difficulty=2,
        section="Write: tokens to experts, and back",
        battery=DISPATCH_BATTERY,
        stub=DISPATCH_STUB,
        reference=DISPATCH,
        hints=(
            "Experts lie on the ranks in order, so tokens in the order of their experts are in the order of the ranks: "
            "sort once, and give `combine` the order. How many rows come, the ranks tell each other first.",
            "dispatch: order = torch.argsort(chosen, stable=True) puts x in the order of the experts, which is also "
            "that of the ranks. counts = torch.bincount(chosen, minlength=experts); an even all_to_all_single of "
            "counts tells each rank how many rows come, from each rank and for each of its experts.",
            "counts.view(N, -1).sum(dim=1).tolist() is `send`, and so for what arrives. local = torch.arange(experts "
            "// N).repeat(N).repeat_interleave(arrive). Return rows, local, (order, send, receive, group).",
        ),
        exports=("dispatch", "combine", "Exchange"),
        errors={
            "does not add up to the": "the lists of an all-to-all must add up to the rows: "
            "output has sum(receive) of them, and the call takes first what comes, then what goes",
            "Tensors must be contiguous": "a gradient may be an expanded or transposed tensor: contiguous()",
            "numbers, where each of": "an all-to-all of rows takes one number for each rank: "
            "add up those of the rank's experts",
            "returned an incorrect number of gradients": "backward returns a value for each argument of forward: the "
            "gradient of the rows, and None for the two lists and the group",
            "returned a gradient different than None": "backward's values stand in the order of forward's arguments: "
            "the gradient of the rows first, then None three times",
        },
    ),
    Exercise(
        id="22.2",
        title="who averages what",
        difficulty=1,
        section="Write: who averages what",
        battery=AVERAGE_BATTERY,
        stub=AVERAGE_STUB,
        reference=AVERAGE,
        hints=(
            "Two questions for each of the two kinds: over which ranks must gradients still be *added up*, and by how "
            "many is the sum divided?",
            "An expert has already got the gradients of all tokens that came to it, whichever rank they came from: its "
            "all-reduce adds up what its replicas have got. One process would divide by the number of all losses.",
            "For (dense, everyone) and (experts, replicas): dist.all_reduce(grad, group=group), then grad /= "
            "dist.get_world_size(everyone), for both.",
        ),
        exports=("average",),
    ),
]
