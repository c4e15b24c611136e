"""The record of a run: small typed events, appended to `events.jsonl`, passed on to sinks, read back as they were."""

from esper.events.event import SCHEMA, CheckpointRefused, Event, EventError, Header, Record, Resumed, SinkDropped, SinkFailed
from esper.events.log import EventLog
from esper.events.reader import Reader, read
from esper.events.sinks import SINK_FOLDERS, Queued, Sink, check_installed, sinks_in
from esper.events.tensorboard import TensorBoardSink
from esper.events.wandb import WandbMode, WandbSink

__all__ = [
    "SCHEMA", "SINK_FOLDERS", "CheckpointRefused", "Event", "EventError", "EventLog", "Header", "Queued", "Reader", "Record", "Resumed",
    "Sink", "SinkDropped", "SinkFailed", "TensorBoardSink", "WandbMode", "WandbSink", "check_installed", "read", "sinks_in",
]  # fmt: skip
