"""What a run's audits can prove: whoever joins is told before, in words; what proves too little is not started."""

from swarm.core.errors import SettingsError
from swarm.core.settings import RunSettings
from verification.audit.tolerance import bounds_for


def unproved(settings: RunSettings) -> tuple[str, ...]:
    """The kinds of work of which no replay in this run gets anybody banned, in words; all of them among friends."""
    codecs, computed = settings.codecs, settings.model.arithmetic
    rows = (
        ("activations", bounds_for(computed, codecs.activations, "activation").report_only),
        ("gradients of activations", bounds_for(computed, codecs.activation_gradients, "gradient").report_only),
        (
            "contributions",
            # What is left unsaid nobody commits to: such a contribution cannot be made again.
            settings.leaves_residual or bounds_for(computed, codecs.averaging, "contribution").report_only,
        ),
    )
    return tuple(name for name, is_open in rows if is_open or not settings.replays)


def checks_of(settings: RunSettings) -> str:
    """What is done about liars, in a sentence."""
    exact = "what it reduces and the states it states are checked to the bit, and who lies in them is banned for ever"
    if not settings.replays:
        return f"{exact}; nobody computes this machine's other work again: a run among friends"
    open_to_lies = unproved(settings)
    if not open_to_lies:
        return "other peers compute some of this machine's work again; one that lies is banned for ever"
    listed = ", ".join(open_to_lies)
    return f"{exact}; other peers compute some of its work again, but nobody is banned for lies in {listed}"


def check_proved(settings: RunSettings) -> None:
    """Raises SettingsError for a run of strangers in which some lie in a tensor could never be proved."""
    open_to_lies = unproved(settings)
    if not settings.replays or not open_to_lies:
        return
    codecs, lies = settings.codecs, f"nobody could be banned for lies in {', '.join(open_to_lies)}"
    if settings.model.routes_tokens:
        raise SettingsError(
            f'run.trust = "public" with a model of routed experts: {lies}, for which expert a token goes to turns on a '
            'last bit, and nobody commits to it; use trust = "friends"'
        )
    given = f"{settings.model.compute_dtype}, {codecs.activations}/{codecs.activation_gradients}/{codecs.averaging}"
    raise SettingsError(
        f'run.trust = "public" with {given}: {lies}, because there are no calibrated bounds, or the codec carries a '
        'residual; use codecs.averaging = "int8", or trust = "friends"'
    )
