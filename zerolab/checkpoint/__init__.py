"""Checkpoints that any stage at any world size can load.

A checkpoint is a folder: one safetensors file per rank with that rank's slice of everything, and manifest.json, which
says which flat elements of which parameter or optimizer state each file holds. All stages write the same files: in
stage 0, where every rank has everything, each rank writes the slice it would own in stage 1. That makes loading at
another stage or world size plain arithmetic: each rank reads the elements it owns now, from whichever files have them.

    step-000100/
        manifest.json
        rank-00000-of-00002.safetensors    parameters/head.weight [0, 52), optimizer/exp_avg/head.weight [0, 52), ...
        rank-00001-of-00002.safetensors    parameters/head.weight [52, 104), ...

A checkpoint is written under another name, flushed to disk, then renamed. So a process killed at any moment leaves
either the old checkpoint or the new one, complete. A load changes nothing until every rank has read and checked all
it needs. Nothing is ever unpickled: a stranger's checkpoint is bytes and JSON.

Gradients are not part of a checkpoint: save after the optimizer's step.

    saving.py      save: each rank's file, then the manifest, then the rename
    loading.py     load: match the manifest with this model and optimizer, read, write
    weights.py     load_model_weights, export_weights: weights alone, for plain modules and other libraries
    manifest.py    manifest.json: what is in it, and its checksum
    state.py       what save and load both know of a model and an optimizer
    files.py       safetensors files with checksums
"""

from zerolab.checkpoint.files import CheckpointError
from zerolab.checkpoint.loading import load, read_extra
from zerolab.checkpoint.manifest import MANIFEST, read_manifest
from zerolab.checkpoint.saving import save
from zerolab.checkpoint.weights import export_weights, load_model_weights

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "export_weights",
    "load",
    "load_model_weights",
    "read_extra",
    "read_manifest",
    "save",
]
