"""``tercet store``: KV in host memory and on disk, behind two of the three verbs, without vLLM and without a device.

:mod:`.contents` names blocks by their contents; :mod:`.pool` and :mod:`.disk` keep them, and :mod:`.blocks` is what the
verbs of :mod:`tercet.engine` run on. :mod:`.server` is the process.
"""
