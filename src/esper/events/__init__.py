"""The record of a run: small typed events, appended to `events.jsonl`, passed on to sinks, read back as they were."""

from esper.events.event import SCHEMA, CheckpointRefused, Event, EventError, Header, Record, Resumed, SinkDropped, SinkFailed
from esper.events.log import EventLog
from esper.events.reader import Reader, read
from esper.events.sinks import Queued, Sink
from esper.events.tensorboard import TensorBoardSink
from esper.events.wandb import WandbMode, WandbSink

__all__ = [
    "SCHEMA", "CheckpointRefused", "Event", "EventError", "EventLog", "Header", "Queued", "Reader", "Record", "Resumed", "Sink",
    "SinkDropped", "SinkFailed", "TensorBoardSink", "WandbMode", "WandbSink", "read",
]  # fmt: skip
