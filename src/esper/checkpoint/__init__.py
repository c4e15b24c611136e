"""Checkpoints: folders of safetensors and JSON that survive a crash at any moment, and load without executing anything."""

from esper.checkpoint.files import CheckpointError
from esper.checkpoint.modules import load_module, plain_names
from esper.checkpoint.store import Checkpoint, CheckpointStore, Migration, Refused
from esper.checkpoint.tensors import NotTensorsError, read_state_file, read_tensors, write_state, write_tensors
from esper.checkpoint.tree import Tree

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Migration",
    "NotTensorsError",
    "Refused",
    "Tree",
    "load_module",
    "plain_names",
    "read_state_file",
    "read_tensors",
    "write_state",
    "write_tensors",
]
