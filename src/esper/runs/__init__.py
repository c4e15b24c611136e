"""Runs as folders: the folder and its lock, events and sinks, checkpoints, and the signals that stop a run.

    runs/first/
        config.toml       the settings, with a digest
        events.jsonl      every event, one per line
        checkpoints/      folders of safetensors and JSON

Every trainer writes such a folder. A run that was killed can be resumed from its latest checkpoint. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.files import NotTensorsError as NotTensorsError
    from esper.runs.catalog import Run as Run, Summary as Summary, find_runs as find_runs, open_run as open_run
    from esper.runs.checkpoints import (
        Checkpoint as Checkpoint,
        CheckpointError as CheckpointError,
        CheckpointStore as CheckpointStore,
        Refused as Refused,
        load_module as load_module,
        plain_names as plain_names,
    )
    from esper.runs.compare import Comparison as Comparison, compare_runs as compare_runs
    from esper.runs.events import (
        SCHEMA as SCHEMA,
        CheckpointRefused as CheckpointRefused,
        Event as Event,
        EventError as EventError,
        EventRecord as EventRecord,
        Figure as Figure,
        Header as Header,
        Reader as Reader,
        Resumed as Resumed,
        RunDeclared as RunDeclared,
        RunEnded as RunEnded,
        SinkDropped as SinkDropped,
        SinkFailed as SinkFailed,
        read as read,
    )
    from esper.runs.folder import RunError as RunError
    from esper.runs.log import EventLog as EventLog
    from esper.runs.signals import StopSignals as StopSignals
    from esper.runs.sinks import (
        SINK_FOLDERS as SINK_FOLDERS,
        Queued as Queued,
        Sink as Sink,
        TensorBoardSink as TensorBoardSink,
        WandbMode as WandbMode,
        WandbSink as WandbSink,
        check_installed as check_installed,
        sinks_in as sinks_in,
    )
    from esper.runs.tables import (
        Table as Table,
        events_table as events_table,
        numbers_table as numbers_table,
        query as query,
        write_table as write_table,
    )
    from esper.runs.tensors import (
        Tree as Tree,
        read_state_file as read_state_file,
        read_tensors as read_tensors,
        write_state as write_state,
        write_tensors as write_tensors,
    )
    from esper.runs.versions import Migration as Migration, Versions as Versions

__getattr__, __dir__, __all__ = lazy_names(__name__)
