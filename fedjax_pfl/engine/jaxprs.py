"""What the versions of JAX write differently into a trace."""

from typing import Any


def parameters(eqn: Any) -> dict[str, Any]:
    """An equation's parameters; a scan's always say `num_consts` and `num_carry`, which JAX's own do up to 0.11."""
    p = eqn.params
    if eqn.primitive.name != "scan" or "num_carry" in p:
        return p
    body = getattr(p["jaxpr"], "jaxpr", p["jaxpr"])
    whole = lambda outer, inner: sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))
    carry = whole(eqn.outvars, body.outvars)  # what is stacked has an axis more, as have the rows that are read
    return p | {"num_carry": carry, "num_consts": whole(eqn.invars, body.invars) - carry}
