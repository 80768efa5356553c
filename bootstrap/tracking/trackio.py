"""Trackio: a project in Trackio's own folder on this machine; `trackio show --project PROJECT` draws it."""

from bootstrap.tracking.tracker import Row, TrackedRun


class Trackio:
    """One run of a project."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{run.name}-{run.short_id}"
        self._held: dict[str, int] = {}
        for entry in SQLiteStorage.get_logs(project, name):
            for series in entry:
                self._held[series] = max(self._held.get(series, -1), entry["step"])
        self._run = trackio.init(
            project=project,
            name=name,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, row: Row) -> None:
        fresh = {name: value for name, value in row.figures.items() if row.step > self._held.get(name, -1)}
        self._held |= dict.fromkeys(fresh, row.step)
        if fresh:
            self._run.log(fresh, step=row.step)

    def flush(self) -> None:
        """Trackio writes what it was given twice a second, by itself."""

    def close(self) -> None:
        self._run.finish()
