"""The verbs of any engine: leases, sends, generation, liveness, agents and callers.

:mod:`.interface` says what an engine implements. :mod:`.receiving`, :mod:`.sending` and :mod:`.generating` are the
three verbs, :mod:`.edge` is what they share. Nothing here imports an engine or its tensors.
"""
