"""The engine: calls the stages from hooks into forward, backward and the optimizer's step.

Read it along one of two routes.

A gradient, from autograd to the optimizer, in Zero2 (a -> b: a calls b):

    parameters.py _pass_on                      autograd has completed the gradient of one parameter
    backward.py   on_gradient ->
    bucket.py         collect                   copied to its place in the unit's flat bucket
    backward.py       at_parameter, _pass ->    was that the unit's last? or _at_input, at_outputs: backward is past it
    backward.py   _on_passed, _take_turns ->    the unit waits for its turn, the same on every rank
    bucket.py         complete_with_zeros       zeros for parameters that this rank did not use
    zero2.py          post_backward ->          Zero2, by way of DDP:
    zero1.py              reduce ->                 the mean of this rank's shard
    collectives.py            reduce_scatter            starts; backward goes on with the next unit
    bucket.py             release               keep this rank's shard, release the rest
    backward.py   _end ->                       autograd has finished
    bucket.py         advance                   wait for the reductions that are still under way
    bucket.py         show ->                   the mean, to the parameters that some rank used
    shown.py              receive, show_grad        it becomes `.grad`
    shown.py          deliver                   or now, if hooks of the user's are to see it first
    step.py       _before_step ->               the optimizer is about to step
    step.py           begin ->
    bucket.py             promote               in the dtype of the masters
    step.py       _on_plain, enter ->
    shown.py          become_plain              as plain tensors

What a program does with them in between, it does with slices: slices.py.

A parameter of Zero3, through one step:

    forward.py    enter ->                      its module's forward is about to run
    zero3.py          pre_forward ->
    stage.py              gather ->
    unit.py                   gather            all-gather of every rank's shard, or the end of one that was prefetched
    prefetch.py               start_next        the unit that will be needed next
    parameters.py     show_full                 the module now holds the full parameter
    forward.py    leave ->                      forward is over
    parameters.py     show                      the module holds this rank's slice again
    zero3.py          post_forward ->
    unit.py               release               the full parameter's memory is given back
    backward.py   at_outputs ->                 a gradient reached the module's outputs
    zero3.py          pre_backward              gathered as before forward
    backward.py   _finish ->                    backward has passed the unit, and it is its turn
    zero3.py          post_backward             released, then reduced as in Zero2
    step.py       _on_plain, leave ->           the optimizer has updated the slice
    shown.py          become_shown              it is a slice again
    step.py       _after_step ->                hooks of the user's have run
    step.py           end ->
    stage.py              master_changed ->
    zero3.py                  after_step        what is gathered is stale, so it is released
"""

from zerolab.engine.engine import Engine

__all__ = ["Engine"]
