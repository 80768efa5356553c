"""TensorBoard: event files in a folder, DIR/<run id, 12 letters>, written and read by TensorBoard's own package."""

from pathlib import Path
from typing import Any

from bootstrap.tracking.tracker import Row, TrackedRun


class TensorBoard:
    """The event files of one run."""

    def __init__(self, folder: str, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        place = Path(folder) / run.short_id
        place.mkdir(parents=True, exist_ok=True)
        self._held = last_steps(place)
        self._writer = EventFileWriter(str(place))

    def write(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = []
        for name, value in sorted(row.figures.items()):
            if row.step > self._held.get(name, -1):
                self._held[name] = row.step
                values.append(Summary.Value(tag=name, simple_value=value))
        if values:
            self._writer.add_event(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def last_steps(place: Path) -> dict[str, int]:
    """By series, the highest step in the folder's event files; what a killed process left half written counts for none.

    All of a row is one record, and so there or not.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    held: dict[str, int] = {}
    for path in sorted(place.glob("events.out.tfevents.*")):
        event: Any
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                held[value.tag] = max(held.get(value.tag, -1), event.step)
    return held
