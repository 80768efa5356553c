"""What one member of a run in windows would have come to by itself: as many steps, on as much data as each member's."""

from bootstrap.demo.request import PreparedDemo


def held_out_alone(prepared: PreparedDemo, *, windows: int, evaluate_tokens: int) -> float:
    """Held-out loss, nats a token, after the inner steps of so many windows, taken one after another by AdamW with the
    run's schedule of inner steps."""
    # These bring torch and transformers, which the start of the host need not wait for.
    from swarm.core.ids import MicrobatchId
    from swarm.local.alone import held_out_loss, trained_alone
    from swarm.manifest.file import freeze, read_manifest
    from swarm.model.initial import stage_weights

    settings = freeze(read_manifest(prepared.folder.manifest), prepared.data, ())
    each, num_steps = settings.microbatches_per_step, windows * settings.averaging.local_steps
    steps = (map(MicrobatchId, range(step * each, (step + 1) * each)) for step in range(num_steps))
    flat = stage_weights(settings.model, 0, settings.data.seed, None)
    flat, _ = trained_alone(settings, settings.inner, flat, prepared.data.train(), steps)
    return held_out_loss(settings, flat, prepared.data.held_out(), limit_tokens=evaluate_tokens)
