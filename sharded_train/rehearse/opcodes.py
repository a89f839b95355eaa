"""Kinds of HLO opcodes: what computes, what only moves bytes, what neither. What stands nowhere is not understood."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One FLOP for each element of the result.
ARITHMETIC = _names("""
    add subtract multiply divide remainder power maximum minimum negate abs exponential exponential-minus-one log
    log-plus-one logistic tanh tan sqrt rsqrt cbrt cosine sine atan2 erf clamp
""")
REDUCTIONS = _names("reduce reduce-window")  # one for each element taken
PRODUCTS = _names("dot scaled-dot")
FUSIONS = _names("fusion fusion-start")
CALLING = FUSIONS | _names("call async-start call-start")
CONTROL = _names("while conditional")

COLLECTIVES = _names("""
    all-gather all-gather-start all-gather-done all-reduce all-reduce-start all-reduce-done reduce-scatter
    reduce-scatter-start reduce-scatter-done all-to-all all-to-all-start all-to-all-done ragged-all-to-all
    ragged-all-to-all-start ragged-all-to-all-done collective-permute collective-permute-start collective-permute-done
    collective-broadcast collective-broadcast-start collective-broadcast-done send send-done recv recv-done
    async-update async-done call-done
""")
SLICES = _names("slice dynamic-slice gather")
UPDATES = _names("dynamic-update-slice scatter")  # in place where the buffer is the operand's
NO_KERNEL = _names("""
    parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier optimization-barrier
    partition-id replica-id get-dimension-size domain copy-done fusion-done
""")
MOVING = _names("""
    iota bitcast-convert reshape broadcast transpose reverse concatenate pad copy copy-start convert compare select and
    or not xor sign floor ceil round-nearest-even round-nearest-afz is-finite shift-left shift-right-logical
    shift-right-arithmetic popcnt count-leading-zeros reduce-precision stochastic-convert real imag complex
    rng-bit-generator rng-get-and-update-state rng select-and-scatter sort map set-dimension-size infeed outfeed
""")
WITHOUT_FLOPS = COLLECTIVES | SLICES | UPDATES | NO_KERNEL | MOVING | CONTROL
