"""The verbs of any engine: leases, sends, generation, liveness, agents and callers.

:mod:`.interface` says what an engine implements. :mod:`.verbs` has the three verbs, :mod:`.edge` what they share.
Nothing here imports an engine or its tensors.
"""
