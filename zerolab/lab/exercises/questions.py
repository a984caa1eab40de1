"""What each prediction asks for, and the slips that lead to a known wrong answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Question:
    """One prediction.

    unit: what a bare number means. words: the possible answers, where it is a word. psi: what "Ψ" stands for.
    slips: a wrong answer as a multiple of the measured one, or of the formula -> the step that leads there.
    against: a wrong word -> what speaks against it.
    formula, beside_formula: for times, what the arithmetic gives, and why the measurement differs.
    """

    unit: str = ""
    words: tuple[str, ...] = ()
    psi: float = 0.0
    slips: dict[float, str] = field(default_factory=dict)
    against: dict[str, str] = field(default_factory=dict)
    formula: float | None = None
    beside_formula: str = ""

    def slip(self, guess: float | str, value: float | str) -> str:
        """The step that leads from the right `value` to `guess`, in a sentence; "" if none is known."""
        if isinstance(guess, str):
            return self.against.get(guess, "")
        if isinstance(value, str) or not value:
            return ""
        known = (_OF_BYTES if self.unit in ("bytes", "MB", "GB") else {}) | self.slips
        for ratio, sentence in known.items():
            if any(math.isclose(guess / right, ratio, rel_tol=0.005) for right in (value, self.formula) if right):
                return sentence
        return ""


_OF_BYTES = {
    1 / 4: "That is the number of elements: each takes 4 bytes in float32.",
    8: "Those are bits.",
    1e6: "Those are bytes.",
    1e-6: "Those are MB: a bare number is taken for bytes.",
}
_OWN_PART = "A rank does not send its own part: (N-1)/N of it, here 3/4."

_LETTERS = ("a", "b", "c", "d")
_VERDICTS = ("true", "false", "condition")

GPT_4, GPT_8, GPT_6 = 867_072, 1_660_160, 1_263_616  # Ψ of the models of lessons 02 and 04, 05, 06, 07 and 10
GPT_11 = 136_960

QUESTIONS: dict[str, Question] = {
    "00.1": Question(
        slips={
            0.25: "That is the mean, or what rank 0 brought: all-reduce gives every rank the sum, 1 + 2 + 3 + 4.",
            0.4: "That is what rank 3 brought alone: all-reduce adds what the four ranks bring.",
        }
    ),
    "00.2": Question(
        "MB for 1 million parameters",
        slips={
            4: "That is stage 0: in stage 3 each of the three is divided by 4.",
            2.5: "That divides Adam's state alone: this is stage 1.",
            1.75: "That is stage 2: the parameters are still whole there.",
        },
    ),
    "01.1": Question(
        "MB",
        slips={
            0.5: "That is one way: 24 MB come in and 24 MB go out.",
            4 / 3: "Rank 0 sends nothing to itself: three ranks send, and three receive.",
        },
    ),
    "01.2": Question(
        "MB",
        slips={
            0.5: "That is one way, or one of the two halves: each of 6 rounds brings 2 MB in and takes 2 MB out.",
            4 / 3: "There are N - 1 = 3 rounds in each half, not 4.",
            2: "Each chunk has a quarter of the 8 MB.",
        },
    ),
    "01.3": Question(
        "bytes",
        slips={0.5: "That would take half as long to send as the latency lasts."},
        formula=500_000,
        beside_formula="The rest is this machine: its own time for a message adds to the latency.",
    ),
    "02.1": Question(
        "bytes",
        psi=GPT_4,
        slips={
            0.5: "That is 8Ψ: parameters and gradients. Adam's two averages take as much again.",
            0.75: "That is 12Ψ: Adam keeps two averages.",
            0.25: "That is the parameters alone, or the number of elements of all model states without their 4 bytes.",
        },
    ),
    "02.2": Question(
        "bytes per parameter",
        slips={
            0.75: "4 bytes are missing: the masters in float32 come on top of the bfloat16 copy.",
            1.125: "Gradients arrive in bfloat16: 2 bytes.",
            0.5: "Adam's two averages and the masters are 4 bytes each.",
            0.875: "2 bytes are missing: both the bfloat16 weight and its gradient count.",
            1.25: "Weight and gradient are 2 bytes each here.",
        },
    ),
    "02.3": Question(
        "bytes per parameter",
        slips={
            0.5: "The gradient takes 4 bytes as well.",
            1.5: "SGD without momentum keeps no state.",
            2: "That is Adam. SGD without momentum keeps no state.",
        },
    ),
    "02.4": Question(
        "bytes",
        slips={
            2 / 3: "That is what is left over after dividing by 5: padding fills up to the next multiple.",
            5 / 3: "Padding goes to the next multiple of 5, so it is less than 5 elements.",
        },
    ),
    "02.5": Question("bytes"),
    "02.6": Question(
        "bytes",
        psi=GPT_4,
    ),
    "03.1": Question("calls", slips={1 / 29: "One call for each parameter tensor, and the model has 29."}),
    "03.2": Question(
        "bytes",
        psi=470_528,
        slips={
            4 / 3: _OWN_PART,
            1 / 2: "That is half of an all-reduce: the reduce-scatter or the all-gather alone.",
            2 / 3: "That is B: a ring sends 2(N-1)/N of it, 1.5 B for N = 4.",
            4: "That is for all four ranks together.",
        },
    ),
    "03.3": Question(
        "ms",
        slips={
            1 / 1000: "Those are seconds.",
            174 / 188.1: "That is the latency alone: the bytes take 14 ms more.",
            43.1 / 188.1: "Each call is 6 messages, one after another, and each of them takes 1 ms.",
            29 / 188.1: "Each call is 6 messages, one after another, and the bytes come on top.",
        },
        formula=188.1,
        beside_formula="The rest is this machine: four ranks share its cores, and each of the 29 calls waits for the "
        "slowest.",
    ),
    "04.1": Question(
        "bytes",
        psi=GPT_4,
        slips={
            4 / 3: "That is all of the state. A rank keeps its quarter, so it saves three quarters.",
            1 / 3: "That is what a rank keeps. It saves the other three quarters.",
            1 / 2: "Adam keeps two averages: 8 bytes per parameter.",
        },
    ),
    "04.2": Question(
        "× DDP's bytes",
        slips={
            1.5: "An all-reduce is a reduce-scatter and an all-gather. ZeRO-1 does the first with gradients and the "
            "second with parameters: no more.",
            0.5: "That is the gradients alone: the new parameters must travel as well.",
            2: "ZeRO-1 does not all-reduce: each rank needs its shard of the mean alone.",
        },
    ),
    "04.3": Question(
        "× DDP's bytes",
        slips={
            2 / 3: "DDP's whole all-reduce is still there: the broadcasts come on top.",
            4 / 3: "A broadcast sends each tensor once, where an all-reduce sends it twice: half of it comes on top.",
            7 / 6: "An all-reduce sends 6/4 of the bytes and the broadcasts 3/4, which is half of that.",
        },
    ),
    "05.1": Question(
        "bytes",
        psi=GPT_8,
        slips={4: "That is all of them. In stage 2 a rank keeps its shard, a quarter.", 3: "That is what goes."},
    ),
    "05.2": Question(words=("small", "large")),
    "05.3": Question(
        "bytes",
        psi=GPT_8,
        slips={
            2 / 5: "That is a step with one backward. Without no_sync each of the four reduces.",
            8 / 5: "The parameters are gathered once per step, not once per micro-batch.",
            4 / 5: "Those are the four reductions. After the step the parameters are gathered once.",
            4 / 3: _OWN_PART,
        },
    ),
    "05.4": Question(
        "bytes",
        psi=GPT_8,
        slips={
            1 / 4: "That is the shard. What is kept back is not reduced yet, so it is whole.",
            4: "They are added up.",
        },
    ),
    "06.1": Question(
        "bytes",
        psi=GPT_6,
        slips={4: "Between two steps nothing is gathered: a rank holds its quarter."},
    ),
    "06.2": Question(
        "bytes",
        psi=GPT_6,
        slips={
            198_272 / 272_256: "The root's forward is under way as long as the model's: it counts as well.",
            73_984 / 272_256: "That is the root alone. Inside of it, a block's forward runs.",
            470_528 / 272_256: "That is two blocks: one is released before the next is gathered.",
            1_263_616 / 272_256: "That is all of them: each block is released after its forward.",
            588_160 / 272_256: "The shards come on top of what is asked: the full parameters.",
        },
    ),
    "06.3": Question(
        "bytes",
        psi=GPT_6,
        slips={4 / 3: _OWN_PART, 1 / 3: "That is one quarter: a rank sends three.", 2: "Forward gathers once."},
    ),
    "07.1": Question(
        "collectives",
        slips={
            21 / 20: "The root is not gathered again: it stays from its forward to its reduction.",
            13 / 20: "Each of the seven units is reduced as well.",
            14 / 20: "The six blocks are gathered once more, for backward.",
            18 / 20: "The root counts: it is gathered once and reduced once.",
        },
    ),
    "07.2": Question(
        "bytes",
        psi=GPT_6,
        slips={
            3 * 1_263_616 / (3 * 1_263_616 - 73_984): "The root is gathered once, not twice.",
            4 / 3: _OWN_PART,
            2 / 3 * 3 * 1_263_616 / (3 * 1_263_616 - 73_984): "Three passes: gathers in forward, gathers in backward, "
            "and the reductions.",
        },
    ),
    "07.3": Question(
        "bytes",
        psi=GPT_6,
        slips={
            272_256 / 470_528: "Block 5 is still there when block 4 is gathered: two blocks and the root.",
            396_544 / 470_528: "The root counts as well: it stays until its gradient is reduced.",
            668_800 / 470_528: "That is three blocks: block 5 is released before block 3 is gathered.",
            1_263_616 / 470_528: "That is all of them: each block is released when backward has passed it.",
        },
    ),
    "08.1": Question(
        "bytes per parameter",
        slips={
            5 / 3: "The masters in float32 come on top of the bf16 copy: 4 bytes, divided by 4.",
            7 / 3: "That is half of everything. Adam's averages stay in float32, and the masters come on top.",
            11 / 3: "That is what is held with bf16.",
            14 / 3: "That is what is held with float32.",
            4 / 3: "The copy saves 2 bytes and the gradient 2/4, but the masters cost 4/4.",
            2: "That is stage 1. In stage 2 the gradients are already sharded.",
        },
    ),
    "08.2": Question(
        "× float32's bytes",
        slips={
            2: "Masters never travel: gradients go out in bf16, and weights come back in bf16.",
            1.5: "The weights are gathered in bf16 as well: forward needs no more.",
        },
    ),
    "08.3": Question("%"),
    "09.1": Question(
        "FLOP per byte",
        slips={
            1024 / 241.9: "That is FLOP for each element: an element has 4 bytes in float32.",
            170.7 / 241.9: "That is ZeRO-3, which sends 1.5 times as much; or backward alone, without the 2 FLOP of "
            "forward.",
            85.3 / 241.9: "That is forward alone: backward computes twice as much.",
            192 / 241.9: "A ring sends (N-1)/N of it, here 3/4, so there are more FLOP for each byte.",
            512 / 241.9: "That is half of an all-reduce: it sends every element twice.",
            64 / 241.9: "A rank's batch has 4 sequences of 64 tokens.",
        },
        formula=256,
        beside_formula="It is a little less, since embeddings are looked up and not multiplied.",
    ),
    "09.2": Question(
        "blocks",
        slips={
            1 / 2: "That is without prefetching: the two that are on their way come on top.",
            3
            / 4: "Those are the block at work and the two ahead: the block behind is released only after the next has "
            "been reached.",
        },
    ),
    "09.3": Question(
        "× DDP's bandwidth",
        slips={
            1.5: "It sends 1.5 times as much, but a third of that in forward, where DDP sends nothing.",
            3: "Forward has a third of the FLOP, and a third of the bytes.",
            2: "Forward sends half of what backward sends, and computes half as much.",
        },
    ),
    "10.1": Question(
        "bytes",
        slips={
            51_200 / 5_136: "That is with everything kept: 16 vectors in each block.",
            4 * 128 * 6 / 5_136: "That is the blocks' inputs alone: two vectors and 256 logarithms follow them.",
            4 * (128 * 6 + 256) / 5_136: "The last norm keeps its input and its output: two vectors more.",
            4 * 128 * 8 / 5_136: "The loss keeps 256 logarithms as well.",
            (5_120 + 4 * 128 * 15) / 5_136: "While forward runs, yes. When it returns, no block's other 15 vectors are "
            "there.",
        },
        formula=5_120,
        beside_formula="The 16 bytes more are the target, and the last norm's mean and spread.",
    ),
    "10.2": Question(
        "× the arithmetic",
        slips={
            1.5 / 1.324: "Forward is one part of three, not of two: backward takes twice as much.",
            2 / 1.324: "Only forward runs a second time: one part of three.",
            5 / 3 / 1.324: "Backward runs once: one part more, for the second forward.",
        },
        formula=4 / 3,
        beside_formula="It is a little less, since the head is not computed again.",
    ),
    "10.3": Question(
        "bytes",
        psi=GPT_6,
        slips={
            2: "Gradients go to the host as they come: the parameters' 2 bytes stay.",
            1 / 4: "In stage 2 the parameters are whole on every rank. In stage 3 it would be a quarter.",
            7 / 4: "That is what is on the host: 14Ψ/4.",
            8: "That is everything. Masters, averages and gradients are on the host.",
            11 / 4: "That is device and host together: 2Ψ and 14Ψ/4.",
        },
    ),
    "10.4": Question(
        "bytes",
        psi=GPT_6,
        slips={
            1 / 2: "That is one direction: gradients go down, and parameters come up.",
            4: "Each rank sends its quarter alone.",
            2: "Both directions carry 2 bytes an element: the casts happen on the host.",
            3 / 2: "Both directions carry 2 bytes an element: the casts happen on the host.",
            3 / 4: "The link to the host has nothing to do with the other ranks: all of the shard crosses it.",
        },
    ),
    "11.1": Question(
        "bytes",
        psi=GPT_11,
        slips={
            4 / 3: "That is 16Ψ: gradients are not saved, since a checkpoint is written after the step.",
            1 / 3: "Those are the weights alone: Adam's two averages take as much each.",
            2 / 3: "Adam keeps two averages, and the parameters come on top.",
            1 / 4: "That is one rank's file: all four together.",
            4: "Every rank writes what it owns, a quarter, and not everything.",
        },
    ),
    "11.2": Question(
        "learning rates",
        slips={
            0.1: "m is corrected for having started at zero: 0.1 g / (1 - 0.9) is g.",
            10**-0.5: "Both averages are corrected for having started at zero: m is g, and v is g squared.",
            0.1 / 0.001**0.5: "Both averages are corrected for having started at zero: m is g, and v is g squared.",
        },
    ),
    "11.3": Question(
        "reads",
        slips={
            2 / 3: "That is one for each file: files 1 and 2 have something for two ranks.",
            0.5: "That is one for each rank: every rank needs something from two files.",
            2: "That is every file for every rank: a rank reads only the files that have something for it.",
            7 / 6: "There are three cuts inside the old unit and two in the new one: five cuts make six pieces.",
        },
    ),
    "12.1": Question(
        "bytes",
        psi=GPT_11,
        slips={
            24 / 15: "That is without compression: the gradients come in with 1 byte an element.",
            3 / 15: "Those are the gradients that come in: the new parameters go out to three ranks as well.",
            12 / 15: "Those are the parameters that go out: three gradients come in as well.",
            6 / 15: "The parameters go out in float32: nobody compresses them.",
            20 / 15: "Rank 0's own gradient does not travel, and it sends nothing to itself: 3 in and 3 out.",
            5 / 15: "That is for one of the other ranks: the main GPU talks to three.",
        },
    ),
    "12.2": Question(
        "× the gradient",
        slips={
            2**0.5 / 1.341: "That is for two gradients with nothing in common: here the cosine is not 0.",
            1.341: "Its square is 2 - 2 cos: take the root.",
        },
    ),
    "12.3": Question(
        "ranks",
        slips={
            2 / 3: "An index has 4 bytes here, so a pair has 8.",
            2: "A pair has 8 bytes: 4 for the value and 4 for the index.",
            1 / 2: "An all-reduce sends everything twice: 2(N-1)/N of 4Ψ bytes.",
        },
        formula=100,
        beside_formula="It is a little more, since 1 % of Ψ was rounded down.",
    ),
    "12.4": Question(
        "updates",
        slips={
            1.5: "Its own update is not between its pull and its push: those of the two others are.",
            0.5: "There are two others, and each pushes once on average.",
        },
    ),
    "13.1": Question(
        "steps",
        slips={
            14 / 15: "The last batch of an epoch is smaller, and is a step as well: three steps an epoch, not 2.8.",
            10 / 15: "Nothing is dropped: the last batch of an epoch is smaller, and is a step as well.",
            15: "That is with batches of 32.",
            3 / 15: "That is one epoch.",
        },
    ),
    "13.2": Question(
        "bytes",
        psi=8_448,
        slips={
            0: "The engine does not know that nobody uses them: it reduces whatever gradients a backward leaves.",
            4 / 3: _OWN_PART,
            2: "That is an all-reduce. In stage 2 the gradients are only reduce-scattered.",
            8 / 3: "That is an all-reduce, and a rank does not send its own part.",
        },
    ),
    "14.1": Question(
        "times as much",
        slips={
            8 / 9: "Those are the tokens. The first of a sentence is never predicted: 63 targets against 7.",
            1 / 9: "That is the other way round: the fewer tokens a rank has, the more each of them weighs.",
            1 / 81: "That is the other way round: the fewer tokens a rank has, the more each of them weighs.",
        },
    ),
    "14.2": Question(
        "bytes",
        slips={
            4 / 3: _OWN_PART,
            2: "That is an all-reduce. In stage 2 the gradients are only reduce-scattered.",
            8 / 3: "That is an all-reduce, and a rank does not send its own part.",
            64 / 20_000: "Those are the rows that were looked up. A gradient is as large as its parameter, "
            "zeros included.",
            64 * 4 / 3 / 20_000: "Those are the rows that were looked up. A gradient is as large as its parameter, "
            "zeros included.",
            256 * 4 / 3 / 20_000: "Those are the rows that were looked up. A gradient is as large as its parameter, "
            "zeros included.",
        },
    ),
    "14.3": Question(
        "bytes",
        psi=GPT_4,
        slips={
            4 / 3: _OWN_PART,
            1 / 3: "That is one quarter: every rank sends its quarter to the three others.",
            2: "There is no backward: the parameters are gathered once.",
            3: "There is no backward, and so no gradients: the parameters are gathered once.",
            8: "A forward of 8 sentences gathers the parameters once.",
        },
    ),
    "15.1": Question(
        "bytes",
        slips={
            1 / 2: "Attention and MLP are two split regions: two all-reduces in forward and two in backward.",
            2: "Between two ranks an all-reduce sends each element once, not twice: 2(N-1)/N = 1.",
            1 / 16: "That is one all-reduce: each half of a block has two, in forward and in backward.",
            3_468_288 / 4_194_304: "That is 4Ψ, the gradients that DDP sends: here activations travel.",
        },
    ),
    "15.2": Question(
        "bytes per parameter",
        psi=GPT_4,
        slips={
            4 / 4.355: "That is 16 bytes / 4: the copies in a pair are divided by two only.",
            16 / 4.355: "That is one rank alone.",
            8 / 4.355: "That divides by one of the two dimensions only: the pair halves the blocks, ZeRO-3 all.",
            8.711 / 4.355: "ZeRO-3 divides by two what a rank of the pair holds.",
        },
    ),
    "15.3": Question(
        "%",
        slips={
            11 / 8: "A rank works for M units and waits for N - 1: that is of M + N - 1 units, not of M.",
            11 / 4: "That is with one micro-batch.",
            11 / 9: "It is N - 1 units that a rank waits, not N: while it works itself it does not wait.",
        },
    ),
    "15.4": Question(
        "%",
        slips={
            27 / 11: "That is 1F1B's: there each rank waits N - 1 units of 60 ms. Here the units are a third of that.",
            27 / 24: "A rank works for 3M units and waits for N - 1: that is of 3M + N - 1 units, not of 3M.",
            27 / 33: "That is a third of 1F1B's percentage. The time is a third, but the step is shorter too.",
            27 / 15: "That waits while the pipeline empties. There, weights' gradients are left to compute.",
            0: "The name is what it aims at. The last rank still has nothing to do until the first micro-batch comes.",
        },
    ),
    "16.1": Question(
        "GB",
        slips={
            16.6 / 31.4: "That is stage 2: in stage 1 only the 12 bytes are divided.",
            120 / 31.4: "That is stage 0.",
        },
    ),
    "16.2": Question("GB", slips={31.4 / 16.6: "That is stage 1: in stage 2 the gradient's 2 bytes are divided too."}),
    "16.3": Question(
        "GB",
        slips={
            1.88 / 1.64: "That is 16 bytes / 64, as in the paper. Here the 16-bit weight is made on the way into the "
            "all-gather and never kept: 14 bytes."
        },
    ),
    "17.1": Question(
        words=_LETTERS,
        against={
            "a": "Then the table would show rank 3 in that collective, waiting too. It is at no line of the script.",
            "b": "A dead process has no record at all. Rank 3 answers, and says where it is.",
            "d": "Then it would have printed more steps than the others, and they would be stuck in a backward.",
        },
    ),
    "17.2": Question(
        words=_LETTERS,
        against={
            "a": "It printed as many steps as the others: it had a batch for each.",
            "c": "The other ranks' losses are finite in every line: the NaN never left rank 1.",
            "d": "A process that is killed finishes no cell. Rank 1 did, as the only one.",
        },
    ),
    "17.3": Question(
        words=_LETTERS,
        against={
            "a": "A network that fails ends no process. Rank 2's is dead, and has an exit code.",
            "b": "Rank 0 reports that its peer closed a connection: a consequence. Sort by cause, not by arrival.",
            "c": "Then rank 2 would have printed an error of its own, as the others did. It printed nothing.",
        },
    ),
    "17.4": Question(
        words=_LETTERS,
        against={
            "b": "Its gradient has the same bits as the others', and it sent as many bytes.",
            "c": "There is a line from before the first step: the parameters were the same.",
            "d": "The gradients are the same on all ranks to the last bit; another order would show there.",
        },
    ),
    "17.5": Question(
        words=_LETTERS,
        against={
            "a": "Then it would explode on one GPU too: the loss and the data are the same.",
            "b": "The loss and the batch stay the same while the gradient doubles: the factor comes in after the loss.",
            "d": "Two sums would make it 4 times as large on 2 ranks, and 16 times on 4. It is 2 times and 4 times.",
        },
    ),
    "17.6": Question(
        words=_LETTERS,
        against={
            "a": "Larger batches would cost more once, and then stay. This grows by the same with every batch.",
            "c": "These are bytes in live tensors. Holes between them are not counted.",
            "d": "Nobody calls backward here, so there are no gradients.",
        },
    ),
    "17.7": Question(
        words=_LETTERS,
        against={
            "a": "The three agree with each other. The analyzer measures everyone by the lowest rank, which is rank 0.",
            "c": "It is call 3 on every rank, and calls 1 and 2 fitted. A rank that is behind is at another number.",
            "d": "The kinds of call differ: reduce and all_reduce. Calls of one kind would differ in their sizes.",
        },
    ),
    "17.8": Question(
        words=_LETTERS,
        against={
            "a": "A rank that died leaves no dump. Rank 1 left one, and in it rank 1 waits in the group of experts.",
            "b": "Ranks 0, 2 and 3 wait as well: they are in the report of the group called dense.",
            "d": "Both reports say whom they expect: ranks 0 to 3. And the first call in each group came to an end.",
        },
    ),
    "17.9": Question(
        words=_LETTERS,
        against={
            "b": "The batches have the same fingerprint on all four ranks, in both steps.",
            "c": "After the mean, all four ranks have the same gradients: it went over both nodes.",
            "d": "The line from before the first step says that all four began with the same parameters.",
        },
    ),
    "17.10": Question(
        words=_LETTERS,
        against={
            "a": "Both runs have the same batch on each rank: the loader goes on where it was.",
            "b": "Adam's state has the same bits in both. And a loss is computed before Adam steps.",
            "c": "Then rank 0 would drop other elements too. It repeats its step to the last digit.",
        },
    ),
    "18.1": Question(
        "× Zero3's bytes",
        slips={
            2 / 3: "That is DDP's: stage 3 gathers the parameters twice.",
            1.5: "That is against DDP: both are stage 3 here.",
            0.75: "A rank does not send its own part, in either of the two.",
        },
    ),
    "18.2": Question(
        "micro-batches",
        slips={
            3 / 4: "48 = 4 x 3 x 4: with 3 GPUs, the same accumulation gives a batch of 36.",
            16 / 4: "That is a GPU's samples in a step: in micro-batches of 4 they are 4.",
            12 / 4: "Those are micro-batches of all GPUs together: each of the 3 has a third of them.",
        },
    ),
    "18.3": Question(
        "GB",
        slips={
            0.25: "Bucket sizes count elements: each takes 4 bytes in float32.",
            0.5: "That is in bfloat16: float32 takes 4 bytes.",
        },
    ),
    "19.1": Question(
        words=_VERDICTS,
        against={
            "true": "Stages 1 and 2 hold less and send what DDP sends, to the byte: it is not the essence of all.",
            "false": "Stage 3 does send more than DDP, and holds less. There the sentence is right.",
        },
    ),
    "19.2": Question(
        words=_VERDICTS,
        against={
            "true": "Every message of a step was opened, in each stage. None of them is an average of Adam's.",
            "condition": "In no stage do they travel in a step. (A checkpoint is not a step.)",
        },
    ),
    "19.3": Question(
        words=_VERDICTS,
        against={
            "true": "What rank 0 wrote into its memory, no other rank saw, even on one machine.",
            "condition": "Processes on *one* node can share memory if they ask for it. Across a network none can.",
        },
    ),
    "19.4": Question(
        words=_VERDICTS,
        against={
            "true": "The wait goes. The bytes stay, and gradients become stale: the cost is in the loss.",
            "false": "Nobody waits, so that part is right: as long as the loss is not counted.",
        },
    ),
    "19.5": Question(
        words=_VERDICTS,
        against={
            "true": "A pipeline is the opposite: with few micro-batches it stands still.",
            "false": "With few tokens in a step, tensor parallelism sends less than DDP.",
        },
    ),
    "19.6": Question(
        words=_VERDICTS,
        against={
            "true": "With the same batch no stage sends less than DDP, and stage 3 sends more.",
            "false": "The freed memory can hold a larger batch, and then each sample costs fewer bytes.",
        },
    ),
    "20.1": Question(
        "bytes",
        psi=GPT_4,
        slips={
            1.5: "That is stage 3 of lesson 07, which gathers each parameter twice. Here nothing gathers again in "
            "backward: autograd has kept the full parameter.",
            1 / 2: "That is the gather alone, or the reduce-scatter alone.",
            4 / 3: _OWN_PART,
            2: "An all-reduce sends twice what a reduce-scatter sends, and here there is none.",
        },
    ),
    "20.2": Question(
        "bytes",
        slips={
            3_468_288 / 3_286_016: "That is all of Ψ: backward needs no biases of linear layers, and no embeddings.",
            3_286_016 / 4 / 3_286_016: "That is this rank's quarter: what is kept has been gathered.",
            3_154_944 / 3_286_016: "The head is a linear layer too: its matrix has 256·128 elements.",
            867_072
            / 3_286_016: "Those are the shards: they rest on the rank, and the gathered ones are held beside them.",
        },
    ),
    "21.1": Question(
        "ranks",
        slips={
            5 / 4: "Rank 2 lives, but the other half of its shards was rank 3's: its replica cannot make a step.",
            6 / 4: "Nobody waits for the new processes.",
            2 / 4: "Two replicas are left, of two ranks each.",
            3 / 4: "Two replicas are left, of two ranks each.",
        },
    ),
    "21.2": Question(
        "bytes",
        psi=GPT_11,
        slips={
            2: "That is the state of a replica: each of its two ranks holds half.",
            1 / 3: "Those are the parameters alone: AdamW has two averages of each.",
            2 / 3: "AdamW has two averages of each parameter, and the parameters themselves must come too.",
            4 / 3: "Gradients are not handed over: they are made anew in each step.",
        },
    ),
    "22.1": Question(
        "bytes",
        slips={
            0.5: "Backward sends gradients both ways, too: four ways in all.",
            4 / 3: "A quarter of the tokens has its expert on its own rank, and isn't sent: (N-1)/N, here 3/4.",
            2 / 3: "Backward sends gradients both ways, too; and a quarter of the tokens is not sent at all.",
            3 / 4: "Three of the four ways: tokens, results, and the gradients of both.",
        },
    ),
    "22.2": Question(
        "times",
        slips={
            0.5: "The mean over the replicas divides by 2; one process divides by the number of losses, 4.",
            0.25: "It is divided by 2 where it should be 4: the divisor is too small, so the gradient is too large.",
            2: "That is G = 4, where an expert has no replica and nothing is divided at all.",
        },
    ),
    "23.1": Question(
        "bytes per parameter",
        slips={
            2 / 2.032: "Each block of 256 has a scale for each average, 4 bytes: that is small, and not nothing.",
            8 / 2.032: "Those are the two averages in float32.",
            1 / 2.032: "Adam keeps two averages.",
            1.015625 / 2.032: "Adam keeps two averages.",
        },
    ),
    "23.2": Question(
        "steps",
        slips={
            1 / 2: "The averages begin at 0, and the first step computes with them before they are stored: they are "
            "rounded only when it has updated the parameters.",
            3 / 2: "The second step reads what the first has rounded, and updates the parameters with it.",
            4 / 2: "The second step reads what the first has rounded, and updates the parameters with it.",
        },
    ),
    "24.1": Question(
        "bytes",
        psi=GPT_11,
        slips={
            16: "That is what every step would send: with H = 16 it is sent once in 16 steps.",
            4 / 3: _OWN_PART,
            1 / 2: "An all-reduce is a reduce-scatter and an all-gather: each sends (N-1)/N.",
            2: "`old` is the same on every rank, so only the parameters are sent.",
        },
    ),
    "24.2": Question(
        words=("less", "more", "most"),
        against={
            "less": "It goes further in each round, and too far: it passes the place that it was heading for.",
            "more": "It is worse than that: worse than four models that never meet.",
        },
    ),
    "25.1": Question(
        "times the mean",
        slips={
            0.96: "That is with one chunk on each rank, 4 of 10 pairs. With two, one of the 4 pairs at home is hidden.",
            9: "Those are the pairs of rank 3, 15: divide by the mean of the four, 36 pairs by 4.",
            3: "That is against rank 0, which has 3 pairs; asked for is the mean.",
            1.05: "That is the limit of many small chunks; here a pair on the diagonal is computed whole.",
        },
    ),
    "25.2": Question(
        "bytes",
        slips={
            4 / 3: "A rank keeps its own block and sends one in each turn: N - 1 turns, here three.",
            64 / 65: "Those are the keys and values. With each block go the places of its 128 tokens, 8 bytes each.",
            1 / 2: "That is one of the two layers, or keys without values.",
            32 / 65: "That is one of the two layers, or keys without values, and without the places.",
            1 / 3: "That is one turn: a block is sent three times until it has been everywhere.",
            4: "A block has a rank's 128 tokens, not all 512.",
        },
    ),
}
