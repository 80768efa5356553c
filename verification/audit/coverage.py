"""What a run's audits can prove: whoever joins, and whoever starts it, is told before, in words."""

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
            settings.leaves_residual or bounds_for(computed, codecs.averaging, "gradient").report_only,
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


def warning_of(settings: RunSettings) -> str:
    """What a host of strangers must know before it starts; empty where every lie in a tensor can be proved."""
    open_to_lies = unproved(settings)
    if not settings.replays or not open_to_lies:
        return ""
    codecs = settings.codecs
    if settings.model.routes_tokens:
        return (
            'trust = "public", but with a model of routed experts audits only report, and nobody can be banned for '
            f"lies in {', '.join(open_to_lies)}: which expert a token goes to turns on a last bit, and nobody commits "
            "to it"
        )
    given = f"{settings.model.compute_dtype}, {codecs.activations}/{codecs.activation_gradients}/{codecs.averaging}"
    return (
        f'trust = "public", but with {given} nobody can be banned for lies in {", ".join(open_to_lies)}: there are no '
        "calibrated bounds, or the codec carries a residual; fp32 with int8 codecs has none of these gaps"
    )
