"""zerolab trial docs/trial/fsdp2.py:MyFSDP --ranks 2"""

from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict as set_in
from torch.distributed.fsdp import fully_shard

from zerolab.trial import Adapter


class MyFSDP(Adapter):
    stage = 3  # whose bytes it promises
    supports = frozenset({"accumulate", "clip", "full_state", "save", "several", "bytes"})

    def wrap(self, model, units, optimizer, **asked):
        blocks = [module for module in model.modules() if units and isinstance(module, units)]
        for module in dict.fromkeys((*reversed(blocks), model)):
            fully_shard(module)
        self.model, self.optimizer = model, optimizer(model)

    @contextmanager
    def accumulate(self):
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def clip(self, max_norm, norm_type=2.0):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type).full_tensor().item()

    def full_state(self):
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))

    def save(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "checkpoint")

    def load(self, folder):
        state = dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder / "checkpoint")
        set_in(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
